"""Command line of the recipe; `--helpfull` lists the flags."""

from .. import main

_program = main.program(main.train, recipe="two_tower")

if __name__ == "__main__":
  _program()
