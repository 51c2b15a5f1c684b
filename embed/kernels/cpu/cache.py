"""Machine code on disk: one file for each compiled function, in a folder that is the user's alone.

A file holds what Numba pickles, so whoever can write it runs code in this process. Hence each
folder of its path, from the root down and without links, is checked: it belongs to this user or to
root, and nobody else can write there or, in a sticky folder such as `/tmp`, replace the next one.
Numba's own cache checks nothing, follows `NUMBA_CACHE_DIR`, and fails at cut files.

Without such a folder, or where files cannot be written, each process compiles in memory.
"""

import contextlib
import functools
import hashlib
import os
import pathlib
import pickle
import stat
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import llvmlite
from numba.core import sigutils
from numba.core.caching import CompileResultCacheImpl
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target
from numba.core.serialize import dumps

_DIGEST_BYTES = 32
_reasons: list[str] = []  # why there is no cache; the first one was in a warning


def digest(*texts: str) -> str:
  """A short name for texts."""
  return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:20]


def compiled(signature: Any) -> Callable[[Callable[..., Any]], CFunc]:
  """Like `numba.cfunc`, with machine code from this cache.

  The name of the function's module has to change with all that the function is made of.
  """
  arguments, result = sigutils.normalize_signature(signature)

  def compile_function(function: Callable[..., Any]) -> CFunc:
    made = _Function(function, sig=(arguments, result), locals={}, options={})
    made.compile()
    return made

  return compile_function


@functools.cache
def _machine() -> str:
  """A digest of the processor and of the versions that machine code depends on."""
  codegen = cpu_target.target_context.codegen()
  versions = llvmlite.__version__, str(sys.implementation.cache_tag)
  return digest(*map(str, codegen.magic_tuple()), *versions)


class _Function(CFunc):
  """A compiled function whose cache is a file."""

  def __init__(self, function: Callable[..., Any], **settings: Any):
    super().__init__(function, **settings)
    self._cache = _File(f"{function.__module__}_{function.__name__}_{_machine()}")


class _File(CompileResultCacheImpl):
  """The cache of one function, as Numba asks for it."""

  def __init__(self, name: str):
    self.name = name

  def load_overload(self, sig: Any, target_context: Any) -> CompileResult | None:
    with _or_without():
      data = _read(self.name)
      code = data[_DIGEST_BYTES:]
      if hashlib.sha256(code).digest() == data[:_DIGEST_BYTES]:
        target_context.refresh()
        return self.rebuild(target_context, pickle.loads(code))
    return None

  def save_overload(self, sig: Any, data: CompileResult) -> None:
    with _or_without():
      code = dumps(self.reduce(data))
      _write(self.name, hashlib.sha256(code).digest() + code)


@contextlib.contextmanager
def _or_without() -> Iterator[None]:
  """Goes on without the cache if the system, or a check, does not allow it; warns once."""
  try:
    yield
  except OSError as error:
    _reasons.append(str(error))
    if len(_reasons) == 1:
      warnings.warn(
        f"Compiled kernels are not kept for other processes, each of which takes seconds to "
        f"compile them again: {error}. Set XDG_CACHE_HOME to a folder that only you can write to.",
        stacklevel=2,
      )


def _read(name: str) -> bytes:
  """What is in a file; nothing where there is none."""
  path = _folder() / name
  try:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
  except FileNotFoundError:
    return b""
  with os.fdopen(file, "rb") as opened:
    info = os.fstat(file)
    if not stat.S_ISREG(info.st_mode):
      raise PermissionError(f"{path} is not a regular file")
    _check(info, path, is_own=True)
    return opened.read()


def _write(name: str, data: bytes) -> None:
  """Writes a file whole or not at all."""
  path = _folder() / name
  new = path.with_name(f"{name}.{uuid.uuid4().hex}")
  file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
  try:
    with os.fdopen(file, "wb") as opened:
      os.fchmod(file, 0o600)  # whatever the umask
      opened.write(data)
    os.replace(new, path)
  except BaseException:
    new.unlink()
    raise


def _folder() -> pathlib.Path:
  """The cache's folder, without links, made where there is none; raises OSError if it is not safe.

  A parent that passed its check keeps the next folder as it is, so that nothing can be replaced
  between the checks and the use.
  """
  root = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
  if not os.path.isabs(root):
    raise NotADirectoryError(f"{root} is no absolute path")
  path = pathlib.Path(os.path.realpath(os.path.join(root, "sparse_embed", "cpu")))
  for folder in (*reversed(path.parents), path):
    try:
      info = folder.lstat()
    except FileNotFoundError:
      with contextlib.suppress(FileExistsError):  # another process was faster
        folder.mkdir(0o700)
        folder.chmod(0o700)  # whatever the umask
      info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode):
      raise NotADirectoryError(f"{folder} is not a folder")
    _check(info, folder, is_own=folder == path)
  return path


def _check(info: os.stat_result, path: pathlib.Path, is_own: bool) -> None:
  """Raises PermissionError for what another user could change, or replace what is in it.

  Args:
    info: of a file or a folder.
    path: for the error.
    is_own: whether root is another user too, and a sticky folder is not enough.
  """
  if info.st_uid != os.geteuid() and (is_own or info.st_uid != 0):
    raise PermissionError(f"{path} belongs to another user")
  is_sticky = bool(info.st_mode & stat.S_ISVTX) and not is_own
  if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
    raise PermissionError(f"other users can write to {path}")
