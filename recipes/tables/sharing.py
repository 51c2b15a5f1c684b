"""Columns that share a table, and with it a vocabulary: which ones can."""

import itertools
from collections.abc import Mapping

from ..errors import UserError
from . import spec


def has_table(kind: spec.Kind) -> bool:
  """Whether a column has vectors; a number without buckets has none."""
  return isinstance(kind, spec.Embedded) and not (
    isinstance(kind, spec.Number) and not kind.buckets
  )


def check(kinds: Mapping[str, spec.Kind], setting: str) -> None:
  """Raises UserError where columns that share a table declare it in different ways."""
  shared = ("min_count", "oov", "hash", "size", "dim", "optimizer")
  first: dict[tuple[str, str], tuple[str, spec.Category]] = {}
  named = {kind.table for kind in kinds.values() if isinstance(kind, spec.Category) and kind.table}
  for name, kind in kinds.items():
    if isinstance(kind, spec.Number | spec.Cross) and has_table(kind) and name in named:
      raise UserError(
        f"{setting}: the table {name!r} has the name of the column {name!r}, which has a table of "
        "its own: choose another name"
      )
    if isinstance(kind, spec.Category) and (kind.table or name) in named:
      # A single value has no combiner: any bag's gives its vector.
      options = (*shared, "combiner") if isinstance(kind, spec.Bag) else shared
      # The table of a column's own name is filled as that column says.
      for option in options if kind.table else options[1:]:
        other, known = first.setdefault((kind.table or name, option), (name, kind))
        if getattr(known, option) != getattr(kind, option):
          raise UserError(
            f"{setting}: {other!r} and {name!r} share the table {kind.table or name!r}, but differ "
            f"in {option}: {getattr(known, option)!r} and {getattr(kind, option)!r}"
          )


def check_between(settings: Mapping[str, Mapping[str, spec.Kind]]) -> None:
  """Raises UserError where columns of different files share a table, and not the vocabulary."""
  for first, second in itertools.permutations(settings, 2):
    named = {getattr(kind, "table", "") for kind in settings[first].values()} - {""}
    for name, kind in settings[second].items():
      table = getattr(kind, "table", "") or name
      if has_table(kind) and table in named:
        raise UserError(
          f"{second}.columns[{name!r}] has the table {table!r} of columns in {first}.columns: only "
          "columns of the same files can share one, so choose another name"
        )
