"""Your own table as sequences: every user's items in the order of time."""

from pathlib import Path
from typing import Any

from .. import arrays
from ..errors import UserError
from ..tables import interactions, spec
from ..tables.settings import parsed, serve_folder


def build(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
  """Writes `items` and `offsets`, and what serving needs; returns the meta.

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
  if table.refit:
    raise UserError("config.refit has no meaning for sequences: remove it")
  log = interactions.read(table, "last", folder)
  if not (log.split == 2).any():
    raise UserError(
      "no user has three items, and sequences are validated and tested on the last two: more rows "
      "are needed"
    )
  items, offsets = log.history()
  arrays.column(folder, "items", items.shape, items.dtype)[:] = items
  arrays.column(folder, "offsets", offsets.shape, offsets.dtype)[:] = offsets
  log.save(serve_folder(settings, folder))
  notes = log.notes
  if table.name_of(spec.Time) is None:
    notes.append("no time is declared: the rows of a user count as being in the order of time")
  features = [feature.name for side in (log.users, log.items) for feature in side.features]
  if features:
    notes.append(f"not used: {', '.join(features)}; the sequence recipe learns from ids alone")
  return {
    "num_items": len(log.items.texts),
    "notes": notes,
    "sha256": table.digests(),
  }
