"""Eight CPU devices for every test, set before jax is imported, and fixtures that set up JAX."""

import os

# A GPU changes rounding and start-up time; ask for one with JAX_PLATFORMS=cuda.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

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


@pytest.fixture(scope="module")
def quick_to_compile():
  """For tests that mostly compile, and do not look at what LLVM makes of a loop: twice as fast."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)
