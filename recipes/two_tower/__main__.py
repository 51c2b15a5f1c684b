"""Command line of the recipe; `--helpfull` lists the flags."""

from .. import aot_flags

_program = aot_flags.program("two_tower")

if __name__ == "__main__":
  _program()
