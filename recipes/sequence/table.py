"""Tables as sequences, every user's items in the order of time: your own, and published files."""

from pathlib import Path
from typing import Any

from .. import cache, files
from ..errors import UserError
from ..tables import interactions, spec
from ..tables.settings import parsed, serve_folder

_LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # format and columns
  "pairs": ({"names": ("user", "item")}, {"user": "user", "item": "item"}),
  "lines": (
    {"names": ("user", "items"), "rest": True},
    {"user": "user", "items": {"kind": "item", "separator": " "}},
  ),
}


def published(config) -> dict[str, Any]:
  """Declares an interaction file as another project publishes it, in the order of time by user.

  `config.layout` is "pairs", `user item` a line, as SASRec's ml-1m.txt and BERT4Rec's beauty.txt;
  or "lines", `user item item ...`, as S3-Rec's Beauty.txt.

  Raises:
    UserError: the layout is unknown.
    MissingFileError: the file is missing; says where it comes from.
  """
  if config.layout not in _LAYOUTS:
    raise UserError(f"unknown layout {config.layout!r}: choose {' or '.join(_LAYOUTS)}")
  hint = (
    f"It is not downloaded because the data's licence does not allow it to be passed on: get it "
    f"from {config.source}, and pass --config.data_dir=<folder>."
  )
  path = files.require(config.data_dir, config.data_file, hint=hint)
  format, columns = _LAYOUTS[config.layout]
  # An item that comes twice is in the history twice, as published figures have it.
  return {
    "files": path,
    "format": {"delimiter": " ", **format},
    "columns": columns,
    "exclude_seen": False,
  }


def build(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
  """Writes `items`, `offsets` and what serving needs; returns the meta.

  Raises:
    UserError: no item is declared, or the split is another one than leave one out.
    DamagedFileError: a row cannot be read; names file, row and column.
  """
  table = parsed(settings)
  by = table.split["by"]
  if by not in ("", "last") or set(table.rows.files) != {""}:
    raise UserError(
      "sequences hold out the last two items of each user: give all rows as config.files, and "
      "--config.split.by=last"
    )
  log = interactions.read(table, "last", folder)
  if not (log.split == 2).any():
    raise UserError(
      "no user has three items, and sequences are validated and tested on the last two: more rows "
      "are needed"
    )
  items, offsets = log.history()
  cache.column(folder, "items", items.shape, items.dtype)[:] = items
  cache.column(folder, "offsets", offsets.shape, offsets.dtype)[:] = offsets
  log.save(serve_folder(settings, folder))
  notes = log.notes
  if table.name_of(spec.Time) is None:
    notes.append("no time is declared: the rows of a user count as being in the order of time")
  return {
    "num_items": len(log.items.texts),
    "notes": notes,
    "sha256": table.digests(),
  }
