"""Prints the settings of a run: the value of each, its default where it differs, and its meaning.

    python -m recipes.config dlrm --config=configs/dlrm/movielens1m.py

The meanings are the comments of the files that hold the defaults.
"""

import ast
import functools
import importlib
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from flax.traverse_util import flatten_dict

from . import main
from .errors import terminal

if TYPE_CHECKING:
  from ml_collections import ConfigDict


def show(recipe: str, config: "ConfigDict", workdir: str = "") -> None:
  """Prints a config of a recipe, a setting a line; `workdir` is not read."""
  del workdir
  print(terminal("\n".join(lines(recipe, config))))


def lines(recipe: str, config: "ConfigDict") -> Iterator[str]:
  """Yields a line for each setting, in the order of the config."""
  from .run import settings
  from .tables import settings as table_settings

  own = importlib.import_module(f".{recipe}.defaults", __package__)
  known = own.DATA_SETS.get(config.get("dataset", ""), {}) | settings.RUN | own.DEFAULTS
  if config.get("dataset") == "table":
    known = table_settings.DEFAULTS | known
  # Columns of a table are one value.
  flat = functools.partial(flatten_dict, sep=".", is_leaf=lambda path, _: path[-1:] == ("columns",))
  defaults, about = flat(known), dict[str, str]()
  for module in (table_settings, settings, own):
    about |= meanings(Path(str(module.__file__)))
  rows = []
  for name, value in flat(config.to_dict()).items():
    changed = name in defaults and value != defaults[name]
    default = f"default {defaults[name]!r}" if changed else ""
    rows.append((name, repr(value), default, about.get(name, "")))
  widths = [max(len(row[i]) for row in rows) for i in range(3)]
  for *cells, text in rows:
    padded = (cell.ljust(min(width, 34)) for cell, width in zip(cells, widths, strict=True))
    yield "  ".join([*padded, text]).rstrip()


def meanings(path: Path) -> dict[str, str]:
  """Returns the comment of each key of the dicts in a file, by the key's dotted name.

  A comment is on the line of the key, or on the lines above it.
  """
  with tokenize.open(path) as file:
    tokens = list(tokenize.generate_tokens(file.readline))
  comments = {t.start[0]: t for t in tokens if t.type == tokenize.COMMENT}
  text = lambda token: token.string.lstrip("# ").strip()
  alone = {line for line, token in comments.items() if not token.line[: token.start[1]].strip()}
  found: dict[str, str] = {}

  def visit(node: ast.AST, prefix: str) -> None:
    if isinstance(node, ast.Dict):
      for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
          name, line = f"{prefix}{key.value}", key.lineno
          above: list[str] = []
          while line - 1 - len(above) in alone:
            above.insert(0, text(comments[line - 1 - len(above)]))
          own = [text(comments[line])] if line in comments and line not in alone else []
          if above or own:
            found.setdefault(name, " ".join([*above, *own]))
          visit(value, f"{name}.")
    else:
      for child in ast.iter_child_nodes(node):
        visit(child, prefix)

  for statement in ast.parse(path.read_text()).body:
    target = getattr(statement, "target", None)
    if isinstance(target, ast.Name) and target.id == "DATA_SETS":
      for group in getattr(statement.value, "values", []):  # type: ignore[attr-defined]
        visit(group, "")
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
      visit(statement, "")
  return found


if __name__ == "__main__":
  main.program(show, f"{__package__}.config")()
