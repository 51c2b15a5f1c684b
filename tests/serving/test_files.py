"""Exports that are saved over earlier ones: after errors and kills one of the two is there."""

import functools

import jax
import numpy as np
import pytest
from kills import full_disk, is_killed

import embed

FILES = ["arrays.npz", "program.bin"]


@functools.cache
def version(factor, size=4):
  """An export that answers `factor ** 2`; a program and arrays of two versions answer otherwise."""
  tables = {"file": np.full((size, 1), factor, np.float32)}  # numpy.savez would refuse this name
  return embed.export(lambda tables, ids: tables["file"][ids] * factor, tables, np.array([0]))


def answer(folder):
  """The answer in a process that has only JAX."""
  program = jax.export.deserialize(bytearray((folder / "program.bin").read_bytes()))
  with np.load(folder / "arrays.npz") as arrays:
    return program.call(dict(arrays), np.array([0])).item()


def names(folder):
  return sorted(path.name for path in folder.iterdir())


def test_two_exports_in_one_folder_after_another(tmp_path):
  (tmp_path / "notes.txt").write_text("mine")
  for factor in (3, 5):
    version(factor).save(tmp_path)
    assert answer(tmp_path) == factor**2
    assert names(tmp_path) == sorted([*FILES, "notes.txt"])
    assert not any(path.is_symlink() for path in tmp_path.iterdir())
  assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.ci
def test_links_of_the_user_are_replaced_and_not_written_through(tmp_path):
  folder, elsewhere = tmp_path / "served", tmp_path / "elsewhere"
  version(3).save(elsewhere)
  folder.mkdir()
  for name in FILES:
    (folder / name).symlink_to(f"../elsewhere/{name}")
  (folder / ".replacing").symlink_to(elsewhere)
  version(5).save(folder)
  assert (answer(folder), answer(elsewhere)) == (25, 9)
  assert names(folder) == names(elsewhere) == FILES


def test_a_full_disk_leaves_what_was_there(tmp_path):
  large = version(5, size=1 << 16)
  for folder in (tmp_path / "new", tmp_path / "old"):
    if folder.name == "old":
      version(3).save(folder)
    with full_disk(1 << 15), pytest.raises(OSError, match="too large"):
      large.save(folder)
    assert not folder.exists() if folder.name == "new" else answer(folder) == 9
    large.save(folder)
    assert answer(folder) == 25
    assert names(folder) == FILES


@pytest.mark.weekly
def test_a_kill_at_any_step_leaves_one_export(tmp_path):
  old, new, newest = version(3), version(5), version(7)
  answers = []
  for step in range(1000):
    folder = tmp_path / str(step)
    old.save(folder)
    if not is_killed(lambda folder=folder: new.save(folder), step=step):
      break
    answers.append(answer(folder))
    newest.save(folder)
    assert answer(folder) == 49
    assert names(folder) == FILES
  assert answers == sorted(answers)
  assert set(answers) == {9, 25}
