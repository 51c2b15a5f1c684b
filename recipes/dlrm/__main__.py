"""Command line of the recipe; `--helpfull` lists the flags."""

from .. import aot_flags

_program = aot_flags.program("dlrm")

if __name__ == "__main__":
  _program()
