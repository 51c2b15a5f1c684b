"""The page about tables of one's own names every kind, option and protocol of splits, and its code
makes histories.
"""

import dataclasses
import re
import runpy

import duckdb
import pytest
from pages import DOCS, blocks
from small_tables import write_csv

from recipes import describe
from recipes.dlrm import train
from recipes.tables import settings, spec

PAGE = "own_table.md"


@pytest.mark.ci
def test_every_kind_and_option_is_on_the_page():
  named = set(re.findall(r"`(\w+)(?:=[^`]*)?`", (DOCS / PAGE).read_text()))
  options = {field.name for kind in spec.KINDS.values() for field in dataclasses.fields(kind)}
  assert not {*spec.KINDS, *options, *filter(None, settings.SPLIT_BY)} - named


@pytest.mark.ci
def test_the_statement_makes_histories_that_a_run_reads(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  rows = [
    ("1", "ann", "heat", 5, 10),
    ("2", "ann", "tron", 2, 20),
    ("3", "ann", "ran", 4, 20),  # at the time of the row before
    ("4", "bob", "heat", 1, 5),
    ("5", "ann", "cube", 5, 30),
  ]
  more = [(f"{n}", f"u{n % 9}", f"m{n % 7}", 1 + n % 5, 40 + n) for n in range(6, 300)]
  write_csv(tmp_path / "log.csv", ("id", "user", "movie", "rating", "when"), rows + more)
  (code,) = (code for _, code in blocks(PAGE, "py") if "with_past" in code)
  exec(code, scope := {})
  made = duckdb.sql("SELECT likes, others, outcomes FROM 'with_past.parquet' ORDER BY id::INTEGER")
  *first, (likes, others, outcomes) = made.fetchmany(5)
  none, one = (None, None, None), (["heat"], [], [True])
  assert first == [none, one, one, none]
  assert (sorted(likes), others, sorted(outcomes)) == (
    ["heat", "ran"],
    ["tron"],
    [False, True, True],
  )
  small = {"batch_size": 32, "steps": 2, "cache_dir": "cache", "baseline": {"max_rows": 0}}
  small |= {"dim": 4, "dcnv2": {"cross_layers": 1, "deep": (8,)}}
  assert 0 < train.run(scope["config"] | small, "run")["metrics"]["test_auc"] < 1


@pytest.mark.ci
def test_the_statement_makes_a_row_of_each_impression(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  row = "{0}\tU{1}\t11/23/2019 1:0{1}:00 PM\tN{2} N{1}\tN{2}-0 N8-1"
  lines = [row.format(n, n % 9, n % 7) for n in range(60)]
  (tmp_path / "behaviors.tsv").write_text("\n".join(lines))
  (code,) = (code for _, code in blocks(PAGE, "py") if "impressions" in code)
  exec(code, {})
  made = duckdb.sql("SELECT user, item, clicked, history FROM 'news.parquet'").fetchmany(2)
  assert made == [("U0", "N0", "0", "N0 N0"), ("U0", "N8", "1", "N0 N0")]
  describe.main(["news.parquet", "--label=clicked", "--item=item", "--out=news.py"])
  columns = runpy.run_path("news.py")["get_config"]()["columns"]
  assert (columns["user"], columns["item"], columns["clicked"]) == ("user", "item", "label")
  assert columns["history_"] == {
    "kind": "sequence", "column": "history", "separator": " ", "table": "item",
  }  # fmt: skip
  assert columns["time"] == {"kind": "time", "format": "%m/%d/%Y %I:%M:%S %p"}
