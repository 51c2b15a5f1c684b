"""Which row stands where: against the recorded cases, and as an inverse of itself."""

import conformance
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embed.engine.stack import Layout

pytestmark = pytest.mark.usefixtures("strict")

LARGEST = 40
IDS = np.arange(-3, LARGEST + 3, dtype=np.int32)
PLACES = np.arange(4 * LARGEST, dtype=np.int32)


@pytest.mark.parametrize("kind", ["mod", "div"])
def test_recorded_cases(kind):
  for case in conformance.load("sharding")["div_mod"]:
    size, shards = case["vocabulary_size"], case["num_shards"]
    layout = Layout((size,), shards, kind == "div")
    for shard, rows in enumerate(case[kind]):
      where, places = layout.locate(0, np.array(rows, np.int32))
      assert where.tolist() == [shard] * len(rows)
      assert places.tolist() == list(range(len(rows)))
      ids = np.asarray(layout.ids(0, shard, PLACES))
      assert ids.tolist() == rows + [size] * (len(PLACES) - len(rows))


@given(st.lists(st.integers(1, LARGEST), min_size=1, max_size=3), st.integers(1, 9), st.booleans())
def test_every_row_has_one_place_and_every_place_one_row_or_none(sizes, shards, contiguous):
  layout = Layout(tuple(sizes), shards, contiguous)
  assert layout.shard_rows == sum(-(-size // shards) for size in sizes)
  stands = {}  # (shard, place) -> (table, id)
  for table, size in enumerate(sizes):
    where, places = layout.locate(table, IDS)
    inside = (IDS >= 0) & (size > IDS)
    assert np.all(where[~inside] == 0)
    assert np.all(places[~inside] == layout.shard_rows)
    assert np.all((where[inside] < shards) & (places[inside] < layout.shard_rows))
    for key, i in zip(zip(where, places, strict=True), IDS, strict=True):
      if 0 <= i < size:
        assert stands.setdefault((int(key[0]), int(key[1])), (table, int(i))) == (table, int(i))
  assert len(stands) == sum(sizes)
  for shard in range(shards):
    for table, size in enumerate(sizes):
      found = np.asarray(layout.ids(table, shard, PLACES))
      for place, i in enumerate(found.tolist()):
        other_table, wanted = stands.get((shard, place), (None, size))
        assert i == (wanted if other_table == table else size)


def test_ids_near_the_largest_number():
  """Padding beyond any table, and the last rows of the largest one."""
  largest = 2**31 - 2
  ids = np.array([largest - 1, largest, 2**31 - 1, -1, -(2**31)], np.int32)
  for contiguous in (False, True):
    layout = Layout((largest,), 8, contiguous)
    shard, place = layout.locate(0, ids)
    assert shard[0] == (7 if contiguous else (largest - 1) % 8)
    assert place[1:].tolist() == [layout.shard_rows] * 4
    assert layout.ids(0, shard[:1], place[:1]).tolist() == [largest - 1]
