"""The rows of a table, chunk by chunk: declared columns, labels, weights and splits."""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .. import arrays
from ..errors import UserError
from . import spec, splitting
from .faults import Ledger
from .fitting import Moments, extracted
from .reading import Chunk, Reader
from .settings import SPLITS, Source, Table, first_time
from .source import Stage, num_rows
from .values import ReadAs, as_numbers, bits, plain, same_value

_OUTCOMES = 100  # texts of a label that are counted
_SPLIT_NAMES = {"train": 0, "valid": 1, "validation": 1, "val": 1, "dev": 1, "test": 2}


def way(kind: spec.Kind) -> ReadAs:
  """Returns how a column is read; see `reading.Reader`."""
  if isinstance(kind, spec.Number | spec.Weight):
    return "number"
  if isinstance(kind, spec.Time):
    return "time"
  if isinstance(kind, spec.Bag) or (isinstance(kind, spec.Item) and kind.separator):
    return ("list", kind.separator)
  return "text"


def ways(kinds: Mapping[str, spec.Kind]) -> dict[str, tuple[tuple[str, ...], ReadAs]]:
  """Returns the columns and the way of reading of each declared name; a cross has none."""
  return {
    name: (kind.sources(name), way(kind))
    for name, kind in kinds.items()
    if not isinstance(kind, spec.Cross)
  }


def open_source(
  source: Source,
  on_bad_row: str,
  paths: Sequence[Path] = (),
  *,
  stage: Stage | None = None,
  may_be_empty: bool = False,
) -> Reader:
  """Returns the reader of a source's declared columns, and of its key by the name "".

  Args:
    source: the files and columns.
    on_bad_row: "raise" or "skip".
    paths: the files of one split; none reads all.
    stage, may_be_empty: as of `Reader`.
  """
  wanted = ways(source.kinds) | ({"": ((source.key,), "text")} if source.key else {})
  return Reader(
    paths or source.all_files,
    {name: how for name, (_, how) in wanted.items()},
    columns={name: columns for name, (columns, _) in wanted.items()},
    format=source.format,
    on_bad_row=on_bad_row,
    stage=stage,
    may_be_empty=may_be_empty,
  )


class Bounds(NamedTuple):
  """What a split of some files' rows depends on in all files.

  Attributes:
    times: the first times of validation and test; None unless rows are split by time.
    firsts: by file, the number of stored rows in the files before; empty unless split by order.
    rows: stored in all files.
  """

  times: tuple[float, float] | None = None
  firsts: Mapping[Path, int] = {}
  rows: int = 0


@dataclasses.dataclass
class Account:
  """What was left out of the rows, and which labels they had.

  Attributes:
    ledgers: of rows that cannot be read, by split of the files.
    num_dropped: rows that `drop` of the label has left out.
    outcomes: some texts of the label.
    has_dates: whether times are dates; None before any.
  """

  ledgers: dict[str, Ledger] = dataclasses.field(default_factory=dict)
  num_dropped: int = 0
  outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
  has_dates: bool | None = None

  def join(self, other: "Account") -> None:
    """Adds the account of later files; raises UserError where their times are of another kind."""
    for split, ledger in other.ledgers.items():
      if split in self.ledgers:
        self.ledgers[split].join(ledger)
      else:
        self.ledgers[split] = ledger
    self.num_dropped += other.num_dropped
    self.outcomes.update(other.outcomes)
    if None not in (self.has_dates, other.has_dates) and self.has_dates != other.has_dates:
      raise UserError("some files have dates as times and some have numbers: write them in one way")
    self.has_dates = other.has_dates if self.has_dates is None else self.has_dates

  @property
  def skipped(self) -> list[str]:
    """A line per kind of bad row."""
    return [line for ledger in self.ledgers.values() for line in ledger.lines()]


class Rows(NamedTuple):
  """Rows of a chunk whose label, weight and split have been read.

  Attributes:
    chunk: the declared columns.
    split: int8 `[N]`, the index in `SPLITS`.
    label: uint8 `[N]`, None where there is no label.
  """

  chunk: Chunk
  split: np.ndarray
  label: np.ndarray | None


class RowReader:
  """Reads the rows of a table, as often as it is iterated.

  Args:
    table: the settings.
    by: how rows are split: "hash", "time", "order", "column" or "files"; "" leaves all rows in one
      split.
    required: names of columns of texts in which every row must have a value.
    holds_out: whether a part of the training files validates where no file does.
    stage: where text is kept; None makes one of its own.
    bounds: of a table that the files are a part of; None reads them.

  Attributes:
    account: of the last iteration.
    bounds: of the split.
  """

  def __init__(
    self,
    table: Table,
    by: str,
    required: Sequence[str] = (),
    *,
    holds_out: bool = True,
    stage: Stage | None = None,
    bounds: Bounds | None = None,
  ):
    self._table, self._by, self._required = table, by, tuple(required)
    self._stage = stage or Stage()
    self._holds_out = holds_out and "valid" not in table.rows.files
    self._label, self._time = table.name_of(spec.Label), table.name_of(spec.Time)
    self._parts: dict[Path, Any] = {}  # futures of the splits of the stored rows
    self._is_part = bounds is not None
    self.account = Account()
    if by == "files" and set(table.rows.files) == {""}:
      raise UserError(
        'config.split.by is "files": give config.files as {"train": ..., "valid": ..., "test": ...}'
      )
    if by == "column":
      table.require(spec.Split, "which the split goes by")
    self.bounds = self._bounds() if bounds is None else bounds

  def _bounds(self) -> Bounds:
    if self._by == "time":
      return Bounds(thresholds(self._table, self._times))
    if self._by == "order":
      return ordered(
        {
          file.path: num_rows(file, self._stage)
          for paths in self._table.rows.files.values()
          for file in self._open(paths).files
        }
      )
    return Bounds()

  def _times(self) -> np.ndarray:
    moments = Moments()
    for times in times_of(self._table, self._table.rows.files, self._stage):
      moments.add(times)
    return moments.sample

  def _open(self, paths: Sequence[Path]) -> Reader:
    return open_source(
      self._table.rows,
      self._table.on_bad_row,
      paths,
      stage=self._stage,
      may_be_empty=self._is_part,
    )

  def __iter__(self) -> Iterator[Rows]:
    self.account = Account()
    for split, paths in self._table.rows.files.items():
      reader = self._open(paths)
      for chunk in reader:
        for name in self._required:
          missing = chunk.columns[name].is_null().to_numpy(zero_copy_only=False)
          chunk = reader.refuse(chunk, missing, name, lambda row: "has no value")
        chunk = self._weighted(reader, self._labelled(reader, chunk))
        chunk, parts = self._split(reader, chunk, split)
        yield Rows(chunk, parts, chunk.columns.get(self._label or ""))
      self.account.join(Account({split: reader.ledger}, has_dates=reader.has_dates))

  def _labelled(self, reader: Reader, chunk: Chunk) -> Chunk:
    """Returns the rows with a label, which is uint8 `[N]`."""
    if self._label is None:
      return chunk
    kind = self._table.kinds[self._label]
    assert isinstance(kind, spec.Label)
    texts = same_value(plain(chunk.columns[self._label]))
    if kind.positive:
      for each in texts.drop_null().value_counts().to_pylist():
        self._count_outcome(each["values"], each["counts"])
    if kind.drop:
      dropped = _member(texts, kind.drop)
      self.account.num_dropped += int(dropped.sum())
      chunk, texts = chunk.take(~dropped), texts.filter(pa.array(~dropped))
    missing = bits(texts.is_null())
    chunk = reader.refuse(chunk, missing, self._label, lambda row: "has no value")
    texts = texts.drop_null()
    label = label_of(texts, kind)
    column = f"config.columns[{self._label!r}]"
    why = (
      f"neither 0 nor 1: give the values that are clicks as {column}['positive'], or the smallest "
      f"as {column}['at_least']"
      if kind.at_least is None
      else f"no number to compare with {column}['at_least']={kind.at_least:g}"
    )
    problem = lambda row: f"is {texts[row].as_py()!r}, which is {why}"
    chunk = chunk._replace(columns=chunk.columns | {self._label: label.astype(np.uint8)})
    return reader.refuse(chunk, label < 0, self._label, problem)

  def _count_outcome(self, text: str, count: int) -> None:
    kind = self._table.kinds[str(self._label)]
    assert isinstance(kind, spec.Label)
    is_named = text in (*kind.positive, *kind.drop)
    outcomes = self.account.outcomes
    if is_named or text in outcomes or len(outcomes) < _OUTCOMES:
      outcomes[text] += count

  @property
  def notes(self) -> list[str]:
    """Lines about what the last iteration has left out or may have misread."""
    notes = [*self.account.skipped, *self._about_label()]
    if self.account.num_dropped:
      notes.append(f"{self.account.num_dropped:,} rows were left out by the label's drop")
    return notes

  def _about_label(self) -> list[str]:
    """Returns lines about texts of the label that its `positive` and `drop` may have missed."""
    kind = self._table.kinds.get(self._label or "")
    if not isinstance(kind, spec.Label) or not kind.positive:
      return []
    notes = [
      f"no row has {value!r}, which config.columns[{self._label!r}] names"
      for value in (*kind.positive, *kind.drop)
      if value not in self.account.outcomes
    ]
    no_clicks = {
      text: count
      for text, count in self.account.outcomes.most_common()
      if text not in (*kind.positive, *kind.drop)
    }
    if len(no_clicks) > 1:
      is_whole = len(self.account.outcomes) < _OUTCOMES  # else some were not counted from the start
      shown = [f"{text!r}" + f" ({count:,})" * is_whole for text, count in no_clicks.items()]
      more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
      notes.append(f"these labels count as no click: {', '.join(shown[:5])}{more}")
    return notes

  def _weighted(self, reader: Reader, chunk: Chunk) -> Chunk:
    """Returns the rows with a weight, if one is declared."""
    name = self._table.name_of(spec.Weight)
    if name is None:
      return chunk
    weight = chunk.columns[name]
    problem = lambda row: f"is {weight[row]}, and a weight is a number of 0 or more"
    return reader.refuse(chunk, ~(weight >= 0), name, problem)

  def _split(self, reader: Reader, chunk: Chunk, files_of: str) -> tuple[Chunk, np.ndarray]:
    """Returns the rows with a split, and the index of each in `SPLITS`, int8 `[N]`."""
    if self._by == "files" and files_of == "train" and self._holds_out:
      return chunk, self._hashed(reader, chunk, (self._table.split["valid"], 0.0))
    if self._by == "time":
      assert self.bounds.times is not None
      assert self._time is not None
      self._check_clock(reader)
      times = chunk.columns[self._time]
      valid, test = self.bounds.times
      split = np.where(times >= test, 2, np.where(times >= valid, 1, 0))
      return chunk, split.astype(np.int8)
    if self._by == "column":
      name = self._table.require(spec.Split, "which the split goes by")
      texts = pc.utf8_lower(pc.fill_null(plain(chunk.columns[name]), ""))
      split = np.array([_SPLIT_NAMES.get(text, -1) for text in texts.to_pylist()], np.int8)
      problem = lambda row: f"is {texts[row].as_py()!r}: write train, valid or test"
      return reader.refuse(chunk, split < 0, name, problem), split[split >= 0]
    if self._by == "order":
      return chunk, self._in_order(chunk)
    if self._by == "hash":
      shares = self._table.split["valid"], self._table.split["test"]
      return chunk, self._hashed(reader, chunk, shares)
    of_files = SPLITS.index(files_of) if self._by == "files" else 0
    return chunk, np.full(len(chunk.rows), of_files, np.int8)

  def _check_clock(self, reader: Reader) -> None:
    """Raises UserError where a first time is a date and the column has numbers, or vice versa."""
    for name in ("valid_from", "test_from"):
      text = self._table.split[name]
      if text and reader.has_dates not in (None, first_time(text, name)[0]):
        held = "dates" if reader.has_dates else "numbers"
        raise UserError(
          f"config.split.{name} is {text!r}, and column {self._time!r} has {held}: write it as "
          "they are"
        )

  def _in_order(self, chunk: Chunk) -> np.ndarray:
    """Splits by the places of the rows in all files: the last ones are tested."""
    split = self._table.split
    ranges = arrays.cut(self.bounds.rows, split["valid"], split["test"])
    places = self.bounds.firsts[chunk.file] + chunk.places
    return np.digitize(places, [ranges["valid"][0], ranges["test"][0]]).astype(np.int8)

  def _hashed(self, reader: Reader, chunk: Chunk, shares: tuple[float, float]) -> np.ndarray:
    """Splits by the content of the rows, or of a column; see `splitting.by_content`."""
    on, seed = self._table.split["on"], self._table.split["seed"]
    if on:
      kind = self._table.kinds.get(on)
      if not isinstance(kind, spec.Category) or way(kind) != "text":
        raise UserError(f"config.split.on is {on!r}: name a declared category, user or item")
      return splitting.by_value(extracted(chunk.columns[on], kind.pattern), shares, seed)
    if chunk.file not in self._parts:
      of_file = functools.partial(splitting.by_content, self._stage, shares=shares, seed=seed)
      self._parts |= {file.path: of_file(file) for file in reader.files}
    return self._parts[chunk.file].result()[chunk.places]


def times_of(
  table: Table,
  files: Mapping[str, Sequence[Path]],
  stage: Stage,
  *,
  may_be_empty: bool = False,
) -> Iterator[np.ndarray]:
  """Yields the times of files' rows, float64, chunk by chunk; arguments as of `open_source`."""
  name = table.require(spec.Time, "which the split goes by")
  only = dataclasses.replace(table.rows, kinds={name: table.kinds[name]})
  for paths in files.values():
    reader = open_source(only, table.on_bad_row, paths, stage=stage, may_be_empty=may_be_empty)
    for chunk in reader:
      yield chunk.columns[name].astype(np.float64)


def ordered(sizes: Mapping[Path, int]) -> Bounds:
  """Returns the bounds of a split by the order of the rows; sizes are of the files, in order."""
  firsts = np.cumsum([0, *sizes.values()]).tolist()
  return Bounds(None, dict(zip(sizes, firsts, strict=False)), firsts[-1])


def thresholds(table: Table, sampled: Callable[[], np.ndarray]) -> tuple[float, float]:
  """Returns the first times of validation and test.

  Args:
    table: with the settings of the split.
    sampled: returns an even sample of all times; asked where the settings do not name both.
  """
  table.require(spec.Time, "which the split goes by")
  split = table.split
  given = {
    key: first_time(split[f"{key}_from"], f"{key}_from")[1]
    for key in ("valid", "test")
    if split[f"{key}_from"]
  }
  if len(given) == 2:
    return given["valid"], given["test"]
  times, held_out = sampled(), split["valid"] + split["test"]
  if "test" in given:  # valid is the last part of what is before
    test = given["test"]
    if not split["valid"]:
      return test, test
    before = times[times < test]
    return _quantile(before, 1 - split["valid"] / max(1 - split["test"], 1e-9)), test
  if "valid" in given:  # test is the last part of what is after
    valid = given["valid"]
    if not split["test"]:
      return valid, np.inf
    after = times[times >= valid]
    return valid, _quantile(after, split["valid"] / max(held_out, 1e-9))
  test = _quantile(times, 1 - split["test"]) if split["test"] else np.inf
  return _quantile(times, 1 - held_out) if held_out else np.inf, test


@contextlib.contextmanager
def split_file(
  folder: Path, names: Mapping[Path, str]
) -> Iterator[Callable[[Path, np.ndarray, np.ndarray], None]]:
  """Writes the split of every row to `split.parquet`, so that other models can be fitted to them.

  The columns are `file`, `row`, the number of the row in its file, and `part`, "train", "valid" or
  "test"; rows that were left out are not there.

  Args:
    folder: where to.
    names: of the files.

  Yields:
    `(file, rows, split)`, which writes the splits of rows by number, both `[N]`.
  """
  code = pa.DictionaryArray.from_arrays
  with pq.ParquetWriter(folder / "split.parquet", _SPLIT_FILE) as writer:

    def write(path: Path, rows: np.ndarray, split: np.ndarray) -> None:
      of_file = code(np.zeros(len(split), np.int8), [names[path]])
      part = code(split.astype(np.int8), list(SPLITS))
      writer.write_table(pa.table([of_file, rows, part], schema=_SPLIT_FILE))

    yield write


_NAME = pa.dictionary(pa.int8(), pa.string())
_SPLIT_FILE = pa.schema({"file": _NAME, "row": pa.int64(), "part": _NAME})


def _quantile(times: np.ndarray, share: float) -> float:
  """Returns the time that a share of the sampled times are before; infinity of none."""
  return float(np.quantile(times, min(max(share, 0.0), 1.0))) if len(times) else np.inf


def _member(texts: pa.Array, values: tuple[str, ...]) -> np.ndarray:
  return bits(pc.is_in(texts, value_set=pa.array(values, pa.string())))


def label_of(texts: pa.Array, kind: spec.Label) -> np.ndarray:
  """Returns 1 for a click, 0 for none and -1 where a text is neither, int8 `[N]`."""
  if kind.at_least is not None:
    numbers = as_numbers(texts, ())[0]
    return np.where(np.isnan(numbers), -1, numbers >= kind.at_least).astype(np.int8)
  if kind.positive:
    return _member(texts, kind.positive).astype(np.int8)
  lower = pc.utf8_lower(texts)
  is_none = _member(lower, spec.NO_CLICKS)
  return np.where(_member(lower, spec.CLICKS), 1, np.where(is_none, 0, -1)).astype(np.int8)
