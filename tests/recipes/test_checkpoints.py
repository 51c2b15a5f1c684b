"""Checkpoints of a run, full and as deltas: damage is named, and the newest whole one is used."""

import functools
import os
import re
import shutil

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import embed
import embed.checkpoint
from recipes import arrays, errors, hosts
from recipes.run import checkpoints
from recipes.run import workdir as runs

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
  hosts.replicate(mesh, *state.values())
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


def saved(folder, steps, full_every=1, best_steps=None, mesh=None):
  """Saves some steps of a run; returns the tree of each."""
  state, trees = make(0, mesh=mesh), {}
  with checkpoints.Manager(folder, full_every=full_every) as manager:
    for step in steps:
      train_step(state["model"], state["optimizer"], np.arange(step, step + 8) % ROWS)
      best_step = (best_steps or {}).get(step, 0)
      progress = checkpoints.Progress(step=step, best_step=best_step, logged={"loss": [0.5]})
      manager.save(progress, **state)
      trees[step] = tree_of(state)
  return trees


def restored(folder, step=None, mesh=None, full_every=1):
  """The newest usable state, or the state of a step: its tree and its progress."""
  state = make(1, mesh=mesh)
  with checkpoints.Manager(folder, full_every=full_every) as manager:
    if step is None:
      step = manager.newest()[-1]
    progress = manager.restore(checkpoints.of_step(manager.folder, step), **state)
  return tree_of(state), progress


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """Five saves of a run: full ones at 1 and 4, deltas at 2, 3 and 5."""
  folder = tmp_path_factory.mktemp("run") / "checkpoints"
  with pytest.MonkeyPatch.context() as patch:
    keep_all = lambda _, held, context: [True] * len(held)
    patch.setattr(checkpoints.Manager, "should_preserve", keep_all)
    trees = saved(folder, range(1, 6), full_every=3)
  return folder, trees


@pytest.fixture
def copy(run, tmp_path):
  """A copy to damage, and the trees."""
  shutil.copytree(run[0], tmp_path / "checkpoints")
  return tmp_path / "checkpoints", run[1]


def test_a_chain_is_a_full_checkpoint_and_its_deltas(run):
  folder, trees = run
  assert checkpoints.steps(folder) == [1, 2, 3, 4, 5]
  chains = {1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [4], 5: [4, 5]}
  assert {step: checkpoints.of_step(folder, step) for step in trees} == chains
  assert [(folder / str(step) / "delta").is_dir() for step in trees] == [
    False, True, True, False, True,
  ]  # fmt: skip


@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.ci)])
def test_a_chain_is_restored_to_the_bit_on_any_devices(run, devices):
  folder, trees = run
  mesh = hosts.start() if devices == 8 else None
  tree, progress = restored(folder, 5, mesh)
  assert_same(tree, trees[5])
  assert progress.step == 5
  assert progress.logged == {"loss": [0.5]}


@pytest.mark.ci
def test_the_chain_of_a_real_run_is_restored_on_eight_devices(clicks, tmp_path):
  mesh, opened = hosts.start(), runs.open_run(clicks.workdir)
  model = lambda model: jax.tree.map(np.asarray, embed.checkpoint.to_tree(model=model))
  assert_same(model(opened.model(opened.load(), mesh)), model(clicks.model))
  folder = clicks.copy(tmp_path) / "checkpoints"
  assert checkpoints.of_step(folder, 8) == [6, 8]
  path = next(path for path in (folder / "6" / "state").rglob("*") if path.is_file())
  damaged(path)
  with pytest.raises(errors.DamagedFileError, match=rf"step 8 is damaged: {re.escape(str(path))}"):
    checkpoints.of_step(folder, 8)


def test_a_model_alone_is_restored_too(run):
  folder, trees = run
  model = make(1)["model"]
  checkpoints.restore(folder, checkpoints.of_step(folder, 5), model=model)
  assert_same(tree_of({"model": model}), {"model": trees[5]["model"]})


# --- damage ---------------------------------------------------------------------------------------


def damaged(path, kind="flip"):
  """Damages a file; `test_arrays.py` has the other kinds of damage."""
  content = path.read_bytes()
  path.unlink()
  if kind == "flip":
    position = len(content) * 2 // 3
    path.write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])


def test_every_damaged_file_is_named_and_not_used(copy, capfd):
  """Of a full checkpoint and of a delta, the manifest itself included."""
  folder, _ = copy
  count = 0
  for step, before in ((4, 3), (5, 4)):
    names = [*arrays._listed(folder / str(step)), arrays.MANIFEST]
    assert len(names) >= 3
    for name in names:
      path = folder / str(step) / name
      content = path.read_bytes()
      for kind in ("flip", "remove") if name == arrays.MANIFEST else ("flip",):
        damaged(path, kind)
        with pytest.raises(errors.UserError, match=re.escape(str(path))):
          checkpoints.of_step(folder, step)
        path.write_bytes(content)
      count += 1
    damaged(path)
    assert checkpoints.newest(folder)[-1] == before
    assert f"step {step} " in capfd.readouterr().err
    path.write_bytes(content)
  assert count >= 6
  assert checkpoints.newest(folder)[-1] == 5


def test_a_run_goes_on_from_the_newest_whole_checkpoint(copy, capfd):
  folder, trees = copy
  damaged(folder / "4" / "state" / "_METADATA")
  tree, progress = restored(folder)
  assert progress.step == 3
  assert_same(tree, trees[3])
  said = capfd.readouterr().err.splitlines()
  assert "4/state/_METADATA has" in said[0]
  assert said[0].startswith("the checkpoint of step 5 is damaged")
  assert said[1].startswith("the checkpoint of step 4 is damaged")
  assert [line.rpartition("/")[0] for line in said[2:4]] == [
    f"the checkpoint of step {step} has been moved to {folder.parent}/damaged_checkpoints"
    for step in (4, 5)
  ]
  assert not [line for line in said if "Traceback" in line or "coroutine" in line]
  assert checkpoints.steps(folder) == [1, 2, 3]
  assert sorted(os.listdir(folder.parent / "damaged_checkpoints")) == ["4", "5"]


def test_if_no_checkpoint_is_whole_the_run_does_not_begin_again_in_silence(copy, capfd):
  folder, _ = copy
  for step in (1, 4):
    damaged(folder / str(step) / arrays.MANIFEST, "remove")
  with pytest.raises(errors.UserError, match=r"no checkpoint in .* can be used \(.*remove that fo"):
    restored(folder)
  assert checkpoints.steps(folder) == [1, 2, 3, 4, 5]  # nothing is moved
  assert checkpoints.newest(folder.parent / "nothing") == []


def test_a_kill_in_a_save_costs_the_steps_since_the_last_checkpoint(tmp_path, monkeypatch):
  def killed(*args):
    raise RuntimeError("killed")

  folder = tmp_path / "c"
  trees = saved(folder, [1, 2])
  with monkeypatch.context() as patch:
    patch.setattr(arrays, "write_manifest", killed)
    with pytest.raises(RuntimeError), checkpoints.Manager(folder) as manager:
      manager.save(checkpoints.Progress(step=3), **make(0))
  assert checkpoints.steps(folder) == [1, 2]
  assert len(os.listdir(folder)) == 3
  assert_same(restored(folder)[0], trees[2])
  with checkpoints.Manager(folder) as manager:
    assert manager.newest() == [2]
    manager.save(checkpoints.Progress(step=3), **make(0))
  assert sorted(os.listdir(folder)) == ["2", "3"]


def test_a_checkpoint_of_another_vocabulary_is_named(run):
  message = r"item/parameters has shape \(30, 4\), the model's has \(31, 4\).*Make the model"
  with (
    checkpoints.Manager(run[0]) as manager,
    pytest.raises(errors.UserError, match=message),
  ):
    manager.restore(checkpoints.of_step(manager.folder, 3), **make(1, rows=31))


# --- what is kept ---------------------------------------------------------------------------------


def check_kept(folder, full_every, best_steps, kept):
  trees = saved(folder, range(1, 8), full_every, best_steps)
  assert checkpoints.steps(folder) == kept
  for step in {best_steps.get(7) or 7, 6, 7}:
    assert_same(restored(folder, step)[0], trees[step])


def test_the_last_two_and_the_best_are_kept(tmp_path):
  check_kept(tmp_path / "last", 1, {}, [6, 7])
  second_is_best = {step: 7 if step == 7 else 2 for step in range(1, 8)}  # of the first six
  check_kept(tmp_path / "best", 1, second_is_best, [2, 6, 7])


# --- asynchronous ---------------------------------------------------------------------------------
