"""The calls of TPUEmbedding recorded in data/errors.json, run as they are on this library's names.

They keep their error type; where the type or the decision differs, `DIFFERS` says why.
"""

import builtins
import types

import conformance
import jax.numpy as jnp
import numpy as np
from flax import nnx

import embed

f32 = np.float32


def TC(**kwargs):
  return embed.TableConfig(**({"vocabulary_size": 4, "dim": 2, "name": "t"} | kwargs))


def FC(table=None, **kwargs):
  return embed.FeatureConfig(table=TC() if table is None else table, **kwargs)


def SE(features, optimizer=None):
  return embed.SparseEmbed(features, optimizer, rngs=nnx.Rngs(0))


def ragged(values=(1, 2, 3), row_splits=(0, 2, 3), dtype=np.int32):
  return embed.Ragged(np.array(values, dtype), np.array(row_splits, np.int32))


def sparse(values=(1, 2, 3), dtype=np.int32):
  indices = np.array([[0, 0], [0, 1], [1, 0]], np.int32)
  return embed.Sparse(indices, np.array(values, dtype), (2, 2))


def dense(*values):
  return np.array(values, np.int32)


NAMES = {
  "E": types.SimpleNamespace(
    FeatureConfig=embed.FeatureConfig,
    TPUEmbedding=SE,
    SGD=embed.sgd,
    Adagrad=embed.adagrad,
    AdagradMomentum=embed.adagrad_momentum,
    FTRL=embed.ftrl,
    Adam=embed.adam,
  ),
  "tf": types.SimpleNamespace(
    float16=jnp.float16,
    float32=f32,
    constant=lambda x: np.array(x, np.int32 if isinstance(x[0], int) else f32),
  ),
  "TC": TC,
  "t": (table := TC()),
  "fc": FC(table),
  "fs": FC(table, max_sequence_length=2),
  "rg": lambda values, dtype=np.int32: ragged(values, dtype=dtype),
  "sp": sparse,
}
# Recorded call -> the error here, or None where it is accepted.
DIFFERS = {
  # TensorFlow's newer classes stopped checking what its older ones did.
  "E.FTRL(learning_rate_power=0.5)": ValueError,
  "E.FTRL(l1_regularization_strength=-1.)": ValueError,
  # A negative rate climbs, and a negative decay grows.
  "E.SGD(learning_rate=-1.)": ValueError,
  "E.SGD(weight_decay_factor=-1.)": ValueError,
  # An empty range would set every touched weight to one of its ends.
  "E.SGD(clip_weight_min=1., clip_weight_max=-1.)": ValueError,
  # TensorFlow matches by path here, but training checks the type of every sequence.
  "S([tf.constant([1,2])], None, (fc,))": TypeError,
  # Here a list of integers is an input.
  "S(([1,2],), None, (fc,))": None,
  # TensorFlow's InvalidArgumentError has no counterpart.
  "S((sp([1,2,9]),), None, (fc,))": ValueError,
  # Negative ids are padding, whatever the kind.
  "S((rg([1,-2,3]),), None, (fc,))": None,
  "S((tf.constant([-1]),), None, (fc,))": None,
}
# No counterpart: quantisation, callbacks and combiners of TensorFlow, its queues and its modes, its
# custom optimizer's arguments, ragged inputs of more than one level.
NOT_APPLICABLE = (
  "E.QuantizationConfig", "E.CustomOptimizer", "E.CustomCombiner", "E.TPUEmbeddingV2",
  "slot_variable_creation_fn", ".dequeue()", ".enqueue(", ".apply_gradients(", "tf.RaggedTensor",
)  # fmt: skip


# The error that each call raises, or None.
CALLS = {
  case["call"]: DIFFERS.get(case["call"], case["error"] and getattr(builtins, case["error"], None))
  for case in conformance.load("errors")["cases"]
  if not any(part in case["call"] for part in (*NOT_APPLICABLE, *conformance.LET_GO))
}
