"""Interaction files as other projects publish them, declared as tables.

    pairs    `user item` a line, as SASRec's ml-1m.txt and BERT4Rec's beauty.txt
    lines    `user item item ...` a line, as S3-Rec's Beauty.txt

Both are in the order of time within a user.
"""

from typing import Any

from .. import files
from ..errors import UserError

HINT = "Is the file complete? Get it again."
_LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # format and columns
  "pairs": ({"names": ("user", "item")}, {"user": "user", "item": "item"}),
  "lines": (
    {"names": ("user", "items"), "rest": True},
    {"user": "user", "items": {"kind": "item", "separator": " "}},
  ),
}


def table(config) -> dict[str, Any]:
  """Returns the settings of the table; see `recipes.tables.settings`.

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
  path = files.require(files.data_folder(config.data_dir, hint), config.data_file, hint=hint)
  format, columns = _LAYOUTS[config.layout]
  # An item that comes twice is in the history twice, as published figures have it.
  return {
    "files": path,
    "format": {"delimiter": " ", **format},
    "columns": columns,
    "duplicates": "keep",
    "exclude_seen": False,
    "counts": config.counts,
    "by_number": True,
  }
