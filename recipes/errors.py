"""The errors that a person can mend: what is wrong, and what to do about it."""

import contextlib
import errno
from collections.abc import Iterator


class UserError(ValueError):
  """A setting, a file or a machine is not as it has to be; the message says what to change.

  The command line prints the message alone. Every other exception is a fault of the program and
  ends in its traceback.
  """


class MissingFileError(UserError, FileNotFoundError):
  """A file or a folder that a setting names does not exist."""


class DamagedFileError(UserError):
  """A file does not hold what its format or its hash promises; names the file."""


class DownloadError(UserError, OSError):
  """A server cannot be reached, or what it sends is something else."""


class DivergedError(UserError, FloatingPointError):
  """The numbers of a training are no longer finite."""


class Stopped(KeyboardInterrupt):
  """Ctrl-C in a run; the message says where it stopped and how it goes on."""


@contextlib.contextmanager
def from_settings() -> Iterator[None]:
  """Takes a ValueError of a library for one about the settings that it was called with."""
  try:
    yield
  except UserError:
    raise
  except ValueError as error:
    raise UserError(str(error)) from error


_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)


def explain(error: Exception) -> str | None:
  """Returns the line that tells a person what to do about an error, or None for a fault of ours."""
  if isinstance(error, UserError):
    return str(error)
  if not isinstance(error, OSError) or error.errno not in _FULL + _REFUSED:
    return None
  what = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
  if error.errno in _FULL:
    return f"{what}. Free some space; the same command then goes on from the last checkpoint."
  return f"{what}. --workdir and --config.cache_dir must be folders that this user can write to."
