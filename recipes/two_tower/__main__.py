"""Command line of the recipe; `--helpfull` lists the flags."""

from absl import app

from recipes import main
from recipes.two_tower import train

_main = main.program("two_tower", train.run)

if __name__ == "__main__":
  app.run(_main)
