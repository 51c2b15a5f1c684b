"""Batches: every row once per epoch, the same after a resume, one shape, split over hosts."""

import errno
import json
import os
import pickle

import grain
import numpy as np
import pytest
import scipy.stats
from absl import flags

from recipes import arrays, errors, pipeline

ROWS = (5, 28)  # 23 rows: no batch size below divides it


@pytest.fixture
def columns(tmp_path):
  arrays.column(tmp_path, "x", (30,), np.int64)[:] = np.arange(30)
  arrays.column(tmp_path, "ids", (30, 2), np.int32)[:] = np.arange(60).reshape(30, 2)
  return arrays.Columns(tmp_path)


def shuffled(columns, **changes):
  options = {"batch_size": 4, "seed": 3, "num_batches": 23} | changes
  return pipeline.ShuffledBatches(columns, ROWS, **options)


@pytest.fixture(params=[False, True], ids=["one window", "windows"])
def windows(request, monkeypatch):
  """Shuffles as few rows as there are here, or as many: in chunks, and in windows of some."""
  if request.param:
    monkeypatch.setattr(pipeline, "_CHUNK", 3)
    monkeypatch.setattr(pipeline, "_WINDOW", 9)


@pytest.mark.usefixtures("windows")
def test_every_row_once_per_epoch_in_a_new_order(columns):
  source = shuffled(columns)
  seen = np.concatenate([source[i]["x"] for i in range(len(source))]).reshape(4, 23)
  for epoch in seen:
    np.testing.assert_array_equal(np.sort(epoch), np.arange(*ROWS))
  assert len({tuple(epoch) for epoch in seen}) == 4
  np.testing.assert_array_equal(source[2]["ids"][:, 0], 2 * source[2]["x"])


@pytest.mark.usefixtures("windows")
def test_a_batch_depends_on_seed_and_number_only(columns):
  forwards, backwards = shuffled(columns), shuffled(columns)
  late = {i: backwards[i]["x"] for i in reversed(range(23))}
  for i in range(23):
    np.testing.assert_array_equal(forwards[i]["x"], late[i])
  other = shuffled(columns, seed=4)
  assert any((forwards[i]["x"] != other[i]["x"]).any() for i in range(23))


@pytest.mark.usefixtures("windows")
def test_hosts_share_a_global_batch(columns):
  whole = shuffled(columns)
  parts = [shuffled(columns, shard=(host, 2)) for host in range(2)]
  for i in (0, 5, 22):  # 5 crosses the end of the first epoch
    joined = np.concatenate([part[i]["x"] for part in parts])
    np.testing.assert_array_equal(joined, whole[i]["x"])
  with pytest.raises(ValueError, match="multiple of the 3 hosts"):
    shuffled(columns, shard=(0, 3))


@pytest.mark.parametrize("hosts", [1, 2])
def test_sequential_reads_once_and_fills_up(columns, hosts):
  sources = [
    pipeline.SequentialBatches(columns, ROWS, batch_size=10, fill={"ids": -1}, shard=(host, hosts))
    for host in range(hosts)
  ]
  seen = []
  for i in range(3):
    for batch in (source[i] for source in sources):
      assert batch["ids"].shape == (10 // hosts, 2)
      assert (batch["ids"][~batch["mask"]] == -1).all()
      seen.extend(batch["x"][batch["mask"]])
  assert seen == list(range(*ROWS))


@pytest.mark.usefixtures("windows")
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_resumes_where_it_was(columns, num_workers, request):
  if num_workers:
    flags.FLAGS.mark_as_parsed()  # a program that starts with app.run has done so
    request.addfinalizer(flags.FLAGS.unparse_flags)
  dataset = pipeline.batches(shuffled(columns), double, num_workers=num_workers)
  assert isinstance(dataset, grain.IterDataset)
  whole = list(iter(dataset))
  assert len(whole) == 23
  first = iter(dataset)
  for _ in range(9):
    next(first)
  second = iter(dataset)
  second.set_state(first.get_state())
  for expected, found in zip(whole[9:], second, strict=True):
    np.testing.assert_array_equal(found["x"], expected["x"])


def double(batch):
  return {"x": 2 * batch["x"]}


@pytest.mark.usefixtures("windows")
@pytest.mark.parametrize("size", [1, 2, 3, 8, 9, 10, 18, 19, 26, 27, 28, 100])
def test_any_number_of_rows_in_any_pieces(size):
  order = pipeline.ShuffledRows(size, seed=5)
  twice = order.rows(0, 2 * size)
  for epoch in np.split(twice, 2):
    np.testing.assert_array_equal(np.sort(epoch), np.arange(size))
  for start in range(0, size, 7):
    stop = min(start + 11, 2 * size)
    other = pickle.loads(pickle.dumps(order))
    np.testing.assert_array_equal(other.rows(start, stop), twice[start:stop])
  assert order.rows(3, 3).shape == (0,)


@pytest.mark.usefixtures("windows")
def test_every_row_is_equally_likely_at_every_position():
  """Chi-square over all pairs of a row and a position, and of successive epochs' rows."""
  size, epochs = 29, 3000
  order = pipeline.ShuffledRows(size, seed=0)
  seen = order.rows(0, epochs * size).reshape(epochs, size)
  for other in (np.broadcast_to(np.arange(size), seen.shape)[1:], seen[:-1]):
    counts = np.bincount((size * other + seen[1:]).ravel(), minlength=size**2)
    wanted = (epochs - 1) / size
    statistic = ((counts - wanted) ** 2 / wanted).sum()
    low, high = scipy.stats.chi2.ppf([1e-3, 1 - 1e-3], (size - 1) ** 2)
    assert low < statistic < high
  seeds = [pipeline.ShuffledRows(size, seed).rows(0, size) for seed in range(50)]
  assert len({tuple(rows) for rows in [*seen, *seeds]}) == epochs + 49  # seed 0 is in both


def test_a_batch_reads_the_chunks_of_one_window_only():
  size = 50_000_000
  order = pipeline.ShuffledRows(size, seed=0)
  epoch = [order.rows(start, start + 2**17) for start in range(0, 8 * 2**20, 2**17)]
  for start in range(0, len(epoch), 8):
    chunks = len(np.unique(np.concatenate(epoch[start : start + 8]) // 2**13))
    assert 200 < chunks < 600  # of two or three windows, each cut by another grid; of 6104 in all
  assert len(np.unique(np.concatenate(epoch) // 2**13)) > 1000


def test_a_small_split_is_one_permutation():
  """So that runs go on, from checkpoints too, in the order in which they have begun."""
  order = pipeline.ShuffledRows(1000, seed=3)
  for epoch in range(2):
    wanted = np.random.default_rng((3, epoch)).permutation(1000)
    np.testing.assert_array_equal(order.rows(1000 * epoch, 1000 * epoch + 1000), wanted)


def test_columns_travel_as_a_path(columns):
  columns["x"]
  data = pickle.dumps(columns)
  assert len(data) < 1000
  np.testing.assert_array_equal(pickle.loads(data)["x"], columns["x"])
  with pytest.raises(KeyError, match=r"no column 'y'; it has \['ids', 'x'\]"):
    columns["y"]


def test_an_empty_split_is_an_error(columns):
  with pytest.raises(ValueError, match="training split is empty"):
    pipeline.ShuffledBatches(columns, (3, 3), batch_size=4, seed=0, num_batches=1)


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
  "a file": ("x.npy", lambda path: path.unlink(), "is missing"),
  "no meta": ("meta.json", lambda path: path.unlink(), "is missing"),
  "half the meta": ("meta.json", lambda path: os.truncate(path, 30), "is damaged"),
  "another meta": (
    "meta.json",
    lambda path: path.write_text(path.read_text().replace('"rows": 8', '"rows": 9')),
    "is not what was written",
  ),
  "no meta at all": ("meta.json", lambda path: path.write_text("[]"), "is damaged"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_in_the_cache_is_named_and_mended(case, tmp_path, capsys):
  name, damage, message = DAMAGE[case]
  assert prepare(tmp_path) == (list(range(8)), True)
  assert prepare(tmp_path) == (list(range(8)), False)
  damage(next(tmp_path.glob("toy-*/meta.json")).with_name(name))
  assert prepare(tmp_path) == (list(range(8)), True)
  said = capsys.readouterr().err
  assert f"{name} {message}" in said
  assert "preparing the data set again" in said
  assert prepare(tmp_path) == (list(range(8)), False)


def test_a_large_file_is_read_where_it_was_written_to(tmp_path, monkeypatch):
  monkeypatch.setattr(arrays, "_TRUSTED", 0)
  prepare(tmp_path)
  path = next(tmp_path.glob("toy-*/x.npy"))
  real, read = arrays._checksum, []
  monkeypatch.setattr(arrays, "_checksum", lambda file: read.append(True) or real(file))
  assert prepare(tmp_path) == (list(range(8)), False)
  assert not read
  data = bytearray(path.read_bytes())
  data[-3] ^= 1
  path.write_bytes(data)
  assert prepare(tmp_path) == (list(range(8)), True)
  assert read


def test_what_a_damaged_source_has_left_is_removed(tmp_path):
  def build(folder):
    arrays.column(folder, "x", (4,), np.int32)
    raise errors.DamagedFileError("line 3")

  with pytest.raises(errors.DamagedFileError, match="line 3"):
    arrays.prepared(tmp_path, "toy", {}, build)
  assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_links_at_the_names_of_locks_and_new_files_are_not_followed(tmp_path):
  victim, cache = tmp_path / "victim", tmp_path / "cache"
  victim.write_text("precious")
  prepare(cache)
  lock = next(cache.glob("*.lock"))
  lock.unlink()
  lock.symlink_to(victim)
  with pytest.raises(errors.UserError, match=r"the lock file .*\.lock is a symbolic link: remove"):
    prepare(cache)
  (tmp_path / "x.json.part").symlink_to(victim)
  arrays.write_json(tmp_path / "x.json", {"a": 1})
  assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}
  assert not (tmp_path / "x.json").is_symlink()
  (tmp_path / "x.npy").symlink_to(victim)
  arrays.column(tmp_path, "x", (4,), np.int32)
  assert victim.read_text() == "precious"


def test_a_full_disk_is_an_error_when_a_column_is_made(tmp_path, monkeypatch):
  """And no bus error when it is written to."""

  def full(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(os, "posix_fallocate", full)
  with pytest.raises(OSError, match=r"No space left on device.*x\.npy") as error:
    arrays.column(tmp_path, "x", (4,), np.int32)
  assert "Free some space; the same command then resumes" in errors.explain(error.value)
