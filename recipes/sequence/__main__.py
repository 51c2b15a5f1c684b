"""Command line of the recipe; `--helpfull` lists the flags."""

from absl import app

from recipes import main
from recipes.sequence import train

_main = main.program("sequence", train.run)

if __name__ == "__main__":
  app.run(_main)
