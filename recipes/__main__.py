"""Lists what there is to run: the recipes, the configs that each of them trains, and commands.

It reads them off the files without importing any, so that the list is there at once, and on a
machine where nothing is installed.
"""

import ast
from pathlib import Path

# The folder of `recipes` and `configs`: of a checkout, or of `embed` in an installation.
ROOT = Path(__file__).resolve().parents[1]

_MORE = """\
These files are in {root}
and the head of each says what it reproduces, what it costs, what it reached and by which command;
CONFIG may be a file of your own as well. [:smoke] is a mode: configs/dlrm/synthetic.py:smoke is
the same code in seconds. Without --config a recipe trains on its synthetic.py, which downloads
nothing. Any setting can be given: --config.batch_size=4096.

python -m {here}.describe FILE                  your own table, and a config that trains on it
python -m {here}.baselines runs/dlrm            baselines of a run whose data are not small
python -m {here}.evaluate runs/mine --files=F   the metrics of a run of dlrm on other files
python -m {here}.export runs/mine --out=served  a run on a table, to answer raw rows
python -m {here}.predict served < rows.csv      scores or recommendations for raw rows
python -m {here}.report runs/dlrm               the metrics of finished runs and their baselines
python -m embed check                            lookups and optimizers of this installation
"""


def summary(path: Path) -> str:
  """Returns the first line of a Python file's docstring."""
  return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def modes(path: Path) -> list[str]:
  """Returns the modes of a config: what its `get_config(mode)` compares the mode with."""
  compared = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name) and node.left.id == "mode":
      for known in ast.walk(node.comparators[0]):
        if isinstance(known, ast.Constant) and isinstance(known.value, str) and known.value:
          compared.add(known.value)
  return sorted(compared)


def main() -> None:
  for folder in sorted(path.parent for path in Path(__file__).parent.glob("*/train.py")):
    recipe, about = folder.name, summary(folder / "__init__.py")
    print(f"python -m {__package__}.{recipe} --config=CONFIG --workdir=runs/{recipe}\n  {about}\n")
    for path in sorted((ROOT / "configs" / recipe).glob("*.py")):
      known = "|".join(modes(path))
      name = f"{path.relative_to(ROOT)}" + f"[:{known}]" * bool(known)
      print(f"  {name:48}  {summary(path)}")
    print()
  print(_MORE.format(root=ROOT, here=__package__), end="")


if __name__ == "__main__":
  main()
