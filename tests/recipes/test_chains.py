"""Which checkpoints of a folder are used and kept, on folders made by hand."""

import shutil

import pytest

from recipes import errors, manifest
from recipes.run import checkpoints


def write(folder, step, follows=None, best_step=0):
  """A checkpoint of one file."""
  item = folder / str(step) / (checkpoints.STATE if follows is None else checkpoints.DELTA)
  item.mkdir(parents=True)
  (item / "arrays").write_bytes(b"content")
  (folder / str(step) / "commit_success.txt").touch()
  about = {"step": step, "follows": follows, "best_step": best_step}
  manifest.write(folder / str(step), about)


@pytest.fixture
def folder(tmp_path):
  path = tmp_path / "checkpoints"
  for step, follows in [(10, None), (20, 10), (30, 20), (40, None), (50, 40)]:
    write(path, step, follows)
  return path


def test_a_chain_begins_with_a_full_checkpoint(folder):
  assert checkpoints.steps(folder) == [10, 20, 30, 40, 50]
  assert checkpoints.of_step(folder, 30) == [10, 20, 30]
  assert checkpoints.base(folder, [10, 20, 30]) == folder / "10" / "state"
  assert checkpoints.newest(folder) == [40, 50]
  assert checkpoints.newest(folder / "nothing") == []


def test_other_names_are_no_checkpoints(folder):
  for name in ("60.orbax-checkpoint-tmp", "70.removed", "notes"):
    (folder / name).mkdir()
  (folder / "80").touch()
  assert checkpoints.steps(folder) == [10, 20, 30, 40, 50]


@pytest.mark.parametrize(
  ("damaged", "chain"),
  [([50], [40]), ([40], [10, 20, 30]), ([40, 20], [10]), ([20], [40, 50]), ([10, 50], [40])],
)
def test_a_damaged_checkpoint_takes_its_deltas_with_it(folder, damaged, chain, capsys):
  for step in damaged:
    (folder / str(step) / "commit_success.txt").write_text("?")
  assert checkpoints.newest(folder) == chain
  said = capsys.readouterr().err.splitlines()
  assert len(said) == sum(step > chain[-1] for step in checkpoints.steps(folder))
  assert all("commit_success.txt has 1 bytes instead of 0" in line for line in said)


def test_what_is_missing_is_said(folder, capsys):
  (folder / "50" / manifest.NAME).unlink()
  (folder / "40" / manifest.NAME).rename(folder / "40" / f"{manifest.NAME}.part")
  assert checkpoints.newest(folder) == [10, 20, 30]
  assert capsys.readouterr().err.splitlines() == [
    f"the checkpoint of step {step} is not complete: {folder}/{step}/manifest.json is missing"
    for step in (50, 40)
  ]
  with pytest.raises(errors.MissingFileError, match=r"/50/manifest\.json is missing"):
    checkpoints.of_step(folder, 50)


def test_a_first_save_without_a_manifest_was_not_completed(folder, capsys):
  for step in checkpoints.steps(folder):
    (folder / str(step) / manifest.NAME).unlink()
  with pytest.raises(errors.UserError, match=r"can be used .*step 50 is not complete"):
    checkpoints.newest(folder)  # several saves are not one that was killed
  for step in checkpoints.steps(folder)[1:]:
    shutil.rmtree(folder / str(step))
  assert checkpoints.newest(folder) == []
  assert "step 10 is not complete" in capsys.readouterr().err


def test_deltas_without_their_full_checkpoint_are_damaged(folder):
  full = [step for step in checkpoints.steps(folder) if checkpoints.of_step(folder, step) == [step]]
  for step in full:
    shutil.rmtree(folder / str(step))
  with pytest.raises(errors.UserError, match=r"no checkpoint in .* can be used"):
    checkpoints.newest(folder)


def test_a_damaged_manifest_is_not_a_missing_one(folder):
  for step in checkpoints.steps(folder):
    (folder / str(step) / manifest.NAME).write_text("{}")
  with pytest.raises(errors.UserError, match=r"can be used \(.*50/manifest\.json is not what was"):
    checkpoints.newest(folder)


def test_later_checkpoints_are_set_aside_once_more(folder):
  for _ in range(2):
    checkpoints.set_aside(folder, 30)
    assert checkpoints.steps(folder) == [10, 20, 30]
    write(folder, 40)
    write(folder, 50, 40)
  assert (folder.parent / "damaged_checkpoints" / "50" / "delta" / "arrays").exists()


@pytest.mark.parametrize(
  ("best_step", "kept"), [(0, [40, 50]), (20, [10, 20, 40, 50]), (40, [40, 50]), (35, [40, 50])]
)
def test_what_is_not_needed_is_removed(folder, best_step, kept):
  (folder / "5.removed").mkdir()  # left by a kill
  checkpoints._prune(folder, best_step)
  assert sorted(path.name for path in folder.iterdir()) == [str(step) for step in kept]


def test_the_best_one_that_the_checkpoint_before_knew_is_kept(folder):
  write(folder, 60, best_step=20)
  write(folder, 70, best_step=70)
  checkpoints._prune(folder, 70)
  assert checkpoints.steps(folder) == [10, 20, 60, 70]
  write(folder, 80, best_step=70)
  checkpoints._prune(folder, 70)
  assert checkpoints.steps(folder) == [70, 80]
