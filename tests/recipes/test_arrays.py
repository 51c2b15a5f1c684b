"""Manifests and prepared columns notice every change of a file, and name it."""

import os
import pickle
import re

import numpy as np
import pytest
from cases import each

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


def test_every_flipped_byte_is_noticed(folder):
  for name in (*FILES, arrays.MANIFEST):
    path = folder / name
    content = path.read_bytes()
    for position in range(0, len(content), 7 if name == arrays.MANIFEST else 97):
      flipped = bytearray(content)
      flipped[position] ^= 1 << position % 8
      path.write_bytes(flipped)
      if name == arrays.MANIFEST and flipped.strip() == content.strip():
        continue  # a space at its end
      with pytest.raises(errors.DamagedFileError, match=re.escape(str(path))):
        arrays.check_manifest(folder)
    path.write_bytes(content)
  arrays.check_manifest(folder)


def test_a_file_that_is_cut_emptied_longer_removed_added_or_a_folder_is_named(folder):
  for name in (*FILES, arrays.MANIFEST):
    path = folder / name
    content = path.read_bytes()
    for changed in (content[: len(content) // 2], b"", content + b"\1"):
      if changed == content:
        continue
      path.write_bytes(changed)
      with pytest.raises(errors.DamagedFileError, match=re.escape(str(path))):
        arrays.check_manifest(folder)
    path.unlink()
    with pytest.raises(errors.UserError, match=rf"{re.escape(str(path))} is missing"):
      arrays.check_manifest(folder)
    path.write_bytes(content)
  added = folder / "state" / "d" / "more"
  added.write_bytes(b"")
  with pytest.raises(errors.DamagedFileError, match="state/d/more is not one of its files"):
    arrays.check_manifest(folder)
  added.unlink()
  (folder / "empty").unlink()
  (folder / "empty").mkdir()
  with pytest.raises(errors.DamagedFileError, match="30/empty"):
    arrays.check_manifest(folder)


# --- columns --------------------------------------------------------------------------------------


def test_columns_travel_as_a_path(tmp_path):
  for name in ("x", "ids"):
    arrays.column(tmp_path, name, (30,), np.int64)[:] = np.arange(30)
  columns = arrays.Columns(tmp_path)
  columns["x"]
  data = pickle.dumps(columns)
  assert len(data) < 1000
  np.testing.assert_array_equal(pickle.loads(data)["x"], columns["x"])
  with pytest.raises(KeyError, match=r"no column 'y'; it has \['ids', 'x'\]"):
    columns["y"]


def test_preparation_goes_on_after_a_kill(tmp_path):
  calls = []

  def build(folder):
    calls.append(folder)
    column = arrays.column(folder, "x", (4,), np.int32)
    if len(calls) == 1:
      column[:2] = 7
      column.flush()
      raise KeyboardInterrupt
    column[2:] = 8
    return {"splits": arrays.cut(4, 0.25, 0.25)}

  with pytest.raises(KeyboardInterrupt):
    arrays.prepared(tmp_path, "toy", {"a": 1}, build)
  columns, meta = arrays.prepared(tmp_path, "toy", {"a": 1}, build)
  assert columns["x"].tolist() == [7, 7, 8, 8]
  assert meta["splits"] == {"train": [0, 2], "valid": [2, 3], "test": [3, 4]}
  arrays.prepared(tmp_path, "toy", {"a": 1}, build)
  assert len(calls) == 2
  arrays.prepared(tmp_path, "toy", {"a": 2}, build)
  assert len(calls) == 3


def test_data_of_another_format_are_built_again(tmp_path, monkeypatch):
  assert prepare(tmp_path)[1]
  assert not prepare(tmp_path)[1]
  monkeypatch.setattr(arrays, "FORMAT", arrays.FORMAT + 1)
  assert prepare(tmp_path)[1]


def prepare(cache):
  """Prepares eight numbers; returns them and whether they were built by this call."""
  built = []

  def build(folder):
    built.append(True)
    arrays.column(folder, "x", (8,), np.int64)[:] = np.arange(8)
    arrays.column(folder, "y", (8,), np.int64)[:] = 0
    return {"rows": 8}

  columns, meta = arrays.prepared(cache, "toy", {}, build)
  assert meta["rows"] == 8
  return columns["x"].tolist(), bool(built)


def flip(path):
  """Changes one byte of a file and leaves its size and its times."""
  stat, data = path.stat(), bytearray(path.read_bytes())
  data[-3] ^= 1
  path.write_bytes(data)
  os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


DAMAGE = {
  "a byte": ("x.npy", flip, "has another checksum"),
  "the end": ("y.npy", lambda path: os.truncate(path, 100), "has 100 bytes instead of 192"),
  "no meta": ("meta.json", lambda path: path.unlink(), "is missing"),
  "another meta": (
    "meta.json",
    lambda path: path.write_text(path.read_text().replace('"rows": 8', '"rows": 9')),
    "is not what was written",
  ),
}


def test_damage_in_the_cache_is_named_and_mended(tmp_path, capsys):
  def check(name, damage, message):
    assert prepare(tmp_path) == (list(range(8)), False)
    damage(next(tmp_path.glob("toy-*/meta.json")).with_name(name))
    assert prepare(tmp_path) == (list(range(8)), True)
    said = capsys.readouterr().err
    assert f"{name} {message}" in said
    assert "preparing the data set again" in said

  assert prepare(tmp_path) == (list(range(8)), True)
  each(DAMAGE, check)
