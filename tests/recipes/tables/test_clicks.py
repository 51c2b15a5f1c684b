"""A table as clicks: what lands in the columns, by hand, and refusals that name the row."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import each, refused
from small_tables import completed, write_csv

from recipes.dlrm import data
from recipes.errors import UserError
from recipes.tables.transforms import Transforms

HEADER = ("clicked", "city", "price", "tags", "part")
ROWS = [
  (1, "Oslo", 10, "a|b", "train"),
  (0, "Rome", 20, "", "train"),
  (1, "Oslo", 30, "b", "train"),
  (0, "Rome", "", "c|a", "train"),
  (1, "Rome", 20, "a", "valid"),
  (0, "Bonn", 50, "b", "valid"),
  (0, "Oslo", 20, "z|b", "test"),
  (1, "", 20, "b", "test"),
]
COLUMNS = {
  "clicked": "label",
  "city": "category",
  "price": "number",
  "tags": {"kind": "bag", "min_count": 1},
  "part": "split",
}


def load(tmp_path, rows=ROWS, columns=COLUMNS, header=HEADER, **given):
  path = write_csv(tmp_path / "clicks.csv", header, rows)
  config = completed("dlrm", tmp_path / "cache", files=str(path), columns=columns, **given)
  return data.load(config)


def test_columns_by_hand(tmp_path):
  loaded = load(tmp_path)
  assert loaded.splits == {"train": (0, 4), "valid": (4, 6), "test": (6, 8)}
  assert loaded.columns["label"].tolist() == [1, 0, 1, 0, 1, 0, 0, 1]
  # Oslo and Rome are seen twice in training; 2 is the row of unknown cities. a and b come twice.
  cities = loaded.columns["ids"][:, 0].tolist()
  assert cities == [0, 1, 0, 1, 1, 2, 0, -1]
  tags = loaded.columns["ids"][:, 1:].tolist()
  assert tags[:5] == [[0, 1], [-1, -1], [1, -1], [2, 0], [0, -1]]
  assert tags[6] == [3, 1]
  deviation = np.std([10, 20, 30])
  expected = [(10 - 20) / deviation, 0, (30 - 20) / deviation, 0, 0, (50 - 20) / deviation, 0, 0]
  np.testing.assert_allclose(loaded.columns["dense"][:, 0], expected, rtol=1e-6)
  assert [f.vocabulary_size for f in loaded.features] == [3, 4]


def test_only_training_rows_are_fitted(tmp_path):
  changed = [row if row[-1] == "train" else (row[0], "Paris", 1e6, "q", row[-1]) for row in ROWS]
  loaded, other = load(tmp_path), load(tmp_path, rows=changed)
  for name in ("ids", "dense"):
    np.testing.assert_array_equal(other.columns[name][:4], loaded.columns[name][:4])
  assert other.features == loaded.features


def test_files_for_the_splits(tmp_path):
  columns = {name: kind for name, kind in COLUMNS.items() if name != "part"}
  files = {
    split: str(write_csv(tmp_path / f"{split}.csv", HEADER, [r for r in ROWS if r[-1] == split]))
    for split in ("train", "valid", "test")
  }
  loaded = data.load(completed("dlrm", tmp_path / "cache", files=files, columns=columns))
  whole = load(tmp_path)
  for name in ("label", "ids", "dense"):
    np.testing.assert_array_equal(loaded.columns[name], whole.columns[name])
  assert set(loaded.sha256) == {"train.csv", "valid.csv", "test.csv"}


MANY = [(i % 2, f"c{i % 7}", i, "a", "") for i in range(2000)]


def test_a_hash_splits_rows_the_same_way_every_time(tmp_path):
  columns = {name: kind for name, kind in COLUMNS.items() if name != "part"}
  loaded = load(tmp_path, rows=MANY, columns=columns)
  sizes = {name: stop - start for name, (start, stop) in loaded.splits.items()}
  assert sum(sizes.values()) == 2000
  longer = load(tmp_path, rows=[*MANY, *MANY[:2]], columns=columns)
  start, stop = loaded.splits["test"]
  at = slice(longer.splits["test"][0], longer.splits["test"][0] + stop - start)
  assert longer.columns["label"][at].tolist() == loaded.columns["label"][start:stop].tolist()


def test_rows_with_one_value_stay_together(tmp_path):
  columns = {name: kind for name, kind in COLUMNS.items() if name != "part"}
  columns["city"] = {"kind": "category", "size": 300}
  rows = [(i % 2, i % 300, i, "a", "") for i in range(3000)]
  loaded = load(tmp_path, rows=rows, columns=columns, split={"by": "hash", "on": "city"})
  cities = {n: set(loaded.columns["ids"][slice(*r), 0].tolist()) for n, r in loaded.splits.items()}
  assert not cities["train"] & cities["test"]
  assert not cities["train"] & cities["valid"]


def test_a_split_by_time_tests_on_the_latest_rows(tmp_path):
  columns = {"clicked": "label", "city": "category", "price": "time"}
  rows = [MANY[i] for i in np.random.default_rng(0).permutation(2000)]
  loaded = load(tmp_path, rows=rows, columns=columns)
  sizes = {name: stop - start for name, (start, stop) in loaded.splits.items()}
  assert sizes == {"train": 1600, "valid": 200, "test": 200}


def test_labels(tmp_path):
  rows = [(stars, "x", 1, "a", part) for part in ("train", "valid", "test") for stars in (1, 3, 5)]
  rated = COLUMNS | {"clicked": {"kind": "label", "at_least": 4, "drop": [3]}}
  assert load(tmp_path, rows=rows, columns=rated).columns["label"].tolist() == [0, 1] * 3
  words = [("buy" if row[0] > 3 else "look", *row[1:]) for row in rows]
  bought = COLUMNS | {"clicked": {"kind": "label", "positive": ["buy"]}}
  loaded = load(tmp_path, rows=words, columns=bought)
  assert loaded.columns["label"].tolist() == [0, 0, 1] * 3


def test_weights(tmp_path):
  columns = COLUMNS | {"price": "weight"}
  rows = [(*row[:2], i, *row[3:]) for i, row in enumerate(ROWS)]
  assert load(tmp_path, rows=rows, columns=columns).columns["weight"].tolist() == [*range(8)]
  with pytest.raises(UserError, match=r"clicks.csv, row 3, column 'price'.*0 or more"):
    load(tmp_path, rows=[*rows[:2], (1, "Rome", -1, "", "train"), *rows[3:]], columns=columns)


@pytest.mark.ci
def test_a_column_that_tells_nothing_is_named(tmp_path, capsys):
  rows = [(*row[:2], 7, *row[3:]) for row in ROWS]
  load(tmp_path, rows=rows)
  assert "column 'price' has the same number in all training rows" in capsys.readouterr().err
  rows = [(row[0], "", *row[2:]) for row in ROWS]
  with pytest.raises(UserError, match="column 'city' has no value in the 4 training rows"):
    load(tmp_path, rows=rows, columns=COLUMNS | {"city": {"kind": "category", "hash": 10}})


@pytest.mark.ci
def test_a_split_needs_weight_on_both_outcomes(tmp_path):
  cases = [
    ([1, 1, 1, 1, 0, 0, 1, 1], "valid"),
    ([1, 1, 1, 1, 1, 1, 1, 0], "test"),
    ([1, 0, 1, 0, 1, 1, 1, 1], "train"),
  ]

  def check(weights, split):
    rows = [(*row[:2], weight, *row[3:]) for row, weight in zip(ROWS, weights, strict=True)]
    with pytest.raises(UserError, match=f"of the {split} split .* weights above 0"):
      load(tmp_path, rows=rows, columns=COLUMNS | {"price": "weight"})

  each(cases, check)


def test_what_serving_needs_makes_the_same_ids(tmp_path):
  loaded = load(tmp_path)
  transforms = Transforms.load(loaded.serve)
  assert transforms.features == loaded.features
  assert transforms.dense_names == ("price",)


def problem(tmp_path, row, **columns):
  load(tmp_path, rows=[*ROWS[:4], row, *ROWS[4:]], columns=COLUMNS | columns)


@pytest.mark.parametrize(
  ("row", "columns", "message"),
  [
    ((2, "x", 1, "a", "test"), {}, r"row 5, column 'clicked'.*'2'.*neither 0 nor 1.*at_least"),
    (
      ("x", "x", 1, "a", "test"),
      {"clicked": {"kind": "label", "at_least": 1}},
      r"row 5, column 'clicked': 'x' is no number",
    ),
    (("", "x", 1, "a", "test"), {}, r"row 5, column 'clicked'.*no value"),
    ((1, "x", 1, "a", "tset"), {}, r"row 5, column 'part'.*'tset'.*train, valid or test"),
    ((1, "x", "dear", "a", "test"), {}, r"row 5, column 'price'.*'dear'.*number"),
    ((1, "x", 1, "a", "test"), {"nosuch": "category"}, "has no column 'nosuch'"),
  ],
)
def test_refusals_name_file_row_and_column(tmp_path, row, columns, message):
  with pytest.raises(UserError, match=f"clicks.csv.*{message}|clicks.csv {message}"):
    problem(tmp_path, row, **columns)


def test_skipped_rows_are_counted_once(tmp_path, capsys):
  rows = [*ROWS[:4], (7, "x", "dear", "a", "test"), (7, "x", 1, "a", "test"), *ROWS[4:]]
  loaded, whole = load(tmp_path, rows=rows, on_bad_row="skip"), load(tmp_path)
  for name in ("label", "ids", "dense"):
    np.testing.assert_array_equal(loaded.columns[name], whole.columns[name])
  said = capsys.readouterr().err
  assert "2 rows: column 'clicked' is neither 0 nor 1" in said


def test_what_cannot_be_trained_is_refused(tmp_path):
  cases = [
    ({"city": "category"}, "no column is declared as 'label', and clicks need one"),
    ({"clicked": "label"}, "declare at least one"),
  ]
  refused(cases, lambda columns: load(tmp_path, columns=columns), UserError)
  with pytest.raises(UserError, match="the train split has no rows"):
    load(tmp_path, rows=ROWS[:2], columns={"clicked": "label", "city": "category"})


def test_a_missing_number_is_the_mean_however_it_is_scaled(tmp_path):
  columns = COLUMNS | {"price": {"kind": "number", "standardize": False}}
  assert load(tmp_path, columns=columns).columns["dense"][3, 0] == 20.0


CITIES = {"clicked": "label", "city": {"kind": "category", "min_count": 1}, "part": "split"}


ENDS = [(0, "v", "valid"), (1, "v", "valid"), (0, "t", "test"), (1, "t", "test")]


@pytest.mark.ci
def test_names_of_files_and_folders_mean_nothing(tmp_path):
  """No brackets, and no `name=value`, of a path is taken for a pattern or a column."""
  for name, city in (("city=L/g[12]*.csv", "a"), ("city=L/g1x.csv", "b"), ("g1.csv", "c")):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    rows = [(i % 2, f"{city}{i % 3}", "train") for i in range(6)] + ENDS
    write_csv(tmp_path / name, ("clicked", "city", "part"), rows)
  path = str(tmp_path / "city=L" / "g[12]*.csv")
  loaded = data.load(completed("dlrm", tmp_path / "cache", files=path, columns=CITIES))
  assert Transforms.load(loaded.serve).vocabularies["city"] == ("a0", "a1", "a2")


@pytest.mark.ci
def test_equal_ids_stay_together_however_they_are_stored(tmp_path):
  draw, names = np.random.default_rng(0), ("clicked", "who")
  for name, ids in (("1", pa.int64()), ("2", pa.float64()), ("3", pa.string())):
    who = pa.array(draw.integers(0, 60, 300)).cast(ids)
    clicked = pa.array(draw.integers(0, 2, 300))
    pq.write_table(pa.table([clicked, who], names), tmp_path / f"{name}.parquet")
  columns = {"clicked": "label", "who": {"kind": "category", "size": 60}}
  given = {"files": str(tmp_path), "columns": columns, "split": {"by": "hash", "on": "who"}}
  loaded = data.load(completed("dlrm", tmp_path / "cache", **given))
  people = [set(loaded.columns["ids"][slice(*rows), 0].tolist()) for rows in loaded.splits.values()]
  assert len(set.union(*people)) == sum(map(len, people)) == 60


@pytest.mark.ci
def test_nothing_is_left_of_a_preparation_that_fails(tmp_path):
  with pytest.raises(UserError, match="row 5"):
    load(tmp_path, rows=[*ROWS[:4], (7, "x", 1, "a", "test")])
  assert not list((tmp_path / "cache").rglob("stage"))


@pytest.mark.ci
def test_a_value_has_one_spelling(tmp_path):
  given = {"columns": {"clicked": "label", "city": "item"}, "split": {"by": "order"}}
  names = ["1", "1.0", "1.00", "-7.0", "TRUE", "true", "x.0", "1.5", "01", "Truest"]
  rows = [(i % 2, names[i % 10], i, "", "") for i in range(2000)]
  transforms = Transforms.load(load(tmp_path, rows=rows, **given).serve)
  vocabulary = transforms.vocabularies["city"]
  assert vocabulary == ("1", "true", "-7", "01", "1.5", "Truest", "x.0")


def test_a_date_in_several_columns_splits_by_time(tmp_path):
  header = ("clicked", "city", "y", "m", "d")
  rows = [(i % 2, "Oslo", 2023 + i // 24, 1 + i // 2 % 12, 1 + i % 28) for i in range(48)]
  columns = {
    "clicked": "label",
    "city": "category",
    "when": {"kind": "time", "columns": list("ymd")},
  }
  split = {"valid": 0.125, "test": 0.125}
  loaded = load(tmp_path, rows=rows, columns=columns, header=header, split=split)
  assert loaded.splits == {"train": (0, 36), "valid": (36, 42), "test": (42, 48)}
  rows[30] = (*rows[30][:2], 2024, 2, 30)
  with pytest.raises(UserError, match=r"row 31, column 'y': '2024, 2, 30' is no date"):
    load(tmp_path, rows=rows, columns=columns, header=header, split=split)


@pytest.mark.ci
def test_several_items_in_a_row_are_refused_before_reading(tmp_path):
  with pytest.raises(UserError, match="'tags' holds several items"):
    load(tmp_path, columns=COLUMNS | {"tags": {"kind": "item", "separator": "|"}})


@pytest.mark.ci
def test_categories_of_parquet_may_be_stored_as_dictionaries(tmp_path):
  cities = pa.array(["Oslo", " Rome", "Oslo", None] * 60).dictionary_encode()
  clicked = pa.array([0, 1, 1, 0, 1] * 48)
  pq.write_table(pa.table([clicked, cities], ["clicked", "city"]), tmp_path / "x.parquet")
  columns = {"clicked": "label", "city": "category"}
  given = {"files": str(tmp_path), "columns": columns, "split": {"by": "order"}}
  loaded = data.load(completed("dlrm", tmp_path / "cache", **given))
  assert Transforms.load(loaded.serve).vocabularies["city"] == ("Oslo", "Rome")
  assert np.bincount(loaded.columns["ids"][:, 0] + 1).tolist() == [60, 120, 60]


def several(tmp_path, files, columns=CITIES, **given):
  """Returns the data of files by name, of rows (clicked, city, part), and their transforms."""
  for name, rows in files.items():
    (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
    write_csv(tmp_path / name, ("clicked", "city", "part"), rows)
  given = {"files": [str(tmp_path / name) for name in files], "columns": columns} | given
  loaded = data.load(completed("dlrm", tmp_path / "cache", **given))
  return loaded, Transforms.load(loaded.serve)


def test_values_are_counted_on_the_rows_that_train(tmp_path):
  cases = [
    (("bad", "ZZZ", "train"), {"on_bad_row": "skip"}),
    (
      ("none", "ZZZ", "train"),
      {"columns": CITIES | {"clicked": {"kind": "label", "drop": "none"}}},
    ),
  ]

  def check(last, given):
    first = [(1, "a", "train"), (0, "a", "train"), last]
    second = [(1, "b", "train"), (0, "c", "train"), *ENDS]
    files = {"1.csv": first, "2.csv": [("bad", "y", "train")] * 2, "3.csv": [], "4.csv": second}
    if "columns" in given:
      files["2.csv"] = [("none", "y", "train")]
    loaded, transforms = several(tmp_path, files, **given)
    assert sorted(transforms.vocabularies["city"]) == ["a", "b", "c"]
    assert loaded.splits["train"] == (0, 4)

  each(cases, check)
