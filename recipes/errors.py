"""Errors that the user can mend, and text from data for a terminal."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator


class UserError(ValueError):
  """A setting, a file or a machine has to be changed by the user; the message says how.

  The command line prints the message alone. Every other exception is a fault of the program and
  ends in its traceback.
  """


class MissingFileError(UserError, FileNotFoundError):
  """A file or a folder that a setting names does not exist."""


class DamagedFileError(UserError):
  """A file does not hold what its format or its hash promises; names the file."""


@contextlib.contextmanager
def from_settings() -> Iterator[None]:
  """Turns a ValueError of a library, which the user's settings have caused, into a UserError."""
  try:
    yield
  except UserError:
    raise
  except ValueError as error:
    raise UserError(str(error)) from error


def parser(module: str, about: str | None) -> argparse.ArgumentParser:
  """Returns the parser of the command `python -m module`, whose help shows `about` as it is."""
  formatter = argparse.RawDescriptionHelpFormatter
  return argparse.ArgumentParser(f"python -m {module}", None, about, formatter_class=formatter)


@contextlib.contextmanager
def in_one_line(parser: argparse.ArgumentParser) -> Iterator[None]:
  """Ends a command with the message of what the code within raises and the user can mend."""
  try:
    yield
  except BrokenPipeError:  # of `| head`; Python would fail once more at its exit
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  except (UserError, OSError) as error:
    parser.exit(2, terminal(f"error: {error}\n"))


def terminal(text: object) -> str:
  r"""Returns text that a terminal shows and does not obey; lines are kept.

  Control characters, and what has no shape of its own, such as marks that turn the direction of
  writing, become escapes of Python.

  >>> print(terminal("price\x1b]52;c;aGk=\x07\n1"))
  price\x1b]52;c;aGk=\x07
  1
  """
  keep = lambda char: char.isprintable() or char == "\n"
  return "".join(c if keep(c) else c.encode("unicode_escape").decode() for c in str(text))
