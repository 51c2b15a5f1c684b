"""Where machine code is kept, and when kernels are taken."""

import os
import pathlib
import subprocess
import sys

import pytest

from embed.kernels import cpu as cpu_kernels

ROOT = pathlib.Path(__file__).parents[3]
PROGRAM = """
import sys
if {hidden}:
  sys.modules["numba"] = None
import importlib.util
spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if {hidden} and name == "numba" else spec(name)
import jax.numpy as jnp
from embed.engine.bags import Bags
from embed.kernels.cpu import gather_and_combine, is_on
print(is_on(), gather_and_combine(jnp.ones((3, 2)), Bags(jnp.zeros((2, 2), int))))
"""


def run(hidden, cache, **variables):
  environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache)} | variables
  done = subprocess.run(
    [sys.executable, "-c", PROGRAM.format(hidden=hidden)],
    env=environment, capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  return done.stdout.split()[0], done.stderr


def test_without_the_extra_nothing_is_compiled(tmp_path):
  assert run(True, tmp_path, SPARSE_EMBED_KERNELS="1") == ("False", "")
  assert not list(tmp_path.iterdir())


def test_the_switch():
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv(cpu_kernels.SWITCH, "0")
    assert not cpu_kernels.is_on()


@pytest.mark.usefixtures("kernels")
def test_the_interface_of_this_jax_is_known():
  from embed.kernels.cpu import build

  assert cpu_kernels.is_on()
  assert build.is_interface_known()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
  ("name", "value", "message"),
  [
    ("embed.kernels.cpu.frame.VERSION", 1, "do not know JAX"),
    ("numba.config.DISABLE_JIT", 1, "NUMBA_DISABLE_JIT is set"),
    ("numba.__version__", "0.61.2", "Numba 0.61.2 is too old"),
  ],
  ids=["interface", "no compiler", "an old Numba"],
)
def test_what_does_not_fit_is_said_once(monkeypatch, name, value, message):
  from embed.kernels.cpu import build

  forget = (cpu_kernels._is_supported.cache_clear, build.is_interface_known.cache_clear)
  monkeypatch.setattr(name, value)
  for clear in forget:
    clear()
  with pytest.warns(UserWarning, match=message):
    assert not cpu_kernels.is_on()
  assert not cpu_kernels.is_on()
  for clear in forget:
    clear()


@pytest.mark.usefixtures("kernels")
def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
  from embed.kernels.cpu import build

  (tmp_path / "file").write_text("")
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
  assert build.cache_folder().is_dir()
  assert tmp_path not in build.cache_folder().parents


@pytest.mark.full
@pytest.mark.usefixtures("kernels")
def test_machine_code_is_kept(tmp_path):
  """A second process compiles nothing: it writes no file."""
  assert run(False, tmp_path, SPARSE_EMBED_KERNELS="1") == ("True", "")
  files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
  assert [path for path in files if path.suffix == ".nbc"]
  assert run(False, tmp_path, SPARSE_EMBED_KERNELS="1") == ("True", "")
  again = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
  assert {p for p in again if p.suffix != ".pyc"} == {p for p in files if p.suffix != ".pyc"}
  assert all(again[path] == files[path] for path in files if path.suffix == ".nbc")
