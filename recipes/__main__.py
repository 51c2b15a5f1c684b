"""Lists what there is to run: the recipes, and the configs that each of them trains."""

import argparse
import sys
from collections.abc import Sequence

from . import catalogue

_MORE = """\
These files are in {root}
and the head of each says what it reproduces, what it costs, what it reached and by which command;
CONFIG may be a file of your own as well. [:smoke] is a mode: configs/dlrm/synthetic.py:smoke is
the same code in seconds. Without --config a recipe trains on its synthetic.py, which downloads
nothing. Any setting can be given: --config.batch_size=4096.
"""

_COMMANDS = {
  f"{__package__}.minimal": "columns to a tested model in one file, to read and to copy",
  f"{__package__}.describe FILE": "a first look at your own table, and a config that trains on it",
  f"{__package__}.baselines runs/dlrm": "baselines of a run whose data are not small",
  f"{__package__}.evaluate runs/dlrm": "the metrics of a run once more, or on other --files",
  f"{__package__}.export runs/mine --out=served": "a run on a table, to answer raw rows",
  f"{__package__}.predict served < rows.csv": "scores or recommendations for raw rows",
  f"{__package__}.report runs/dlrm": "the metrics of finished runs and their baselines",
  "embed check": "lookups, gradients and optimizers of this installation",
}


def listing(recipe: str) -> str:
  """Returns the recipe's command and a line for each of its configs."""
  lines = [f"python -m {__package__}.{recipe} --config=CONFIG --workdir=runs/{recipe}"]
  lines += [f"  {catalogue.recipes()[recipe]}", ""]
  rows = []
  for path in catalogue.configs(recipe):
    modes = "|".join(catalogue.modes(catalogue.ROOT / path))
    rows.append((f"{path}[:{modes}]" if modes else str(path), path))
  width = max((len(name) for name, _ in rows), default=0)
  lines += [f"  {name:{width}}  {catalogue.summary(catalogue.ROOT / path)}" for name, path in rows]
  return "\n".join(lines)


def more() -> str:
  """Returns notes on the files of all recipes, and the commands that read runs and tables."""
  width = max(map(len, _COMMANDS))
  commands = [f"python -m {name:{width}}  {about}" for name, about in _COMMANDS.items()]
  return "\n".join([_MORE.format(root=catalogue.ROOT), *commands])


def main(argv: Sequence[str]) -> None:
  parser, known = argparse.ArgumentParser(f"python -m {__package__}"), list(catalogue.recipes())
  parser.add_argument("recipe", nargs="?", choices=known, help="one of them; default: all")
  recipe = parser.parse_args(argv).recipe
  print(listing(recipe) if recipe else "\n\n".join([*map(listing, known), more()]))


if __name__ == "__main__":
  main(sys.argv[1:])
