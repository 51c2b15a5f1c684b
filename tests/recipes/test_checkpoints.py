"""Checkpoints of a run, full and as deltas: damage is named, and the newest whole one is used."""

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

ROWS = 30


class Model(nnx.Module):
  def __init__(self, seed, rows=ROWS, mesh=None):
    rngs = nnx.Rngs(seed)
    table = embed.TableConfig(rows, 4, name="item", optimizer=embed.adam(0.1))
    self.embed = embed.SparseEmbed(embed.FeatureConfig(table), rngs=rngs, mesh=mesh)
    self.head = nnx.Linear(4, 1, rngs=rngs)


def make(seed, rows=ROWS, mesh=None):
  model = Model(seed, rows, mesh)
  state = {"model": model, "optimizer": embed.Optimizer(model, optax.adam(0.01))}
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
  assert [checkpoints.of_step(folder, step) for step in trees] == [
    [1],
    [1, 2],
    [1, 2, 3],
    [4],
    [4, 5],
  ]
  assert [(folder / str(step) / "delta").is_dir() for step in trees] == [
    False, True, True, False, True,
  ]  # fmt: skip


@pytest.mark.parametrize("step", [1, 3, 5])
@pytest.mark.parametrize("devices", [1, 8])
def test_every_step_is_restored_to_the_bit_on_any_devices(run, step, devices):
  folder, trees = run
  mesh = hosts.start() if devices == 8 else None
  tree, progress = restored(folder, step, mesh)
  assert_same(tree, trees[step])
  assert progress.step == step
  assert progress.logged == {"loss": [0.5]}


@pytest.mark.ci
def test_a_run_on_eight_devices_goes_on_with_deltas_on_one(tmp_path):
  trees = saved(tmp_path / "c", [1, 2], full_every=5, mesh=hosts.start())
  state = make(1)
  with checkpoints.Manager(tmp_path / "c", full_every=5) as manager:
    manager.restore(manager.newest(), **state)
    assert_same(tree_of(state), trees[2])
    train_step(state["model"], state["optimizer"], np.arange(5))
    manager.save(checkpoints.Progress(step=3), **state)
  assert checkpoints.of_step(tmp_path / "c", 3) == [1, 2, 3]
  assert_same(restored(tmp_path / "c", mesh=hosts.start())[0], tree_of(state))


@pytest.mark.parametrize("step", [4, 5])
def test_a_model_alone_is_restored_too(run, step):
  folder, trees = run
  model = make(1)["model"]
  checkpoints.restore(folder, checkpoints.of_step(folder, step), model=model)
  assert_same(tree_of({"model": model}), {"model": trees[step]["model"]})


# --- damage ---------------------------------------------------------------------------------------


def damaged(path, kind="flip"):
  """Damages a file; `test_arrays.py` has the other kinds of damage."""
  content = path.read_bytes()
  path.unlink()
  if kind == "flip":
    position = len(content) * 2 // 3
    path.write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])


@pytest.mark.parametrize("kind", ["flip", "remove"])
def test_every_damaged_file_is_named_and_not_used(run, copy, capfd, kind):
  """Of a full checkpoint and of a delta, the manifest itself included."""
  folder, _ = copy
  count = 0
  for step, before in ((4, 3), (5, 4)):
    shutil.rmtree(folder)
    shutil.copytree(run[0], folder)
    names = [*arrays._listed(folder / str(step)), arrays.MANIFEST]
    files = [folder / str(step) / name for name in names]
    assert len(files) >= 3
    for path in files:
      damaged(path, kind)
      with pytest.raises(errors.UserError, match=re.escape(str(path))):
        checkpoints.of_step(folder, step)
      assert checkpoints.newest(folder)[-1] == before, path
      said = capfd.readouterr().err.splitlines()
      assert [line for line in said if str(path) in line and f"step {step} " in line], path
      path.parent.mkdir(exist_ok=True)
      path.write_bytes((run[0] / path.relative_to(folder)).read_bytes())
      count += 1
    assert checkpoints.newest(folder)[-1] == 5
  assert count >= 12


@pytest.mark.parametrize("kind", ["flip", "remove"])
def test_what_orbax_writes_after_the_manifest_is_not_needed(copy, kind):
  folder, trees = copy
  for name in arrays._UNLISTED[2:]:
    damaged(folder / "4" / name, kind)
  tree, progress = restored(folder)
  assert progress.step == 5
  assert_same(tree, trees[5])


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


def test_a_damaged_base_costs_its_deltas(copy, capfd):
  folder, trees = copy
  for step in (4, 5):
    shutil.rmtree(folder / str(step))
  damaged(next((folder / "2" / "delta").iterdir()))
  tree, _ = restored(folder)
  assert_same(tree, trees[1])
  assert "the checkpoint of step 3 is damaged" in capfd.readouterr().err


def test_if_no_checkpoint_is_whole_the_run_does_not_begin_again_in_silence(copy, capfd):
  folder, _ = copy
  for step in (1, 4):
    damaged(folder / str(step) / arrays.MANIFEST, "remove")
  with pytest.raises(errors.UserError, match=r"no checkpoint in .* can be used \(.*remove that fo"):
    restored(folder)
  assert checkpoints.steps(folder) == [1, 2, 3, 4, 5]  # nothing is moved
  assert checkpoints.newest(folder.parent / "nothing") == []


def test_a_tested_checkpoint_that_is_damaged_is_named(copy):
  folder, _ = copy
  path = next((folder / "3" / "delta").iterdir())
  damaged(path)
  message = rf"step 3 is damaged: {re.escape(str(path))} has another checksum.*another --workdir"
  with pytest.raises(errors.DamagedFileError, match=message):
    restored(folder, 3)


def test_a_damage_after_it_was_verified_is_noticed(tmp_path):
  """A manager verifies again what it restores later, as the best one at the end of a run."""
  folder = tmp_path / "c"
  saved(folder, [1, 2], best_steps={1: 1, 2: 1})
  with checkpoints.Manager(folder) as manager:
    state = make(1)
    manager.restore(manager.newest(), **state)
    manager.restore(checkpoints.of_step(manager.folder, 1), **state)
    damaged(folder / "1" / "state" / "_METADATA")
    with pytest.raises(errors.DamagedFileError, match="1/state/_METADATA"):
      manager.restore(checkpoints.of_step(manager.folder, 1), **state)


@pytest.mark.parametrize("steps", [[], [1, 2]])
def test_a_kill_in_a_save_costs_the_steps_since_the_last_checkpoint(tmp_path, monkeypatch, steps):
  """Also in the first one: the run begins again."""

  def killed(*args):
    raise RuntimeError("killed")

  folder = tmp_path / "c"
  trees = saved(folder, steps)
  with monkeypatch.context() as patch:
    patch.setattr(arrays, "write_manifest", killed)
    with pytest.raises(RuntimeError), checkpoints.Manager(folder) as manager:
      manager.save(checkpoints.Progress(step=3), **make(0))
  assert checkpoints.steps(folder) == steps
  assert len(os.listdir(folder)) == len(steps) + 1
  if steps:
    assert_same(restored(folder)[0], trees[2])
  with checkpoints.Manager(folder) as manager:
    assert manager.newest() == steps[-1:]
    manager.save(checkpoints.Progress(step=3), **make(0))
  assert sorted(os.listdir(folder)) == [*map(str, steps[-1:]), "3"]


def test_a_kill_while_old_checkpoints_are_removed_leaves_no_trace(tmp_path):
  folder = tmp_path / "c"
  saved(folder, [1, 2, 3])
  (folder / "1" / "state").mkdir(parents=True)  # the rest of a folder whose files are removed
  with checkpoints.Manager(folder) as manager:
    assert manager.newest() == [3]
    manager.save(checkpoints.Progress(step=4), **make(0))
  assert checkpoints.steps(folder) == [3, 4]


def test_a_checkpoint_of_another_vocabulary_is_named(run):
  message = r"item/parameters has shape \(30, 4\), the model's has \(31, 4\).*Make table"
  with (
    checkpoints.Manager(run[0]) as manager,
    pytest.raises(errors.UserError, match=message),
  ):
    manager.restore(checkpoints.of_step(manager.folder, 3), **make(1, rows=31))


# --- what is kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("full_every", "best_steps", "kept"),
  [
    (1, {}, [6, 7]),
    (1, {step: 7 if step == 7 else 2 for step in range(1, 8)}, [2, 6, 7]),  # 2 is the best of 6
    (3, {step: min(step, 2) for step in range(1, 8)}, [1, 2, 4, 5, 6, 7]),
  ],
)
def test_the_last_two_and_the_best_are_kept_with_what_they_need(
  tmp_path, full_every, best_steps, kept
):
  trees = saved(tmp_path / "c", range(1, 8), full_every, best_steps)
  assert checkpoints.steps(tmp_path / "c") == kept
  for step in {best_steps.get(7) or 7, 6, 7}:
    assert_same(restored(tmp_path / "c", step)[0], trees[step])


def test_a_full_checkpoint_comes_every_so_often_over_restarts(tmp_path, capfd):
  folder, state = tmp_path / "c", make(0)
  for step in range(1, 8):
    with checkpoints.Manager(folder, full_every=3) as manager:
      if latest := manager.newest():
        manager.restore(latest, **state)
      train_step(state["model"], state["optimizer"], np.arange(4))
      manager.save(checkpoints.Progress(step=step), **state)
  assert [checkpoints.of_step(folder, step) for step in (5, 6, 7)] == [[4, 5], [4, 5, 6], [7]]
  said = [line for line in capfd.readouterr().err.splitlines() if "saved" in line]
  assert re.fullmatch(r"saved step 4 in full: 0\.0 MB", said[3])
  assert re.fullmatch(r"saved step 6 since step 5: 0\.0 MB", said[5])


# --- asynchronous ---------------------------------------------------------------------------------


@pytest.mark.parametrize("full_every", [1, 3])
def test_a_save_in_the_background_is_finished_by_the_next_one(tmp_path, monkeypatch, full_every):
  """As on an accelerator: here the state is not donated."""
  monkeypatch.setattr(checkpoints, "_is_asynchronous", lambda: True)
  trees = saved(tmp_path / "c", range(1, 6), full_every)
  for step in (4, 5):
    assert_same(restored(tmp_path / "c", step)[0], trees[step])


def test_a_full_disk_in_the_background_is_named(tmp_path, monkeypatch):
  def full(*args):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(checkpoints, "_is_asynchronous", lambda: True)
  monkeypatch.setattr(arrays, "write_manifest", full)
  with checkpoints.Manager(tmp_path / "c") as manager:
    manager.save(checkpoints.Progress(step=1), **make(0))
    with pytest.raises(OSError, match=r"No space left on device: .*/c"):
      manager.save(checkpoints.Progress(step=2), **make(0))
