"""The calls of TPUEmbedding recorded in data/errors.json, written for this library.

They keep their error type; where the type or the decision differs, the line here says why.
"""

import conformance
import jax.numpy as jnp
import numpy as np
from flax import nnx

import embed

RECORDED = {case["call"]: case["error"] for case in conformance.load("errors")["cases"]}


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


def serve(features, weights, config):
  """TensorFlow's serving lookup checks the same things as a call of the layer."""
  return SE(config, embed.sgd())(features, weights)


f32 = np.float32
# Recorded call -> (ours, error type, or None where it is accepted).
CONSTRUCT = {
  "TC(vocabulary_size=0)": (lambda: TC(vocabulary_size=0), ValueError),
  "TC(vocabulary_size=2.0)": (lambda: TC(vocabulary_size=2.0), ValueError),
  "TC(dim=0)": (lambda: TC(dim=0), ValueError),
  'TC(dim="2")': (lambda: TC(dim="2"), ValueError),
  "TC(initializer=3)": (lambda: TC(initializer=3), ValueError),
  'TC(combiner="max")': (lambda: TC(combiner="max"), ValueError),
  "TC(combiner=None)": (lambda: TC(combiner=None), ValueError),
  "TC(dtype=tf.float16)": (lambda: TC(dtype=jnp.float16), ValueError),
  "E.FeatureConfig(table=3)": (lambda: FC(table=3), ValueError),
  "E.FeatureConfig(table=TC(), max_sequence_length=-1)": (
    lambda: FC(max_sequence_length=-1),
    ValueError,
  ),
  "E.FeatureConfig(table=TC(), max_sequence_length=1.5)": (
    lambda: FC(max_sequence_length=1.5),
    ValueError,
  ),
  "E.FeatureConfig(table=TC(), validate_weights_and_indices=1)": (
    lambda: FC(validate_weights_and_indices=1),
    ValueError,
  ),
  'E.FeatureConfig(table=TC(), output_shape="x")': (lambda: FC(output_shape="x"), TypeError),
  "E.SGD(use_gradient_accumulation=False, clipvalue=1.)": (
    lambda: embed.sgd(use_gradient_accumulation=False, clipvalue=1.0),
    ValueError,
  ),
  "E.Adagrad(use_gradient_accumulation=False, clipvalue=(None, 1.))": (
    lambda: embed.adagrad(use_gradient_accumulation=False, clipvalue=(None, 1.0)),
    ValueError,
  ),
  "E.Adam(use_gradient_accumulation=False, clipvalue=0.)": (
    lambda: embed.adam(use_gradient_accumulation=False, clipvalue=0.0),
    ValueError,
  ),
  "E.Adagrad(initial_accumulator_value=0.)": (
    lambda: embed.adagrad(initial_accumulator_value=0.0),
    ValueError,
  ),
  "E.Adagrad(initial_accumulator_value=-1.)": (
    lambda: embed.adagrad(initial_accumulator_value=-1.0),
    ValueError,
  ),
  "E.AdagradMomentum(epsilon=0.)": (lambda: embed.adagrad_momentum(epsilon=0.0), ValueError),
  "E.AdagradMomentum(exponent=0.)": (lambda: embed.adagrad_momentum(exponent=0.0), ValueError),
  "E.FTRL(initial_accumulator_value=0.)": (
    lambda: embed.ftrl(initial_accumulator_value=0.0),
    ValueError,
  ),
  "E.FTRL(initial_accumulator_value=0., allow_zero_accumulator=True)": (
    lambda: embed.ftrl(initial_accumulator_value=0.0, allow_zero_accumulator=True),
    ValueError,
  ),
  # TensorFlow's newer classes stopped checking what its older ones did.
  "E.FTRL(learning_rate_power=0.5)": (lambda: embed.ftrl(learning_rate_power=0.5), ValueError),
  "E.FTRL(l1_regularization_strength=-1.)": (
    lambda: embed.ftrl(l1_regularization_strength=-1.0),
    ValueError,
  ),
  "E.Adam(beta_1=1.)": (lambda: embed.adam(beta_1=1.0), ValueError),
  "E.Adam(beta_1=-0.1)": (lambda: embed.adam(beta_1=-0.1), ValueError),
  "E.Adam(beta_2=1.)": (lambda: embed.adam(beta_2=1.0), ValueError),
  "E.Adam(epsilon=0.)": (lambda: embed.adam(epsilon=0.0), ValueError),
  "E.Adam(lazy_adam=False, use_gradient_accumulation=False)": (
    lambda: embed.adam(lazy_adam=False, use_gradient_accumulation=False),
    ValueError,
  ),
  "E.SGD(learning_rate=-1.)": (lambda: embed.sgd(learning_rate=-1.0), None),
  "E.SGD(weight_decay_factor=-1.)": (lambda: embed.sgd(weight_decay_factor=-1.0), None),
  # An empty range would set every touched weight to one of its ends.
  "E.SGD(clip_weight_min=1., clip_weight_max=-1.)": (
    lambda: embed.sgd(clip_weight_min=1.0, clip_weight_max=-1.0),
    ValueError,
  ),
  "E.TPUEmbedding((E.FeatureConfig(TC()), E.FeatureConfig(TC())), E.SGD(0.1))": (
    lambda: SE((FC(), FC()), embed.sgd(0.1)),
    ValueError,
  ),
  'E.TPUEmbedding((E.FeatureConfig(TC()),), "sgd")': (lambda: SE((FC(),), "sgd"), ValueError),
  'E.TPUEmbedding((E.FeatureConfig(TC(optimizer="adam")),), None)': (
    lambda: SE((FC(TC(optimizer="adam")),), None),
    ValueError,
  ),
  "E.TPUEmbedding((E.FeatureConfig(TC()),), None)": (lambda: SE((FC(),), None), None),
  'E.TPUEmbedding({"z": E.FeatureConfig(TC(name=None)), "a": E.FeatureConfig('
  'TC(name="table_1"))}, E.SGD(0.1))': (
    lambda: SE({"z": FC(TC(name=None)), "a": FC(TC(name="table_1"))}, embed.sgd(0.1)),
    ValueError,
  ),
}
SERVE = {
  "S((tf.constant([1,2]),), (tf.constant([1.,2.]),), (fc,))": (
    lambda: serve((dense(1, 2),), (np.array([1.0, 2.0], f32),), (FC(),)),
    ValueError,
  ),
  "S((sp([1,2,3]),), (rg([1,2,3],tf.float32),), (fc,))": (
    lambda: serve((sparse(),), (ragged(dtype=f32),), (FC(),)),
    ValueError,
  ),
  "S((rg([1,2,3]),), (sp([1,2,3],tf.float32),), (fc,))": (
    lambda: serve((ragged(),), (sparse(dtype=f32),), (FC(),)),
    ValueError,
  ),
  "S((sp([1,2,3]),), (sp([1,2,3],tf.float32),), (fs,))": (
    lambda: serve((sparse(),), (sparse(dtype=f32),), (FC(max_sequence_length=2),)),
    ValueError,
  ),
  "S((tf.constant([1,2]),), None, (fs,))": (
    lambda: serve((dense(1, 2),), None, (FC(max_sequence_length=2),)),
    ValueError,
  ),
  # TensorFlow matches by path here, but training checks the type of every sequence.
  "S([tf.constant([1,2])], None, (fc,))": (
    lambda: serve([dense(1, 2)], None, (FC(),)),
    TypeError,
  ),
  'S({"a": tf.constant([1])}, None, {"a": fc, "b": fc})': (
    lambda: serve({"a": dense(1)}, None, {"a": FC(), "b": FC(TC(name="u"))}),
    None,
  ),
  'S({"c": tf.constant([1])}, None, {"a": fc})': (
    lambda: serve({"c": dense(1)}, None, {"a": FC()}),
    ValueError,
  ),
  "S((tf.constant([1]), sp([1,2,3])), (sp([1,2,3],tf.float32),), (fc, fc))": (
    lambda: serve((dense(1), sparse()), (sparse(dtype=f32),), (FC(), FC(TC(name="u")))),
    ValueError,
  ),
  # Here a list of integers is an input.
  "S(([1,2],), None, (fc,))": (lambda: serve(([1, 2],), None, (FC(),)), None),
  "S((rg([1,2,3]),), None, (E.FeatureConfig(t, output_shape=[3]),))": (
    lambda: serve((ragged(),), None, (FC(output_shape=[3]),)),
    ValueError,
  ),
  # TensorFlow's InvalidArgumentError has no counterpart.
  "S((sp([1,2,9]),), None, (fc,))": (
    lambda: serve((sparse((1, 2, 9)),), None, (FC(),)),
    ValueError,
  ),
  # Negative ids are padding, whatever the kind.
  "S((sp([1,-2,3]),), None, (fc,))": (lambda: serve((sparse((1, -2, 3)),), None, (FC(),)), None),
  "S((rg([1,-2,3]),), None, (fc,))": (lambda: serve((ragged((1, -2, 3)),), None, (FC(),)), None),
  "S((tf.constant([-1]),), None, (fc,))": (lambda: serve((dense(-1),), None, (FC(),)), None),
}
# No counterpart: quantisation, callbacks and combiners of TensorFlow, its queues and its modes, its
# custom optimizer's arguments, ragged inputs of more than one level.
NOT_APPLICABLE = {
  "E.QuantizationConfig(1, -1, 1)",
  "E.QuantizationConfig(2, 1, -1)",
  "E.Adam(slot_variable_creation_fn=3)",
  "E.TPUEmbedding((E.FeatureConfig(TC()),), E.SGD(0.1)).dequeue()",
  "E.TPUEmbedding((E.FeatureConfig(TC()),), E.SGD(0.1)).enqueue((tf.constant([1]),))",
  "E.TPUEmbedding((E.FeatureConfig(TC()),), E.SGD(0.1)).apply_gradients((tf.constant([[1.]]),))",
  "E.TPUEmbeddingV2((E.FeatureConfig(TC()),), E.SGD(0.1))",
  'E.CustomOptimizer(custom_computation=None, slot_names=["a"])',
  'E.CustomOptimizer(custom_computation=None, slot_names=["a"], slot_initializers=[None], '
  "slot_dims=[3])",
  "E.CustomCombiner(print, max_valency=4, num_weights=1)",
  "S((tf.RaggedTensor.from_row_lengths(rg([1,2,3]),[2]),), None, (fc,))",
}
CALLS = CONSTRUCT | SERVE
