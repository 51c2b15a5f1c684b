"""Batches: every row once per epoch, the same after a resume, one shape, split over hosts."""

import pickle

import grain
import numpy as np
import pytest
from absl import flags

from recipes import arrays, pipeline

ROWS = (5, 28)  # 23 rows: no batch size below divides it


@pytest.fixture
def columns(tmp_path):
  arrays.column(tmp_path, "x", (30,), np.int64)[:] = np.arange(30)
  arrays.column(tmp_path, "ids", (30, 2), np.int32)[:] = np.arange(60).reshape(30, 2)
  return arrays.Columns(tmp_path)


def shuffled(columns, **changes):
  options = {"batch_size": 4, "seed": 3, "num_batches": 23} | changes
  return pipeline.ShuffledBatches(columns, ROWS, **options)


def test_every_row_once_per_epoch_in_a_new_order(columns):
  source = shuffled(columns)
  seen = np.concatenate([source[i]["x"] for i in range(len(source))]).reshape(4, 23)
  for epoch in seen:
    np.testing.assert_array_equal(np.sort(epoch), np.arange(*ROWS))
  assert len({tuple(epoch) for epoch in seen}) == 4
  np.testing.assert_array_equal(source[2]["ids"][:, 0], 2 * source[2]["x"])


def test_a_batch_depends_on_seed_and_number_only(columns):
  forwards, backwards = shuffled(columns), shuffled(columns)
  late = {i: backwards[i]["x"] for i in reversed(range(23))}
  for i in range(23):
    np.testing.assert_array_equal(forwards[i]["x"], late[i])
  other = shuffled(columns, seed=4)
  assert any((forwards[i]["x"] != other[i]["x"]).any() for i in range(23))


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
