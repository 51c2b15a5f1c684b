"""Ours against what torch, FBGEMM, TorchRec and keras-rs made of the same 100 steps.

`make_torch.py` and `make_keras.py` wrote the `.npz`, with the versions in them. The settings are
those that docs/moving.md names.
"""

import functools
import pathlib

import jax.numpy as jnp
import numpy as np
import optax
import parity_problem as problem
import pytest
from cases import each
from flax import nnx

import embed

HERE = pathlib.Path(__file__).parent
BY_RATE = {"multiply_weight_decay_factor_by_learning_rate": True}
TORCH_ADAM = {"epsilon": 1e-8, "sum_inside_sqrt": False, "bias_correction": True}
FBGEMM_ROWWISE = {"initial_accumulator_value": 0.0, "epsilon": 1e-8}


def within_norm(g, w, slots, lr):
  """SGD that scales a row of a norm over 1 back to 1."""
  w = w - lr * g
  norm = jnp.linalg.norm(w, axis=-1, keepdims=True)
  return w / jnp.maximum(norm, 1), slots


def with_l2(tx):
  return embed.from_optax(optax.chain(optax.add_decayed_weights(0.1), tx))


# By peer and the name in its file: ours.
SETTINGS = {
  "torch": {
    "sgd": embed.sgd(0.1),
    "adagrad": embed.adagrad(0.1, 0.0, epsilon=1e-10),
    "sparse_adam": embed.adam(embed.bias_corrected(0.01), epsilon=1e-8, sum_inside_sqrt=False),
    "adam": embed.adam(0.01, **TORCH_ADAM),
    "adamw": embed.adam(0.01, weight_decay_factor=0.1, **TORCH_ADAM, **BY_RATE),
    "adagrad_l2": with_l2(optax.adagrad(0.1, 0.0, 1e-10)),
    "sgd_l2": with_l2(optax.sgd(0.1)),
    "momentum": embed.from_optax(optax.sgd(0.1, momentum=0.9)),
    "nesterov": embed.from_optax(optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "rmsprop": embed.from_optax(optax.rmsprop(0.01, decay=0.9, eps=1e-16)),
    "max_norm": embed.custom_optimizer(within_norm, learning_rate=0.1),
  },
  "fbgemm": {
    "sgd": embed.sgd(0.1),
    "adagrad": embed.adagrad(0.1, 0.0, epsilon=1e-3),
    "rowwise_adagrad": embed.rowwise_adagrad(0.1, **FBGEMM_ROWWISE),
  },
  "torchrec": {"rowwise_adagrad": embed.rowwise_adagrad(0.1, 0.0, epsilon=1e-10)},
  "keras": {
    "sgd": embed.sgd(0.1),
    "adagrad": embed.adagrad(0.1, 0.1 + 1e-7),
    "adam": embed.adam(embed.bias_corrected(0.01), epsilon=1e-7, sum_inside_sqrt=False),
    "ftrl": embed.ftrl(0.1),
    "momentum": embed.from_optax(optax.sgd(0.1, momentum=0.9)),
    "rmsprop": embed.from_optax(optax.rmsprop(0.01, decay=0.9, eps=1e-7)),
    "lion": embed.from_optax(optax.lion(0.01, weight_decay=0.0)),
  },
}
# With dense gradients these move, at each step, rows that were not looked up.
MOVES_UNTOUCHED = {"keras": ("adam", "ftrl", "momentum", "rmsprop", "lion")}
# One rule of each form that differs between peers, by ids that not every step looks up.
FEW = {
  "torch": ("adagrad", "sparse_adam", "adam", "adamw"),
  "fbgemm": ("adagrad", "rowwise_adagrad"),
  "torchrec": ("rowwise_adagrad",),
  "keras": ("adagrad",),
}  # fmt: skip
VERSIONS = {"torch", "fbgemm", "torchrec", "keras", "keras_rs"}


def scaled_rows(table):
  """Rows within the norm 1: torch scales them at the next lookup, ours after the update."""
  return table / np.maximum(1, np.linalg.norm(table, axis=1, keepdims=True))


def run(kind, optimizers, steps, combiner):
  """The tables of several optimizers after 100 steps, and their layer."""
  tables = {
    name: embed.TableConfig(problem.V, problem.D, name=name, combiner=combiner, optimizer=optimizer)
    for name, optimizer in optimizers.items()
  }
  features = {name: embed.FeatureConfig(table) for name, table in tables.items()}
  layer = embed.SparseEmbed(features, rngs=nnx.Rngs(0))
  start = problem.table()
  is_scaled = lambda name: name == "torch/max_norm"
  layer.load_tables({name: scaled_rows(start) if is_scaled(name) else start for name in tables})

  @nnx.jit
  def train(layer, ids, weights, cotangents, number):
    given = lambda x: dict.fromkeys(features, embed.Padded(x))
    _, residual = layer.lookup(given(ids), None if weights is None else given(weights))
    layer.apply_gradients(dict.fromkeys(features, cotangents), residual, step=number)

  for number, step in enumerate(steps):
    train(layer, step.ids, step.weights, jnp.asarray(step.cotangents), jnp.int32(number))
  return {name: np.asarray(x) for name, x in layer.tables.items()}


@functools.cache
def theirs(peer):
  with np.load(HERE / f"{peer}.npz") as file:
    return dict(file)


def close(actual, expected):
  """To 1e-5 of an element, or of the largest, where an element is small by cancellation."""
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def assert_ours_is_theirs(kind, names):
  optimizers = {
    f"{peer}/{name}": SETTINGS[peer][name] for peer, of_peer in names.items() for name in of_peer
  }
  found = run(kind, optimizers, problem.steps(kind), problem.combiner(kind))

  def check(peer, name):
    expected = theirs(peer)[f"{name}/{kind}"]
    if (peer, name) == ("torch", "max_norm"):
      expected = scaled_rows(expected)
    assert np.abs(expected - problem.table()).max() > 0.05  # trained
    close(found[f"{peer}/{name}"], expected)

  each({f"{peer}/{name}": (peer, name) for peer in names for name in names[peer]}, check)


@pytest.mark.ci
def test_ours_is_theirs():
  assert_ours_is_theirs("rare", FEW)


@pytest.mark.weekly
@pytest.mark.parametrize("kind", problem.KINDS)
def test_all_of_ours_are_theirs(kind):
  """Every rule in the files; those that move rows without a gradient by ids that look up all."""
  for peer, of_peer in SETTINGS.items():
    named = {key.split("/")[0] for key in theirs(peer)} - VERSIONS - {"state", "weighted_mean"}
    assert VERSIONS & set(theirs(peer))
    assert named == set(of_peer)
  left_out = MOVES_UNTOUCHED if kind == "rare" else {}
  names = {
    peer: [name for name in of_peer if name not in left_out.get(peer, ())]
    for peer, of_peer in SETTINGS.items()
  }
  assert_ours_is_theirs(kind, names)


def test_a_weighted_mean_that_divides_by_the_count():
  """FBGEMM's and TorchRec's, by a sum with other weights."""
  step = next(problem.steps("weighted"))
  rows = lambda key, shape, dtype: problem.table().astype(dtype)
  table = embed.TableConfig(problem.V, problem.D, rows, name="t", combiner="sum")
  layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  by_count = step.weights / (step.ids >= 0).sum(1, keepdims=True)
  look_up = nnx.jit(lambda layer, ids, weights: layer(ids, weights))
  act = look_up(layer, embed.Padded(step.ids), embed.Padded(by_count.astype(np.float32)))
  close(act, theirs("fbgemm")["weighted_mean"])
