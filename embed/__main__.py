"""`python -m embed check` compares this installation with NumPy."""

import argparse

from embed import check

if __name__ == "__main__":
  parser = argparse.ArgumentParser("python -m embed", description=__doc__)
  commands = parser.add_subparsers(dest="command", required=True)
  commands.add_parser("check", help=check.main.__doc__, description=check.__doc__)
  parser.parse_args()
  raise SystemExit(check.main())
