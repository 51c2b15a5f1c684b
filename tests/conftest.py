"""Eight CPU devices for every test, set before jax is imported, and fixtures that set up JAX."""

import os

# A GPU changes rounding and start-up time; ask for one with JAX_PLATFORMS=cuda.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()

# Both formulations mean the same; tests of the compiled kernels ask for them, see `kernels`.
os.environ.setdefault("SPARSE_EMBED_KERNELS", "0")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

if os.environ.get("SPARSE_EMBED_PACKED") == "1":  # as on TPUs: parts of lines are read and written
  from embed.engine import rows as rows_lib

  rows_lib.has_lines = lambda device_kind: True

# deadline=None: the first example of a shape compiles, which takes longer than any deadline.
_PROFILE = {
  "deadline": None,
  "suppress_health_check": [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
}
hypothesis.settings.register_profile("local", max_examples=15, **_PROFILE)
hypothesis.settings.register_profile(
  "ci", max_examples=15, derandomize=True, database=None, print_blob=True, **_PROFILE
)
hypothesis.settings.register_profile("thorough", max_examples=500, **_PROFILE)
hypothesis.settings.load_profile(
  os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "local")
)


@pytest.fixture(scope="session", autouse=True)
def compile_once(tmp_path_factory):
  """Keeps compiled programs in a folder, where half of a run's programs are found again.

  Every test makes its own functions, and code outside jit makes new ones wherever it branches or
  loops. The folder is new in every run and of one process alone, since JAX does not write its files
  in one piece. What is read back has the text, the memory and the aliases of what was compiled.
  """
  jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


@pytest.fixture(scope="session", autouse=True)
def on_sparse_cores():
  """With the environment variable for SparseCores, the CPU is a chip that has them, emulated."""
  if os.environ.get("SPARSE_EMBED_SPARSE_CORES") != "1":
    yield
    return
  from sparse_cores import emulated

  from embed.kernels import sparse_core

  sparse_core.KINDS = (*sparse_core.KINDS, "cpu")
  assert sparse_core.unsupported_reason("cpu") is None
  with emulated():
    yield


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
  """XLA:CPU maps each program's code: a whole run's would exceed what Linux maps for a process.

  That is 65,530 mappings (`vm.max_map_count`), past which the compiler crashes.
  """
  yield
  jax.clear_caches()


@pytest.fixture(scope="module")
def strict():
  """A user may run with these settings on; silent broadcasting and promotion become errors."""
  with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
    yield


@pytest.fixture
def kernels(monkeypatch):
  """Programs that are traced in the test take the compiled kernels of the CPU."""
  pytest.importorskip("numba", reason="the extra `cpu` is not installed")
  monkeypatch.setenv("SPARSE_EMBED_KERNELS", "1")
  jax.clear_caches()
  yield
  jax.clear_caches()
