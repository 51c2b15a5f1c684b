"""Lists what there is to run: the recipes, and the configs that each of them trains."""

import argparse
import difflib
import sys
from collections.abc import Sequence

from . import catalogue

_MORE = """\
[:smoke] is a mode: --config=configs/dlrm/synthetic.py:smoke is the same code in seconds. Without
--config a recipe trains on its synthetic.py, which downloads nothing. The head of a config's file
says what it reproduces, what it costs, what it reached and by which command. Any setting can be
given: --config.batch_size=4096.

python -m recipes.report runs/dlrm                     the curves and the metrics of finished runs
python -m recipes.export runs/mine --out=served        what predictions need, of a run on a table
python -m recipes.predict served < rows.csv > out.csv  scores or recommendations for rows
python -m embed inspect runs/dlrm                      the tables in a run's checkpoint
python -m embed check                                  lookups, gradients, optimizers as installed
"""


def listing(recipe: str) -> str:
  """Returns the recipe's command and a line for each of its configs."""
  lines = [f"python -m recipes.{recipe} --config=CONFIG --workdir=runs/{recipe}"]
  lines += [f"  {catalogue.recipes()[recipe]}", ""]
  rows = []
  for path in catalogue.configs(recipe):
    modes = "|".join(catalogue.modes(catalogue.ROOT / path))
    rows.append((f"{path}[:{modes}]" if modes else str(path), path))
  width = max((len(name) for name, _ in rows), default=0)
  lines += [f"  {name:{width}}  {catalogue.summary(catalogue.ROOT / path)}" for name, path in rows]
  return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
  parser = argparse.ArgumentParser(f"python -m {__package__}", description=__doc__)
  parser.add_argument("recipe", nargs="?", help="one of them; default: all")
  wanted, known = parser.parse_args(argv).recipe, list(catalogue.recipes())
  if wanted is None:
    print("\n\n".join([*map(listing, known), _MORE]), end="")
  elif wanted in known:
    print(listing(wanted))
  else:
    close = difflib.get_close_matches(wanted, known, 1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}."
    parser.exit(2, f"error: there is no recipe {wanted!r}: {hint}\n")


if __name__ == "__main__":
  main(sys.argv[1:])
