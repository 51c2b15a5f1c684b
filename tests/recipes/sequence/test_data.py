"""Files, splits, packed rows, batches: by hand, every user once, a function of the number alone."""

import functools
import hashlib
from itertools import chain

import numpy as np
import pytest
import recipe_runs
import scipy.stats
from cases import each
from hypothesis import given
from hypothesis import strategies as st
from small_data import write_sequences

from recipes import packing
from recipes.sequence import data, table

SEQUENCES = {1: [5, 3, 9, 2, 7, 4], 2: [3, 5, 2], 4: [9, 4], 7: [8, 2, 3, 5, 9]}


def config(tmp_path, name="beauty", **changes):
  made = recipe_runs.load(f"sequence.{name}", "smoke")
  defaults = {"cache_dir": str(tmp_path / "cache"), "max_length": 4}
  if name != "synthetic":
    defaults |= {"data_dir": str(tmp_path)}
  made.update_from_flattened_dict(defaults | changes)
  return made


def write(tmp_path, layout="lines", sequences=SEQUENCES):
  name = "Beauty.txt" if layout == "lines" else "beauty.txt"
  return write_sequences(tmp_path / name, sequences, layout)


def sequences_of(columns):
  return [s.tolist() for s in np.split(columns["items"], columns["offsets"][1:-1])]


def test_both_layouts_are_the_same_data(tmp_path):
  path = write(tmp_path)
  loaded = data.load(config(tmp_path))
  assert loaded.num_items == 7  # 5, 3, 9, 2, 7, 4, 8 become 0 to 6
  expected = [[0, 1, 2, 3, 4, 5], [1, 0, 3], [2, 5], [6, 3, 1, 0, 2]]
  assert sequences_of(loaded.columns) == expected
  assert loaded.sha256 == {"Beauty.txt": hashlib.sha256(path.read_bytes()).hexdigest()}
  write(tmp_path, "pairs")
  other = data.load(config(tmp_path, "beauty_bert4rec"))
  assert sequences_of(other.columns) == expected


@pytest.mark.ci
def test_damage_is_named(tmp_path):
  cases = [
    ("pairs", "1 2\n1 3 4\n", r"beauty.txt, line 2.* has too many fields"),
    ("pairs", "1 2\n1\n", r"beauty.txt, line 2.* has too few fields"),
    ("lines", "", r"Beauty.txt is empty"),
  ]

  def check(layout, content, message):
    write(tmp_path, layout).write_text(content)
    with pytest.raises(ValueError, match=message):
      data.load(config(tmp_path, "beauty" if layout == "lines" else "beauty_bert4rec"))

  each(cases, check)


@pytest.mark.ci
def test_a_missing_file_says_where_it_comes_from(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"has no Beauty\.txt.*CIKM2020-S3Rec"):
    data.load(config(tmp_path, data_dir=""))
  with pytest.raises(
    FileNotFoundError, match=r"no Beauty\.txt.*CIKM2020-S3Rec.*--config\.data_dir"
  ):
    data.load(config(tmp_path))
  with pytest.raises(ValueError, match="unknown layout 'csv': choose pairs or lines"):
    table.published(config(tmp_path, layout="csv"))


def test_the_split_by_hand(tmp_path):
  write(tmp_path)
  loaded = data.load(config(tmp_path))
  assert loaded.evaluated.tolist() == [0, 1, 3]  # user 4 has two items, which train
  dense = lambda matrix: [np.flatnonzero(row).tolist() for row in matrix.toarray()]
  everyone = np.arange(4)
  assert dense(loaded.matrix(everyone, 2)) == [[0, 1, 2, 3], [1], [2, 5], [1, 3, 6]]
  assert dense(loaded.targets(loaded.evaluated, 2)) == [[4], [0], [0]]
  assert dense(loaded.targets(loaded.evaluated, 1)) == [[5], [3], [2]]


def test_packed_rows_by_hand():
  """Users train on 1 to 5, on [6], [7, 8, 9] and [0, 1]; without windows, the last four of five."""
  items = np.array([1, 2, 3, 4, 5, 90, 91, 6, 90, 91, 7, 8, 9, 90, 91, 0, 1], np.int32)
  offsets = np.array([0, 7, 10, 15, 17])
  pack = functools.partial(data.pack, items, offsets, 3)
  rows = pack(positions="end", windows=False)
  assert rows["items"].tolist() == [[2, 3, 4], [7, 8, 0]]
  assert rows["targets"].tolist() == [[3, 4, 5], [8, 9, 1]]
  assert rows["segments"].tolist() == [[0, 0, 0], [0, 0, 2]]
  assert rows["positions"].tolist() == [[0, 1, 2], [1, 2, 2]]
  rows = pack(positions="start")
  assert rows["items"].tolist() == [[2, 3, 4], [7, 8, 1], [0, -1, -1]]
  assert rows["targets"].tolist() == [[3, 4, 5], [8, 9, 2], [1, -1, -1]]
  assert rows["segments"].tolist() == [[0, 0, 0], [0, 0, 2], [0, -1, -1]]
  assert rows["positions"].tolist() == [[0, 1, 2], [0, 1, 0], [0, 0, 0]]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 9))
def test_every_item_but_the_first_is_the_target_of_one_window(lengths, width):
  """And an item's context is what comes before it."""
  offsets = np.cumsum([0, *lengths])
  rows = data.pack(np.arange(offsets[-1]), offsets, width, positions="start")
  held_out = np.where(np.array(lengths) >= 3, 2, 0)
  wanted = [
    range(s + 1, e - h) for s, e, h in zip(offsets[:-1], offsets[1:], held_out, strict=True)
  ]
  assert sorted(rows["targets"][rows["targets"] >= 0]) == list(chain(*wanted))
  for place in zip(*np.nonzero(rows["targets"] >= 0), strict=True):
    position, item = rows["positions"][place], rows["items"][place]
    assert item == rows["targets"][place] - 1
    context = rows["items"][place[0], place[1] - position : place[1] + 1]
    assert context.tolist() == list(range(item - position, item + 1))


def test_packing_fits_and_wastes_little():
  lengths = np.minimum(np.random.default_rng(0).geometric(0.15, 2_000), 50)
  row, column = packing.place(lengths, 50)
  used = np.zeros((row.max() + 1, 50), int)
  for r, c, length in zip(row, column, lengths, strict=True):
    used[r, c : c + length] += 1
  assert used.max() == 1
  assert used.sum() == lengths.sum()
  assert used.mean() > 0.98


SAMPLED = {"loss": "sampled_softmax", "negatives.number": 4}


def test_draws_are_a_function_of_seed_and_number(tmp_path):
  made = config(tmp_path, "synthetic", max_length=40, **SAMPLED)
  loaded = data.load(made)
  forwards, backwards = data.TrainBatches(loaded, made), data.TrainBatches(loaded, made)
  late = {i: backwards[i] for i in reversed(range(made.steps))}
  for i in range(made.steps):
    assert sorted(forwards[i]) == sorted(late[i])
    for name, array in forwards[i].items():
      np.testing.assert_array_equal(array, late[i][name])
  made.seed = 1
  other = data.TrainBatches(loaded, made)
  assert (forwards[0]["negatives"] != other[0]["negatives"]).any()
  assert (forwards[0]["negatives"] != forwards[1]["negatives"]).any()


def test_hosts_share_a_global_batch(tmp_path):
  made = config(tmp_path, "synthetic", max_length=40, **SAMPLED)
  loaded = data.load(made)
  whole = data.TrainBatches(loaded, made)
  parts = [data.TrainBatches(loaded, made, shard=(host, 2)) for host in range(2)]
  for i in (0, 3):
    both = [part[i] for part in parts]
    for name, array in whole[i].items():
      np.testing.assert_array_equal(np.concatenate([b[name] for b in both]), array)


def packed_by_hand(*rows, num_items):
  """Data of one user, whose items, the last two aside, are counted; and of rows to train on."""
  items = np.array(rows, np.int32)
  packed = {"items": items, "targets": items, "segments": np.minimum(items, 0), "positions": items}
  user = np.concatenate([items.ravel(), [0, 0]])
  columns = {"items": user, "offsets": np.array([0, len(user)])}
  return data.SequenceData(columns, {"num_items": num_items}, packed=packed)


def test_negatives_are_drawn_from_the_whole_catalogue(tmp_path):
  loaded = packed_by_hand([1, 1, 1, 1, 1], [1, 2, 2, 2, 3], num_items=4)
  changes = {"negatives.number": 1_000, "batch_size": 2}
  found = data.TrainBatches(loaded, config(tmp_path, "synthetic", **changes))[0]
  counts = np.bincount(found["negatives"], minlength=4)
  assert scipy.stats.chisquare(counts).pvalue > 1e-3
