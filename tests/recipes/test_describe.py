"""A first look at a table: the roles that its values decide, and configs that train as written."""

import gzip
import importlib
import runpy

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipes import describe
from recipes.tables import profile, proposing, settings
from recipes.tables.formats import Format
from recipes.tables.proposing import Roles

RNG = np.random.default_rng(0)
ROWS = 600


def kind(values, total=0, name="x"):
  array = pa.array([str(v) if v is not None else "" for v in values])
  if isinstance(values[0], list):
    array = pa.array(values)
  column = profile.of_arrays(name, [array], Format().missing)
  return proposing.feature(column, total or len(values))[:2]


def write(path, columns, delimiter=","):
  rows = zip(*columns.values(), strict=True)
  lines = [delimiter.join(columns), *(delimiter.join(map(str, row)) for row in rows)]
  text = "\n".join(lines) + "\n"
  if path.suffix == ".gz":
    path.write_bytes(gzip.compress(text.encode()))
  else:
    path.write_text(text)
  return path


def click_columns(rows=ROWS):
  clicked = RNG.random(rows) < 0.3
  return {
    "row_id": [f"{i:016x}" for i in RNG.integers(2**60, size=rows)],
    "clicked": clicked.astype(int),
    "user-agent.os": np.where(clicked & (RNG.random(rows) < 0.9), "ios", RNG.choice(["web", "?"], rows)),
    "price": np.round(RNG.lognormal(3, 2, rows), 2),
    "same": ["x"] * rows,
    "tags": [
      "|".join(RNG.choice(list("abcd"), RNG.integers(1, 4), replace=False)) for _ in range(rows)
    ],
  }


def log_columns(rows=3000):
  user, item = RNG.integers(40, size=rows), RNG.integers(30, size=rows)
  return {
    "visitor": [f"u-{i}" for i in user],
    "product": [f"p{i}" for i in item],
    "category": np.array(["hats", "coats"])[item % 2],
    "name": [f"Fine hat {i}" for i in item],
    "country": np.array(["NO", "US"])[user % 2],
    "device": RNG.choice(["web", "ios"], rows),
    "seen_at": [f"2024-03-{1 + i % 28:02d}T{i % 24:02d}:10:00Z" for i in range(rows)],
  }  # fmt: skip


def look(capsys, *arguments):
  """Runs the command; returns what it prints."""
  capsys.readouterr()
  describe.main([str(argument) for argument in arguments])
  return capsys.readouterr().out


def refused(capsys, *arguments):
  """Runs the command, which refuses; returns the line that says why."""
  with pytest.raises(SystemExit):
    look(capsys, *arguments)
  error = capsys.readouterr().err
  assert error.count("\n") == 1
  return error


def completed(path, recipe, tmp_path):
  """The config of a file, completed as `--config` completes it."""
  given = runpy.run_path(str(path))["get_config"]() | {"cache_dir": str(tmp_path / "cache")}
  defaults = importlib.import_module(f"recipes.{recipe}.defaults").DEFAULTS
  return settings.complete(given, defaults)


def built(path, recipe, tmp_path):
  """What the recipe's data set says of the table that a config declares."""
  module = {"dlrm": "tables.clicks", "two_tower": "two_tower.table", "sequence": "sequence.table"}
  build = importlib.import_module(f"recipes.{module[recipe]}").build
  folder = tmp_path / recipe
  folder.mkdir()
  return build(settings.settings(completed(path, recipe, tmp_path)), folder)


@pytest.mark.parametrize(
  ("values", "expected"),
  [
    ([3] * 50, ("", {})),
    ([None] * 50, ("", {})),
    ([f"{i:x}" for i in range(50)], ("", {})),
    (list(range(7, 57)), ("", {})),
    (["a long text of many words, number " + str(i) for i in range(50)], ("", {})),
    (["1,5", "2,5", "3,1"] * 20, ("", {})),
    (["1,500", "17", "2,300,000.5"] * 20, ("", {})),
    (["['a', 'b']", "['b']"] * 20, ("", {})),
    (["2024-01-01", "2024-01-02"] * 20, ("", {})),
    (["a", "b", None] * 20, ("category", {})),
    ([1, 2, 3, 4] * 20, ("category", {})),
    (["02139", "10001"] * 20, ("category", {})),
    ([10**12 + i for i in range(20)] * 20, ("category", {})),
    (["New York", "San Francisco", "Los Angeles"] * 20, ("category", {})),
    (["Paris, France", "Rome, Italy", "Bonn, Germany"] * 20, ("category", {})),
    (["a|b", "b|c", "a|c", "a|b|c", "a"] * 20, ("bag", {})),
    (["a;b", "b;c", "a;c", "a;b;c"] * 20, ("bag", {"separator": ";"})),
    (["a, b", "b, c", "a, c", "a, b, c"] * 20, ("bag", {"separator": ","})),
    ([["a", "b"], ["b"], []] * 20, ("bag", {})),
    (np.linspace(0, 1, 80).tolist(), ("number", {})),
    ([17, 90, 25, 33, 41, 60, 18, 19] * 5 + list(range(40)), ("number", {})),
    ([*np.linspace(0, 1, 80).tolist(), None], ("number", {"missing": "indicator"})),
    ([2**i for i in range(20)] * 2 + list(range(60)), ("number", {"log": True})),
    ([*np.linspace(-1, 1, 80).tolist(), "-", "-"], ("number", {"missing": "indicator"})),
  ],
)  # fmt: skip
def test_values_decide_the_kind(values, expected):
  assert kind(values) == expected


def test_names_are_hints_where_integers_could_be_both():
  values = RNG.integers(1000, size=3000).tolist()
  assert kind(values, name="shop_id") == kind(values, name="storeType") == ("category", {})
  assert kind(values, name="income") == ("number", {})


def test_many_values_are_counted_from_the_whole_table():
  values = [f"h{i}" for i in RNG.integers(400, size=1000)]
  assert kind(values) == ("category", {})
  assert kind(values, total=3_000_000) == ("category", {"min_count": 5})
  assert kind(values, total=30_000_000) == ("category", {"hash": 1_000_000})


def test_a_click_table(tmp_path, capsys):
  path, out = write(tmp_path / "clicks.csv", click_columns()), tmp_path / "my.py"
  printed = look(capsys, path, "--label=clicked", f"--out={out}")
  lines = {line.split("  ")[0]: line for line in printed.splitlines()}
  assert "6 columns, all 600 rows" in printed
  assert max(len(line) for line in lines.values() if str(tmp_path) not in line) <= 100
  assert "left out: unique per row" in lines["row_id"]
  assert "left out: constant" in lines["same"]
  assert "number, log: heavy tail" in lines["price"]
  assert "bag: cut at '|'" in lines["tags"]
  assert f"python -m recipes.dlrm --config={out} --workdir=runs/my" in printed
  text = out.read_text()
  assert "python -m recipes.describe" in text
  assert '# left out: "row_id", "same"' in text
  config = completed(out, "dlrm", tmp_path)
  assert set(config.columns) == {"clicked", "user-agent.os", "price", "tags"}
  assert config.columns.price.log
  assert built(out, "dlrm", tmp_path)["dense"] == ["price"]


def test_an_interaction_log_serves_sequences_and_towers(tmp_path, capsys):
  path, out = write(tmp_path / "log.tsv", log_columns(), "\t"), tmp_path / "my.py"
  printed = look(capsys, path, f"--out={out}")
  assert "--user=visitor --item=product" in printed
  assert "exclude_seen is False" in printed
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


def test_a_time_is_no_condition_of_towers(tmp_path, capsys):
  columns = log_columns()
  del columns["seen_at"]
  printed = look(capsys, write(tmp_path / "log.csv", columns))
  assert "recipes.two_tower" in printed
  assert "recipes.sequence" not in printed


def test_the_time_is_when_a_row_happened(tmp_path):
  columns = log_columns()
  released = {item: f"1999-01-{1 + int(item[1:]) % 28:02d}" for item in columns["product"]}
  columns = {"date_of_birth": ["2001-02-03", "1980-04-05"] * 1500, **columns}
  columns = {"published": [released[item] for item in columns["product"]], **columns}
  read = profile.read([write(tmp_path / "log.csv", columns)], Format(), 5000)
  plan = proposing.propose(read, Roles())
  assert plan.columns["seen_at"].kind == "time"
  assert (plan.columns["published"].kind, plan.columns["date_of_birth"].kind) == ("", "")


def test_ratings_serve_all_recipes(tmp_path, capsys):
  columns = log_columns()
  columns = {"u": columns["visitor"], "i": columns["product"], "rating": RNG.integers(1, 6, 3000)}
  columns["when"] = range(3000)
  path, out = write(tmp_path / "ratings.csv", columns), tmp_path / "my.py"
  printed = look(
    capsys, path, "--user=u", "--item=i", "--label=rating", "--time=when", f"--out={out}"
  )
  assert "3 or more is a click, by the median" in printed
  assert runpy.run_path(str(out))["get_config"]()["columns"]["rating"] == {
    "kind": "label",
    "at_least": 3,
  }
  for recipe in ("dlrm", "two_tower", "sequence"):
    assert f"recipes.{recipe}" in printed
    built(out, recipe, tmp_path)


def test_a_split_by_time_needs_both_outcomes(tmp_path, capsys):
  columns = click_columns() | {"date": [f"2024-01-{1 + i // 300:02d}" for i in range(ROWS)]}
  path, out = write(tmp_path / "clicks.csv", columns), tmp_path / "my.py"
  assert "the split is by hash" in look(capsys, path, "--label=clicked", f"--out={out}")
  built(out, "dlrm", tmp_path)


@pytest.mark.parametrize("columns", [60, 200])
def test_wide_tables_fit_in_thirty_lines(tmp_path, capsys, columns):
  texts = lambda i: RNG.choice(["", "a", "b"], ROWS)
  numbers = lambda i: np.round(RNG.lognormal(1, 3, ROWS), 2)
  table = {f"a_long_column_name_{i:03d}": (texts, numbers)[i % 2](i) for i in range(columns)}
  table["target"] = RNG.integers(2, size=ROWS)
  path, out = write(tmp_path / "wide.csv", table), tmp_path / "my.py"
  printed = look(capsys, path, "--label=target", f"--out={out}")
  assert max(len(line) for line in printed.splitlines() if str(tmp_path) not in line) <= 100
  assert len(out.read_text().splitlines()) <= 30
  assert len(completed(out, "dlrm", tmp_path).columns) == columns + 1


def test_every_table_that_the_recipes_read(tmp_path, capsys):
  columns = click_columns()
  plain = look(capsys, write(tmp_path / "a.csv", columns), "--label=clicked")
  packed = look(capsys, write(tmp_path / "a.tsv.gz", columns, "\t"), "--label=clicked")
  body = lambda text: text.split("\n", 1)[1]
  assert body(plain) == body(packed)
  folder = tmp_path / "parts"
  folder.mkdir()
  for part in range(2):
    lists = pa.array([tags.split("|") for tags in columns["tags"]])
    table = {"tags": lists, "clicked": columns["clicked"] == 1, "struct": [{"a": 1}] * ROWS}
    pq.write_table(pa.table(table), folder / f"{part}.parquet", row_group_size=100)
  printed = look(capsys, folder, "--label=clicked")
  assert "all 1,200 rows" in printed
  assert "bag: lists" in printed
  assert "left out: holds structs" in printed
  assert "of about 1,200" in look(capsys, folder, "--label=clicked", "--rows=500")


def test_a_sample_is_of_several_places(tmp_path):
  file = tmp_path / "a.parquet"
  pq.write_table(pa.table({"n": np.arange(1000)}), file, row_group_size=100)
  read = profile.read([file], Format(), 50)
  assert (read.num_rows, read.total, read.is_all, read.places) == (50, 1000, False, 5)
  assert {number // 100 for number in read.columns["n"].of_rows} == {0, 2, 4, 6, 9}
  text = write(tmp_path / "a.csv", {"n": range(1000, 9000), "m": range(1000, 9000)})
  read = profile.read([text], Format(), 100)
  assert (read.num_rows, read.is_all) == (100, False)
  assert 7000 < read.total < 9000


def test_a_table_of_items_is_a_setting_of_another(tmp_path, capsys):
  items = {
    "sku": range(100, 150),
    "name": [f"Hat no. {i}" for i in range(50)],
    "size": [*"SML", "XL", "M"] * 10,
  }
  printed = look(capsys, write(tmp_path / "items.csv", items), "--item=sku")
  assert '"item_table": {' in printed
  setting = eval("{" + printed[printed.index('"item_table"') :] + "}")
  assert setting["item_table"]["key"] == "sku"
  assert setting["item_table"]["columns"] == {"name": "title", "size": "category"}
  log = log_columns()
  log = {"user": log["visitor"], "item": RNG.integers(100, 150, len(log["visitor"]))}
  out = tmp_path / "my.py"
  look(capsys, write(tmp_path / "log.csv", log), f"--out={out}")
  out.write_text(out.read_text().replace("  return {", "  return {\n" + setting_text(printed)))
  features = built(out, "two_tower", tmp_path)["features"]
  assert [feature["name"] for feature in features["item"]] == ["size"]


def setting_text(printed):
  return printed[printed.index('    "item_table"') :]


def test_rows_that_cannot_be_read_are_counted(tmp_path, capsys):
  path, out = write(tmp_path / "clicks.csv", click_columns()), tmp_path / "my.py"
  path.write_text(path.read_text() + "too,many\n" * 5)
  printed = look(capsys, path, "--label=clicked", f"--out={out}")
  assert "5 rows: too few fields" in printed
  assert runpy.run_path(str(out))["get_config"]()["on_bad_row"] == "skip"
  path.write_text(path.read_text() + "too,many\n" * 500)
  assert "2 instead of 6" in refused(capsys, path, "--label=clicked")


def test_a_config_is_not_overwritten(tmp_path, capsys):
  path, out = write(tmp_path / "clicks.csv", click_columns()), tmp_path / "my.py"
  out.write_text("mine")
  assert "add --force" in refused(capsys, path, "--label=clicked", f"--out={out}")
  assert out.read_text() == "mine"
  look(capsys, path, "--label=clicked", f"--out={out}", "--force")
  assert "get_config" in out.read_text()
  assert "--force" not in out.read_text()


@pytest.mark.parametrize(
  ("arguments", "line"),
  [
    (["--label=click"], "--label=click: no column; did you mean 'clicked'?"),
    (["--label=same"], "has one value in these rows, 'x'"),
    (["--label=tags"], "say which is a click, --positive="),
    (["--label=user-agent.os", "--positive=linux"], "--positive=linux: no value of"),
    (["--positive=1"], "give --label too"),
    (["--user=same", "--item=same"], "are both 'same'"),
    (["--label=clicked", "--time=tags"], "a time is a number that grows"),
    (["--label=clicked", "--out=my"], "a config is a Python file: --out=my.py"),
    (["--out=my.py"], "my.py is not written. For a config, name the column that is"),
    (["--rows=0"], "read one row or more"),
    (["--delimiter=;", "--quote=;"], "--delimiter"),
    (["--encoding=utf-99"], "--encoding='utf-99' is unknown"),
  ],
)  # fmt: skip
def test_mistakes_are_one_line(tmp_path, capsys, monkeypatch, arguments, line):
  monkeypatch.chdir(tmp_path)
  path = write(tmp_path / "clicks.csv", click_columns())
  assert line in refused(capsys, path, *arguments)
  assert not (tmp_path / "my.py").exists()


def test_a_first_line_of_texts_may_be_a_row(tmp_path, capsys):
  rows = [f"{30 + i % 40}, {'State-gov' if i % 3 else 'Private'}, {i}, {'BSc' if i % 2 else 'HS'}, "
          f"Male, {'>50K' if i % 5 == 0 else '<=50K'}" for i in range(60)]  # fmt: skip
  path = tmp_path / "adult.data"
  path.write_text("\n".join(rows) + "\n")
  assert "the first line seems a row, not a header" in refused(capsys, path, "--label=<=50K")


def test_a_header_may_be_a_value_or_come_again(tmp_path, capsys):
  path = tmp_path / "tags.csv"
  rows = "".join(f"{'tag' if i == 3 else 'a'},{i % 7},{i % 2}\n" for i in range(40))
  path.write_text("tag,count,clicked\n" + rows)
  assert "tag" in look(capsys, path, "--label=clicked")
  path.write_text("tag,clicked\na,1\nb,0\ntag,clicked\na,0\nb,1\n")
  look(capsys, path)


def test_a_first_line_that_is_a_row(tmp_path, capsys):
  path = tmp_path / "u.data"
  rows = (f"{196 + i % 2}\t{242 + i % 9}\t{i % 5}\t{881250949 + i}" for i in range(40))
  path.write_text("\n".join(rows) + "\n")
  assert "name its 4 columns, as --names=" in refused(capsys, path)
  printed = look(capsys, path, "--names=user,item,rating,time")
  assert "recipes.sequence" in printed
  out = tmp_path / "my.py"
  assert "c4" in look(capsys, path, "--no_header", "--user=c1", "--item=c2", f"--out={out}")
  assert completed(out, "two_tower", tmp_path).format.names == ("c1", "c2", "c3", "c4")


def test_nothing_to_train_on_asks(tmp_path, capsys):
  printed = look(capsys, write(tmp_path / "clicks.csv", click_columns()))
  assert "name the column that is predicted, --label (clicked?)" in printed


def test_two_texts_of_a_label(tmp_path):
  path = write(
    tmp_path / "a.csv", {"n": range(40), "income": ["<=50K", "<=50K", ">50K", "<=50K"] * 10}
  )
  read = profile.read([path], Format(), 100)
  plan = proposing.propose(read, Roles(label="income"))
  assert plan.columns["income"].options == {"positive": (">50K",)}
  assert any("'>50K' is the rarer value" in note for note in plan.notes)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["dlrm", "sequence", "two_tower"])
def test_a_written_config_trains(tmp_path, capsys, recipe):
  columns, label = (
    (click_columns(), ["--label=clicked"]) if recipe == "dlrm" else (log_columns(), [])
  )
  path, out = write(tmp_path / "table.csv", columns), tmp_path / "my.py"
  look(capsys, path, *label, f"--out={out}")
  config = completed(out, recipe, tmp_path)
  config.epochs = 1
  importlib.import_module(f"recipes.{recipe}.train").run(config, str(tmp_path / "run"))
  assert (tmp_path / "run" / "result.json").is_file()
