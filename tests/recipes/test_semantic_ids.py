"""Semantic ids: centroids by hand, collisions and their repair, new items, files that are none."""

import doctest
import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipes import semantic_ids

# Two groups along one axis, which are two groups each along the other.
VECTORS = np.array([[0, 0], [0, 2], [10, 0], [10, 2], [10, 2]], np.float32)
IDS = ["a", "b", "c", "d", "e"]


def test_docstrings():
  assert not doctest.testmod(semantic_ids).failed


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


def test_each_level_leaves_less_over():
  vectors = np.random.default_rng(0).normal(size=(300, 8))
  left = [np.mean(vectors**2)]
  for levels in (1, 2, 3):
    centroids = semantic_ids.fit(vectors, levels=levels, size=16)
    codes = semantic_ids.assign(vectors, centroids)
    sums = sum(level[column] for level, column in zip(centroids, codes.T, strict=True))
    left.append(np.mean((vectors - sums) ** 2))
  assert all(after < 0.8 * before for before, after in itertools.pairwise(left))


def test_equal_vectors_need_fewer_centroids():
  centroids = semantic_ids.fit(np.repeat(VECTORS[:2], 3, axis=0), levels=2, size=4)
  assert [len(level) for level in centroids] == [2, 1]


def test_collisions_are_reported_and_repaired(tmp_path):
  path = vectors_file(tmp_path / "v.parquet")
  line = semantic_ids.write(path, tmp_path / "raw", levels=2, size=2)
  assert "5 items, 4 distinct, up to 2 with the same codes" in line
  assert stored(tmp_path / "raw")["d"] == stored(tmp_path / "raw")["e"] == [1, 1]
  semantic_ids.write(path, tmp_path / "codes", levels=2, size=2, repair=True)
  assert stored(tmp_path / "codes") == {
    "a": [0, 0, 0], "b": [0, 1, 0], "c": [1, 0, 0], "d": [1, 1, 0], "e": [1, 1, 1],
  }  # fmt: skip


@pytest.mark.parametrize("repair", [False, True])
def test_new_items_change_no_old_ones(tmp_path, repair):
  folder, extra = tmp_path / "codes", repair * [0]
  path = vectors_file(tmp_path / "v.parquet")
  semantic_ids.write(path, folder, levels=2, size=2, repair=repair)
  before = stored(folder)
  # "a" is known, and stays where it is although its vector has moved.
  new = vectors_file(
    tmp_path / "n.parquet", ["f", "a", "g"], np.array([[9, 3], [10, 2], [1, -1]], np.float32)
  )
  line = semantic_ids.append(new, folder)
  assert "2 new items, 1 known ones; 7 items" in line
  after = stored(folder)
  assert {item: after[item] for item in IDS} == before
  assert after["f"] == [1, 1, *([2] if repair else [])]  # the third of its collision
  assert after["g"] == [0, 0, *([1] if repair else [])]
  assert list(after) == [*IDS, "f", "g"]
  assert len(before["a"]) == 2 + len(extra)


def test_published_json_and_parquet_are_the_same(tmp_path):
  published = {"0": ["<a_3>", "<b_12>"], "1": ["<a_0>", "<b_7>"]}
  (tmp_path / "x.index.json").write_text(json.dumps(published))
  ids, codes = semantic_ids.read(tmp_path / "x.index.json", first_id=1)
  assert ids == ["1", "2"]
  assert codes.tolist() == [[3, 12], [0, 7]]
  columns = {"id": ids, "codes": pa.array(codes.tolist(), pa.list_(pa.int32()))}
  pq.write_table(pa.table(columns), tmp_path / "codes.parquet")
  for path in (tmp_path, tmp_path / "codes.parquet"):
    again, found = semantic_ids.read(path)
    assert again == ids
    np.testing.assert_array_equal(found, codes)


@pytest.mark.parametrize(
  "content",
  [
    "{",
    "[]",
    '{"0": ["<a_2147483648>"]}',
    '{"0": ["a"]}',
    '{"x": ["<a_1>"]}',
    '{"0": ["<a_1>"], "1": []}',
    "{}",
  ],
)
def test_json_that_holds_no_codes(tmp_path, content):
  (tmp_path / "x.json").write_text(content)
  with pytest.raises(ValueError, match=r"x\.json holds no codes"):
    semantic_ids.read(tmp_path / "x.json")


@pytest.mark.parametrize(
  ("ids", "vectors"),
  [
    (["a", "a"], [[1.0], [2.0]]),
    (["a", None], [[1.0], [2.0]]),
    (["a", "b"], [[1.0], [2.0, 3.0]]),
    (["a", "b"], [[1.0], [float("nan")]]),
    (["a", "b"], [[1.0], None]),
  ],
)
def test_vectors_that_are_none(tmp_path, ids, vectors):
  columns = {"id": pa.array(ids, pa.string()), "vector": pa.array(vectors)}
  pq.write_table(pa.table(columns), tmp_path / "v.parquet")
  with pytest.raises(ValueError, match=r"v\.parquet holds no vectors"):
    semantic_ids.read_vectors(tmp_path / "v.parquet")


def test_what_makes_no_sense_writes_nothing(tmp_path):
  path = vectors_file(tmp_path / "v.parquet")
  with pytest.raises(ValueError, match="choose at least one level, and 1 to 5 codes"):
    semantic_ids.write(path, tmp_path / "codes")
  assert not (tmp_path / "codes").exists()
  with pytest.raises(ValueError, match="holds other files"):
    semantic_ids.write(path, tmp_path, levels=1, size=2)
  semantic_ids.write(path, tmp_path / "codes", levels=1, size=2)
  with pytest.raises(SystemExit):
    semantic_ids.main([str(path), f"--append={tmp_path / 'codes'}", "--repair"])
  wide = vectors_file(tmp_path / "w.parquet", ["x"], np.ones((1, 3)))
  with pytest.raises(ValueError, match="vectors of 3 numbers, and the centroids of"):
    semantic_ids.append(wide, tmp_path / "codes")
  (tmp_path / "codes" / "centroids.npz").write_bytes(b"PK")
  with pytest.raises(ValueError, match=r"centroids\.npz holds no centroids"):
    semantic_ids.append(path, tmp_path / "codes")
  with pytest.raises(FileNotFoundError, match=r"other is missing"):
    semantic_ids.append(path, tmp_path / "other")


def test_the_command(tmp_path, capsys):
  path = vectors_file(tmp_path / "v.parquet")
  out = tmp_path / "codes"
  semantic_ids.main([str(path), f"--out={out}", "--levels=2", "--codes=2", "--repair"])
  assert capsys.readouterr().out.splitlines()[-1] == str(out / "codes.parquet")
  with pytest.raises(SystemExit) as ended:
    semantic_ids.main([str(tmp_path / "none.parquet"), f"--append={out}"])
  assert ended.value.code == 2
  assert "none.parquet is missing" in capsys.readouterr().err
