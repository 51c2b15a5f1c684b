"""When kernels are taken."""

import os
import pathlib
import subprocess
import sys

import pytest

from embed.kernels import cpu as cpu_kernels

pytestmark = pytest.mark.ci

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


def run(hidden, cache, before="", **variables):
  environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache)} | variables
  done = subprocess.run(
    [sys.executable, "-c", before + PROGRAM.format(hidden=hidden)],
    env=environment, capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  return done.stdout.split()[0], done.stderr


def test_without_the_extra_nothing_is_compiled(tmp_path):
  assert run(True, tmp_path, SPARSE_EMBED_KERNELS="1") == ("False", "")
  assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("kernels")
def test_the_interface_of_this_jax_is_known():
  from embed.kernels.cpu import build

  assert cpu_kernels.is_on()
  assert build.is_interface_known()


def test_a_jax_without_the_header_runs_without_kernels(tmp_path):
  before = f"import jax\njax.ffi.include_dir = lambda: {str(tmp_path)!r}\n"
  on, errors = run(False, tmp_path / "cache", before, SPARSE_EMBED_KERNELS="1")
  assert on == "False"
  assert errors.count("they do not know JAX") == 1
