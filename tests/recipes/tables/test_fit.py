"""Statistics and transforms, by hand: vocabularies, hashes, numbers, buckets, bags."""

import hashlib

import numpy as np
import pyarrow as pa
import pytest
from cases import each

from recipes.errors import UserError
from recipes.tables import source, spec
from recipes.tables.fit import fit
from recipes.tables.transforms import Transforms


def fitted(columns, values, base=None, split=None):
  arrays = [pa.array(column, from_pandas=True) for column in values.values()]
  place = np.arange(len(arrays[0]))
  split = np.zeros(len(place), np.int8) if split is None else np.array(split, np.int8)
  names = {name: f"c{number}" for number, name in enumerate(values)}
  with source.connect() as con:
    con.register("rows", pa.table([*arrays, place, split], [*names.values(), "place", "split"]))
    return fit(con, "rows", names, spec.parse(columns), base)[0]


CITIES = pa.array(["Oslo", "Rome", None, "Oslo", "Bonn", "Rome", "Oslo"])


def test_a_vocabulary_has_the_frequent_values_first():
  made = fitted({"city": {"kind": "category", "oov": 2}}, {"city": CITIES})
  assert made.vocabularies == {"city": ("Oslo", "Rome")}
  (feature,) = made.features
  assert feature.vocabulary_size == 4
  ids = made.ids({"city": pa.array(["Rome", "Oslo", None, "Bonn", "Paris"])}, "city")
  assert ids.tolist()[:3] == [1, 0, -1]
  assert set(ids[3:]) <= {2, 3}


def test_the_row_for_unknown_values_learns_from_rare_ones():
  texts = pa.array([f"often {i // 2}" for i in range(400)] + [f"once {i}" for i in range(1000)])
  made = fitted({"city": {"kind": "category", "min_count": 1}}, {"city": texts})
  kept = made.vocabularies["city"]
  assert kept[:200] == tuple(sorted(f"often {i}" for i in range(200)))
  # Of the values that occur once, one in ten trains the row, by the hash of its text.
  once = {f"once {i}" for i in range(1000)}
  drawn = {text for text in once if hashlib.md5(text.encode()).hexdigest() < "19"}
  assert set(kept[200:]) == once - drawn
  ids = made.ids({"city": texts}, "city")
  assert (ids == len(kept)).sum() == 1200 - len(kept)
  without = {"city": {"kind": "category", "min_count": 1, "oov": 0}}
  assert len(fitted(without, {"city": texts}).vocabularies["city"]) == 1200

  made = fitted({"city": {"kind": "category", "oov": 0, "min_count": 1}}, {"city": CITIES})
  assert made.ids({"city": pa.array(["Bonn", "Paris"])}, "city").tolist() == [2, -1]
  assert made.features[0].vocabulary_size == 3


def test_two_columns_share_a_vocabulary():
  shared = {"kind": "category", "table": "city", "min_count": 1}
  values = {"home": pa.array(["Oslo", "Rome"]), "work": pa.array(["Rome", "Bonn"])}
  made = fitted({"home": shared, "work": shared}, values)
  assert made.vocabularies == {"city": ("Rome", "Bonn", "Oslo")}
  assert made.ids(values, "home").tolist() == [2, 0]
  assert made.ids(values, "work").tolist() == [0, 1]
  assert {feature.table for feature in made.features} == {"city"}


def test_what_an_earlier_run_has_fitted_grows():
  columns = {
    "city": {"kind": "category", "oov": 2, "min_count": 1},
    "shop": {"kind": "category", "oov": 1, "min_count": 1},
    "age": {"kind": "number", "buckets": 2},
    "price": "number",
    "tags": "bag",
  }
  first = {
    "city": pa.array(["Oslo", "Rome", "Oslo"]),
    "shop": pa.array(["a", "b", "a"]),
    "age": np.array([10.0, 20.0, 30.0]),
    "price": np.array([1.0, 2.0, 3.0]),
    "tags": pa.array([["x", "x", "y"], ["y"], ["x"]]),
  }
  second = {
    "city": pa.array(["Bonn", "Rome", "Bonn"]),
    "shop": pa.array(["c", "c", "b"]),
    "age": np.array([60.0, 70.0, 80.0]),
    "price": np.array([np.nan, np.nan, np.nan]),  # a base has a mean for them
    "tags": pa.array([["z"], ["z"], []], pa.list_(pa.string())),
  }
  base = fitted(columns, first)
  grown = fitted(columns | {"shop": {"kind": "category", "min_count": 2}}, second, base=base)
  assert grown.vocabularies == {
    "city": ("Oslo", "Rome", "Bonn"),
    "shop": ("c",),  # declared in another way
    "tags": ("x", "y", "z"),
  }
  assert grown.numbers == base.numbers
  assert grown.widths == {"tags": 3}
  ids = grown.ids({"city": pa.array(["Rome", "Bonn", "Lima"])}, "city").tolist()
  assert ids[:2] == [1, 2]
  assert ids[2] in (3, 4)


def test_identity_and_hash():
  columns = {"a": {"kind": "category", "size": 5}, "b": {"kind": "category", "hash": 7}}
  made = fitted(columns, {"a": pa.array(["0"]), "b": pa.array(["x"])})
  values = {"a": pa.array(["4", "5", "-1", "x", None]), "b": pa.array(["x", "y", None])}
  assert made.ids(values, "a").tolist() == [4, -1, -1, -1, -1]
  hashed = made.ids(values, "b")
  assert hashed[2] == -1
  assert (hashed[:2] >= 0).all()
  assert (hashed < 7).all()


LOGS = np.array([-np.log(2), 0, 1])


def test_numbers_by_hand():
  cases = [
    ({}, [1, 2, np.nan, 3, 6], [3, 6, np.nan], [0, 3, 0] / np.std([1, 2, 3, 6])),
    ({"log": True}, [-1, 0, np.e - 1], [-1, 0, np.e - 1], (LOGS - LOGS.mean()) / LOGS.std()),
    ({}, [5, 5], [5, 7], [0, 2]),  # a constant number has no deviation
  ]

  def check(options, trained, asked, expected):
    made = fitted({"x": {"kind": "number", **options}}, {"x": np.array(trained, float)})
    dense = made.dense({"x": pa.array(np.array(asked, float))}, len(asked))
    np.testing.assert_allclose(dense[:, 0], expected, rtol=1e-6)

  each(cases, check)


def test_buckets_hold_equally_many_rows():
  made = fitted({"x": {"kind": "number", "buckets": 4}}, {"x": np.arange(1000.0)})
  ids = made.ids({"x": pa.array(np.append(np.arange(1000.0), np.nan))}, "x")
  assert np.bincount(ids[:-1]).tolist() == [250] * 4
  assert ids[-1] == -1
  assert made.dense({}, 3).shape == (3, 0)
  made = fitted({"x": {"kind": "number", "buckets": [0, 10]}}, {"x": np.array([1.0])})
  assert made.ids({"x": pa.array([-1.0, 0.0, 9.0, 10.0])}, "x").tolist() == [0, 1, 1, 2]


TAGS = pa.array([["a", "b", "c"], [], None, ["c"]], pa.list_(pa.string()))


def test_bags_are_cut_to_their_first_values_and_sequences_to_their_last():

  def check(kind, expected):
    made = fitted({"tags": {"kind": kind, "min_count": 1, "max_length": 2}}, {"tags": TAGS})
    assert made.vocabularies == {"tags": ("c", "a", "b")}
    assert made.features[0].valency == 2
    assert fitted({"tags": kind}, {"tags": TAGS}).widths == {"tags": 3}  # the longest
    ids = made.ids({"tags": TAGS}, "tags")
    assert ids.tolist() == [expected, [-1, -1], [-1, -1], [0, -1]]

  each([("bag", [1, 2]), ("sequence", [2, 0])], check)


def test_what_is_saved_is_loaded(tmp_path):
  columns = {
    "city": {"kind": "category", "oov": 2},
    "tags": {"kind": "bag", "min_count": 1, "optimizer": "sgd"},
    "x": {"kind": "number", "buckets": 2},
    "z": "number",
  }
  numbers = pa.array(np.arange(4.0))
  values = {"city": pa.array(["a", "a", "b", "ü"]), "tags": TAGS, "x": numbers, "z": numbers}
  made = fitted(columns, values)
  made.save(tmp_path, "columns")
  loaded = Transforms.load(tmp_path, "columns")
  assert loaded.features == made.features
  assert loaded.dense_names == made.dense_names
  np.testing.assert_array_equal(loaded.dense(values, 4), made.dense(values, 4))
  for feature in made.features:
    np.testing.assert_array_equal(loaded.ids(values, feature.name), made.ids(values, feature.name))


@pytest.mark.ci
def test_a_column_without_values_is_refused():
  with pytest.raises(UserError, match="'x' has no value in the 2 training rows: remove it"):
    fitted({"x": "number"}, {"x": np.array([np.nan, np.nan])})
  with pytest.raises(UserError, match="'c' has no value in the 2 training rows: remove it"):
    fitted({"c": "category"}, {"c": pa.array([None, None], pa.string())})
  with pytest.raises(UserError, match="lower its min_count"):
    fitted({"c": {"kind": "category", "min_count": 3, "oov": 0}}, {"c": pa.array(["a"])})


@pytest.mark.ci
def test_means_have_ten_digits():
  numbers = np.random.default_rng(0).normal(3, 2, 70_000)
  numbers[::7] = np.nan
  columns = {"x": "number", "y": {"kind": "number", "buckets": 3}}
  made = fitted(columns, {"x": numbers, "y": numbers})
  for about in made.numbers.values():
    assert about["mean"] == float(f"{np.nanmean(numbers):.10g}")
    assert about["deviation"] == float(f"{np.nanstd(numbers):.10g}")
  # Quantiles are of every second row.
  assert np.bincount(made.ids({"y": pa.array(numbers)}, "y") + 1)[1:].min() > 19_000


def test_rows_of_other_splits_are_not_fitted():
  columns = {
    "city": {"kind": "category", "min_count": 1},
    "tags": {"kind": "bag", "min_count": 1},
    "age": {"kind": "number", "buckets": 2},
    "price": "number",
    "sold": {"kind": "number", "log": True},
  }
  far = 1e6  # in the rows of validation and test
  values = {
    "city": pa.array(["a", "a", "b", "c"]),
    "tags": pa.array([["x"], ["x"], ["y", "y", "y"], ["z"]]),
    "age": np.array([10.0, 20.0, far, far]),
    "price": np.array([1.0, 3.0, -far, far]),
    "sold": np.array([0.0, np.e - 1, far, far]),
  }
  made = fitted(columns, values, split=[0, 0, 1, 2])
  first = fitted(columns, {name: column[:2] for name, column in values.items()})
  assert made.vocabularies == first.vocabularies == {"city": ("a",), "tags": ("x",)}
  assert made.widths == {"tags": 1}
  assert made.numbers == first.numbers
