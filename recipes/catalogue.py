"""Lists recipes, configs and their modes, read off the files without importing any.

So the list is there at once, and on a machine where nothing is installed.
"""

import ast
from pathlib import Path

# The folder of `recipes` and `configs`: of a checkout, or of `embed` in an installation.
ROOT = Path(__file__).resolve().parents[1]


def summary(path: Path) -> str:
  """Returns the first line of a Python file's docstring."""
  return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def recipes() -> dict[str, str]:
  """Returns a line about each recipe, by its name."""
  folders = sorted(path.parent for path in (ROOT / "recipes").glob("*/train.py"))
  return {folder.name: summary(folder / "__init__.py") for folder in folders}


def configs(recipe: str) -> list[Path]:
  """Returns a recipe's config files, relative to `ROOT`, as `--config` reads them."""
  return sorted(path.relative_to(ROOT) for path in (ROOT / "configs" / recipe).glob("*.py"))


def modes(path: Path) -> list[str]:
  """Returns the modes of a config: what its `get_config(mode)` compares the mode with."""
  compared = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name) and node.left.id == "mode":
      for known in ast.walk(node.comparators[0]):
        if isinstance(known, ast.Constant) and isinstance(known.value, str) and known.value:
          compared.add(known.value)
  return sorted(compared)
