"""When kernels are taken, and how often they are compiled."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest
from suites import full_unless

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


HEADER = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
FIELD = "_XLA_FFI_API_STRUCT_FIELD(XLA_FFI_{});"
HEADERS = {
  "missing": None,
  "empty": "",
  "cut": "#define XLA_FFI_API_MAJOR 0",
  "a version that XLA refuses": re.sub(r"(define XLA_FFI_API_MINOR) \d+", r"\1 99", HEADER),
  "one function more": HEADER.replace(
    FIELD.format("Error_Create"), f"{FIELD.format('New')}\n  {FIELD.format('Error_Create')}"
  ),
}


@pytest.mark.parametrize(
  "header", full_unless([*HEADERS, "no folder"], lambda header: header == "no folder")
)
def test_a_jax_without_the_header_runs_without_kernels(tmp_path, header):
  folder = tmp_path / "xla" / "ffi" / "api"
  folder.mkdir(parents=True)
  if HEADERS.get(header) is not None:
    (folder / "c_api.h").write_text(HEADERS[header])
  where = "1 / 0" if header == "no folder" else repr(str(tmp_path))
  before = f"import jax\njax.ffi.include_dir = lambda: {where}\n"
  on, errors = run(False, tmp_path / "cache", before, SPARSE_EMBED_KERNELS="1")
  assert on == "False"
  assert errors.count("they do not know JAX") == 1


@pytest.mark.weekly
def test_several_threads_build_the_same_kernels(tmp_path):
  """Eight of them, in a fresh process."""
  program = """
import threading
import jax, numpy as np, optax
from flax import nnx
import embed

barrier, steps = threading.Barrier(8), []

def step(i):
  table = embed.TableConfig(9, 4, optimizer=embed.adagrad(), name="t")
  layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  optimizer, ids = embed.Optimizer(layer, optax.identity()), embed.Padded(np.array([[1, 2]]))
  barrier.wait()
  _, grads = embed.value_and_grad(lambda layer: layer(ids).sum())(layer)
  optimizer.update(layer, grads)
  steps.append(np.asarray(layer.tables["t"]))

threads = [threading.Thread(target=step, args=(i,)) for i in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(steps) == 8
for rows in steps: np.testing.assert_array_equal(rows, steps[0])
"""
  run(False, tmp_path, program, SPARSE_EMBED_KERNELS="1")


@pytest.mark.weekly
@pytest.mark.usefixtures("kernels")
def test_machine_code_is_kept(tmp_path):
  """A second process compiles nothing: it writes no file."""
  assert run(False, tmp_path, SPARSE_EMBED_KERNELS="1") == ("True", "")
  state = lambda: {x: x.stat().st_mtime_ns for x in tmp_path.rglob("*") if x.is_file()}
  files = state()
  assert files
  assert run(False, tmp_path, SPARSE_EMBED_KERNELS="1") == ("True", "")
  assert state() == files
