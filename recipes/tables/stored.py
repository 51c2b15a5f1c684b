"""Rows of Parquet and ArrayRecord files."""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import DamagedFileError
from .batches import Batch, Way, rebatched
from .faults import Fault, shown
from .formats import Format, repeated

_AGAIN = "Copy or download it again."


class ParquetFile:
  """A Parquet file.

  Attributes:
    names: of the columns, in order.
    types: of the columns.

  Raises:
    DamagedFileError: the file is no Parquet, incomplete, or names two columns alike.
  """

  def __init__(self, path: Path, format: Format):
    self.path = path
    with self._open() as file:
      schema = file.schema_arrow
    self.names = tuple(schema.names)
    if (duplicate := repeated(self.names)) is not None:
      raise DamagedFileError(f"{path} has two columns {duplicate!r}. Rename one.")
    self.types: Mapping[str, pa.DataType] = dict(zip(schema.names, schema.types, strict=True))

  def advice(self) -> str:
    return ""

  def batches(self, ways: Mapping[str, Way], chunk_rows: int) -> Iterator[Batch]:
    """Yields the rows in their order, with the columns of `ways` as they are stored.

    Raises:
      DamagedFileError: the file is damaged; names the row before.
    """
    yield from rebatched(self._row_groups(tuple(ways), chunk_rows), chunk_rows)

  def _row_groups(self, columns: tuple[str, ...], chunk_rows: int) -> Iterator[Batch]:
    start, size = 0, self.path.stat().st_size
    with self._open() as file:
      stored = file.iter_batches(chunk_rows, columns=list(columns), use_threads=False)
      while True:
        try:
          batch = next(stored, None)
        except (pa.ArrowException, OSError) as error:
          raise DamagedFileError(
            f"{self.path} is damaged after row {start} ({error}). {_AGAIN}"
          ) from error
        if batch is None:
          return
        rows = np.arange(start + 1, start + 1 + len(batch))
        start += len(batch)
        arrays = {name: _decoded(batch.column(name)) for name in columns}
        yield Batch(rows, arrays, [], size * len(batch) // file.metadata.num_rows)

  def _open(self) -> pq.ParquetFile:
    try:
      # With a buffer, a column of a row group is read in pages, not as a whole.
      return pq.ParquetFile(
        self.path, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True
      )
    except (pa.ArrowException, OSError) as error:
      raise DamagedFileError(f"{self.path} is no whole Parquet file ({error}). {_AGAIN}") from error


def _decoded(array: pa.Array) -> pa.Array:
  """Returns the values of a dictionary, which differs from row group to row group."""
  return array.dictionary_decode() if isinstance(array, pa.DictionaryArray) else array


class ArrayRecordFile:
  """An ArrayRecord file of `tf.train.Example` messages, or of JSON objects in UTF-8.

  A column that a record lacks is missing there.

  Attributes:
    names: of the columns of the first records.

  Raises:
    DamagedFileError: the file is no ArrayRecord, or its first records are neither.
  """

  def __init__(self, path: Path, format: Format):
    self.path = path
    self.types: Mapping[str, pa.DataType] = {}
    if path.stat().st_size == 0:
      raise DamagedFileError(f"{path} is empty. {_AGAIN}")
    names: dict[str, None] = {}
    with self._open() as reader:
      for record in self._read(reader, 0, min(100, reader.num_records())):
        names.update(dict.fromkeys(_parsed(record) or ()))
      if reader.num_records() and not names:
        raise DamagedFileError(
          f"{path}, row 1 has a record that is neither a tf.train.Example nor a JSON object. Write "
          "its records so, or store the table as Parquet."
        )
    self.names = tuple(names)

  def advice(self) -> str:
    return "They are from its first 100 records."

  def batches(self, ways: Mapping[str, Way], chunk_rows: int) -> Iterator[Batch]:
    """Yields the rows in their order, with the columns of `ways`.

    Raises:
      DamagedFileError: the file is damaged; names the row before.
    """
    with self._open() as reader:
      count, size = reader.num_records(), self.path.stat().st_size
      for start in range(0, count, chunk_rows):
        stop = min(start + chunk_rows, count)
        records = [_parsed(record) for record in self._read(reader, start, stop)]
        yield _batch(records, start + 1, ways, size * (stop - start) // count)

  def _open(self) -> "_Opened":
    return _Opened(self.path)

  def _read(self, reader: Any, start: int, stop: int) -> list[bytes]:
    try:
      return reader.read(start, stop) if stop > start else []
    except (RuntimeError, ValueError, IndexError) as error:
      raise DamagedFileError(
        f"{self.path} is damaged after row {start} ({error}). {_AGAIN}"
      ) from error


class _Opened:
  """A reader of an ArrayRecord file, for `with`."""

  def __init__(self, path: Path):
    from array_record.python import array_record_module  # starts a pool of threads

    self._path = path
    self._reader = array_record_module.ArrayRecordReader(str(path))
    if not self._reader.ok():
      self.__exit__()

  def __enter__(self) -> Any:
    return self._reader

  def __exit__(self, *error: object) -> None:
    try:
      self._reader.close()  # raises what was wrong with the file, once more
    except RuntimeError as damage:
      if not any(error):
        raise DamagedFileError(
          f"{self._path} is no whole ArrayRecord file ({damage}). {_AGAIN}"
        ) from damage


def _batch(
  records: Sequence[dict[str, Any] | None], first: int, ways: Mapping[str, Way], size: int
) -> Batch:
  faults = {}
  for row, record in enumerate(records, start=first):
    if record is None:
      faults[row] = Fault(
        row, None, "a damaged record", "neither a tf.train.Example nor a JSON object"
      )
      continue
    for name, way in ways.items():
      value = record.get(name)
      if way != "any" and _is_nested(value):
        hint = "Store its fields as columns, and lists of numbers or texts."
        faults.setdefault(row, Fault(row, name, "is nested", shown(value), hint))
      elif isinstance(value, list) and not isinstance(way, tuple) and way != "any":
        if len(value) > 1:
          hint = "Declare it as a bag or a sequence."
          faults.setdefault(row, Fault(row, name, "is a list", shown(value), hint))
        record[name] = value[0] if value else None
      elif (
        isinstance(way, tuple) and value is not None and not isinstance(value, list | str | bytes)
      ):
        record[name] = [value]
      elif isinstance(way, tuple) and way[1] and isinstance(value, str | bytes):
        record[name] = _cut(value, way[1])  # another record may have a list
  rows = np.arange(first, first + len(records))
  good = np.array([row not in faults for row in rows.tolist()], bool)
  kept = [
    record for record, is_good in zip(records, good, strict=True) if is_good and record is not None
  ]
  arrays = {name: _array([record.get(name) for record in kept]) for name in ways}
  return Batch(rows[good], arrays, [faults[row] for row in sorted(faults)], size)


def _cut(text: str | bytes, separator: str) -> list[Any]:
  """Returns the parts of a text, or of its bytes."""
  if isinstance(text, bytes):
    return list(text.split(separator.encode()))
  return list(text.split(separator))


def _is_nested(value: Any) -> bool:
  inner = value if isinstance(value, list) else [value]
  return any(isinstance(item, dict | list) for item in inner)


def _array(values: list[Any]) -> pa.Array:
  """Returns values as an array, as text where they have no common type."""
  if any(isinstance(value, list) for value in values):
    values = [value if value is None or isinstance(value, list) else [value] for value in values]
  try:
    return pa.array(values)
  except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
    return pa.array([_text(value) for value in values])


def _text(value: Any) -> Any:
  if isinstance(value, list):
    return [_text(item) for item in value]
  if isinstance(value, bytes):
    return value.decode("utf-8", "replace")
  return value if value is None or isinstance(value, str) else json.dumps(value)


def _parsed(record: bytes) -> dict[str, Any] | None:
  """Returns a record's columns, or None if it is neither an Example nor a JSON object."""
  if record[:1] == b"{":
    try:
      return json.loads(record)
    except ValueError:
      return None
  message_class, decode_error = _example()
  try:
    features = message_class.FromString(record).features.feature
  except decode_error:
    return None
  columns = {}
  for name in sorted(features):
    kind = features[name].WhichOneof("kind")
    values = [] if kind is None else list(getattr(features[name], kind).value)
    columns[name] = values[0] if len(values) == 1 else values or None
  return columns or None


@functools.cache
def _example() -> tuple[Any, type[Exception]]:
  """Returns the class of `tf.train.Example` messages, and the error of its parser."""
  from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

  file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tables", syntax="proto3")
  field = descriptor_pb2.FieldDescriptorProto

  def add(name: str, *fields: tuple[str, int, str], parent: Any = file) -> Any:
    """Adds a message of (name, type, name of its message type) fields, numbered from 1."""
    added = (parent.message_type if parent is file else parent.nested_type).add(name=name)
    for number, (field_name, kind, type_name) in enumerate(fields, start=1):
      added.field.add(
        name=field_name,
        number=number,
        type=kind,
        type_name=type_name or None,
        label=field.LABEL_REPEATED if field_name in ("value", "feature") else field.LABEL_OPTIONAL,
      )
    return added

  add("BytesList", ("value", field.TYPE_BYTES, ""))
  add("FloatList", ("value", field.TYPE_FLOAT, ""))
  add("Int64List", ("value", field.TYPE_INT64, ""))
  lists = [("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List")]
  feature = add("Feature", *((name, field.TYPE_MESSAGE, f".tables.{kind}") for name, kind in lists))
  feature.oneof_decl.add(name="kind")
  for member in feature.field:
    member.oneof_index = 0
  features = add("Features", ("feature", field.TYPE_MESSAGE, ".tables.Features.FeatureEntry"))
  entry = add(
    "FeatureEntry",
    ("key", field.TYPE_STRING, ""),
    ("value", field.TYPE_MESSAGE, ".tables.Feature"),
    parent=features,
  )
  entry.field[1].label = field.LABEL_OPTIONAL
  entry.options.map_entry = True
  add("Example", ("features", field.TYPE_MESSAGE, ".tables.Features"))
  pool = descriptor_pool.DescriptorPool()
  pool.Add(file)
  descriptor = pool.FindMessageTypeByName("tables.Example")
  return message_factory.GetMessageClass(descriptor), message.DecodeError
