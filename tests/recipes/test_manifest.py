"""A manifest notices every change of a file, and names the file."""

import os
import re

import pytest

from recipes import arrays, errors

FILES = {"state/d/0": os.urandom(5000), "state/_METADATA": b"{}", "empty": b"", "progress/p": b"x"}


@pytest.fixture
def folder(tmp_path):
  path = tmp_path / "30"
  for name, content in FILES.items():
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).write_bytes(content)
  assert arrays.write_manifest(path, {"step": 30}) == sum(map(len, FILES.values()))
  return path


def test_files_as_they_were_written_are_whole(folder):
  (folder / "no files").mkdir()
  content = arrays.check_manifest(folder)
  assert content == arrays.read_manifest(folder)
  assert content["step"] == 30
  assert set(content["files"]) == set(FILES)


@pytest.mark.parametrize("name", [*FILES, arrays.MANIFEST])
def test_every_flipped_byte_is_noticed(folder, name):
  path = folder / name
  content = path.read_bytes()
  positions = range(len(content)) if name == arrays.MANIFEST else range(0, len(content), 97)
  for position in positions:
    flipped = bytearray(content)
    flipped[position] ^= 1 << position % 8
    path.write_bytes(flipped)
    if name == arrays.MANIFEST and flipped.strip() == content.strip():
      continue  # a space at its end
    with pytest.raises(errors.DamagedFileError, match=re.escape(str(path))):
      arrays.check_manifest(folder)


@pytest.mark.parametrize("name", [*FILES, arrays.MANIFEST])
def test_a_file_that_is_cut_emptied_removed_or_longer_is_named(folder, name):
  path = folder / name
  content = path.read_bytes()
  for changed in (content[:-1], content[: len(content) // 2], b"", content + b"\0"):
    path.write_bytes(changed)
    if changed == content or (name == arrays.MANIFEST and changed.strip() == content.strip()):
      continue
    with pytest.raises(errors.DamagedFileError, match=re.escape(str(path))):
      arrays.check_manifest(folder)
  path.unlink()
  with pytest.raises(errors.UserError, match=rf"{re.escape(str(path))} is missing"):
    arrays.check_manifest(folder)


def test_a_file_that_was_added_is_named(folder):
  (folder / "state" / "d" / "more").write_bytes(b"")
  with pytest.raises(errors.DamagedFileError, match="state/d/more is not one of its files"):
    arrays.check_manifest(folder)


def test_a_file_that_became_a_folder_is_named(folder):
  (folder / "empty").unlink()
  (folder / "empty").mkdir()
  with pytest.raises(errors.DamagedFileError, match="30/empty"):
    arrays.check_manifest(folder)


def test_many_damaged_files_are_counted(tmp_path):
  for i in range(9):
    (tmp_path / str(i)).write_bytes(b"content")
  arrays.write_manifest(tmp_path, {})
  for i in range(9):
    (tmp_path / str(i)).write_bytes(b"")
  with pytest.raises(errors.DamagedFileError, match=r"/4 has 0 bytes instead of 7; and 4 more$"):
    arrays.check_manifest(tmp_path)


def test_the_start_of_a_kill_is_no_manifest(folder):
  """As a kill leaves it while the manifest is written."""
  (folder / arrays.MANIFEST).rename(folder / f"{arrays.MANIFEST}.part")
  with pytest.raises(errors.MissingFileError, match=r"manifest\.json is missing"):
    arrays.read_manifest(folder)
  arrays.write_manifest(folder, {"step": 30})
  assert set(arrays.check_manifest(folder)["files"]) == set(FILES)
