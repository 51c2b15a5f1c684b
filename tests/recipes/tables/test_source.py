"""Rows of files: dialects, types, bad values, and the splits; by hand."""

import datetime
import gzip
import hashlib
import pathlib
import tempfile

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import each, refused

from recipes.errors import UserError
from recipes.tables import source, spec
from recipes.tables.formats import Format, file_format, paths

SPLIT = {"valid": 0.1, "test": 0.1}


def read(path, columns, *, on_bad_row="raise", by="", split=SPLIT, format=None, **how):
  """Returns the rows of files; `path` is one, a list, or lists by split."""
  by_split = path if isinstance(path, dict) else {"": path}
  files = {name: tuple(paths(each)) for name, each in by_split.items()}
  of_files = source.Source(files, Format(**(format or {})), spec.parse(columns), {})
  folder = tempfile.mkdtemp()
  rows = source.read(source.connect(), of_files, pathlib.Path(folder), on_bad_row, **how)
  rows.split(by, split)
  return rows


def values(rows):
  """Returns the values of all rows by declared name."""
  read = [rows.values(parts, [*rows.columns]) for parts, _ in rows.parts()]
  return {name: [x for each in read for x in each[name].to_pylist()] for name in rows.columns}


def splits(rows):
  return np.concatenate([split for _, split in rows.parts()]).tolist()


def places(rows):
  return rows.query(f"SELECT place FROM {rows.view}")["place"].to_pylist()


def write(path, content, encoding="utf-8"):
  path.write_bytes(content if isinstance(content, bytes) else content.encode(encoding))
  return str(path)


TWO = {"city": "category", "price": "number"}
ROWS = {"city": ["Oslo", "Rome", None], "price": [1.5, None, 3.0]}
PLAIN = "city,price\nOslo,1.5\nRome,\n,3\n"
NAMES = {"names": ("city", "price")}
DIALECTS = {
  "plain": ("a.csv", PLAIN, {}),
  "spaces": ("a.csv", "city , price\n Oslo , 1.5 \nRome,NA\n\\N,\t3\n", {}),
  "tabs": ("a.tsv", PLAIN.replace(",", "\t"), {}),
  "semicolons": ("a.csv", PLAIN.replace(",", ";"), {}),
  "colons": ("a.dat", "Oslo::1.5\nRome::\n::3\n", NAMES),
  "no header": ("a.csv", PLAIN.partition("\n")[2], NAMES),
  "other columns": ("a.csv", "x,price,city\n1,1.5,Oslo\n2,,Rome\n3,3,\n", {}),
  "no last line end": ("a.csv", "city,price\nOslo,1.5\nRome,\n,3", {}),
  "line ends": ("a.csv", PLAIN.replace("\n", "\r\n"), {}),
  "mixed line ends": ("a.csv", "city,price\r\nOslo,1.5\nRome,\r\n,3\n", {}),
  "byte order mark": ("a.csv", "\ufeff" + PLAIN, {}),
  "empty lines": ("a.csv", "\n\ncity,price\nOslo,1.5\n\nRome,\n,3\n\n", {}),
  "quotes": ("a.csv", 'city,price\n"Oslo","1.5"\n"Rome",""\n"","3"\n', {}),
  "utf-16": ("a.csv", PLAIN.encode("utf-16"), {"encoding": "utf-16"}),
  "gzip": ("a.csv.gz", gzip.compress(PLAIN.encode()), {}),
  "JSON Lines": (
    "a.jsonl",
    '{"city": "Oslo", "price": 1.5}\n{"price": null, "city": "Rome"}\n\n{"price": "3"}\n',
    {},
  ),
}


def test_a_table_reads_the_same_in_every_dialect(tmp_path):
  def check(name, content, format):
    assert values(read(write(tmp_path / name, content), TWO, format=format)) == ROWS

  each(DIALECTS, check)


def test_quoted_values_have_delimiters_quotes_and_lines(tmp_path):
  text = 'city,price\n"a, ""b""\nc",1\nd,2\n'
  rows = read(write(tmp_path / "a.csv", text), TWO)
  assert values(rows)["city"] == ['a, "b"\nc', "d"]
  one = read(write(tmp_path / "o.csv", "city,price\nOslo,1"), TWO)
  assert values(one)["city"] == ["Oslo"]
  rows = read(write(tmp_path / "b.csv", 'city,price\n"a,1\nb",2\n'), TWO, format={"quote": ""})
  assert values(rows)["city"] == ['"a', 'b"']
  latin = write(tmp_path / "l.csv", "city,price\nMünchen,1\n", "latin-1")
  assert values(read(latin, TWO, format={"encoding": "latin-1"}))["city"] == ["München"]


def test_the_last_column_takes_the_rest_of_a_line(tmp_path):
  format = {"names": ("user", "items"), "delimiter": " ", "rest": True}
  columns = {"user": "user", "items": {"kind": "item", "separator": " "}}
  rows = read(write(tmp_path / "a.txt", "u1 3 5 8\nu2 4\nu3\n"), columns, format=format)
  assert values(rows) == {"user": ["u1", "u2", "u3"], "items": [["3", "5", "8"], ["4"], []]}


def test_zstd(tmp_path):
  con = duckdb.connect()
  con.execute(
    f"COPY (SELECT 'Oslo' AS city, 1.5 AS price) TO '{tmp_path}/a.csv.zst' "
    "(FORMAT csv, COMPRESSION zstd)"
  )
  assert values(read(str(tmp_path / "a.csv.zst"), TWO)) == {"city": ["Oslo"], "price": [1.5]}
  whole = (tmp_path / "a.csv.zst").read_bytes()
  with pytest.raises(UserError, match=r"b\.csv\.zst cannot be read"):
    read(write(tmp_path / "b.csv.zst", whole[:-1]), TWO)


def test_files_follow_each_other_with_columns_in_any_order(tmp_path):
  first = write(tmp_path / "a.csv", "city,price\nOslo,1\nRome,2\n")
  second = write(tmp_path / "b.csv", "price,x,city\n3,0,Bonn\n")
  rows = read([first, second], TWO)
  assert values(rows) == {"city": ["Oslo", "Rome", "Bonn"], "price": [1, 2, 3]}
  assert rows.starts == [0, 2]


def test_a_missing_number_is_missing_in_every_spelling(tmp_path):
  path = write(tmp_path / "a.csv", "city,price\n-999.0,-999.0\n-999,-999\n1,-99\n")
  rows = read(path, TWO, format={"missing": ["-999"]})
  assert values(rows) == {"city": [None, None, "1"], "price": [None, None, -99]}


def test_a_column_of_json_may_be_nested(tmp_path):
  text = (
    '{"a": {"b": {"c": 7}}, "tags": ["x", "y"], "a.b": 1, "q\\"": 5}\n{"a": null, "tags": []}\n'
  )
  columns = {
    "c": {"kind": "category", "column": "a.b.c"},
    "tags": "bag",
    "n": {"kind": "number", "column": "a.b"},
    'q"': "number",
  }
  rows = read(write(tmp_path / "a.jsonl", text), columns)
  assert values(rows) == {
    "c": ["7", None],
    "tags": [["x", "y"], []],
    "n": [1, None],
    'q"': [5, None],
  }


# --- values ---------------------------------------------------------------------------------------


def column_of(tmp_path, kind, texts, **how):
  """Returns the values of a column of texts."""
  lines = "\n".join(f'"{text}"' if text else '""' for text in texts)
  path = write(tmp_path / "a.csv", f"x,y\n{lines.replace(chr(10), ',1' + chr(10))},1\n")
  return values(read(path, {"x": kind, "y": "label"}, **how))["x"]


TIME_US = 1_735_603_200_000_000  # 2024-12-31
KINDS = [
  ("category", ["1.0", "-0.0", "1.50", "TRUE", "a.0", "007"],
   ["1", "0", "1.50", "true", "a.0", "007"]),
  ("number", ["1e3", " 2 ", "true", "FALSE", "nan", "?"], [1000, 2, 1, 0, None, None]),
  ({"kind": "number", "decimal": ","}, ["68,44", "1.234,5", "-3", ""], [68.44, 1234.5, -3, None]),
  ({"kind": "number", "thousands": ","}, ["1,299", "12", "2,300,000.5"], [1299, 12, 2300000.5]),
  ("bag", ["a| b |NA|", "", "[27, 9.0]", "['x', 'y']", '[""q""]'],
   [["a", "b"], [], ["27", "9"], ["x", "y"], ["q"]]),
  ("bag", ["""['Tyler, The Creator', ""it's""]""", r"""['it\'s', None]"""],
   [["Tyler, The Creator", "it's"], ["it's"]]),
  ("time", ["5", "-7"], [5, -7]),
  ("time", ["0.5", "2"], [0.5, 2]),
  ("time", ["2024-12-31", "2024/12/31", "2024-12-31T02:00:00+02:00", "2024-12-31 00:00:01Z"],
   [TIME_US, TIME_US, TIME_US, TIME_US + 1_000_000]),
  ({"kind": "time", "format": "%d.%m.%Y %H:%M"}, ["31.12.2024 00:00"], [TIME_US]),
  ({"kind": "time", "format": "%m/%d/%Y %I:%M:%S %p"}, ["12/31/2024 12:00:01 AM"],
   [TIME_US + 1_000_000]),
]  # fmt: skip


def test_what_texts_mean(tmp_path):
  each(KINDS, lambda kind, texts, expected: _equal(column_of(tmp_path, kind, texts), expected))


def _equal(actual, expected):
  assert actual == expected


LABELS = [
  ({}, ["1", "0.0", "Yes", "false"], [1, 0, 1, 0]),
  ({"positive": ["5", "x"]}, ["5.0", "x", "4"], [1, 1, 0]),
  ({"at_least": 4}, ["4", "3.9", "5"], [1, 0, 1]),
  ({"at_least": 3.5, "decimal": ","}, ['"3,5"', '"3,4"', "4"], [1, 0, 1]),
  ({"drop": ["3"], "at_least": 4}, ["3", "4", "1"], [1, 0]),
]


def test_labels_by_hand(tmp_path):
  def check(options, texts, expected):
    path = write(tmp_path / "a.csv", "y,x\n" + "".join(f"{text},1\n" for text in texts))
    assert values(read(path, {"y": {"kind": "label", **options}}))["y"] == expected

  each(LABELS, check)


def test_a_date_and_a_time_within_it(tmp_path):
  when = {"kind": "time", "columns": ["day", "at"]}
  clocks = {"00:00:01": 1, "12:00:01 AM": 1, "4:10 PM": 58_200, "16:10": 58_200, "1500": 1.5}
  for date in ("2024-12-31", "20241231"):
    rows = "".join(f"{date},{clock}\n" for clock in clocks)
    found = values(read(write(tmp_path / "a.csv", f"day,at\n{rows}"), {"when": when}))["when"]
    assert found == [TIME_US + seconds * 1_000_000 for seconds in clocks.values()]


def test_impressions_are_no_items(tmp_path):
  columns = {"shown": {"kind": "bag", "separator": " "}}
  rows = [["shown"], ["sku-1"], ["N1-0 N2-1"]]
  path = write(tmp_path / "a.csv", "\n".join(",".join(row) for row in rows))
  with pytest.raises(UserError, match="row 2, column 'shown': 'N1-0 N2-1' holds items, each with"):
    read(path, columns)


def test_parquet_types(tmp_path):
  day = datetime.datetime(2024, 12, 31)
  arrays = {
    "dictionary": (pa.array(["a", "b"]).dictionary_encode(), "category", ["a", "b"]),
    "decimal": (pa.array([1, 2], pa.decimal128(5, 2)), "category", ["1", "2"]),
    "bool": (pa.array([True, None]), "category", ["true", None]),
    "float": (pa.array([1.0, np.nan]), "category", ["1", None]),
    "half": (pa.array(np.array([1, 2], np.float16)), "number", [1, 2]),
    "binary": (pa.array([b"a", b"b"]), "category", ["a", "b"]),
    "null": (pa.nulls(2), "category", [None, None]),
    "date": (pa.array([day.date()] * 2), "time", [TIME_US] * 2),
    "zone": (pa.array([0, 1], pa.timestamp("s", "Europe/Oslo")), "time", [0, 1_000_000]),
    "lists": (pa.array([[1, None, 2], None]), "bag", [["1", "2"], []]),
    "c0": (pa.array([7, 8]), "number", [7, 8]),
    "f0": (pa.array([3, 4]), "category", ["3", "4"]),
    "bad": (pa.array([5, 6]), "number", [5, 6]),
    "split": (pa.array(["x", "y"]), "category", ["x", "y"]),
    "place": (pa.array(["x", "y"]), "category", ["x", "y"]),
  }
  for unit in ("s", "ms", "us", "ns"):
    arrays[unit] = pa.array([day, day], pa.timestamp(unit)), "time", [TIME_US] * 2
  pq.write_table(pa.table({name: x for name, (x, *_) in arrays.items()}), tmp_path / "a.parquet")

  def check(name, kind, expected):
    assert values(read(str(tmp_path / "a.parquet"), {name: kind}))[name] == expected

  each({name: (name, *rest) for name, (_, *rest) in arrays.items()}, check)
  kinds = {name: kind for name, (_, kind, _) in arrays.items() if kind != "time"}
  assert len(values(read(str(tmp_path / "a.parquet"), kinds))["split"]) == 2  # none is in the way


# --- what cannot be read --------------------------------------------------------------------------

BAD = [
  (TWO, "city,price\nOslo,1\nRome,dear\n", r"a.csv, row 2, column 'price': 'dear' is no number"),
  (TWO, "city,price\nOslo,1e400\n", "row 1, column 'price': '1e400' is no number within float32"),
  (TWO, 'city,price\nOslo,"3,5"\n', r"'3,5' is no number.*declare decimal=','"),
  (TWO, "city,price\nOslo,1,2\n", "a.csv, line 2: 'Oslo,1,2' has too many fields for 2 columns"),
  (TWO, "city,price\nOslo,1\nRome\n", "a.csv, line 3: 'Rome' has too few fields"),
  (TWO, 'city,price\nOslo,1\n"Rome,2\n', r"line 3: '\"Rome,2' has too few fields.*quote=''"),
  (TWO, b"city,price\nOslo,1\nM\xfcnchen,2\n", "cannot be read.*utf-8.*latin-1"),
  (TWO, "city;price\nOslo;1\n", None),
  (TWO, "town,price\nOslo,1\n", "no column 'city'; there are: town, price"),
  (TWO, "citi,price\nOslo,1\n", "no column 'city'; did you mean 'citi'"),
  (TWO, "3,4\n5,6\n", r"no column 'city'.*If the first line is a row.*names="),
  (TWO, "city,city\n1,2\n", "the header names two columns 'city'"),
  (TWO, "", "is empty"),
  ({"p": "number"}, "p,x\ninf,1\n", "row 1, column 'p': 'inf' is no number"),
  (TWO, "city,price\n", "has a header and no rows"),
  ({"when": "time"}, "when,x\n2024-02-30,1\n", r"row 1, column 'when': '2024-02-30' is no time"),
  ({"when": "time"}, "when,x\n5,1\nsoon,1\n", "row 2, column 'when': 'soon' is no time"),
  ({"when": "time"}, "when,x\n2024-01-01,1\n,1\n", "row 2, column 'when'"),
  ({"when": "time"}, "when,x\n2024-01-01,1\n20240102,1\n", "has dates and numbers"),
  ({"part": "split"}, "part,x\ntrain,1\nelse,1\n", "row 2, column 'part': 'else' is no split"),
  ({"w": "weight"}, "w,x\n1,1\n-2,1\n", "row 2, column 'w': '-2' is no weight"),
  ({"y": "label"}, "y,x\n1,1\nmaybe,1\n", r"row 2, column 'y': 'maybe' is neither 0 nor 1"),
  ({"y": "label"}, "y,x\n1,1\n,1\n", "row 2, column 'y' has no value"),
]  # fmt: skip


def test_errors_name_file_row_column_and_value(tmp_path):
  def call(columns, content):
    read(write(tmp_path / "a.csv", content), columns)

  named = [((columns, content), text) for columns, content, text in BAD if text]
  refused(named, lambda given: call(*given), UserError)


def test_a_damaged_file_of_another_format_is_named(tmp_path):
  cases = [
    ("a.parquet", b"PAR1 and no more", "a.parquet cannot be read"),
    ("a.csv.gz", gzip.compress(PLAIN.encode() * 99)[:60], r"a.csv.gz"),
    ("a.jsonl", "no JSON\n", "has no JSON object in its first lines"),
    ("a.jsonl", '{"city": 1, "price": 2}\n{"city": 3,\n', "row 2 is no JSON object"),
    ("a.jsonl", '{"city": 1, "price": 2}\n[7]\n', "row 2 is no JSON object"),
    ("a.csv", "stadt,größe\n1,2\n".encode("latin-1"), "cannot be read.*utf-8.*latin-1"),
    ("a.csv", PLAIN.encode("utf-16"), "cannot be read.*utf-8.*utf-16"),
    ("b.csv.gz", gzip.compress(PLAIN.encode() * 999)[:-8], "b.csv.gz cannot be read"),
  ]

  def call(given):
    read(write(tmp_path / given[0], given[1]), TWO)

  refused([((name, content), text) for name, content, text in cases], call, UserError)


def test_bad_rows_are_skipped_and_counted(tmp_path):
  text = "city,price\nOslo,1\nRome,x\na,b,c\nBonn,2\nRome\nLima,y\nParis,3\n"
  rows = read(write(tmp_path / "a.csv", text), TWO, on_bad_row="skip")
  assert values(rows) == {"city": ["Oslo", "Bonn", "Paris"], "price": [1, 2, 3]}
  assert places(rows) == [0, 2, 4]  # of the lines of two fields
  assert sorted(note.partition(" within")[0].partition(" (")[0] for note in rows.notes) == [
    "1 row: has too few fields for 2 columns",
    "1 row: has too many fields for 2 columns",
    "2 rows: column 'price' is no number",
  ]
  with pytest.raises(UserError, match="every row was left out"):
    read(write(tmp_path / "b.csv", "city,price\nOslo,x\n"), TWO, on_bad_row="skip")


# --- splits ---------------------------------------------------------------------------------------


def test_a_hash_is_the_start_of_an_md5(tmp_path):
  rows = [(f"c{i}", f"{i}.5") for i in range(400)]
  text = "price,x,city\n" + "".join(f"{price},{i},{city}\n" for i, (city, price) in enumerate(rows))
  by = {"by": "hash", "seed": 3}
  found = splits(read(write(tmp_path / "a.csv", text), TWO, **by))
  share = lambda texts: int(hashlib.md5("\x1f".join(texts).encode()).hexdigest()[:8], 16) / 2**32
  expected = [(share(("3", *row)) < 0.2) + (share(("3", *row)) < 0.1) for row in rows]
  assert found == expected
  on = splits(read(str(tmp_path / "a.csv"), TWO, on="city", **by))
  assert on == [(share(("3", city)) < 0.2) + (share(("3", city)) < 0.1) for city, _ in rows]


def test_splits_by_hand(tmp_path):
  times = (50, 10, 20, 30, 40, 90, 60, 70, 80, 100)
  parts = ["train", "val", "TEST", "dev", *["train"] * 6]
  lines = (f"{when},{part}\n" for when, part in zip(times, parts, strict=True))
  text = "when,part\n" + "".join(lines)
  path = write(tmp_path / "a.csv", text)
  cases = [
    ("order", SPLIT, [0] * 8 + [1, 2]),
    ("time", SPLIT, [0, 0, 0, 0, 0, 1, 0, 0, 0, 2]),
    ("column", SPLIT, [0, 1, 2, 1] + [0] * 6),
  ]

  def check(by, split, expected):
    assert splits(read(path, {"when": "time", "part": "split"}, by=by, split=split)) == expected

  each(cases, check)


def test_files_of_the_splits(tmp_path):
  files = {
    name: write(tmp_path / f"{name}.csv", f"city,price\n{name},1\n{name},2\n")
    for name in ("train", "valid", "test")
  }
  assert splits(read(files, TWO, by="files", seed=0)) == [0, 0, 1, 1, 2, 2]
  del files["valid"]
  text = "city,price\n" + "".join(f"c{i},{i}\n" for i in range(500))
  rows = read(files | {"train": write(tmp_path / "train.csv", text)}, TWO, by="files", seed=0)
  counts = np.bincount(splits(rows))
  assert counts[2] == 2
  assert 25 < counts[1] < 75  # a tenth of the rows that train


def test_a_missing_number_is_missing_in_times_and_labels_too(tmp_path):
  pq.write_table(pa.table({"y": [5.0, -999.0], "z": [1, 0]}), tmp_path / "a.parquet")
  columns = {"y": {"kind": "label", "at_least": 4}}
  with pytest.raises(UserError, match=r"row 2, column 'y': '-999\.0' has no value"):
    read(str(tmp_path / "a.parquet"), columns, format={"missing": ["-999"]})
  pq.write_table(pa.table({"when": [5.0, -999.0]}), tmp_path / "b.parquet")
  with pytest.raises(UserError, match=r"row 2, column 'when': '-999\.0' is no time"):
    read(str(tmp_path / "b.parquet"), {"when": "time"}, format={"missing": ["-999"]})


def test_kinds_of_times_do_not_mix_in_any_format(tmp_path):
  mixed = write(tmp_path / "a.jsonl", '{"when": 1700000000}\n{"when": "2024-01-01"}\n')
  with pytest.raises(UserError, match="has dates and numbers"):
    read(mixed, {"when": "time"})
  pq.write_table(pa.table({"when": [1, 2]}), tmp_path / "b.parquet")
  numbers = [str(tmp_path / "b.parquet"), write(tmp_path / "c.csv", "when,x\n3,1\n")]
  assert values(read(numbers, {"when": "time"}))["when"] == [1, 2, 3]


def test_a_first_row_may_be_longer_than_what_shows_the_format(tmp_path):
  path = write(tmp_path / "a.csv", f"city,price\n{'x' * (2 << 20)},1\ny,2\n")
  assert [len(city) for city in values(read(path, TWO))["city"]] == [2 << 20, 1]
  path = write(tmp_path / "b.csv", "\n" * 300 + "city,price\nOslo,1\n")
  assert values(read(path, TWO)) == {"city": ["Oslo"], "price": [1]}


@pytest.mark.ci
def test_the_order_of_many_rows_is_that_of_the_files(tmp_path):
  count = 300_000
  for part in range(2):
    lines = (f"c{i % 7},{part * count + i}\n" for i in range(count))
    write(tmp_path / f"{part}.csv", "city,price\n" + "".join(lines))
  rows = read([str(tmp_path / "0.csv"), str(tmp_path / "1.csv")], TWO, by="order")
  np.testing.assert_array_equal(places(rows), np.arange(2 * count))
  np.testing.assert_array_equal(values(rows)["price"], np.arange(2 * count))


# --- files ----------------------------------------------------------------------------------------


def test_a_setting_of_files(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in ("b.csv", "a.csv", "_SUCCESS", "sub/c.csv", "sub/.d.csv", "notes.md"):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x\n")
  names = lambda files: [path.removeprefix(f"{tmp_path}/") for path in paths(files)]
  assert names(str(tmp_path)) == ["a.csv", "b.csv", "sub/c.csv"]
  assert names([tmp_path / "b.csv", str(tmp_path / "*.csv")]) == ["b.csv", "a.csv"]
  assert paths("s3://bucket/a.parquet") == ["s3://bucket/a.parquet"]
  assert [file_format(name) for name in ("a.TSV", "a.jsonl.zst", "a.pq")] == [
    "text",
    "json",
    "parquet",
  ]
  cases = [
    ("", "config.files is empty"),
    ("none.csv", "there is no file none.csv"),
    ("*.tsv", "there is no file"),
    (["a.csv", "notes.md"], "notes.md cannot be read: unpack or convert it"),
  ]
  refused(cases, paths, UserError)
