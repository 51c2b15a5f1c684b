"""Semantic ids: centroids by hand, collisions and their repair, new items, files that are none."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import refused

from recipes import semantic_ids

# Two groups along one axis, which are two groups each along the other.
VECTORS = np.array([[0, 0], [0, 2], [10, 0], [10, 2], [10, 2]], np.float32)
IDS = ["a", "b", "c", "d", "e"]


def vectors_file(path, ids=IDS, vectors=VECTORS):
  columns = {"id": ids, "vector": pa.array(np.asarray(vectors).tolist(), pa.list_(pa.float32()))}
  pq.write_table(pa.table(columns), path)
  return path


def stored(folder):
  table = pq.read_table(folder / "codes.parquet")
  assert table.schema.field("id").type == pa.string()
  assert table.schema.field("codes").type == pa.list_(pa.int32())
  return dict(zip(table["id"].to_pylist(), table["codes"].to_pylist(), strict=True))


def test_centroids_by_hand():
  """The means of the groups, and of what they leave over: -1, 1 on the left, -4/3, 2/3 right."""
  first, second = semantic_ids.fit(VECTORS, levels=2, size=2)
  np.testing.assert_allclose(first, [[0, 1], [10, 4 / 3]], atol=1e-5)
  np.testing.assert_allclose(second, [[0, -7 / 6], [0, 7 / 9]], atol=1e-5)
  codes = semantic_ids.assign(VECTORS, [first, second])
  assert codes.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [1, 1]]


def test_new_items_change_no_old_ones(tmp_path):
  folder = tmp_path / "codes"
  path = vectors_file(tmp_path / "v.parquet")
  line = semantic_ids.write(path, folder, levels=2, size=2, repair=True)
  assert "5 items, " in line
  before = stored(folder)
  expected = {"a": [0, 0, 0], "b": [0, 1, 0], "c": [1, 0, 0], "d": [1, 1, 0], "e": [1, 1, 1]}
  assert before == expected
  # "a" is known, and stays where it is although its vector has moved.
  new = vectors_file(
    tmp_path / "n.parquet", ["f", "a", "g"], np.array([[9, 3], [10, 2], [1, -1]], np.float32)
  )
  assert "2 new items, 1 known ones; 7 items" in semantic_ids.append(new, folder)
  # "f" is the third of its collision, "g" the second.
  assert stored(folder) == before | {"f": [1, 1, 2], "g": [0, 0, 1]}


@pytest.mark.ci
def test_files_that_hold_no_codes_or_vectors(tmp_path):
  def read(content):
    (tmp_path / "x.json").write_text(content)
    semantic_ids.read(tmp_path / "x.json")

  contents = ("{", '{"0": ["<a_2147483648>"]}', '{"0": ["<a_1>"], "1": []}')
  refused([(content, r"x\.json holds no codes") for content in contents], read)

  def read_vectors(given):
    ids, vectors = given
    columns = {"id": pa.array(ids, pa.string()), "vector": pa.array(vectors)}
    pq.write_table(pa.table(columns), tmp_path / "v.parquet")
    semantic_ids.read_vectors(tmp_path / "v.parquet")

  tables = [
    (["a", "a"], [[1.0], [2.0]]),
    (["a", "b"], [[1.0], [2.0, 3.0]]),
    (["a", "b"], [[1.0], [float("nan")]]),
  ]
  refused([(table, r"v\.parquet holds no vectors") for table in tables], read_vectors)
