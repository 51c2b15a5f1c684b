"""Lists what there is to run: the recipes, the configs that each of them trains, and commands."""

from . import catalogue

_MORE = """\
These files are in {root}
and the head of each says what it reproduces, what it costs, what it reached and by which command;
CONFIG may be a file of your own as well. [:smoke] is a mode: configs/dlrm/synthetic.py:smoke is
the same code in seconds. Without --config a recipe trains on its synthetic.py, which downloads
nothing. Any setting can be given: --config.batch_size=4096.

python -m {here}.minimal                        columns to a tested model in one file, to copy
python -m {here}.describe FILE                  your own table, and a config that trains on it
python -m {here}.baselines runs/dlrm            baselines of a run whose data are not small
python -m {here}.evaluate runs/dlrm             the metrics of a run, or on other --files
python -m {here}.export runs/mine --out=served  a run on a table, to answer raw rows
python -m {here}.predict served < rows.csv      scores or recommendations for raw rows
python -m {here}.report runs/dlrm               the metrics of finished runs and their baselines
python -m embed check                            lookups and optimizers of this installation
"""


def main() -> None:
  for recipe, about in catalogue.recipes().items():
    print(f"python -m {__package__}.{recipe} --config=CONFIG --workdir=runs/{recipe}\n  {about}\n")
    for path in catalogue.configs(recipe):
      modes = "|".join(catalogue.modes(catalogue.ROOT / path))
      name = f"{path}[:{modes}]" if modes else str(path)
      print(f"  {name:48}  {catalogue.summary(catalogue.ROOT / path)}")
    print()
  print(_MORE.format(root=catalogue.ROOT, here=__package__), end="")


if __name__ == "__main__":
  main()
