"""Commands of the library: test this installation, or inspect a checkpoint or a profile."""

import argparse
import difflib
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
  """Runs a command; returns its exit status."""
  parser = argparse.ArgumentParser("python -m embed", description=__doc__)
  commands = parser.add_subparsers(dest="command", required=True, metavar="{check,inspect}")
  commands.add_parser(
    "check",
    help="compare lookups, row gradients and optimizers with NumPy, on these devices",
    description="Compares lookups, row gradients and every optimizer with NumPy, on one device and "
    "on all local ones, and some optimizers by other shardings. Prints a line for each. Takes half "
    "a minute on one device and some minutes on many, mostly for compilation. Exits with 1 if any "
    "result differs.",
  )
  inspecting = commands.add_parser("inspect", help="print the tables of a checkpoint, or a profile")
  inspecting.add_argument(
    "path", help="a run's workdir, a folder that Orbax wrote, or the .npz of embed.profile"
  )
  inspecting.add_argument(
    "--shapes", action="store_true", help="print shapes and bytes of a checkpoint; read no array"
  )
  known = list(commands.choices)
  if argv and not argv[0].startswith("-") and argv[0] not in known:
    close = difflib.get_close_matches(argv[0], known, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {' and '.join(known)}."
    parser.error(f"unknown command {argv[0]!r}: {hint}")
  arguments = parser.parse_args(argv)
  if arguments.command == "check":
    from embed.tools import check  # Optax and Orbax are imported only by the command that uses them

    return check.main()
  from embed.tools import inspection

  return inspection.main(arguments.path, arguments.shapes)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
