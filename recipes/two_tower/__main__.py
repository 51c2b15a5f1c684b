"""Command line of the recipe; `--helpfull` lists the flags."""

from .. import main

_program = main.program("two_tower")

if __name__ == "__main__":
  _program()
