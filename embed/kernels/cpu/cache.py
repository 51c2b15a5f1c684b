"""Machine code on disk: one file for each compiled function, in a folder that is the user's alone.

A file holds what Numba pickles, so whoever can write it runs code in this process. Files are read
and written by way of open folders, from the root down, each of which was checked: it belongs to
this user or to root, and nobody else can write there or, in a sticky folder such as `/tmp`, replace
the next one. Numba's own cache checks nothing, follows `NUMBA_CACHE_DIR`, and fails at cut files.

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

# Linux can open a folder that may be passed through but not listed.
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", os.O_RDONLY)
_LINKS = 40  # followed in a path, at most
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
  with _folder() as folder:
    try:
      file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
      return b""
    with os.fdopen(file, "rb") as opened:
      info = os.fstat(file)
      if not stat.S_ISREG(info.st_mode):
        raise PermissionError(f"{name} is not a regular file")
      _check(info, name, is_own=True)
      return opened.read()


def _write(name: str, data: bytes) -> None:
  """Writes a file whole or not at all."""
  with _folder() as folder:
    new = f"{name}.{uuid.uuid4().hex}"
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    try:
      with os.fdopen(file, "wb") as opened:
        os.fchmod(file, 0o600)  # whatever the umask
        opened.write(data)
      os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
      os.unlink(new, dir_fd=folder)
      raise


@contextlib.contextmanager
def _folder() -> Iterator[int]:
  """The descriptor of the cache's folder, which is made where there is none."""
  root = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
  if not os.path.isabs(root):
    raise NotADirectoryError(f"{root} is no absolute path")
  folder = _enter(os.path.join(root, "sparse_embed", "cpu"))
  try:
    yield folder
  finally:
    os.close(folder)


def _enter(path: str) -> int:
  """Opens a folder by way of its parents; raises OSError if another user could replace one."""
  parts, links, seen = [*reversed(pathlib.Path(path).parts)], 0, "/"
  at = os.open(parts.pop(), _FOLDER)
  try:
    _check(os.fstat(at), seen)
    while parts:
      part = parts.pop()
      seen = os.path.join(seen, part)
      info = _made(part, at)
      if stat.S_ISLNK(info.st_mode):
        _check(info, seen)
        links += 1
        if links > _LINKS:
          raise OSError(f"{path} has too many links")
        parts += reversed(pathlib.Path(os.readlink(part, dir_fd=at)).parts)
      else:
        inner = os.open(part, _FOLDER, dir_fd=at)
        os.close(at)
        at = inner
        _check(os.fstat(at), seen, is_own=not parts)
    return at
  except BaseException:
    os.close(at)
    raise


def _made(folder: str, at: int) -> os.stat_result:
  """The status of a folder, or of a link to one; makes it where there is none."""
  status = functools.partial(os.stat, folder, dir_fd=at, follow_symlinks=False)
  try:
    return status()
  except FileNotFoundError:
    with contextlib.suppress(FileExistsError):  # another process was faster
      os.mkdir(folder, 0o700, dir_fd=at)
      os.chmod(folder, 0o700, dir_fd=at)  # whatever the umask
    return status()


def _check(info: os.stat_result, path: str, is_own: bool = False) -> None:
  """Raises PermissionError for what another user could change, or replace what is in it.

  Args:
    info: of a file, a folder or a link.
    path: for the error.
    is_own: whether root is another user too, and a sticky folder is not enough.
  """
  if info.st_uid != os.geteuid() and (is_own or info.st_uid != 0):
    raise PermissionError(f"{path} belongs to another user")
  is_sticky = bool(info.st_mode & stat.S_ISVTX) and not is_own
  can_write = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
  if can_write and not is_sticky and not stat.S_ISLNK(info.st_mode):
    raise PermissionError(f"other users can write to {path}")
