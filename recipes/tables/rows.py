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
from .fitting import extracted
from .reading import Chunk, Reader
from .settings import SPLITS, Source, Table, first_time
from .source import Stage
from .store import way, ways
from .values import as_numbers, bits, plain, same_value

_OUTCOMES = 100  # texts of a label that are counted
_SAMPLE = 1 << 16  # times that thresholds are taken of, at least half as many
_SPLIT_NAMES = {"train": 0, "valid": 1, "validation": 1, "val": 1, "dev": 1, "test": 2}


def open_source(
  source: Source, on_bad_row: str, paths: Sequence[Path] = (), *, stage: Stage | None = None
) -> Reader:
  """Returns the reader of a source's declared columns, and of its key by the name "".

  Args:
    source: the files and columns.
    on_bad_row: "raise" or "skip".
    paths: the files of one split; none reads all.
    stage: as of `Reader`.
  """
  wanted = ways(source.kinds) | ({"": ((source.key,), "text")} if source.key else {})
  columns = {name: names for name, (names, _) in wanted.items()}
  how = {name: each for name, (_, each) in wanted.items()}
  options: dict[str, Any] = {"format": source.format, "on_bad_row": on_bad_row, "stage": stage}
  return Reader(paths or source.all_files, how, columns=columns, **options)


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

  Attributes:
    skipped: a line per kind of bad row, of the last iteration.
  """

  def __init__(
    self,
    table: Table,
    by: str,
    required: Sequence[str] = (),
    *,
    holds_out: bool = True,
    stage: Stage | None = None,
  ):
    self._table, self._by, self._required = table, by, tuple(required)
    self._stage = stage or Stage()
    self._holds_out = holds_out and "valid" not in table.rows.files
    self._label = table.name_of(spec.Label)
    self._parts: dict[Path, Any] = {}  # splits of the stored rows, or their futures
    self.skipped: list[str] = []
    self._num_dropped = 0  # rows that `drop` of the label has left out
    self._outcomes: collections.Counter[str] = collections.Counter()  # some texts of the label
    if by == "files" and set(table.rows.files) == {""}:
      raise UserError(
        'config.split.by is "files": give config.files as {"train": ..., "valid": ..., "test": ...}'
      )
    kinds: dict[str, type[spec.Kind]] = {"time": spec.Time, "column": spec.Split}
    self._of_split = table.require(kinds[by], "which the split goes by") if by in kinds else ""
    self._from = self._thresholds() if by == "time" else ()

  def _open(self, paths: Sequence[Path]) -> Reader:
    return open_source(self._table.rows, self._table.on_bad_row, paths, stage=self._stage)

  def __iter__(self) -> Iterator[Rows]:
    self.skipped, self._num_dropped = [], 0
    self._outcomes.clear()
    weight = self._table.name_of(spec.Weight)
    for split, paths in self._table.rows.files.items():
      reader = self._open(paths)
      for chunk in reader:
        for name in self._required:
          chunk = reader.refuse(chunk, bits(chunk.columns[name].is_null()), name)
        chunk = self._labelled(reader, chunk) if self._label else chunk
        if weight:
          bad = ~(chunk.columns[weight] >= 0)
          chunk = reader.refuse(chunk, bad, weight, "is no weight, a number of 0 or more")
        chunk, parts = self._split(reader, chunk, split)
        yield Rows(chunk, parts, chunk.columns.get(self._label or ""))
      self.skipped += reader.skipped

  def _labelled(self, reader: Reader, chunk: Chunk) -> Chunk:
    """Returns the rows with a label, which is uint8 `[N]`."""
    name, kind = str(self._label), self._table.kinds[str(self._label)]
    assert isinstance(kind, spec.Label)
    texts = same_value(plain(chunk.columns[name]))
    if kind.positive:
      for each in texts.drop_null().value_counts().to_pylist():
        text, is_named = each["values"], each["values"] in (*kind.positive, *kind.drop)
        if is_named or text in self._outcomes or len(self._outcomes) < _OUTCOMES:
          self._outcomes[text] += each["counts"]
    if kind.drop:
      kept = ~_member(texts, kind.drop)
      self._num_dropped += len(kept) - int(kept.sum())
      chunk, texts = chunk.take(kept), texts.filter(pa.array(kept))
    chunk = reader.refuse(chunk, bits(texts.is_null()), name)
    label, column = label_of(texts.drop_null(), kind), f"config.columns[{name!r}]"
    what, hint = (
      "is neither 0 nor 1",
      f"Give the values that are clicks as {column}['positive'], or the smallest as "
      f"{column}['at_least'].",
    )
    if kind.at_least is not None:
      what, hint = f"is no number to compare with {column}['at_least']={kind.at_least:g}", ""
    chunk = reader.refuse(chunk, label < 0, name, what, hint)
    return chunk._replace(columns=chunk.columns | {name: label[label >= 0].astype(np.uint8)})

  @property
  def notes(self) -> list[str]:
    """Lines about what the last iteration has left out or may have misread."""
    notes, kind = list(self.skipped), self._table.kinds.get(self._label or "")
    if isinstance(kind, spec.Label) and kind.positive:
      named = (*kind.positive, *kind.drop)
      column = f"config.columns[{self._label!r}]"
      unseen = [value for value in named if value not in self._outcomes]
      notes += [f"no row has {value!r}, which {column} names" for value in unseen]
      others = [(text, n) for text, n in self._outcomes.most_common() if text not in named]
      if len(others) > 1:
        is_whole = len(self._outcomes) < _OUTCOMES  # else some were not counted from the start
        texts = [f"{text!r}" + f" ({count:,})" * is_whole for text, count in others]
        more = f" and {len(texts) - 5} more" if len(texts) > 5 else ""
        notes.append(f"these labels count as no click: {', '.join(texts[:5])}{more}")
    if self._num_dropped:
      notes.append(f"{self._num_dropped:,} rows were left out by the label's drop")
    return notes

  def _split(self, reader: Reader, chunk: Chunk, files_of: str) -> tuple[Chunk, np.ndarray]:
    """Returns the rows with a split, and the index of each in `SPLITS`, int8 `[N]`."""
    split, by = self._table.split, self._by
    if by == "files" and files_of == "train" and self._holds_out:
      return chunk, self._hashed(reader, chunk, (split["valid"], 0.0))
    if by == "hash":
      return chunk, self._hashed(reader, chunk, (split["valid"], split["test"]))
    if by == "order":
      return chunk, self._in_order()[chunk.file][chunk.places]
    if by == "time":
      self._check_clock(reader)
      times = chunk.columns[self._of_split]
      return chunk, np.searchsorted(self._from, times, side="right").astype(np.int8)
    if by == "column":
      texts = pc.utf8_lower(pc.fill_null(plain(chunk.columns[self._of_split]), ""))
      parts = np.array([_SPLIT_NAMES.get(text, -1) for text in texts.to_pylist()], np.int8)
      hint = "Write train, valid or test."
      chunk = reader.refuse(chunk, parts < 0, self._of_split, "is no split", hint)
      return chunk, parts[parts >= 0]
    return chunk, np.full(len(chunk.rows), SPLITS.index(files_of) if by == "files" else 0, np.int8)

  def _check_clock(self, reader: Reader) -> None:
    """Raises UserError where a first time is a date and the column has numbers, or vice versa."""
    for name in ("valid_from", "test_from"):
      text = self._table.split[name]
      if text and reader.has_dates not in (None, first_time(text, name)[0]):
        held = "dates" if reader.has_dates else "numbers"
        raise UserError(
          f"config.split.{name} is {text!r}, and column {self._of_split!r} has {held}: write it as "
          "they are"
        )

  def _in_order(self) -> dict[Path, np.ndarray]:
    """Splits by the places of the rows in all files: the last ones are tested."""
    if not self._parts:
      listed = [
        file for paths in self._table.rows.files.values() for file in self._open(paths).files
      ]
      rows = [pq.read_metadata(file.stored(self._stage).path).num_rows for file in listed]
      parts, split = np.zeros(sum(rows), np.int8), self._table.split
      for name, (start, stop) in arrays.cut(len(parts), split["valid"], split["test"]).items():
        parts[start:stop] = SPLITS.index(name)
      pieces = np.split(parts, np.cumsum(rows)[:-1])
      self._parts = {file.path: piece for file, piece in zip(listed, pieces, strict=True)}
    return self._parts

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

  def _thresholds(self) -> tuple[float, float]:
    """Returns the first times of validation and test: as given, or by quantiles of a sample."""
    split, source = self._table.split, self._table.rows
    given = {
      key: first_time(split[f"{key}_from"], f"{key}_from")[1]
      for key in ("valid", "test")
      if split[f"{key}_from"]
    }
    if len(given) == 2:
      return given["valid"], given["test"]
    only = dataclasses.replace(source, kinds={self._of_split: source.kinds[self._of_split]})
    times, seen, step = np.empty(0), 0, 1
    for chunk in open_source(only, self._table.on_bad_row, stage=self._stage):
      of_chunk = chunk.columns[self._of_split]
      times, seen = np.append(times, of_chunk[-seen % step :: step]), seen + len(of_chunk)
      while len(times) > _SAMPLE:
        times, step = times[::2], 2 * step
    valid, test = split["valid"], split["test"]
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

  The columns are `file`, `row`, the number of the row in its file, and `part`, "train", "valid" or
  "test"; rows that were left out are not there.

  Args:
    folder: where to.
    names: of the files.

  Yields:
    `(file, rows, split)`, which writes the splits of rows by number, both `[N]`.
  """
  name, code = pa.dictionary(pa.int8(), pa.string()), pa.DictionaryArray.from_arrays
  schema = pa.schema({"file": name, "row": pa.int64(), "part": name})
  with pq.ParquetWriter(folder / "split.parquet", schema) as writer:

    def write(path: Path, rows: np.ndarray, split: np.ndarray) -> None:
      of_file = code(np.zeros(len(split), np.int8), [names[path]])
      part = code(split.astype(np.int8), list(SPLITS))
      writer.write_table(pa.table([of_file, rows, part], schema=schema))

    yield write


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
