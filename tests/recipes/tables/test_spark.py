"""Tables prepared on a local Spark session: as on one machine, and in shards that hosts share."""

import gzip
import importlib.util
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from small_tables import completed, write_csv

import recipes
from recipes import files
from recipes.dlrm import data
from recipes.errors import UserError
from recipes.tables.transforms import Transforms
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


def load(tmp_path, given, engine="spark"):
  return data.load(completed("dlrm", tmp_path / "cache [1]", engine=engine, **given))


def simple(folder):
  """Two files, with the second one's columns in another order."""
  draw = np.random.default_rng(2)
  rows = [
    (draw.integers(2), f"u{draw.integers(30)}", f"c{draw.integers(9)}", draw.integers(1000), i)
    for i in range(600)
  ]
  write_csv(folder / "a.csv", ("y", "user", "city", "price", "when"), rows[:350])
  turned = [tuple(reversed(row)) for row in rows[350:]]
  write_csv(folder / "b.csv", ("when", "price", "city", "user", "y"), turned)
  columns = {
    "y": "label",
    "user": "user",
    "city": {"kind": "category", "min_count": 1},
    "price": {"kind": "number", "buckets": 5},
    "again": {"kind": "label", "column": "y", "weight": 0.5},
  }
  return {"files": str(folder), "columns": columns}


def by_time(folder):
  given = simple(folder)
  return given | {"columns": given["columns"] | {"when": "time"}}


def by_files(folder):
  given = simple(folder)
  return given | {"files": {"train": f"{folder}/a.csv", "test": f"{folder}/b.csv"}}


TABLES = {
  "messy": messy,
  "by hash": simple,
  "by order": lambda folder: simple(folder) | {"split": {"by": "order"}},
  "by time": by_time,
  "by files": by_files,
}


@pytest.mark.weekly
@needs_spark
@pytest.mark.parametrize("name", TABLES)
def test_both_engines_give_the_same(name, session, tmp_path):
  (tmp_path / "table").mkdir()
  table = TABLES[name](tmp_path / "table")
  expected, actual = load(tmp_path, table, "duckdb"), load(tmp_path, table)
  assert actual.splits == expected.splits
  assert actual.features == expected.features
  assert actual.sha256 == expected.sha256
  assert list(actual.columns) == list(expected.columns)
  for column in expected.columns:
    assert actual.columns[column].dtype == expected.columns[column].dtype
    np.testing.assert_array_equal(actual.columns[column][:], expected.columns[column])
  one, other = (Transforms.load(loaded.serve) for loaded in (actual, expected))
  assert one.dense_names == other.dense_names
  assert one.vocabularies == other.vocabularies
  assert (one.numbers, one.widths) == (other.numbers, other.widths)
  splits = [pq.read_table(loaded.serve.parent / "split.parquet") for loaded in (actual, expected)]
  assert splits[0].to_pydict() == splits[1].to_pydict()
  notes = [files.read_json(x.serve.parent / "meta.json")["notes"] for x in (actual, expected)]
  assert notes[0] == notes[1]


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
