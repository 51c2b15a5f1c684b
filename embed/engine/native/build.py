"""Kernels to machine code: compiled once for a machine, kept on disk, and registered with XLA.

A kernel is a file of this package, whose text is written to a folder of the user under a name that
tells its content, these files included, and imported from there: Numba keeps machine code next to
the file it compiled. Another version of a kernel is another file, so no stale code is ever loaded.
"""

import functools
import hashlib
import importlib.util
import os
import pathlib
import sys
import tempfile
from types import ModuleType

import jax
import numba

from embed.engine.native import frame

_FOLDER = pathlib.Path(__file__).parent


@functools.cache
def _sources() -> str:
  """A digest of all that a kernel is made of but its own text."""
  texts = [path.read_text() for path in sorted(_FOLDER.glob("*.py"))]
  return hashlib.sha256("\0".join([numba.__version__, str(frame.LAYOUT), *texts]).encode()).hexdigest()


def cache_folder() -> pathlib.Path:
  """Where machine code is kept; a temporary folder where a user has none to write to."""
  root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  folder = pathlib.Path(root, "sparse_embed", "cpu").expanduser()
  try:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
      return folder
  except OSError:
    pass
  return _temporary_folder()


@functools.cache
def _temporary_folder() -> pathlib.Path:
  return pathlib.Path(tempfile.mkdtemp(prefix="sparse_embed_cpu_"))


def _load(name: str, text: str) -> ModuleType:
  """The module of a text, written to the cache if it is not there."""
  path = cache_folder() / f"{name}.py"
  if not path.exists() or path.read_text() != text:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
      file.write(text)
    os.replace(file.name, path)
  spec = importlib.util.spec_from_file_location(name, path)
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  spec.loader.exec_module(module)
  return module


@functools.cache
def target(kernel: str, program: str = "") -> str:
  """The name by which XLA finds a kernel: compiled and registered when it is first asked for.

  Args:
    kernel: the file that it is in.
    program: the text of the `equations.Program` that takes the place of the file's own.
  """
  text = (_FOLDER / f"{kernel}.py").read_text()
  if program:
    text = text.replace("PROGRAM = equations.SGD", f"PROGRAM = {program}")
  digest = hashlib.sha256((_sources() + text).encode()).hexdigest()[:20]
  name = f"sparse_embed_{kernel}_{digest}"
  text = text.replace('TASK = "sparse_embed_task"', f'TASK = "{name}_task"')
  module = _load(name, text)
  jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(module.handler.ctypes), platform="cpu")
  return name
