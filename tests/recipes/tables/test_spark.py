"""Tables prepared on a local Spark session: as on one machine, and in shards that hosts share."""

import gzip
import importlib.util
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_tables import completed, write_csv

import recipes
from recipes import arrays, export, serving
from recipes.dlrm import data, train
from recipes.errors import DamagedFileError, UserError
from recipes.tables import spark
from recipes.tables.encoding import Encoder
from recipes.two_tower import data as two_tower

_MISSING = [
  name
  for name, found in (
    ("pyspark", importlib.util.find_spec("pyspark")),
    ("java", shutil.which("java")),
  )
  if not found
]
needs_spark = pytest.mark.skipif(
  bool(_MISSING), reason=f"prepares tables on Spark, and {' and '.join(_MISSING)} is not installed"
)


@pytest.fixture(scope="module")
def session():
  """A session on this machine with one task at a time, for all tests of this file."""
  from pyspark.sql import SparkSession

  checkout = str(Path(recipes.__file__).parents[1])
  os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [checkout, os.environ.get("PYTHONPATH")]))
  os.environ["PYSPARK_PYTHON"] = sys.executable
  options = {
    "spark.driver.memory": "512m",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.host": "127.0.0.1",
  }
  builder = SparkSession.builder.master("local[1]")
  for name, value in options.items():
    builder = builder.config(name, value)
  session = builder.getOrCreate()
  session.sparkContext.setLogLevel("ERROR")
  yield session
  session.stop()


# --- three tables: by the name, what writes the files and the config on them ----------------------


def messy(folder):
  """Ragged rows, bad numbers, other orders of columns, quotes, gzip, `1.0`, blanks, bad labels."""
  draw = np.random.default_rng(1)
  lines = ["outcome;shop;code;flag;price;note"]
  for i in range(400):
    outcome = ("bought", "looked", "looked", "pending")[draw.integers(4)]
    code = ("NA", "", "7.0", "8.0", f"{draw.integers(30)}.0")[draw.integers(5)]
    price = ("", "3,5", "abc", "1e3", f"{draw.normal():.3f}", f"{i}")[draw.integers(6)]
    note = '"two\nlines; one ""quote"""' if i % 50 == 0 else f" n{i % 9} "
    lines.append(f"{outcome};shöp {i % 11};{code};{('TRUE', 'false')[i % 2]};{price};{note}")
    if i % 40 == 0:
      lines.append("bought;too;few")
    if i % 60 == 0:
      lines.append("bought;one;2.0;true;1;n;more")
  (folder / "a.csv").write_text("\n".join(lines[:300]) + "\n\n", encoding="latin-1")
  with gzip.open(folder / "b.csv.gz", "wt", encoding="latin-1") as file:
    file.write("\n".join([lines[0], *lines[300:]]))
  (folder / "c.csv").write_text(lines[0] + "\n")  # no rows
  (folder / "d.csv").write_text("note;price;flag;code;shop;outcome\nn1;2;True;7.0;x;bought\n")
  columns = {
    "outcome": {"kind": "label", "positive": ("bought",), "drop": ("pending",)},
    "shop": {"kind": "category", "min_count": 1, "pattern": r"(\d+)"},
    "code": "category",
    "flag": "category",
    "price": "number",
    "note": {"kind": "category", "hash": 50},
  }
  return {
    "files": str(folder),
    "columns": columns,
    "on_bad_row": "skip",
    "format": {"encoding": "latin-1", "delimiter": ";"},
  }


def timed(folder):
  """Parquet with lists, timestamps, dictionaries and weights, split by time; quantiles."""
  draw = np.random.default_rng(2)
  for part in range(3):
    rows = 500
    start = np.datetime64("2024-01-01T00:00:00") + part * np.timedelta64(9, "D")
    table = {
      "clicked": draw.random(rows) < 0.4,
      "when": pa.array(start + draw.integers(0, 10**6, rows) * np.timedelta64(1, "s")),
      "age": pa.array(draw.integers(18, 80, rows), mask=draw.random(rows) < 0.1),
      "city": pa.array([f"c{x}" for x in draw.integers(0, 30, rows)]).dictionary_encode(),
      "tags": pa.array([draw.integers(0, 9, n).tolist() for n in draw.integers(0, 4, rows)]),
      "count": draw.integers(0, 3, rows).astype(np.float32),
    }
    pq.write_table(pa.table(table), folder / f"{part}.parquet")
  columns = {
    "clicked": "label",
    "when": "time",
    "age": {"kind": "number", "buckets": 5},
    "city": "category",
    "tags": {"kind": "sequence", "max_length": 2},
    "count": "weight",
    "age_city": {"kind": "cross", "columns": ("age", "city"), "buckets": 64},
  }
  return {"files": str(folder / "*.parquet"), "columns": columns}


def sided(folder):
  """Files for the splits, of which train also validates; users and items of tables of their own."""
  draw = np.random.default_rng(3)
  header, files = ("clicked", "who", "what"), {}
  for split, count in (("train", 3), ("test", 1)):
    (folder / split).mkdir()
    for n in range(count):
      rows = [
        (draw.integers(2), f"u{draw.integers(50)}", f"i{draw.integers(20)}") for _ in range(200)
      ]
      write_csv(folder / split / f"{n}.csv", header, rows)
    files[split] = str(folder / split)
  users = [(f"u{n}", n % 5, draw.normal()) for n in range(45)]
  write_csv(folder / "users.csv", ("id", "country", "score"), users)
  write_csv(folder / "items.csv", ("id", "genres"), [(f"i{n}", "a|b") for n in range(20)])
  return {
    "files": files,
    "columns": {"clicked": "label", "who": "user", "what": "item"},
    "user_table": {
      "files": str(folder / "users.csv"),
      "key": "id",
      "columns": {"country": "category", "score": "number"},
    },
    "item_table": {
      "files": str(folder / "items.csv"),
      "key": "id",
      "columns": {"genres": "bag"},
    },
    "refit": True,
    "select": "",
  }


def load(tmp_path, given, engine="spark"):
  return data.load(completed("dlrm", tmp_path / "cache [1]", engine=engine, **given))


@pytest.mark.weekly
@needs_spark
@pytest.mark.parametrize("make_table", [messy, timed, sided])
def test_both_engines_give_the_same(make_table, session, tmp_path):
  (tmp_path / "table").mkdir()
  table = make_table(tmp_path / "table")
  expected, actual = load(tmp_path, table, "duckdb"), load(tmp_path, table)
  assert actual.splits == expected.splits
  assert actual.features == expected.features
  assert actual.dense_names == expected.dense_names
  assert actual.sha256 == expected.sha256
  assert list(actual.columns) == list(expected.columns)
  for column in expected.columns:
    assert actual.columns[column].dtype == expected.columns[column].dtype
    np.testing.assert_array_equal(actual.columns[column][:], expected.columns[column])
  both = [Encoder.load(loaded.serve).all_fitted for loaded in (actual, expected)]
  for one, other in zip(*both, strict=True):
    assert one.vocabularies == other.vocabularies
    assert one.numbers == other.numbers
    assert (one.widths, one.spellings) == (other.widths, other.spellings)
  splits = [pq.read_table(loaded.serve.parent / "split.parquet") for loaded in (actual, expected)]
  assert splits[0].to_pydict() == splits[1].to_pydict()
  notes = [arrays.read_json(x.serve.parent / "meta.json")["notes"] for x in (actual, expected)]
  assert notes[0] == notes[1]


@pytest.mark.weekly
@needs_spark
def test_a_bad_row_is_named_as_on_one_machine(session, tmp_path):
  header = ("clicked", "city", "price")
  for n in range(3):
    rows = [(i % 2, "a", "4x" if (n, i) in ((1, 7), (2, 3)) else i) for i in range(20)]
    write_csv(tmp_path / f"{n}.csv", header, rows)
  given = {
    "files": str(tmp_path / "*.csv"),
    "columns": {"clicked": "label", "city": "category", "price": "number"},
  }
  messages = []
  for engine in ("duckdb", "spark"):
    with pytest.raises(DamagedFileError, match=r"1\.csv, row 8, column 'price'") as error:
      load(tmp_path, given, engine)
    messages.append(str(error.value))
  assert messages[0] == messages[1]
  assert [path.suffix for path in (tmp_path / "cache [1]").iterdir()] == [".lock"] * 2


# --- what training reads --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(session, tmp_path_factory):
  """Five files of 90 to 98 rows, prepared as shards, and the config; `number` numbers all rows."""
  folder = tmp_path_factory.mktemp("prepared")
  (folder / "rows").mkdir()
  number = 0
  for part in range(5):
    rows = [(i % 2, f"c{i % 5}", number + i, i // 2 % 10) for i in range(90 + 2 * part)]
    number += len(rows)
    splits = [
      (*row[:3], "test" if row[3] == 9 else "valid" if row[3] > 6 else "train") for row in rows
    ]
    write_csv(folder / "rows" / f"{part}.csv", ("clicked", "city", "number", "part"), splits)
  columns = {
    "clicked": "label",
    "city": "category",
    "number": {"kind": "number", "standardize": False},
    "part": "split",
  }
  given = {"files": str(folder / "rows"), "columns": columns, "engine": "spark"}
  config = completed("dlrm", folder / "cache", **given)
  data.load(config)
  return config


@pytest.mark.weekly
@needs_spark
def test_a_shard_that_was_written_to_is_not_read(prepared):
  columns = data.load(prepared).columns
  (label,) = (columns.folder / "shards" / "00003").glob("label.npy")
  content = label.read_bytes()
  try:
    label.write_bytes(content[:-1] + b"\7")
    with pytest.raises(DamagedFileError, match=r"00003/label\.npy"):
      columns["label"][:]
    columns["label"][:50]  # of another shard
  finally:
    label.write_bytes(content)


@pytest.mark.weekly
@needs_spark
def test_a_run_on_shards_is_the_run_on_one_machine(prepared, tmp_path):
  results, scores, cities = [], [], {"city": ["c1", "c4", None], "number": [3.0, 200.0, None]}
  for engine in ("duckdb", "spark"):
    given = {**prepared.to_dict(), "engine": engine, "steps": 20, "epochs": 0, "batch_size": 32}
    results.append(train.run(given, str(tmp_path / engine)))
    split = pq.read_table(tmp_path / engine / "split.parquet")
    assert len(split) == 470
    served = export.export(tmp_path / engine, tmp_path / f"{engine}_served")
    scores.append(serving.load(served).predict(cities).tolist())
  assert scores[0] == scores[1]
  assert results[0]["metrics"] == results[1]["metrics"]


# --- without Spark --------------------------------------------------------------------------------


@pytest.mark.ci
def test_a_missing_package_is_named(monkeypatch, tmp_path):
  monkeypatch.setitem(sys.modules, "pyspark", None)
  (tmp_path / "table").mkdir()
  with pytest.raises(UserError, match=r"pip install -e '\.\[spark\]'"):
    load(tmp_path, messy(tmp_path / "table"))


@pytest.mark.ci
def test_an_unknown_engine_and_interactions_are_refused(tmp_path):
  (tmp_path / "table").mkdir()
  with pytest.raises(UserError, match=r"config\.engine is 'ray': choose one of"):
    load(tmp_path, messy(tmp_path / "table"), "ray")
  rows = [(f"u{i % 9}", f"i{i % 7}") for i in range(99)]
  given = {
    "files": str(write_csv(tmp_path / "log.csv", ("who", "what"), rows)),
    "columns": {"who": "user", "what": "item"},
  }
  config = completed("two_tower", tmp_path / "cache", engine="spark", **given)
  with pytest.raises(UserError, match=r"config\.engine is 'spark', which prepares rows with a"):
    two_tower.load(config)


@pytest.mark.ci
def test_of_two_attempts_at_a_task_the_first_to_end_is_kept(tmp_path):
  target = tmp_path / "shard"
  with spark._written(target) as slow:
    (slow / "x").write_text("slow")
    with spark._written(target) as fast:
      (fast / "x").write_text("fast")
  assert (target / "x").read_text() == "fast"
  with pytest.raises(ZeroDivisionError), spark._written(tmp_path / "other"):
    raise ZeroDivisionError
  assert [path.name for path in tmp_path.iterdir()] == ["shard"]
