"""Kernels to machine code: compiled once for a machine, kept on disk, and registered with XLA.

A kernel is a file of the folder `sources`. It becomes a module whose name is a digest of its text,
of the constants that were put into it, and of this package: `cache` keeps machine code under that
name, so no stale code is ever loaded.
"""

import functools
import pathlib
import re
import sys
import threading
from collections.abc import Callable
from concurrent import futures
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
import numba
import numpy as np

from embed.kernels.cpu import frame
from embed.kernels.cpu.cache import digest

if TYPE_CHECKING:  # a lookup needs no equation
  from embed.kernels.cpu.equations import Program


_FOLDER = pathlib.Path(__file__).parent
_LOCK = threading.RLock()


def _once(function: Callable[..., Any]) -> Any:
  """`functools.cache` for threads: of several that call at once, one runs the function."""
  kept = functools.cache(function)

  @functools.wraps(kept)
  def locked(*args: Any, **kwargs: Any) -> Any:
    with _LOCK:
      return kept(*args, **kwargs)

  locked.cache_clear = kept.cache_clear  # type: ignore[attr-defined]
  return locked


@functools.cache
def _sources() -> str:
  """A digest of all that a kernel is made of but its own text."""
  texts = [path.read_text() for path in sorted(_FOLDER.glob("*.py"))]
  return digest(numba.__version__, str(frame.LAYOUT), *texts)


def _load(name: str, text: str) -> ModuleType:
  """The module of a text."""
  module = ModuleType(name)
  sys.modules[name] = module  # where cached code looks for it
  exec(compile(text, f"<{name}>", "exec"), vars(module))
  return module


@_once
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
  name = f"sparse_embed_{kernel}_{digest(_sources(), text)}"
  text = re.sub(r'"sparse_embed_(task|equation|update)"', rf'"{name}_\1"', text)
  return name, _load(name, text)


def _registered(name: str, module: ModuleType) -> str:
  jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(module.handler.ctypes), platform="cpu")
  return name


@_once
def kernel(name: str, **constants: str) -> str:
  """The name by which XLA finds a kernel; the arguments are those of `_compiled`."""
  return _registered(*_compiled(name, **constants))


def row_step(program: "Program") -> str:
  """The name by which XLA finds the kernel of updates by an optimizer's equation."""
  common, _ = _compiled("row_step")
  text = repr(program)
  for kind in ("Program", "Operation"):
    text = text.replace(f"{kind}(", f"equations.{kind}(")
  return kernel("row_equation", PROGRAM=text, UPDATE=f'"{common}_update"')


@_once
def is_interface_known() -> bool:
  """Whether XLA passes what `frame` reads: compares versions first, then asks a call."""
  if frame.VERSION != frame.MAJOR:
    return False
  answer = jax.ShapeDtypeStruct((1,), np.int32)
  ask = jax.ffi.ffi_call(kernel("probe"), answer, input_output_aliases={0: 0})
  # In a thread of its own: jax.set_mesh with devices that are not attached holds in this one.
  with futures.ThreadPoolExecutor(1) as thread:
    answered = thread.submit(lambda: int(jax.jit(ask)(np.zeros(1, np.int32))[0]))
  return answered.result() == 1
