"""A first look at a table: the roles that its values decide, and configs that train as written."""

import csv
import gzip
import importlib
import io
import json
import runpy

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import each
from served_models import run_of

from recipes import config as config_lib
from recipes import describe, export, predict
from recipes import mesh as mesh_lib
from recipes.tables import settings
from recipes.tables.spec import Format

RNG = np.random.default_rng(0)
ROWS = 600


def write(path, columns):
  opened = gzip.open if path.suffix == ".gz" else open
  with opened(path, "wt", newline="") as file:
    csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
  return path


def proposed(path, columns, **roles):
  """The columns of a Parquet file with what they are proposed to be."""
  pq.write_table(pa.table(columns), path)
  sample = describe.read([str(path)], Format(), 10_000)
  describe.propose(sample, roles)
  return sample.columns


def click_columns(rows=ROWS):
  clicked = RNG.random(rows) < 0.3
  tags = [RNG.choice(list("abcd"), RNG.integers(1, 4), replace=False) for _ in range(rows)]
  return {
    "row_id": [f"{i:016x}" for i in RNG.integers(2**60, size=rows)],
    "clicked": clicked.astype(int),
    "user-agent.os": np.where(
      clicked & (RNG.random(rows) < 0.9), "ios", RNG.choice(["web", "?"], rows)
    ),
    "price": np.round(RNG.lognormal(3, 2, rows), 2),
    "same": ["x"] * rows,
    "tags": ["|".join(each) for each in tags],
  }


def log_columns(rows=3000):
  user, item = RNG.integers(40, size=rows), RNG.integers(30, size=rows)
  return {
    "visitor": [f"u-{i}" for i in user],
    "product": [f"p{i}" for i in item],
    "category": np.array(["hats", "coats"])[item % 2],
    "name": [f"Fine hat {i}" for i in item],
    "country": np.array(["NO", "US"])[user % 2],
    "stars": RNG.integers(1, 6, rows),
    "seen_at": [f"2024-03-{1 + i % 28:02d}T{i % 24:02d}:10:00Z" for i in range(rows)],
  }


def look(capsys, *arguments):
  """Runs the command; returns what it prints."""
  capsys.readouterr()
  describe.main([str(argument) for argument in arguments])
  return capsys.readouterr().out


def refusal(capsys, *arguments):
  """Runs the command, which refuses; returns the line that says why."""
  with pytest.raises(SystemExit):
    look(capsys, *arguments)
  error = capsys.readouterr().err
  assert error.count("\n") == 1
  return error


def completed(path, recipe, tmp_path):
  """The config of a file, completed as `--config` completes it."""
  given = runpy.run_path(str(path))["get_config"]() | {"cache_dir": str(tmp_path / "cache")}
  return config_lib.complete(recipe, given)


def built(path, recipe, tmp_path):
  """What the recipe's data set says of the table that a config declares."""
  module = {"dlrm": "tables.clicks", "two_tower": "two_tower.table", "sequence": "sequence.table"}
  (folder := tmp_path / recipe).mkdir(exist_ok=True)
  build = importlib.import_module(f"recipes.{module[recipe]}").build
  return build(settings.settings(completed(path, recipe, tmp_path)), folder)


KINDS = [
  ([3] * 50, ("", {})),
  ([None] * 50, ("", {})),
  ([f"{i:x}" for i in range(50)], ("", {})),
  (list(range(7, 57)), ("", {})),
  (["68,44", "2,5", "1.203,1"] * 20, ("number", {"decimal": ",", "log": True})),
  (["1,500", "17", "2,300,000.5"] * 20, ("number", {"thousands": ",", "log": True})),
  (["1,500", "2,300"] * 20, ("", {})),  # 1500 or 1.5
  (["1/31/2024", "2/1/2024"] * 20, ("time", {"format": "%m/%d/%Y"})),
  (["1/2/2024", "2/1/2024"] * 20, ("", {})),  # February or January
  (["31.12.2024 10:00", "1.1.2025 9:30"] * 20, ("time", {"format": "%d.%m.%Y %H:%M"})),
  (["11/9/2019 12:04:22 AM", "11/23/2019 1:00:00 PM"] * 20,
   ("time", {"format": "%m/%d/%Y %I:%M:%S %p"})),
  (["N1 N23", "N4 N1 N23", "N1", "N4 N4"] * 20, ("bag", {"separator": " "})),
  (["N1-0 N2-1", "N2-0", "N1-1"] * 20, ("", {})),  # what was shown, and what was clicked
  ([["N1-0", "N2-1"], ["N3-1"]] * 20, ("", {})),
  (["['N1:0', 'N2:1']", "['N3:1']"] * 20, ("", {})),
  (["sku-1", "sku-0"] * 20, ("category", {})),
  (["1'250", "7", "12'000.5"] * 20, ("number", {"thousands": "'", "log": True})),
  (["10 018,73", "7,5", "1 250"] * 20, ("number", {"decimal": ",", "thousands": " ", "log": True})),
  (["1.234.567", "1.234,5", "12,25"] * 20, ("number", {"decimal": ",", "log": True})),
  (["1.112", "62", "28.486"] * 20, ("", {})),  # 28,486 or 28.486
  (["0,250", "0", "1,500"] * 20, ("number", {"decimal": ","})),
  (["$7", "$1,250.50"] * 20, ("", {})),
  (["08-Aug-2023", "09-Sep-2023"] * 20, ("time", {"format": "%d-%b-%Y"})),
  (["2024-01-01", "2024-01-02"] * 100 + ["soon"], ("time", {})),
  ([[0.5, 2.0], [3.0, 4.0], []] * 20, ("bag", {})),
  ([[0.5, 2.0], [3.0, 1e-9]] * 20, ("", {})),  # a vector
  ([*np.linspace(-1, 1, 80).astype(str), "-", "-"], ("", {})),
  (["2024-01-01", "2024-01-02"] * 20, ("time", {})),
  (["1.2.30", "1.10.4"] * 20, ("category", {})),  # versions
  ([str(2**64), str(2**65)] * 20, ("category", {})),
  (["a", "b", None] * 20, ("category", {})),
  ([1, 2, 3, 4] * 20, ("category", {})),
  (["02139", "10001"] * 20, ("category", {})),
  ([10**12 + i for i in range(20)] * 20, ("category", {})),
  (["Paris, France", "Rome, Italy", "Bonn, Germany"] * 20, ("category", {})),
  (["a|b", "b|c", "a|c", "a|b|c", "a"] * 20, ("bag", {"separator": "|"})),
  (["a, b", "b, c", "a, c", "a, b, c"] * 20, ("bag", {"separator": ","})),
  ([["a", "b"], ["b"], []] * 20, ("bag", {})),
  (["['a', 'b']", "['b']"] * 20, ("bag", {})),
  (np.linspace(0, 1, 80).tolist(), ("number", {})),
  ([17, 90, 25, 33, 41, 60, 18, 19] * 5 + list(range(40)), ("number", {})),
  ([*np.linspace(0, 1, 80).tolist(), None], ("number", {})),
  ([2**i for i in range(20)] * 2 + list(range(60)), ("number", {"log": True})),
]  # fmt: skip


def test_values_decide_the_kind(tmp_path):
  def check(values, expected):
    column = proposed(tmp_path / "x.parquet", {"x": values})["x"]
    assert (column.kind, column.options) == expected, column.why

  each({f"{values[:4]}": (values, expected) for values, expected in KINDS}, check)


def test_a_click_table(tmp_path, capsys):
  path, out = write(tmp_path / "clicks.csv.gz", click_columns()), tmp_path / "my.py"
  printed = look(capsys, path, "--label=clicked", f"--out={out}")
  lines = {line.split("  ")[0]: line for line in printed.splitlines()}
  assert "6 columns, all 600 rows" in printed
  assert "left out: unique per row" in lines["row_id"]
  assert "left out: constant" in lines["same"]
  assert "number, log=True: heavy tail" in lines["price"]
  assert "bag, separator='|'" in lines["tags"]
  assert f"python -m recipes.dlrm --config={out} --workdir=runs/my" in printed
  text = out.read_text()
  assert "python -m recipes.describe" in text
  assert "# 'row_id': left out, unique per row" in text
  config = completed(out, "dlrm", tmp_path)
  assert set(config.columns) == {"clicked", "user-agent.os", "price", "tags"}
  assert config.columns.price.log
  assert built(out, "dlrm", tmp_path)["splits"]["train"][1] > 0


def test_an_interaction_log_serves_sequences_and_towers(tmp_path, capsys):
  path, out = write(tmp_path / "log.csv", log_columns()), tmp_path / "my.py"
  printed = look(capsys, path, f"--out={out}")
  assert "--user=visitor" in printed
  assert "--item=product" in printed
  assert "exclude_seen is False" in printed
  assert "Every row counts as liked. --label=COLUMN (stars) counts clicks alone." in printed
  assert printed.index("recipes.sequence") < printed.index("recipes.two_tower")
  given = runpy.run_path(str(out))["get_config"]()
  assert given["exclude_seen"] is False
  assert given["columns"] == {
    "visitor": "user",
    "product": "item",
    "category": {"kind": "category", "side": "item"},
    "name": "title",
    "country": {"kind": "category", "side": "user"},
    "seen_at": "time",
  }
  assert built(out, "sequence", tmp_path)["num_items"] == 30
  features = built(out, "two_tower", tmp_path)["features"]
  assert [feature["name"] for feature in features["item"]] == ["category"]


def test_the_time_is_the_finest_moment_of_a_row(tmp_path):
  seconds = np.sort(1_700_000_000 + RNG.integers(10**7, size=ROWS))
  days = [f"{np.datetime64(int(each), 's')}"[:10] for each in seconds]
  born = ["2001-02-03", "1980-04-05"] * (ROWS // 2)
  copies = {"week": seconds // 604_800, "days_left": -(seconds // 86_400), "x": RNG.random(ROWS)}
  columns = {"date_of_birth": born, "date": days, "unix": seconds, "y": [0, 1] * (ROWS // 2)}
  found = proposed(tmp_path / "log.parquet", columns | copies, label="y")
  assert {name: column.kind for name, column in found.items()} == {
    "date_of_birth": "", "date": "", "unix": "time", "y": "label", "week": "", "days_left": "",
    "x": "number",
  }  # fmt: skip


def test_rows_that_cannot_be_read_are_counted(tmp_path, capsys):
  path, out = write(tmp_path / "clicks.csv", click_columns()), tmp_path / "my.py"
  path.write_text(path.read_text() + "too,many\n" * 5)
  printed = look(capsys, path, "--label=clicked", f"--out={out}")
  assert "5 rows: has too few fields" in printed
  assert runpy.run_path(str(out))["get_config"]()["on_bad_row"] == "skip"


MISTAKES = [
  (["--label=click"], "--label=click: no column; did you mean 'clicked'?"),
  (["--label=same"], "has 1 values (x), and needs clicks and others"),
  (["--label=tags"], "say which is a click, as --positive="),
  (["--label=user-agent.os", "--positive=linux"], "and needs clicks and others"),
  (["--label=clicked", "--out=mine.py"], "File exists: 'mine.py'"),
  (
    ["news.tsv", "--item=shown"],
    "--item=shown holds items, each with 0 or 1 for its click: write a",
  ),
  (["lists.csv", "--label=y"], "nothing to train on: "),
  (
    ["lists.csv", "--label=y"],
    "id is left out: unique per row; x is left out: numbers of a vector",
  ),
  (["games.json"], "its lines are Python's. Convert them: python -c 'import ast, json, sys;"),
  (["rows.csv", "--label=y"], "the first line seems a row: name them, as --names=c1,c2"),
]


def test_mistakes_are_one_line(tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "mine.py").write_text("mine")
  write(tmp_path / "clicks.csv", click_columns())
  (tmp_path / "news.tsv").write_text(
    "user\tshown\n" + "".join(f"u{i}\tN1-0 N{i}-1\n" for i in range(9))
  )
  lists = {
    "y": [0, 1] * 50,
    "id": [f"{i:x}" for i in range(100)],
    "x": ["[0.5, 1.5]", "[2.5]"] * 50,
  }
  write(tmp_path / "lists.csv", lists)
  (tmp_path / "games.json").write_text("{u'id': 1, 'is_free': True}\n" * 9)
  write(tmp_path / "rows.csv", {"1": [1] * ROWS, "2024-01-02": ["2024-01-03"] * ROWS})

  def check(arguments, line):
    files = [] if (tmp_path / arguments[0]).exists() else ["clicks.csv"]
    assert line in refusal(capsys, *files, *arguments)
    assert not (tmp_path / "my.py").exists()
    assert (tmp_path / "mine.py").read_text() == "mine"

  each({str(arguments): (arguments, line) for arguments, line in MISTAKES}, check)


def test_leaks_are_left_out(tmp_path, capsys):
  columns = click_columns(2000)
  clicked = columns["clicked"]
  columns["paid"] = np.where(clicked, np.round(RNG.lognormal(3, 1, 2000), 2), 0)
  columns["paid_by"] = np.where(clicked & (RNG.random(2000) < 0.2), "app", "")
  columns["status"] = np.where(clicked, "done", RNG.choice(["open", "new"], 2000))
  columns["hint"] = np.where(RNG.random(2000) < 0.9, clicked, 1 - clicked)
  path, out = write(tmp_path / "a.csv", columns), tmp_path / "my.py"
  assert "paid, paid_by, status" in look(capsys, path, "--label=clicked", f"--out={out}")
  assert set(completed(out, "dlrm", tmp_path).columns) == {
    "clicked", "user-agent.os", "price", "tags", "hint"
  }  # fmt: skip


def y(rows=ROWS):
  return {"y": RNG.integers(2, size=rows)}


NUMBERS = {"noise": RNG.random(ROWS), "other": RNG.normal(size=ROWS)}
LINES = {"note": ["one\ntwo", 'a "b"', "c", "d,e"] * 150, "split": [*"ab"] * 300}
EMPTY = {"a": [7] * ROWS, "b": [""] * ROWS, "c": ["x"] + [""] * (ROWS - 1), "d": [*"xyz"] * 200}
HARD = {
  "numbers": NUMBERS,
  "lines, and a name that is stored": LINES | {"n": NUMBERS["noise"]},
  "constants": EMPTY | NUMBERS,
  "unicode": {'😀 "Größe" €': [f"ä{i % 97}" for i in range(ROWS)]},
  "wide": {f"c{n}": RNG.lognormal(3, 2, ROWS) for n in range(80)},
}


LOGS = [  # rows by number, user, item, second; and the columns that become more than features
  ("timestamp,visitorid,event,itemid,transactionid", "{t}007,{u}7919,view,{i}31,{n}",
   {"timestamp": "time", "visitorid": "user", "itemid": "item"}),
  ("session,ms,item,category", "{u},{t}000,2145{i:05},{i}", {"session": "user", "item": "item"}),
  ("t_dat,customer_id,article_id,price", "{day},{u:064x},0{i},0.0{n}",
   {"t_dat": "time", "customer_id": "user", "article_id": "item"}),
  ("user,time_stamp,adgroup_id,pid,nonclk,clk", "{u},{t},{i},430548_1007,1,0",
   {"user": "user", "time_stamp": "time", "adgroup_id": "item"}),
  ("msno,song_id,source", "{u:044x},{i:044x},radio", {"msno": "user", "song_id": "item"}),
  ("steamid,appid,playtime", "7656119796{u:07},{i}0,{n}", {"steamid": "user", "appid": "item"}),
  ("sessionId;userId;itemId", "{s};NA;{i}", {"sessionId": "user", "itemId": "item"}),
  ("Kunde;Artikel;Betrag", "K{u:05};A{i:04};{n},50", {"Kunde": "user", "Artikel": "item"}),
  ("uid,iid", "{u},{i}", {"uid": "user", "iid": "item"}),
  ("userid\ttimestamp\tartid\tartname\ttraid\ttraname",
   '{u:x}\t{day}T00:00:00Z\ta{a}\tThe "{a}\tt{i}\tSong {i}',
   {"userid": "user", "timestamp": "time", "traid": "item"}),
  ("user_id,video_id,time,date,timestamp", "{u},{i},{day} 10:00:00.5,{short},{t}.5",
   {"user_id": "user", "video_id": "item", "timestamp": "time"}),
]  # fmt: skip


def test_ids_and_times_of_public_logs(tmp_path):
  """By the shape of the columns: many ids, each with many of the other side's."""
  user, item = RNG.integers(40, size=ROWS), RNG.zipf(1.5, ROWS) % 50
  second = np.sort(1_577_836_800 + RNG.integers(60 * 86_400, size=ROWS))

  def check(number, header, row, expected):
    path = tmp_path / f"{number}.csv"
    rows = [
      row.format(
        n=n, u=u, i=i, a=i // 4, s=u + n // 100 * 1000, t=t, day=day, short=day.replace("-", "")
      )
      for n, (u, i, t) in enumerate(zip(user.tolist(), item.tolist(), second, strict=True))
      for day in [str(np.datetime64(int(t), "s"))[:10]]
    ]
    path.write_text("\n".join([header, *rows]))
    sample = describe.read([str(path)], Format(), 10_000)
    describe.propose(sample, {})
    kinds = {column.name: column.kind for column in sample.columns.values()}
    assert {name: kinds[name] for name in expected} == expected, kinds
    assert not {"user", "item", "time"} & {kinds[name] for name in kinds.keys() - expected.keys()}
    assert "number" not in [kinds.get("date"), kinds.get("transactionid")]  # copies of the time

  each({log[0]: (number, *log) for number, log in enumerate(LOGS)}, check)


def test_a_row_may_have_several_items(tmp_path):
  for basket, mark in (
    (["i1 i2", "i2 i3", "i1"], " "),
    (["i1|i2", "i3"], "|"),
    ([["i1"], []], "|"),
  ):
    columns = {"who": [f"u{n}" for n in range(9)] * 4, "basket": basket * (36 // len(basket))}
    found = proposed(tmp_path / "a.parquet", columns, user="who", item="basket")
    assert found["basket"].options == {"separator": mark}


def test_fields_of_objects_are_proposed(tmp_path):
  rows = [{"at": {"city": c, "zip": None}, "y": n % 2, "k": [{}]} for n, c in enumerate("aab" * 50)]
  (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
  lines = ["y,about", *(f'{n % 2},"{{""lang"": ""{c}""}}"' for n, c in enumerate("dde" * 50))]
  (tmp_path / "a.csv").write_text("\n".join(lines))
  for file, name in (("a.jsonl", "at.city"), ("a.csv", "about.lang")):
    sample = describe.read([str(tmp_path / file)], Format(), 200)
    describe.propose(sample, {"label": "y"})
    assert {c.name for c in sample.columns.values() if c.kind == "category"} == {name}


@pytest.mark.ci
def test_what_is_proposed_is_prepared(tmp_path, capsys):
  def check(number, columns):
    folder = tmp_path / str(number)
    folder.mkdir()
    path, out = write(folder / "a.csv", {"はい": y()["y"], **columns}), folder / "my.py"
    look(capsys, path, "--label=はい", f"--out={out}")
    built(out, "dlrm", folder)

  each({name: (number, HARD[name]) for number, name in enumerate(HARD)}, check)


ODD = ["a.b", "x/y", 'say "x"', "line\nbreak", "--x", "score", ""]


@pytest.mark.ci
def test_odd_names_of_columns_are_described_trained_and_served(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(mesh_lib, "start", lambda: None)
  values = [[f"{value}"[-1] for value in RNG.integers(5, size=ROWS)] for _ in ODD]
  columns = dict(zip([".y", *ODD], [y()["y"], *values], strict=True))
  path, out = write(tmp_path / "a.csv", columns), tmp_path / "my.py"
  look(capsys, path, "--label=.y", f"--out={out}")
  config = completed(out, "dlrm", tmp_path)
  assert list(config.columns) == [".y", *ODD[:-1], "column 8"]
  run_of("dlrm", config, tmp_path / "run")
  served = export.export(tmp_path / "run", tmp_path / "served", platforms=("cpu",))
  predicted = io.StringIO()
  notes = predict.predict(str(served), str(path), predicted)
  header, *rows = csv.reader(io.StringIO(predicted.getvalue()))
  assert notes == f"{ROWS} rows"
  assert (header[-1], len(header), len(rows)) == ("score_", len(ODD) + 2, ROWS)
