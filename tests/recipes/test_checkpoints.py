"""Checkpoints of a run: restored to the bit on any devices, and what is kept."""

import functools

import jax
import numpy as np
import optax
import pytest
from etils import epath
from flax import nnx

import embed
import embed.checkpoint
from recipes import checkpoints, errors
from recipes import mesh as mesh_lib

ROWS = 30


class Model(nnx.Module):
  def __init__(self, seed, rows=ROWS, mesh=None):
    rngs = nnx.Rngs(seed)
    table = embed.TableConfig(rows, 4, name="item", optimizer=embed.adam(0.1))
    self.embed = embed.SparseEmbed(embed.FeatureConfig(table), rngs=rngs, mesh=mesh)
    self.head = nnx.Linear(4, 1, rngs=rngs)


@functools.partial(nnx.jit, static_argnums=(0, 1, 2))
def make_state(seed, rows, mesh):
  model = Model(seed, rows, mesh)
  return {"model": model, "optimizer": embed.Optimizer(model, optax.adam(0.01))}


def make(seed, rows=ROWS, mesh=None):
  state = make_state(seed, rows, mesh)
  mesh_lib.replicate(mesh, *state.values())
  return state


@nnx.jit
def train_step(model, optimizer, ids):
  loss = lambda model, ids: (model.head(model.embed(ids)) ** 2).mean()
  _, grads = embed.value_and_grad(loss)(model, ids)
  optimizer.update(model, grads)


def tree_of(state):
  return jax.tree.map(np.array, embed.checkpoint.to_tree(**state))


def assert_same(actual, expected):
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """Seven saves of a run, the second of which is the best, and the trees of all."""
  workdir = epath.Path(tmp_path_factory.mktemp("run"))
  state, trees = make(0), {}
  with checkpoints.opened(workdir, "valid_auc") as manager:
    for step in range(1, 8):
      train_step(state["model"], state["optimizer"], np.arange(step, step + 8) % ROWS)
      metrics = {} if step % 2 else {"valid_auc": 1 / step}
      checkpoints.save(manager, step, **state, metrics=metrics, memory={"values": {"x": [0.5]}})
      trees[step] = tree_of(state)
  return workdir, trees


def restored(workdir, step=None, mesh=None):
  state = make(1, mesh=mesh)
  with checkpoints.opened(workdir, "valid_auc") as manager:
    found = checkpoints.restore(manager, step, **state)
    return tree_of(state), *found, manager.best_step()


def test_the_last_two_and_the_best_are_kept(run):
  workdir, trees = run
  names = {path.name for path in (workdir / "checkpoints").iterdir()}
  assert names == {"2", "6", "7"}
  tree, step, memory, best = restored(workdir)
  assert (step, memory, best) == (7, {"values": {"x": [0.5]}}, 2)
  assert_same(tree, trees[7])
  assert_same(restored(workdir, 2)[0], trees[2])
  alone = make(1)["model"]
  checkpoints.load(checkpoints.folder(workdir, 6), model=alone)
  assert_same(tree_of({"model": alone}), {"model": trees[6]["model"]})


@pytest.mark.ci
def test_a_checkpoint_is_restored_to_the_bit_on_eight_devices(run):
  workdir, trees = run
  assert_same(restored(workdir, mesh=mesh_lib.start())[0], trees[7])


def test_a_checkpoint_of_another_vocabulary_is_named(run):
  message = r"item/parameters has shape \(30, 4\), the model's has \(31, 4\).*Make the model"
  with pytest.raises(errors.UserError, match=message):
    checkpoints.load(checkpoints.folder(run[0], 6), **make(1, rows=31))
