"""Messy input: each kind is named by file, row and column with its remedy, or counted."""

import gzip
import io
import random
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import each, refused

from recipes.errors import DamagedFileError, MissingFileError, UserError
from recipes.tables.formats import Format, paths
from recipes.tables.reading import Reader

AB = {"a": "text", "b": "number"}
SKIP = "config.on_bad_row='skip'"


def parquet(**columns):
  file = io.BytesIO()
  pq.write_table(pa.table(columns), file)
  return file.getvalue()


def garbled(content, start, size=400):
  return content[:start] + b"\xff" * size + content[start + size :]


def noise(num_rows):
  words = random.Random(0)
  return "".join(f"{words.getrandbits(64):x},{row}\n" for row in range(num_rows))


def write(path, content):
  path.write_bytes(content if isinstance(content, bytes) else content.encode())
  return path


# Kinds of a bad row: (file, content, ways, format, the row, its column or None, words of the
# message, kind in the count).
ROWS = {
  "too few fields": (
    "x.csv", "a,b\nx,1\ny\nz,3\n", AB, {}, 2, None, ["1 instead of 2", "'b'"], "has too few fields"
    ),
  "too many fields": (
    "x.csv", "a,b\nx,1\ny,2,3\nz,3\n", AB, {}, 2, None, ["3 instead of 2", "Quote", "','"],
    "has too many fields"),
  "too few fields in a bad encoding": ("x.csv", b"a,b\nx,1\ncaf\xe9\nz,3\n", AB, {}, 2, "a",
    [r"b'caf\xe9' is not utf-8", "config.format.encoding='latin-1'"], "is not utf-8"),
  "too few fields before the rest": ("x.txt", "x 1 1 2\ny\nz 2\n", AB | {"c": ("list", " ")},
    {"delimiter": " ", "names": ("a", "b", "c"), "rest": True},
    2, None, ["1 instead of 3"], "has too few fields"),
  "too many fields, as a quote takes lines": (
    "x.csv", 'a,b\nx,1\ny,"2\nz,3",4\nz,3\n', AB, {}, 2, None, ["quote", "config.format.quote=''"],
    "has too many fields"),
  "bad encoding": ("x.csv", b"a,b\nx,1\ncaf\xe9,2\nz,3\n", AB, {}, 2, "a",
    [r"b'caf\xe9' is not utf-8", "config.format.encoding='latin-1'"], "is not utf-8"),
  "an unescaped quote": (
    "x.csv", 'a,b\nx,1\n"y"z,2\nz,3\n', AB, {}, 2, "a", ["config.format.quote=''"],
    "has an unescaped quote"),
  "a NUL byte": (
    "x.csv", b"a,b\nx,1\n\0y,2\nz,3\n", AB, {}, 2, "a", [r"'\x00y' has a NUL byte", "tr -d"],
    "has a NUL byte"),
  "a text as number": (
    "x.csv", "a,b\nx,1\ny,two\nz,3\n", AB, {}, 2, "b", ["'two' is not a number"], "is not a number"
    ),
  "a decimal comma": ("x.csv", "a;b\nx;1\ny;1.003,5\nz;3\n", AB, {}, 2, "b",
    ["'1.003,5' has a decimal comma", "decimal point"], "has a decimal comma"),
  "a comma of thousands or decimals": ("x.csv", "a;b\nx;1\ny;1,000\nz;3\n", AB, {}, 2, "b",
    ["'1,000' has a comma", "write a decimal point."], "has a comma"),
  "an infinite number": (
    "x.csv", "a,b\nx,1\ny,-inf\nz,3\n", AB, {}, 2, "b", ["'-inf' is not finite"], "is not finite"),
  "a number beyond float32": (
    "x.csv", "a,b\nx,1\ny,-1e39\nz,3\n", AB, {}, 2, "b", ["beyond float32"], "is beyond float32"),
  "an integer beyond int64": ("x.csv", "a,b\nx,1\ny,99999999999999999999\nz,3\n", AB, {}, 2, "b",
    ["beyond 64 bits", "category"], "is an integer beyond 64 bits"),
  "an integer beyond int64 in Parquet": (
    "x.parquet", parquet(b=pa.array([1, 2**64 - 1, 3], pa.uint64())), {"b": "number"}, {}, 2, "b",
    ["18446744073709551615", "beyond 64 bits"], "is an integer beyond 64 bits"),
  "an infinite number in Parquet": (
    "x.parquet", parquet(b=[1.0, float("inf"), 3.0]), {"b": "number"}, {}, 2, "b",
    ["inf is not finite"], "is not finite"),
  "bytes that are no text in Parquet": (
    "x.parquet", parquet(b=[b"x", b"\xe9", b"z"]), {"b": "text"}, {}, 2, "b",
    [r"b'\xe9' is not UTF-8"], "is not UTF-8"),
  "no time": ("x.csv", "a,t\nx,2024-01-01\ny,yesterday\nz,2024-01-03\n", {"t": "time"}, {}, 2, "t",
    ["'yesterday' is not a time", "2024-12-31"], "is not a time"),
  "a missing time": (
    "x.csv", "a,t\nx,1\ny,\nz,3\n", {"t": "time"}, {}, 2, "t", ["is missing"], "is missing"),
  "a time beyond 64 bits": (
    "x.csv", "a,t\nx,1\ny,99999999999999999999\nz,3\n", {"t": "time"}, {}, 2, "t",
    ["beyond 64 bits"], "is a time beyond 64 bits"),
  "a number among dates": (
    "x.csv", "a,t\nx,2024-01-01\ny,1704067200\nz,2024-01-03\n", {"t": "time"}, {}, 2, "t",
    ["'1704067200' is a number", "the first time is a date"],
    "is a number, while the first time is a date"),
}  # fmt: skip


def test_bad_rows_are_named_or_counted(tmp_path):
  def check(name, content, ways, format, row, column, words, counted_as):
    path = write(tmp_path / name, content)
    reader = Reader([path], ways, format=Format(**format))
    with pytest.raises(DamagedFileError) as error:
      list(reader)
    where = f"{path}, row {row}" + (" has " if column is None else f", column {column!r}")
    assert str(error.value).startswith(where)
    assert not [word for word in [*words, SKIP] if word not in str(error.value)], error.value
    reader = Reader([path], ways, format=Format(**format), on_bad_row="skip")
    assert [row for chunk in reader for row in chunk.rows.tolist()] == [1, 3]
    assert reader.ledger.rows == 1
    (line,) = reader.ledger.lines()
    named = "" if column is None else f"column {column!r} "
    assert line.startswith(f"1 row: {named}{counted_as} (first: {path}, row {row}")

  each(ROWS, check)


TEXT = noise(20_000)

# Kinds of a bad file: (files by name, ways,
# format, the file that is named, words of the message). The content of None is no file.
FILES = {
  "wrong delimiter": ({"x.csv": "a;b\n1;2\n"}, AB, {"delimiter": ","}, "x.csv",
    ["no column 'a'", "'a;b'", "config.format.delimiter=';'"]),
  "no such column": ({"x.csv": "user,age\n1,2\n"}, {"agee": "number"}, {}, "x.csv",
    ["no column 'agee'", "Did you mean 'age'?", "'user', 'age'"]),
  "no header": ({"x.csv": "1,2\n3,4\n"}, AB, {}, "x.csv", ["no column 'a'", "config.format.names="]
    ),
  "a header below names": (
    {"x.csv": "a,b\n1,2\n"}, AB, {"names": ("a", "b")}, "x.csv", ["header", "config.format.names"]),
  "no such column in the second file": (
    {"1.csv": "a,b\n1,2\n", "2.csv": "a,c\n1,2\n"}, AB, {}, "2.csv", ["no column 'b'", "1.csv has"]
    ),
  "text in the second file": (
    {"1.parquet": parquet(b=[1, 2]), "2.parquet": parquet(b=["3", "x"])}, {"b": "number"}, {},
    "2.parquet", ["row 2, column 'b': 'x' is not a number"]),
  "lists in the second file": (
    {"1.parquet": parquet(b=["x"]), "2.parquet": parquet(b=[["x"]])}, {"b": "text"}, {},
    "2.parquet", ["column 'b' holds lists", "declare it as a bag"]),
  "no lists in the second file": (
    {"1.parquet": parquet(b=[[1]]), "2.parquet": parquet(b=[1])}, {"b": ("list", "|")}, {},
    "2.parquet", ["column 'b' holds single values"]),
  "text as a list without separator": (
    {"x.parquet": parquet(b=["x y"])}, {"b": ("list", "")}, {}, "x.parquet", ["separator"]),
  "a list without separator": (
    {"x.csv": "b\nx y\n"}, {"b": ("list", "")}, {}, "x.csv", ["column 'b'", "separator"]),
  "times as numbers": (
    {"x.parquet": parquet(b=pa.array([1]).cast(pa.timestamp("us")))}, {"b": "number"}, {},
    "x.parquet", ["column 'b' holds times", "declare it as time"]),
  "structures": ({"x.parquet": parquet(b=[{"c": 1}])}, {"b": "text"}, {}, "x.parquet",
    ["column 'b' holds struct"]),
  "two columns of one name": (
    {"x.csv": "a,b,a\n1,2,3\n"}, AB, {}, "x.csv", ["columns 1 and 3", "'a'"]),
  "a header in another encoding": ({"x.csv": b"a,caf\xe9\n1,2\n"}, AB, {}, "x.csv",
    ["header, column 2", "config.format.encoding='latin-1'"]),
  "an empty file": ({"x.csv": ""}, AB, {}, "x.csv", ["is empty"]),
  "a header only": ({"x.csv": "a,b\n"}, AB, {}, "x.csv", ["no rows"]),
  "a Parquet file without rows": (
    {"x.parquet": parquet(a=[], b=[])}, {"b": "text"}, {}, "x.parquet", ["no rows"]),
  "an image": ({"x.csv": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"}, AB, {}, "x.csv", ["header, column 1"]),
  "bytes": ({"x.csv": b"\0\1\2,\3"}, AB, {}, "x.csv", ["NUL", "no text"]),
  "a spreadsheet": ({"x.csv": b"PK\3\4..."}, AB, {}, "x.csv", ["spreadsheet", "as CSV"]),
  "Parquet named as text": ({"x.csv": parquet(a=[1])}, AB, {}, "x.csv", ["x.parquet"]),
  "gzip named as text": ({"x.csv": gzip.compress(b"a,b\n")}, AB, {}, "x.csv", ["x.csv.gz"]),
  "UTF-16": (
    {"x.csv": "a,b\n1,2\n".encode("utf-16")}, AB, {}, "x.csv", ["config.format.encoding='utf-16'"]),
  "a gzip that breaks off": (
    {"x.csv.gz": gzip.compress(f"a,b\n{TEXT}".encode())[:-50_000]}, AB, {}, "x.csv.gz",
    ["breaks off", "after row 1", "again"]),
  "a damaged gzip": (
    {"x.csv.gz": garbled(gzip.compress(f"a,b\n{TEXT}".encode()), 140_000)}, AB, {}, "x.csv.gz",
    ["damaged after row"]),
  "Parquet that breaks off": ({"x.parquet": parquet(b=[1])[:-9]}, {"b": "text"}, {}, "x.parquet",
    ["not a complete Parquet", "again"]),
  "damaged Parquet": (
    {"x.parquet": garbled(parquet(b=[f"{i}x{i * 7919}" for i in range(100_000)]), 300_000)},
    {"b": "text"}, {}, "x.parquet", ["is damaged after row 0", "again"]),
  "an open quote": ({"x.csv": 'a,b\nx,1\ny,"2\nz,3\nz,3\n'}, AB, {}, "x.csv",
    ["row 2, column 'b'", "quote is not closed", "config.format.quote=''"]),
  "an open quote before many rows": (
    {"x.csv": f'a,b\nx,1\ny,"2\n{TEXT}'}, AB, {}, "x.csv", ["row 2", "quote is not closed"]),
  "an open quote in the header": ({"x.csv": 'a,"b\n1,2\n'}, AB, {}, "x.csv", ["header", "quotes"]),
  "nothing but bad rows": (
    {"x.csv": "a,b\nx,y\nx,z\n"}, AB, {}, "x.csv", ["column 'b'", "is not a number", "row 1"]),
}  # fmt: skip


def test_bad_files_are_named_with_the_remedy(tmp_path):
  def check(contents, ways, format, file, words):
    paths = [write(tmp_path / name, content) for name, content in contents.items()]
    with pytest.raises((DamagedFileError, UserError)) as error:
      list(Reader(paths, ways, format=Format(**format)))
    assert str(error.value).startswith(str(tmp_path / file))
    assert not [word for word in words if word not in str(error.value)], error.value

  each(FILES, check)


def test_files_of_bad_rows_alone_are_refused_where_rows_are_skipped(tmp_path):
  path = write(tmp_path / "x.csv", "a,b\nx,y\nx,z\n")
  with pytest.raises(DamagedFileError, match=r"x\.csv.*every row"):
    list(Reader([path], AB, on_bad_row="skip"))


def test_empty_lines_are_no_rows_whatever_ends_a_line_elsewhere(tmp_path):
  path = write(tmp_path / "x.csv", "a,b\nx\u2028y,1\n\n\nz,bad\nw\nv,3\n")
  reader = Reader([path], AB, on_bad_row="skip")
  assert [row for chunk in reader for row in chunk.rows.tolist()] == [1, 4]
  assert [re.search(r"row (\d)", line)[1] for line in reader.ledger.lines()] == ["2", "3"]


@pytest.mark.ci
def test_a_long_line_is_read_and_one_without_end_is_named(tmp_path):
  path = write(tmp_path / "x.csv", f"a,b\n{'x' * 3_000_000},1\n")
  assert sum(len(chunk.rows) for chunk in Reader([path], AB)) == 1
  path = write(tmp_path / "y.csv", f"a,b\n{'x' * 9_000_000},1\n")
  with pytest.raises(DamagedFileError, match=r"y\.csv, row 1: a line of more than 8 MiB"):
    list(Reader([path], AB))


# Settings.


@pytest.mark.ci
def test_bad_formats_are_refused():
  cases = [
    ({"encoding": "utf-9"}, "config.format.encoding='utf-9' is unknown"),
    ({"names": ("a", "b", "a")}, "config.format.names has 'a' twice"),
    ({"rest": True}, "config.format.names="),
    ({"delimiter": '"'}, "config.format.delimiter"),
    ({"quote": "''"}, "config.format.quote"),
  ]
  refused(cases, lambda settings: Format(**settings), UserError)


# Paths.


@pytest.fixture
def folder(tmp_path):
  names = "b.csv a.csv sub/c.csv.gz _SUCCESS .hidden.csv _tmp/d.csv notes.md"
  for name in names.split():
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("a\n1\n")
  return tmp_path


def test_paths_are_of_files_folders_and_globs_each_once(folder):
  names = lambda files: [str(path.relative_to(folder)) for path in paths(files)]
  assert names(str(folder)) == ["a.csv", "b.csv", "sub/c.csv.gz"]
  assert names(str(folder / "*.csv")) == ["a.csv", "b.csv"]
  assert names(str(folder / "**" / "*.gz")) == ["sub/c.csv.gz"]
  assert names([str(folder / "b.csv"), str(folder)]) == ["b.csv", "a.csv", "sub/c.csv.gz"]
  (folder / "x[1].csv").write_text("a\n1\n")
  assert names(folder / "x[1].csv") == ["x[1].csv"]
  assert names([folder / "b.csv", str(folder / "a*")]) == ["b.csv", "a.csv"]


@pytest.mark.ci
def test_paths_that_lead_nowhere_are_refused(folder, tmp_path):
  (tmp_path / "empty").mkdir()
  (tmp_path / "x.xlsx").write_text("")
  (tmp_path / "y.parquet").write_text("")
  (tmp_path / "z.zip").write_text("")
  for files, kind, words in [
    ("", MissingFileError, "config.files is empty"),
    ([], MissingFileError, "config.files is empty"),
    (str(tmp_path / "none.csv"), MissingFileError, "none.csv does not exist"),
    (str(tmp_path / "*.tsv"), MissingFileError, "no file fits"),
    (str(tmp_path / "empty"), MissingFileError, "it is empty"),
    (str(tmp_path / "x.xlsx"), UserError, "Save the sheet as CSV"),
    (str(tmp_path / "z.zip"), UserError, "Unpack it"),
    (str(tmp_path / "notes.md"), UserError, "suffix '.md' is unknown"),
    (str(tmp_path), UserError, r"several formats .*config.files='.*\*\.parquet'"),
  ]:
    with pytest.raises(kind, match=words):
      paths(files)
