"""The encoders: causality, nothing leaks from padding or neighbours, scores by hand."""

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import recipe_runs
import ways
from flax import nnx

import embed
from recipes.sequence import model as model_lib
from recipes.sequence import train

ITEMS, LENGTH = 50, 12


def smoke(**changes):
  config = recipe_runs.load("sequence.synthetic", "smoke")
  defaults = {"max_length": LENGTH, "blocks": 2, "heads": 2, "dropout": 0.0}
  config.update_from_flattened_dict(defaults | changes)
  return config


@functools.cache
def build(name, **changes):
  return model_lib.SequenceModel(smoke(model=name, **changes), ITEMS)


def batch(*sequences):
  """One row of sequences side by side; positions count from 0 in each."""
  flat = lambda parts, fill: np.array(
    [[*itertools.chain(*parts), *[fill] * LENGTH][:LENGTH]], np.int32
  )
  return {
    "items": flat([list(s) for s in sequences], -1),
    "segments": flat([[i] * len(s) for i, s in enumerate(sequences)], -1),
    "positions": flat([list(range(len(s))) for s in sequences], 0),
  }


@nnx.jit
def call_block(block, x, mask):
  return block(x, mask)


@nnx.jit
def call(model, inputs):
  return model(inputs)


def outputs(model, inputs):
  return np.asarray(call(model, inputs))[0]


@functools.partial(nnx.jit, static_argnums=2)
def differentiate(model, inputs, loss_fn):
  return embed.value_and_grad(loss_fn)(model, inputs)


@pytest.mark.parametrize("name", ["sasrec", *ways.ci("hstu")])
@pytest.mark.programs(60, "a model of many layers is initialized")
def test_a_later_item_never_changes_an_earlier_output(name):
  model = build(name)
  one = outputs(model, batch([3, 7, 11, 2, 9, 4]))
  two = outputs(model, batch([3, 7, 11, 5, 9, 4]))
  np.testing.assert_array_equal(one[:3], two[:3])
  assert (np.abs(one[3:6] - two[3:6]).max(axis=1) > 1e-3).all()


@pytest.mark.ci
@pytest.mark.parametrize("name", model_lib.MODELS)
def test_padding_and_neighbours_never_leak(name):
  model = build(name)
  alone = outputs(model, batch([3, 7, 11]))[:3]
  first = outputs(model, batch([3, 7, 11], [8, 1, 6, 4]))
  second = outputs(model, batch([8, 1, 6, 4], [3, 7, 11]))
  noise = batch([3, 7, 11])
  noise["items"][:, 3:], noise["positions"][:, 3:] = 5, 2  # of places that no segment has
  for found in (outputs(model, noise)[:3], first[:3], second[4:7]):
    np.testing.assert_allclose(found, alone, rtol=1e-4, atol=1e-5)
  assert np.isfinite(outputs(model, noise)).all()


def layer_norm(x):
  return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)


def test_who_sees_whom_by_hand():
  segments = np.array([[0, 0, 1, -1]])
  expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
  np.testing.assert_array_equal(jax.jit(model_lib.visible)(segments)[0], expected)


def train_batch(**more):
  inputs = batch([3, 7, 11, 2], [8, 1, 6])
  return inputs | {"targets": batch([7, 11, 2, 9], [1, 6, 5])["items"]} | more


@pytest.mark.ci
def test_the_sampled_loss_touches_the_sampled_rows_only():
  # With weight decay, a row that was touched by a gradient of zero would move as well.
  changes = {"negatives.number": 5, "warmup_steps": 0, "table.weight_decay": 0.1}
  config = smoke(loss="sampled_softmax", **changes)
  model = model_lib.SequenceModel(config, ITEMS)
  before = {key: np.array(x) for key, x in model.embed.variables["item"].items()}
  negatives = np.array([20, 21, 11, 6, 24], np.int32)  # 11 and 6 are right somewhere
  inputs = train_batch(negatives=negatives)
  optimizer, data = embed.Optimizer(model, optax.adamw(1e-2)), types.SimpleNamespace()
  nnx.jit(train.make_train_step(config, data))(model, optimizer, inputs)
  touched = {3, 7, 11, 2, 8, 1, 6, 9, 5} | set(negatives.tolist())
  untouched = [i for i in range(ITEMS) if i not in touched]
  for key, x in model.embed.variables["item"].items():
    np.testing.assert_array_equal(np.asarray(x)[untouched], before[key][untouched])
  moved = (np.asarray(model.embed.tables["item"]) != before["parameters"]).any(axis=1)
  assert set(np.flatnonzero(moved)) == touched


@pytest.mark.ci
def test_sampled_softmax_of_all_items_is_the_full_one():
  config = smoke(loss="sampled_softmax")
  model = model_lib.SequenceModel(config, ITEMS)
  every = np.arange(ITEMS, dtype=np.int32)
  inputs = train_batch(negatives=every)
  sampled, grads = differentiate(model, inputs, train.loss_function(config))
  full, wanted = differentiate(model, inputs, train.loss_function(smoke(loss="softmax")))
  assert sampled == pytest.approx(float(full), rel=1e-5)
  rows = lambda g: np.zeros((ITEMS + 1, 8)) + _dense(g.rows["embed/item"])
  np.testing.assert_allclose(rows(grads), rows(wanted), rtol=1e-3, atol=1e-6)


def _dense(rows):
  table = np.zeros((ITEMS + 1, 8), np.float32)
  np.add.at(table, np.asarray(rows.ids), np.asarray(rows.values))
  table[ITEMS] = 0
  return table


@pytest.mark.ci
def test_sasrec_with_the_residual_of_the_authors_code():
  """Queries are normed, keys and values not; both layers add to what is normed."""
  how = {"dropout": 0.0, "residual": "norm", "init": "normal"}
  block = model_lib.SASRecBlock(64, 1, **how, dtype=jnp.float32, rngs=nnx.Rngs(3))
  x = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
  wq, wk, wv = np.split(np.asarray(block.attention.qkv.kernel[...]), 3, axis=1)
  query = layer_norm(x)
  scores = np.where(np.tri(5), (query @ wq) @ (x @ wk).T / 8, -np.inf)
  weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
  out, inner, last = (
    np.asarray(layer.kernel[...])
    for layer in (block.attention.out, block.forward.inner, block.forward.out)
  )
  y = layer_norm(query + weights @ (x @ wv) @ out)
  expected = y + np.maximum(y @ inner, 0) @ last
  mask = model_lib.visible(jnp.zeros((1, 5), jnp.int32))
  np.testing.assert_allclose(call_block(block, x[None], mask)[0], expected, rtol=1e-3, atol=1e-4)
  for kernel in (out, inner, last):
    assert kernel.std() == pytest.approx(0.02, rel=0.1)
  assert wq.std() > 0.05


@pytest.mark.ci
@pytest.mark.parametrize("name", model_lib.MODELS)
def test_gradients_reach_everything(name):
  model = build(name)
  inputs = train_batch()
  loss_fn = train.loss_function(smoke(loss="softmax"))
  _, grads = differentiate(model, inputs, loss_fn)
  for path, leaf in jax.tree.leaves_with_path(grads.dense):
    assert np.any(leaf != 0), jax.tree_util.keystr(path)
    assert np.isfinite(leaf).all(), jax.tree_util.keystr(path)
