"""The rows of a table, chunk by chunk: declared columns, labels, weights and splits."""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .. import cache
from ..errors import UserError
from . import spec, splitting
from .encoding import extracted
from .reading import Chunk, Ledger, Reader
from .settings import SPLITS, Source, Table, first_time
from .source import File, Stage
from .values import as_numbers, bits, indices_of, same_value

_OUTCOMES = 100  # texts of a label that are counted
_SAMPLE = 1 << 16  # times that thresholds are taken of, at least half as many
_SPLIT_NAMES = {"train": 0, "valid": 1, "validation": 1, "val": 1, "dev": 1, "test": 2}


def open_source(
  source: Source, on_bad_row: str, hashed: Sequence[str] = (), **options: Any
) -> Reader:
  """Returns the reader of a source's declared columns, and of its key by the name "".

  Columns that are only `hashed` are read as they are.
  """
  wanted = spec.ways(source.kinds) | ({"": ((source.key,), "text")} if source.key else {})
  wanted |= {name: ((name,), "any") for name in hashed}
  columns = {name: names for name, (names, _) in wanted.items()}
  how = {name: each for name, (_, each) in wanted.items()}
  options |= {"columns": columns, "format": source.format, "on_bad_row": on_bad_row}
  return Reader(source.all_files, how, **options)


class Bounds(NamedTuple):
  """What a split of some files' rows by time or by order depends on in all files."""

  times: tuple[float, ...] = ()  # the first of validation and of test
  firsts: Mapping[Path, int] = {}  # by file, the number of rows in the files before
  rows: int = 0  # in all files


@dataclasses.dataclass
class Account:
  """What was left out of the rows, and which labels they had."""

  ledger: Ledger  # of rows that cannot be read
  dropped: int = 0  # rows that `drop` of the label has left out
  outcomes: dict[str, collections.Counter[str]] = dataclasses.field(  # texts by label
    default_factory=dict
  )
  has_dates: bool | None = None  # whether times are dates; None before any

  def join(self, other: "Account") -> None:
    """Adds the account of later files; raises UserError where their times are of another kind."""
    self.ledger.join(other.ledger)
    self.dropped += other.dropped
    for name, counts in other.outcomes.items():
      self.outcomes.setdefault(name, collections.Counter()).update(counts)
    if None not in (self.has_dates, other.has_dates) and self.has_dates != other.has_dates:
      raise UserError("some files have dates as times and some have numbers: write them in one way")
    self.has_dates = other.has_dates if self.has_dates is None else self.has_dates


class Rows(NamedTuple):
  """N rows of a chunk whose label, weight and split have been read."""

  chunk: Chunk  # the declared columns
  split: np.ndarray  # int8 `[N]`, the index in `SPLITS`
  label: np.ndarray | None  # uint8 `[N]`; else float32 `[N, labels]`: see `RowReader`


class RowReader:
  """Reads the rows of a table, as often as it is iterated.

  One label of clicks is uint8. Several, or another one, are float32: 0 or 1, the number of the
  class, or log(1 + value), and NaN where a label does not count in a row.

  Args:
    by: how rows are split: "hash", "time", "order", "column" or "files"; "" leaves all rows in one
      split.
    required: names of columns of texts in which every row must have a value.
    holds_out: whether a part of the training files validates where no file does.
    stage: where text is kept; None makes one of its own.
    bounds: of the table that the files are a part of; None reads them.
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
    self._stage, self._labels = stage or Stage(), table.labels
    if by == "files" and set(table.rows.files) == {""}:
      raise UserError(
        'config.split.by is "files": give config.files as {"train": ..., "valid": ..., "test": ...}'
      )
    kinds: dict[str, type[spec.Kind]] = {"time": spec.Time, "column": spec.Split}
    self._of_split = table.require(kinds[by], "which the split goes by") if by in kinds else ""
    split = table.split
    self._shares: dict[str, tuple[float, float]] = {}  # of rows by hash, by split of the files
    if by == "hash":
      self._shares = dict.fromkeys(table.rows.files, (split["valid"], split["test"]))
    elif by == "files" and holds_out and "valid" not in table.rows.files:
      self._shares = {"train": (split["valid"], 0.0)}
    on, named = table.kinds.get(split["on"]), self._shares and split["on"]
    if named and not (isinstance(on, spec.Category) and on.read_as == "text"):
      raise UserError(f"config.split.on is {named!r}: name a declared category, user or item")
    self._files_of = {path: name for name, each in table.rows.files.items() for path in each}
    self._seed = split["seed"] if self._shares and not named else None
    self._is_part, self.account = bounds is not None, Account(Ledger(table.on_bad_row))
    self._bounds = self._found_bounds() if bounds is None else bounds

  @functools.cached_property
  def _reader(self) -> Reader:
    options: dict[str, Any] = {"stage": self._stage, "may_be_empty": self._is_part}
    options |= {} if self._seed is None else {"seed": self._seed, "hashed": self._table.hashed}
    return open_source(self._table.rows, self._table.on_bad_row, **options)

  def __iter__(self) -> Iterator[Rows]:
    weight, reader = self._table.name_of(spec.Weight), self._reader
    self.account = Account(Ledger(self._table.on_bad_row))
    for chunk in reader:
      for name in self._required:
        chunk = reader.refuse(chunk, bits(chunk.columns[name].is_null()), name)
      for name, kind in self._labels.items():
        chunk = self._labelled(chunk, name, kind)
      if weight:
        bad = ~(chunk.columns[weight] >= 0)
        chunk = reader.refuse(chunk, bad, weight, "is no weight, a number of 0 or more")
      chunk, parts = self._split(chunk)
      yield Rows(chunk, parts, self._label_of(chunk))
    self.account.ledger, self.account.has_dates = reader.ledger, reader.has_dates

  def _label_of(self, chunk: Chunk) -> np.ndarray | None:
    """Returns the label of rows whose columns of labels are numbers."""
    if not self._labels:
      return None
    columns = [chunk.columns[name] for name in self._labels]
    if spec.is_one_click(self._labels):
      return columns[0].astype(np.uint8)
    masks = [chunk.columns.get(kind.mask) for kind in self._labels.values()]
    masked = zip(columns, masks, strict=True)
    counted = [x if mask is None else np.where(mask == 1, x, np.nan) for x, mask in masked]
    return np.stack(counted, axis=1).astype(np.float32)

  def _labelled(self, chunk: Chunk, name: str, kind: spec.Label) -> Chunk:
    """Returns the rows with a label, float64 `[N]`, NaN for none where there are other labels."""
    reader = self._reader
    encoded = same_value(chunk.columns[name])
    texts, places = encoded.dictionary, indices_of(encoded)
    if kind.positive:
      counts = np.bincount(places + 1, minlength=len(texts) + 1)[1:]
      outcomes = self.account.outcomes.setdefault(name, collections.Counter())
      for text, count in zip(texts.to_pylist(), counts.tolist(), strict=True):
        is_known = text in (*kind.positive, *kind.drop) or text in outcomes
        if count and (is_known or len(outcomes) < _OUTCOMES):
          outcomes[text] += count
    label = np.append(label_of(texts, kind), np.nan)[places]
    kept = ~np.append(_member(texts, kind.drop), False)[places]
    if not kept.all():
      self.account.dropped += len(kept) - int(kept.sum())
      chunk, label, places = chunk.take(kept), label[kept], places[kept]
    if len(self._labels) == 1:
      chunk, label = reader.refuse(chunk, places < 0, name), label[places >= 0]
      places = places[places >= 0]
    column, what = f"config.columns[{name!r}]", "is neither 0 nor 1"
    hint = (
      f"Give the values that are clicks as {column}['positive'], or the smallest as "
      f"{column}['at_least']."
    )
    if kind.at_least is not None:
      what, hint = f"is no number to compare with {column}['at_least']={kind.at_least:g}", ""
    if kind.loss == "softmax":
      what, hint = f"is none of {column}['classes']", "Add it there, or to drop."
    elif kind.loss == "squared_log":
      what, hint = "is no number of 0 or more", ""
    bad = np.isnan(label) & (places >= 0)
    chunk = reader.refuse(chunk, bad, name, what, hint)
    return chunk._replace(columns=chunk.columns | {name: label[~bad]})

  @property
  def notes(self) -> list[str]:
    """Lines about what the last iteration has left out or may have misread."""
    notes = self.account.ledger.lines()
    for name, kind in self._labels.items():
      if not kind.positive:
        continue
      named = (*kind.positive, *kind.drop)
      outcomes = self.account.outcomes.get(name, collections.Counter[str]())
      unseen = [value for value in named if value not in outcomes]
      notes += [f"no row has {value!r}, which config.columns[{name!r}] names" for value in unseen]
      others = [(text, n) for text, n in outcomes.most_common() if text not in named]
      if len(others) > 1:
        is_whole = len(outcomes) < _OUTCOMES  # else some were not counted from the start
        texts = [f"{text!r}" + f" ({count:,})" * is_whole for text, count in others]
        more = f" and {len(texts) - 5} more" if len(texts) > 5 else ""
        notes.append(f"these labels count as no click: {', '.join(texts[:5])}{more}")
    if self.account.dropped:
      notes.append(f"{self.account.dropped:,} rows were left out by the label's drop")
    return notes

  def _split(self, chunk: Chunk) -> tuple[Chunk, np.ndarray]:
    """Returns the rows with a split, and the index of each in `SPLITS`, int8 `[N]`."""
    settings, by, files_of = self._table.split, self._by, self._files_of[chunk.file]
    if files_of in self._shares:
      hashes = chunk.content
      if on := settings["on"]:
        pattern = self._table.kinds[on].pattern  # type: ignore[attr-defined]
        hashes = splitting.hashes(extracted(chunk.columns[on], pattern), settings["seed"])
      assert hashes is not None
      return chunk, splitting.by_hash(hashes, self._shares[files_of])
    if by == "order":
      ranges = cache.cut(self._bounds.rows, settings["valid"], settings["test"])
      places = self._bounds.firsts[chunk.file] + chunk.rows - 1
      firsts = np.array([ranges["valid"][0], ranges["test"][0]])
      return chunk, np.searchsorted(firsts, places, side="right").astype(np.int8)
    if by == "time":
      self._check_clock()
      times = chunk.columns[self._of_split]
      return chunk, np.searchsorted(self._bounds.times, times, side="right").astype(np.int8)
    if by == "column":
      encoded = chunk.columns[self._of_split]
      of_texts = [_SPLIT_NAMES.get(text.lower(), -1) for text in encoded.dictionary.to_pylist()]
      parts = np.array([*of_texts, -1], np.int8)[indices_of(encoded)]
      hint = "Write train, valid or test."
      chunk = self._reader.refuse(chunk, parts < 0, self._of_split, "is no split", hint)
      return chunk, parts[parts >= 0]
    return chunk, np.full(len(chunk.rows), SPLITS.index(files_of) if by == "files" else 0, np.int8)

  def _check_clock(self) -> None:
    """Raises UserError where a first time is a date and the column has numbers, or vice versa."""
    for name in ("valid_from", "test_from"):
      text = self._table.split[name]
      if text and self._reader.has_dates not in (None, first_time(text, name)[0]):
        held = "dates" if self._reader.has_dates else "numbers"
        raise UserError(
          f"config.split.{name} is {text!r}, and column {self._of_split!r} has {held}: write it as "
          "they are"
        )

  def _found_bounds(self) -> Bounds:
    table, stage = self._table, self._stage
    if self._by == "time":
      return Bounds(thresholds(table, lambda: sampled(times_of(table, stage))))
    if self._by == "order":
      return in_order({file.path: num_rows(file, stage) for file in self._reader.files})
    return Bounds()


def num_rows(file: File, stage: Stage) -> int:
  """Returns the number of rows in a file, with those that cannot be read."""
  path, faults, _ = file.stored(stage)
  return pq.read_metadata(path).num_rows + len(faults)


def in_order(rows: Mapping[Path, int]) -> Bounds:
  """Returns the bounds of a split by the order of the rows, given their number by file."""
  firsts = np.cumsum([0, *rows.values()]).tolist()
  return Bounds((), dict(zip(rows, firsts, strict=False)), firsts[-1])


def times_of(table: Table, stage: Stage, *, may_be_empty: bool = False) -> Iterator[np.ndarray]:
  """Yields the times of the rows, chunk by chunk."""
  name = table.require(spec.Time, "which the split goes by")
  only = dataclasses.replace(table.rows, kinds={name: table.kinds[name]})
  for chunk in open_source(only, table.on_bad_row, stage=stage, may_be_empty=may_be_empty):
    yield chunk.columns[name]


def sampled(chunks: Iterable[np.ndarray]) -> np.ndarray:
  """Returns an even sample of numbers, which does not depend on how they are cut into chunks."""
  sample, seen, step = np.empty(0), 0, 1
  for chunk in chunks:
    sample, seen = np.append(sample, chunk[-seen % step :: step]), seen + len(chunk)
    while len(sample) > _SAMPLE:
      sample, step = sample[::2], 2 * step
  return sample


def thresholds(table: Table, sample: Callable[[], np.ndarray]) -> tuple[float, float]:
  """Returns the first times of validation and of test: as given, or by quantiles of a sample."""
  split = table.split
  given = {
    key: first_time(split[f"{key}_from"], f"{key}_from")[1]
    for key in ("valid", "test")
    if split[f"{key}_from"]
  }
  if len(given) == 2:
    return given["valid"], given["test"]
  times, valid, test = sample(), split["valid"], split["test"]
  if "test" in given:  # valid is the last part of what is before
    before = times[times < given["test"]]
    return _first(before, valid / max(1 - test, 1e-9), given["test"]), given["test"]
  if "valid" in given:  # test is the last part of what is after
    after = times[times >= given["valid"]]
    return given["valid"], _first(after, test / max(valid + test, 1e-9))
  return _first(times, valid + test), _first(times, test)


def _first(times: np.ndarray, share: float, otherwise: float = np.inf) -> float:
  """Returns the first time of the last share of the times."""
  if not share or not len(times):
    return otherwise
  return float(np.quantile(times, min(max(1 - share, 0.0), 1.0)))


@contextlib.contextmanager
def split_file(
  folder: Path, names: Mapping[Path, str]
) -> Iterator[Callable[[Path, np.ndarray, np.ndarray], None]]:
  """Writes the split of every row to `split.parquet`, so that other models can be fitted to them.

  The columns are `file`, its name, `row`, the number of the row in its file, and `part`, "train",
  "valid" or "test"; rows that were left out are not there. Yields a function of a file, numbers of
  rows and their splits, both `[N]`, which writes them.
  """
  name, code = pa.dictionary(pa.int8(), pa.string()), pa.DictionaryArray.from_arrays
  schema = pa.schema({"file": name, "row": pa.int64(), "part": name})
  options: dict[str, Any] = {
    "use_dictionary": ["file", "part"],
    "column_encoding": {"row": "DELTA_BINARY_PACKED"},
  }
  with pq.ParquetWriter(folder / "split.parquet", schema, **options) as writer:

    def write(path: Path, rows: np.ndarray, split: np.ndarray) -> None:
      of_file = code(np.zeros(len(split), np.int8), [names[path]])
      part = code(split.astype(np.int8), list(SPLITS))
      writer.write_table(pa.table([of_file, rows, part], schema=schema))

    yield write


def _member(texts: pa.Array, values: tuple[str, ...]) -> np.ndarray:
  return bits(pc.is_in(texts, value_set=pa.array(values, pa.string())))


def label_of(texts: pa.Array, kind: spec.Label) -> np.ndarray:
  """Returns what a model is trained on, float64 `[N]`, NaN where a text says nothing.

  1 for a click and 0 for none, the number of the class, or log(1 + value).
  """
  if kind.loss == "softmax":
    return pc.index_in(texts, pa.array(kind.classes, pa.string())).to_numpy(zero_copy_only=False)
  if kind.loss == "squared_log" or kind.at_least is not None:
    numbers = as_numbers(texts, ())[0]
    if kind.at_least is None:
      return np.log1p(np.where(numbers >= 0, numbers, np.nan))
    return np.where(np.isnan(numbers), np.nan, numbers >= kind.at_least)
  if kind.positive:
    return np.where(bits(texts.is_valid()), _member(texts, kind.positive), np.nan)
  lower = pc.utf8_lower(texts)
  is_none = _member(lower, spec.NO_CLICKS)
  return np.where(_member(lower, spec.CLICKS), 1.0, np.where(is_none, 0.0, np.nan))
