"""Kernels to machine code: compiled once for a machine, kept on disk, and registered with XLA.

A kernel is a file of the folder `sources`. Its text is written to a folder of the user, under a
name that tells its content and that of this package, and imported from there: Numba keeps machine
code next to the file that it compiled. Another version of a kernel is another file, so no stale
code is ever loaded.
"""

import functools
import hashlib
import importlib.util
import os
import pathlib
import re
import sys
import tempfile
from concurrent import futures
from types import ModuleType

import jax
import numba
import numpy as np

from embed.kernels.cpu import frame
from embed.kernels.cpu.equations import Program

_FOLDER = pathlib.Path(__file__).parent


@functools.cache
def _sources() -> str:
  """A digest of all that a kernel is made of but its own text."""
  texts = [path.read_text() for path in sorted(_FOLDER.glob("*.py"))]
  return _digest(numba.__version__, str(frame.LAYOUT), *texts)


def _digest(*texts: str) -> str:
  return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:20]


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
def _compiled(kernel: str, **constants: str) -> tuple[str, ModuleType]:
  """A kernel's own name and its module.

  Args:
    kernel: the file that it is in.
    **constants: the text of what some of the file's constants become.
  """
  text = (_FOLDER / "sources" / f"{kernel}.py").read_text()
  for constant, value in constants.items():
    line = f"{constant} = {value}".replace("\\", r"\\")
    text = re.sub(rf"^{constant} = .*$", line, text, flags=re.MULTILINE)
  name = f"sparse_embed_{kernel}_{_digest(_sources(), text)}"
  text = re.sub(r'"sparse_embed_(task|equation|update)"', rf'"{name}_\1"', text)
  return name, _load(name, text)


def _registered(name: str, module: ModuleType) -> str:
  jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(module.handler.ctypes), platform="cpu")
  return name


@functools.cache
def bag_sum() -> str:
  """The name by which XLA finds the kernel of lookups, compiled where it is not yet."""
  return _registered(*_compiled("bag_sum"))


@functools.cache
def count_beyond() -> str:
  """The name by which XLA finds the kernel that counts ids that are beyond a table."""
  return _registered(*_compiled("count_beyond"))


@functools.cache
def row_step(program: Program) -> str:
  """The name by which XLA finds the kernel of updates by an optimizer's equation."""
  common, _ = _compiled("row_step")
  text = repr(program)
  for kind in ("Program", "Operation"):
    text = text.replace(f"{kind}(", f"equations.{kind}(")
  return _registered(*_compiled("row_equation", PROGRAM=text, UPDATE=f'"{common}_update"'))


@functools.cache
def is_interface_known() -> bool:
  """Whether XLA passes what `frame` reads: compares versions first, then asks a call."""
  if frame.VERSION != frame.MAJOR:
    return False
  name = _registered(*_compiled("probe"))
  answer = jax.ShapeDtypeStruct((1,), np.int32)
  ask = jax.ffi.ffi_call(name, answer, input_output_aliases={0: 0})
  # In a thread of its own: jax.set_mesh with devices that are not attached holds in this one.
  with futures.ThreadPoolExecutor(1) as thread:
    answered = thread.submit(lambda: int(jax.jit(ask)(np.zeros(1, np.int32))[0]))
  return answered.result() == 1
