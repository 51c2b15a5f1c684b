"""The user's files: rows as they were asked for, and messy input named by file, row and column."""

import codecs
import csv
import datetime
import gzip
import io

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from cases import each

from recipes.errors import DamagedFileError
from recipes.tables.formats import Format
from recipes.tables.reading import Reader
from recipes.tables.source import open_file

AB = {"a": "text", "b": "number"}


def write(path, content):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(content if isinstance(content, bytes) else content.encode())
  return path


def listed(column):
  """Returns the values of a column as a list, nan as None."""
  if isinstance(column, np.ndarray):
    return [None if value != value else value for value in column.tolist()]
  return column.to_pylist()


def read(paths, ways, **settings):
  """Returns (file name, row, values by column) of all rows, and the reader."""
  reader = Reader(paths if isinstance(paths, list) else [paths], ways, **settings)
  rows = []
  for chunk in reader:
    columns = {name: listed(values) for name, values in chunk.columns.items()}
    assert chunk.rows.dtype == np.int64
    assert {len(values) for values in columns.values()} == {len(chunk.rows)}
    for index, row in enumerate(chunk.rows.tolist()):
      values = {name: values[index] for name, values in columns.items()}
      rows.append((chunk.file.name, row, values))
  return rows, reader


def table(path, ways, **settings):
  """Returns the values by column, and the numbers of the rows."""
  rows, _ = read(path, ways, **settings)
  return {name: [values[name] for _, _, values in rows] for name in ways}, [
    row for _, row, _ in rows
  ]


# Columns as they are stored, and as they are read.


def test_delimiters_are_used_or_found_with_and_without_header(tmp_path):
  def check(name, delimiter, given, names):
    records = [["user", "score", "kind"], ["u1", "1.5", "x"], ["u2", "-2", "y"]][bool(names) :]
    text = "".join(delimiter.join(record) + "\n" for record in records).encode()
    path = write(tmp_path / name, gzip.compress(text) if name.endswith(".gz") else text)
    format = Format(**given | names)
    columns, rows = table(path, {"score": "number", "user": "text"}, format=format)
    assert columns == {"score": [1.5, -2.0], "user": ["u1", "u2"]}
    assert rows == [1, 2]
    assert open_file(path, format).names == ("user", "score", "kind")

  names = {"names": ("user", "score", "kind")}
  cases = [
    ("x.csv", ",", {"delimiter": ","}, {}),
    ("x.tsv", "\t", {"delimiter": "\\t"}, {}),
    ("x.csv.gz", ",", {}, {}),
    ("x.txt", ";", {}, {}),
    ("x.dat", "::", {}, {}),
    ("x.data", " ", {}, names),
    ("x.dat", "::", {"delimiter": "::"}, names),
  ]
  each(cases, check)


def test_line_ends_byte_order_marks_blanks_and_quotes_make_no_difference(tmp_path):
  cases = [
    "a,b\n1,2\n3,4\n",
    "a,b\n1,2\n3,4",
    "a,b\r\n1,2\r\n3,4\r\n",
    "a,b\r1,2\r3,4\r",
    "\n\na,b\n\n1,2\n\n3,4\n\n",
    " a , b \n 1 , 2 \n3,\t4\n",
    '"a","b"\n"1","2"\n"3","4"\n',
    codecs.BOM_UTF8 + b"a,b\n1,2\n3,4\n",
  ]

  def check(text):
    path = write(tmp_path / "x.csv", text)
    assert table(path, AB) == ({"a": ["1", "3"], "b": [2.0, 4.0]}, [1, 2])
    assert Reader([path], AB).names == ("a", "b")

  each([(case,) for case in cases], check)


def test_quoted_values_hold_delimiters_quotes_and_line_ends_and_rows_count_records(tmp_path):
  path = write(tmp_path / "x.csv", 'a,b\n"x,\ny ""z""",1\n5" screen,2\n"",bad\n')
  with pytest.raises(DamagedFileError, match=r"x\.csv, row 3, column 'b': 'bad'"):
    read(path, AB)
  columns, _ = table(path, AB, on_bad_row="skip")
  assert columns == {"a": ['x,\ny "z"', '5" screen'], "b": [1.0, 2.0]}


def test_other_encodings_are_read_as_they_are_named(tmp_path):
  for encoding in ("latin-1", "cp1252", "utf-16", "shift_jis"):
    word = "テスト" if encoding == "shift_jis" else "café"
    path = write(tmp_path / "x.csv", f"a,{word}\n1,{word}\n".encode(encoding))
    columns, _ = table(path, {word: "text"}, format=Format(encoding=encoding))
    assert columns == {word: [word]}


def test_the_last_name_takes_the_rest_of_the_line(tmp_path):
  path = write(tmp_path / "x.txt", "0 7 8 9 \n1 5\n2\n\n3  4\n")
  format = Format(delimiter=" ", names=("user", "items"), rest=True)
  columns, rows = table(path, {"user": "number", "items": ("list", " ")}, format=format)
  assert columns == {"user": [0.0, 1.0, 2.0, 3.0], "items": [["7", "8", "9"], ["5"], [], ["4"]]}
  assert rows == [1, 2, 3, 4]
  assert table(path, {"items": "text"}, format=format)[0]["items"] == ["7 8 9", "5", None, "4"]


def test_missing_values_are_none_in_every_way(tmp_path):
  absent = ["", " ", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?", "\\N"]
  lines = ["t,n,l"] + [f"{value},{value},{value}|x| {value} " for value in absent]
  path = write(tmp_path / "x.csv", "\n".join(lines))
  ways = {"t": "text", "n": "number", "l": ("list", "|")}
  none = [None] * len(absent)
  assert table(path, ways)[0] == {"t": none, "n": none, "l": [["x"]] * len(absent)}
  path = write(tmp_path / "y.csv", "t,n\nNA,-\n,\n")
  columns, _ = table(path, {"t": "text", "n": "number"}, format=Format(missing=("-",)))
  assert columns == {"t": ["NA", None], "n": [None, None]}


def test_numbers_are_read_in_every_spelling(tmp_path):
  spellings = {
    "1": 1, "+1": 1, "-0.5": -0.5, ".5": 0.5, "5.": 5, "1e3": 1000, "1E-2": 0.01, "007": 7,
    "true": 1, "False": 0, "9007199254740993": 2**53, "1e-999": 0, "-1e38": -1e38, "1e19": 1e19,
  }  # fmt: skip
  path = write(tmp_path / "x.csv", "a,b\n" + "".join(f"x,{text}\n" for text in spellings))
  assert table(path, {"b": "number"})[0]["b"] == list(map(float, spellings.values()))


def test_times_are_microseconds_and_numbers_as_they_are(tmp_path):
  moment = datetime.datetime(2024, 2, 29, 10, 11, 12, 345678, datetime.UTC)
  expected = round(moment.timestamp() * 1e6)
  spellings = [
    "2024-02-29T10:11:12.345678", "2024-02-29 10:11:12.345678", "2024-02-29T10:11:12.345678Z",
    "2024-02-29T10:11:12.345678901", "2024-02-29 12:11:12.345678+02:00",
    "2024-02-29T05:11:12.345678-0500", "2024/02/29 10:11:12.345678",
    "2024-02-29 10:11:12.345678 UTC",
  ]  # fmt: skip
  path = write(tmp_path / "x.csv", "\n".join(["a,t", *(f"x,{text}" for text in spellings)]))
  assert table(path, {"t": "time"})[0]["t"] == [expected] * len(spellings)
  path = write(tmp_path / "y.csv", "a,t\nx,2024-02-29\nx,2024-02-29 10\nx,1969-12-31 23:59\n")
  day = round(datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC).timestamp() * 1e6)
  assert table(path, {"t": "time"})[0]["t"] == [day, day + 36_000_000_000, -60_000_000]
  path = write(tmp_path / "z.csv", "a,t\nx,12\nx,+13\nx,9007199254740993\nx,1e3\n")
  assert table(path, {"t": "time"})[0]["t"] == [12, 13, 2**53 + 1, 1000]
  path = write(tmp_path / "z.csv", "a,t\nx,12\nx,1.5\nx,1.25\nx,-0.5\n")
  assert table(path, {"t": "time"})[0]["t"] == [12, 1.5, 1.25, -0.5]


NOON = datetime.datetime(2024, 1, 5, 12)
STORED = {
  "integer": (pa.array([1, None, -3]), ["1", None, "-3"], [1.0, None, -3.0]),
  "unsigned": (pa.array([1, 2, 2**63 - 1], pa.uint64()), ["1", "2", str(2**63 - 1)], None),
  "float": (pa.array([12.0, 2.5, float("nan")]), ["12", "2.5", None], [12.0, 2.5, None]),
  "negative float": (pa.array([-3.0, -0.0, -2.5]), ["-3", "0", "-2.5"], [-3.0, 0.0, -2.5]),
  "id in a float": (pa.array([1e15, 2.0**52, None]), [str(10**15), str(2**52), None], None),
  "narrow float": (pa.array([0.1, 3.0, None], pa.float32()), ["0.1", "3", None], None),
  "half float": (pa.array(np.array([0.1, 3, 2], np.float16)), ["0.099975586", "3", "2"], None),
  "decimal": (pa.array([1, None, 3]).cast(pa.decimal128(22, 1)), ["1", None, "3"], None),
  "bool": (pa.array([True, False, None]), ["true", "false", None], [1.0, 0.0, None]),
  "text": (pa.array([" 7 ", "NA", ""]), ["7", None, None], [7.0, None, None]),
  "large text": (pa.array(["7", "8", None], pa.large_string()), ["7", "8", None], [7.0, 8.0, None]),
  "text view": (pa.array(["7", "8", None], pa.string_view()), ["7", "8", None], [7.0, 8.0, None]),
  "bytes": (pa.array([b"7", b"8", None]), ["7", "8", None], [7.0, 8.0, None]),
  "dictionary": (
    pa.array(["7", None, "7"]).dictionary_encode(),
    ["7", None, "7"],
    [7.0, None, 7.0],
  ),
  "null": (pa.nulls(3), [None] * 3, [None] * 3),
  "date": (pa.array([NOON.date(), None, None]), ["2024-01-05", None, None], None),
  "timestamp": (
    pa.array([NOON, None, NOON.replace(microsecond=5)]),
    ["2024-01-05T12:00:00", None, "2024-01-05T12:00:00.000005"],
    None,
  ),
  "timestamp in a zone": (
    pa.array([NOON, None, None]).cast(pa.timestamp("ns", "Asia/Tokyo")),
    ["2024-01-05T12:00:00Z", None, None],
    None,
  ),
}


def test_columns_of_parquet_are_read_as_text_and_numbers(tmp_path):
  def check(array, texts, numbers):
    pq.write_table(pa.table({"x": array}), tmp_path / "x.parquet")
    assert table(tmp_path / "x.parquet", {"x": "text"})[0]["x"] == texts
    if numbers is not None:
      assert table(tmp_path / "x.parquet", {"x": "number"})[0]["x"] == numbers

  each(STORED, check)


def test_times_of_parquet_are_microseconds_whatever_their_unit(tmp_path):
  expected = 1_704_456_000_000_000
  stamps = pa.array([NOON])
  for array in [
    stamps.cast(pa.timestamp("s")),
    stamps.cast(pa.timestamp("ns")),
    stamps.cast(pa.timestamp("ms", "Asia/Tokyo")),
    pa.array(["2024-01-05 12:00"]),
    pa.array([expected]),
  ]:
    pq.write_table(pa.table({"x": array}), tmp_path / "x.parquet")
    assert table(tmp_path / "x.parquet", {"x": "time"})[0]["x"] == [expected]
  pq.write_table(pa.table({"x": pa.array([1.5, 1.25])}), tmp_path / "x.parquet")
  assert table(tmp_path / "x.parquet", {"x": "time"})[0]["x"] == [1.5, 1.25]


@pytest.mark.ci
def test_lists_become_lists_of_text(tmp_path):
  texts = [["1", "2"], None, ["3", None]]
  fixed = pa.array([[1, 2], None, [3, None]], pa.list_(pa.int16(), 2))
  codes = pa.array(["1", "2", "3", None]).dictionary_encode()
  for array in (
    pa.array(["1| 2", None, "|3||NA"]),
    pa.array(texts, pa.large_list(pa.large_string())),
    pa.array([[1.0, 2.0], None, [3.0, None]]),
    pa.ListArray.from_arrays(pa.array([0, None, 2, 4], pa.int32()), codes),
    fixed,
  ):
    pq.write_table(pa.table({"x": array}), tmp_path / "x.parquet")
    columns, _ = table(tmp_path / "x.parquet", {"x": ("list", "|")}, chunk_rows=2)
    assert columns["x"] == [["1", "2"], [], ["3"]], array.type


# Properties.


FIELD = st.text('a,;"\n\r \té|', max_size=8)


@pytest.mark.ci
@hypothesis.given(
  rows=st.lists(st.tuples(FIELD, FIELD, FIELD), min_size=1, max_size=30),
  quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
)
def test_what_a_writer_of_csv_quotes_is_read_back(tmp_path_factory, rows, quoting):
  file = io.StringIO(newline="")
  csv.writer(file, quoting=quoting).writerows([("a", "b", "c"), *rows])
  path = write(tmp_path_factory.mktemp("quoted") / "x.csv", file.getvalue())
  ways = {"c": "text", "a": "text"}
  columns, numbers = table(path, ways, format=Format(delimiter=","), chunk_rows=7)
  assert numbers == list(range(1, len(rows) + 1))
  assert columns["a"] == [row[0].strip() or None for row in rows]
  assert columns["c"] == [row[2].strip() or None for row in rows]


def test_rows_keep_their_numbers_where_others_are_skipped(tmp_path):
  rng, lines, good = np.random.default_rng(1), [], []
  for row in range(1, 501):
    kind = int(rng.integers(0, 6)) if row < 300 else 2 if row < 450 else 0
    lines.append([b"x,1", b"x,1", b"x,1,2", b"x", b"caf\xe9,1", b"x,one"][kind])
    good += [row] * (kind < 2)
  path = write(tmp_path / "x.csv", b"\n".join([b"a,b", *lines]))
  rows, reader = read(path, AB, on_bad_row="skip", chunk_rows=3)
  assert [row for _, row, _ in rows] == good
  assert reader.ledger.rows == 500 - len(good)
  counts = [int(line.split()[0]) for line in reader.ledger.lines()]
  assert (len(counts), sum(counts)) == (4, reader.ledger.rows)
  first = min(set(range(1, 501)) - set(good))
  with pytest.raises(DamagedFileError, match=rf"x.csv, row {first}[, ]"):
    read(path, AB, chunk_rows=3)


def test_files_follow_each_other_with_columns_in_any_order(tmp_path):
  first = write(tmp_path / "1.csv", "a,b\nx,1\n")
  second = write(tmp_path / "2.csv", "c;b;a\n0;2;y\n0;3;z\n")
  empty = write(tmp_path / "3.csv", "a,b\n")
  rows, reader = read([first, second, empty], AB)
  assert rows == [
    ("1.csv", 1, {"a": "x", "b": 1.0}),
    ("2.csv", 1, {"a": "y", "b": 2.0}),
    ("2.csv", 2, {"a": "z", "b": 3.0}),
  ]
  assert reader.names == ("a", "b")
