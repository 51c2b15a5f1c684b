"""Command line of the recipe; `--helpfull` lists the flags."""

from .. import main

if __name__ == "__main__":
  main.program(main.train, recipe="dlrm")()
