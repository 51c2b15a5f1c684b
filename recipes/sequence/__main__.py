"""Command line of the recipe; `--helpfull` lists the flags."""

from .. import main

_program = main.program(main.train, recipe="sequence")

if __name__ == "__main__":
  _program()
