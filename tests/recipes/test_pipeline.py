"""Batches: every row once per epoch, the same after a resume, one shape, split over hosts."""

import grain
import numpy as np
import pytest
import scipy.stats
from cases import each

from recipes import cache, pipeline

ROWS = (5, 28)  # 23 rows: no batch size below divides it


@pytest.fixture
def columns(tmp_path):
  cache.column(tmp_path, "x", (30,), np.int64)[:] = np.arange(30)
  cache.column(tmp_path, "ids", (30, 2), np.int32)[:] = np.arange(60).reshape(30, 2)
  return cache.Columns(tmp_path)


def shuffled(columns, **changes):
  options = {"batch_size": 4, "seed": 3, "num_batches": 23} | changes
  return pipeline.ShuffledBatches(columns, ROWS, **options)


@pytest.fixture
def windows(monkeypatch):
  """Shuffles as many rows as there are: in chunks, and in windows of some."""
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
def test_hosts_share_a_global_batch(columns):
  whole = shuffled(columns)
  parts = [shuffled(columns, shard=(host, 2)) for host in range(2)]
  for i in (0, 5, 22):  # 5 crosses the end of the first epoch
    joined = np.concatenate([part[i]["x"] for part in parts])
    np.testing.assert_array_equal(joined, whole[i]["x"])


def test_sequential_reads_once_and_fills_up(columns):
  sources = [
    pipeline.SequentialBatches(columns, ROWS, batch_size=10, fill={"ids": -1}, shard=(host, 2))
    for host in range(2)
  ]
  seen = []
  for i in range(3):
    for batch in (source[i] for source in sources):
      assert batch["ids"].shape == (5, 2)
      assert (batch["ids"][~batch["mask"]] == -1).all()
      seen.extend(batch["x"][batch["mask"]])
  assert seen == list(range(*ROWS))


@pytest.mark.usefixtures("windows")
def test_resumes_where_it_was(columns):
  double = lambda batch: {"x": 2 * batch["x"]}
  dataset = pipeline.batches(shuffled(columns), double)
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


@pytest.mark.usefixtures("windows")
def test_any_number_of_rows_in_any_pieces():
  each({size: (size,) for size in (1, 2, 9, 10, 27, 28, 100)}, check_pieces)


def check_pieces(size):
  order = pipeline.ShuffledRows(size, seed=5)
  twice = order.rows(0, 2 * size)
  for epoch in np.split(twice, 2):
    np.testing.assert_array_equal(np.sort(epoch), np.arange(size))
  for start in range(0, size, 7):
    stop = min(start + 11, 2 * size)
    other = pipeline.ShuffledRows(size, seed=5)
    np.testing.assert_array_equal(other.rows(start, stop), twice[start:stop])
  assert order.rows(3, 3).shape == (0,)


@pytest.mark.ci
@pytest.mark.usefixtures("windows")
def test_every_row_is_equally_likely_at_every_position():
  """Chi-square over all pairs of a row and a position, and of successive epochs' rows."""
  size, epochs = 27, 1000  # of chunks of one size
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
