"""The settings of a table: completed from what the user's config says, and checked before reading.

A config with `columns` needs nothing else but `files`; everything that it leaves out is the
recipe's default. It may be a plain dict:

    def get_config():
      return {"files": "clicks.csv", "columns": {"clicked": "label", "city": "category"}}
"""

import dataclasses
import operator
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import config as config_lib
from .. import files
from ..errors import DamagedFileError, UserError
from . import spec
from .formats import paths
from .source import Source
from .spec import Format
from .values import SPLITS

SPLIT_BY = ("", "hash", "user", "last", "time", "order", "column")
READING = "table.json"  # in the folder `serve`: the declared columns and the format of text files
_PLAIN = ("on_bad_row", "exclude_seen", "core")  # of a `Table`


@dataclasses.dataclass(frozen=True)
class Table:
  """The parsed settings of a table; those without a comment are as in the config."""

  rows: Source  # the files and columns
  split: Mapping[str, Any]
  on_bad_row: str
  exclude_seen: bool
  core: int
  base: Path | None = None  # the folder `serve` of an earlier run, whose transforms grow

  def digests(self) -> dict[str, str]:
    """Returns the SHA-256 of every file on this machine, by its path below the folder of all."""
    local = [path for path in self.rows.stamps if os.path.exists(path)]
    folder = os.path.commonpath([os.path.dirname(path) for path in local]) if local else ""
    return {os.path.relpath(path, folder): files.digest(Path(path)) for path in local}

  def check_unchanged(self) -> None:
    """Raises DamagedFileError where a file is another one than when the settings were made."""
    for path, stamp in self.rows.stamps.items():
      if _stamp(path) != stamp:
        raise DamagedFileError(f"{path} has changed while it was read: run the command again")

  @property
  def kinds(self) -> Mapping[str, spec.Kind]:
    """The declared columns."""
    return self.rows.kinds

  def split_by(self, *, timed: str, untimed: str) -> str:
    """Returns how the rows are split: as the settings say, or else by what is declared.

    Args:
      timed, untimed: how, if neither files nor a column say it, with a time column and without.

    Raises:
      UserError: the rows cannot be split so.
    """
    by = timed if self.name_of(spec.Time) else untimed
    by = "column" if self.name_of(spec.Split) else by
    by = "files" if set(self.rows.files) != {""} else by
    by = self.split["by"] or by
    needed: dict[str, type[spec.Kind]] = {"time": spec.Time, "column": spec.Split}
    if by in needed:
      self.require(needed[by], "which the split goes by")
    if (on := self.split["on"]) and by not in ("hash", "files"):
      raise UserError("config.split.on has no effect: remove it, or set config.split.by to 'hash'")
    if on and (not isinstance(kind := self.kinds.get(on), spec.Category) or kind.is_list):
      raise UserError(f"config.split.on is {on!r}: name a declared category, user or item")
    return by

  def name_of(self, cls: type[spec.Kind]) -> str | None:
    """Returns the name of the column of a kind that at most one column has."""
    return spec.only(self.kinds, cls)

  def require(self, cls: type[spec.Kind], why: str) -> str:
    """Returns as `name_of`; raises UserError where no column is of that kind."""
    if (name := self.name_of(cls)) is None:
      raise UserError(f"no column is declared as {cls.kind!r}, {why}: add it to config.columns")
    return name


def settings(config) -> dict[str, Any]:
  """Returns everything the prepared columns depend on, as JSON values."""
  for name, known in {"on_bad_row": ("raise", "skip"), "split.by": SPLIT_BY}.items():
    if (found := operator.attrgetter(name)(config)) not in known:
      raise UserError(f"config.{name} is {found!r}: choose one of {known}")
  shares = config.split.valid, config.split.test
  if min(shares) < 0 or sum(shares) >= 1:
    raise UserError(f"config.split holds out {shares} of the rows: choose fractions of less than 1")
  about = {
    "rows": _source(config),
    "split": config.split.to_dict(),
    **{name: config[name] for name in _PLAIN},
  }
  spec.check_tables(parsed(about).kinds)
  serve = Path(config.init_from).expanduser().resolve() / "serve"
  if config.init_from and serve.is_dir():
    about["base"] = [str(serve), *(files.digest(path) for path in sorted(serve.glob("*.*")))]
  return about


def serve_folder(settings: Mapping[str, Any], folder: Path) -> Path:
  """Makes and returns the folder `serve` of the columns; it tells predictions how rows are read."""
  serve = files.new_folder(folder / "serve")
  about = {"columns": settings["rows"]["columns"], "format": settings["rows"]["format"]}
  files.write_json(serve / READING, about)
  return serve


def declared(table: Callable[[Any], Mapping[str, Any]]) -> Callable[[Any], dict[str, Any]]:
  """Returns the `settings` of a data set whose files and columns are known.

  Args:
    table: `(config) -> settings`, as a user's config has them. What it leaves out is the config's
      where it has that, and else the default.
  """

  def settings_of(config) -> dict[str, Any]:
    own = {name: config[name] for name in (*config_lib.TABLE, "init_from") if name in config}
    return settings(config_lib.of_table({**own, **table(config)}, {"init_from": ""}))

  return settings_of


def _source(config) -> dict[str, Any]:
  given = config.files.to_dict() if hasattr(config.files, "to_dict") else config.files
  by_split = given if isinstance(given, Mapping) else {"": given}
  for name in by_split:
    if name not in ("", *SPLITS):
      raise UserError(f"config.files has no split {name!r}; {spec.nearest(name, list(SPLITS))}")
  return {
    # In the order of SPLITS: a ConfigDict sorts them, and the first row of an item counts.
    "files": {n: [_stamp(p) for p in paths(by_split[n])] for n in ("", *SPLITS) if n in by_split},
    "format": config.format.to_dict(),
    "columns": {name: kind.to_dict() for name, kind in config.columns.items()},
  }


def _stamp(path: str) -> list[Any]:
  """Returns what tells a changed file without reading it; a URL is taken to stay as it is."""
  return files.stamp(Path(path)) if os.path.exists(path) else [path, 0, 0]


def parsed(settings: Mapping[str, Any]) -> Table:
  """Returns the settings as an object."""
  rows = settings["rows"]
  by_split = {name: tuple(stamp[0] for stamp in of) for name, of in rows["files"].items()}
  stamps = {stamp[0]: stamp for of in rows["files"].values() for stamp in of}
  kinds = spec.parse(rows["columns"])
  return Table(
    Source(by_split, Format(**rows["format"]), kinds, stamps),
    settings["split"],
    base=Path(settings["base"][0]) if "base" in settings else None,
    **{name: settings[name] for name in _PLAIN},
  )
