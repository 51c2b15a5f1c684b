"""Tables over eight devices give what one device gives: every kind of input, scores, small tables.

Nothing here divides by eight: not the rows, the columns or the batch. Optimizers, strategies and
exchanges are those of engine/test_steps.py.
"""

from typing import NamedTuple

import harness
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, make_world, sixteenths

import embed

V, D = 21, 3
BAG = (10, 3)

# --- every kind of input -------------------------------------------------------------------------


class Given(NamedTuple):
  """A feature: its table, kind, sequence length, batch, longest bag and whether it has weights."""

  table: str
  kind: str
  sequence: int
  batch: int
  length: int
  weighted: bool = False


FEATURES = {
  "bag": Given("sum", "padded", 0, 10, 3, True),
  "history": Given("mean", "padded", 2, 9, 3),
  "id": Given("sum", "dense", 0, 13, 1),
  "ragged": Given("sqrtn", "ragged", 0, 7, 3, True),
  "sparse": Given("sum", "sparse", 0, 6, 4, True),
  "valency": Given("mean", "valency", 0, 16, 3),
}
SIZES = {"sum": 21, "mean": 13, "sqrtn": 16}  # of three tables that share an array


def every_kind():
  tables = {
    name: embed.TableConfig(size, D, combiner=name, name=name) for name, size in SIZES.items()
  }
  return {
    name: embed.FeatureConfig(tables[f.table], max_sequence_length=f.sequence)
    for name, f in FEATURES.items()
  }


def kinds_batch(seed):
  """Any row, padding, and two ids that are no row of the table; bags of any length."""
  draw = np.random.default_rng(seed)
  features, weights, cotangents = {}, {}, {}
  for name, f in FEATURES.items():
    values = draw.integers(-1, SIZES[f.table] + 2, (f.batch, f.length)).astype(np.int32)
    of_ids = draw.normal(size=values.shape).astype(np.float32) if f.weighted else None
    lengths = draw.integers(0, f.length + 1, f.batch)
    features[name], weights[name] = to_kind(f, values, of_ids, lengths)
    shape = f.batch, *([f.sequence] if f.sequence else []), D
    cotangents[name] = draw.normal(size=shape).astype(np.float32)
  return features, weights, cotangents


def to_kind(f, values, weights, lengths):
  if f.kind == "dense":
    return (values[:, 0] if f.length == 1 else values), None
  if f.kind == "padded":
    wrap = embed.Padded
  elif f.kind == "sparse":
    order = np.random.default_rng(0).permutation(values.size)  # in no order
    indices = np.argwhere(np.ones(values.shape))[order].astype(np.int32)
    wrap = lambda v: embed.Sparse(indices, v.reshape(-1)[order], values.shape)
  else:  # what lies behind the last split must not matter
    splits = np.cumsum([0, *lengths]).astype(np.int32)
    wrap = lambda v: embed.Ragged(
      v.reshape(-1), splits, max_valency=f.length if f.kind == "valency" else None
    )
  return wrap(values), None if weights is None else wrap(weights)


@pytest.mark.ci
@pytest.mark.parametrize(("strategy", "kind"), [("mod", "explicit"), ("replicated", "auto")])
def test_every_kind_of_input(strategy, kind):
  """Activations, the row gradients of every table, and eight steps."""
  # A user may run with these settings on; silent broadcasting and promotion become errors.
  with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
    train = lambda **where: make_world(every_kind(), embed.adagrad(0.5), rows=True, **where).run(
      map(kinds_batch, range(8))
    )
    found = train(mesh=make_mesh(kind), sharding=strategy)
    meshes.assert_same_outcomes(found, train(), SIZES)


@pytest.mark.ci
@pytest.mark.parametrize(("strategy", "kind"), [("mod", "explicit"), ("div", "auto")])
def test_a_table_smaller_than_the_mesh(strategy, kind):
  """Three rows, one column, one example: most devices have nothing."""

  def features():
    table = embed.TableConfig(3, 1, sixteenths, combiner="sum", name="t")
    return embed.FeatureConfig(table)

  batch = (embed.Padded(np.array([[2, 0, 2]], np.int32)), None, np.ones((1, 1), np.float32))
  one = make_world(features(), embed.adagrad(0.5), rows=True)
  world = make_world(
    features(), embed.adagrad(0.5), rows=True, mesh=make_mesh(kind), sharding=strategy
  )
  wanted = one.run([batch] * 2)
  assert harness.rows(wanted[0].rows["t"], 3) == {0: 1, 2: 2}
  meshes.assert_same_outcomes(world.run([batch] * 2), wanted, {"t": 3})


# --- scores ---------------------------------------------------------------------------------------


def two_tables(optimizer):
  """In one array."""
  t = embed.TableConfig(V, D, sixteenths, optimizer, "mean", name="t")
  u = embed.TableConfig(9, D, sixteenths, optimizer, "sum", name="u")
  return {"bag": embed.FeatureConfig(t), "id": embed.FeatureConfig(u)}


def scores_batch(seed):
  draw = np.random.default_rng(seed)
  features = {
    "bag": embed.Padded(draw.integers(-1, V, BAG).astype(np.int32)),
    "id": draw.integers(-1, 9, 11).astype(np.int32),
  }
  return features, None, meshes.normal(seed, {"bag": (BAG[0], D), "id": (11, D)})


def against_every_row(model, features, weights, cotangents):
  loss, _ = harness.loss_fn(model, features, weights, cotangents)
  scores = model.embed.attend(cotangents["id"], "t")
  return loss + jnp.sum(jnp.tanh(scores)), scores


def against_candidates(model, features, weights, cotangents):
  shared = model.embed.attend(cotangents["id"], "u", np.array([3, 0, 3, -1], np.int32))
  each = model.embed.attend(cotangents["bag"], "t", features["bag"].values)
  return jnp.sum(jnp.tanh(shared)) + jnp.sum(jnp.tanh(each)), (shared, each)


@pytest.mark.ci
@pytest.mark.parametrize(
  ("loss", "strategy", "kind"),
  [(against_every_row, "mod", "auto"), (against_candidates, "div", "explicit")],
)
def test_scores_of_rows(loss, strategy, kind):
  gradients = embed.value_and_grad(loss, has_aux=True)
  train = lambda **where: make_world(
    two_tables(embed.adagrad(0.5)), rows=True, gradients=gradients, **where
  ).run(map(scores_batch, range(3)))
  found = train(mesh=make_mesh(kind), sharding=strategy)
  meshes.assert_same_outcomes(found, train(), {"t": V, "u": 9})


# --- at the mid level ----------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize(("form", "kind"), [("segments", "auto"), ("max_valency", "explicit")])
def test_row_splits_on_some_of_the_axes(form, kind):
  """XLA's partitioner adds wrong elements where splits are split over one of two axes."""
  features = embed.FeatureConfig(embed.TableConfig(V, D, sixteenths, name="t"))
  max_valency = 9 if form == "max_valency" else None
  batch = embed.Ragged(
    np.arange(16, dtype=np.int32), np.array([0, 0, 3, 3, 9, 14, 15, 16], np.int32), max_valency
  )
  mesh = make_mesh(kind, (4, 2), ("data", "model"))
  layer = harness.Model(features, mesh=mesh, axis="data").embed
  look_up = nnx.jit(lambda layer, batch: layer(batch), graph=False)
  activations = look_up(layer, jax.device_put(batch, NamedSharding(mesh, P("data"))))
  meshes.assert_close(activations, look_up(harness.Model(features).embed, batch))
