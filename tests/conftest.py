"""Eight CPU devices for every test, set before jax is imported, and fixtures that set up JAX."""

import os

# A GPU changes rounding and start-up time; ask for one with JAX_PLATFORMS=cuda.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()

import contextlib  # noqa: E402
import shutil  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
import ways  # noqa: E402

HERE = Path(__file__).parent
COMPILED = Path(os.environ.get("SPARSE_EMBED_COMPILED", HERE.parent / ".compiled"))
PROGRAMS_OF_A_TEST, PROGRAMS_OF_A_FILE = 15, 60

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
def compiled_before():
  """Finds programs of earlier runs in the folder COMPILED, and leaves new ones there.

  Each process has a folder of its own, of hard links: JAX writes its files in pieces, and its lock
  (`jax_compilation_cache_max_size`) reads the age of every program whenever it adds one. What is
  read back has the text, the memory and the aliases of what was compiled.
  """
  shared = COMPILED / "programs"
  shared.mkdir(parents=True, exist_ok=True)
  own = Path(tempfile.mkdtemp(dir=COMPILED))
  _link(shared, own)
  jax.config.update("jax_compilation_cache_dir", str(own))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
  # XLA's own caches put the folder in the key of every program, which no other run would find.
  jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
  yield
  _link(own, shared)
  shutil.rmtree(own)


def _link(source, folder):
  """Links the files of one folder in another one, where they are whole from the beginning."""
  for path in source.iterdir():
    with contextlib.suppress(FileExistsError):
      os.link(path, folder / path.name)


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
  """XLA:CPU maps each program's code: a whole run's may exceed what Linux maps for a process.

  That is 65,530 mappings (`vm.max_map_count`), past which the compiler crashes.
  """
  yield
  maps = Path("/proc/self/maps")
  if maps.exists() and maps.read_bytes().count(b"\n") > 40_000:
    jax.clear_caches()


class Programs:
  """Counts the programs that are compiled or found, and fails a quick test or file with too many.

  What fixtures compile does not count. A test marked `programs(number, reason)` has a budget of its
  own, and does not count for its file.
  """

  def __init__(self):
    self.count = 0
    self.files = {}
    jax.monitoring.register_event_duration_secs_listener(self.listen)

  def listen(self, event, duration, **kwargs):
    self.count += event == "/jax/core/compile/backend_compile_duration"

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_call(self, item):
    before = self.count
    outcome = yield
    if item.get_closest_marker("ci") or item.get_closest_marker("weekly"):
      return outcome
    own = item.get_closest_marker("programs")
    compiled = self.count - before
    limit = own.args[0] if own else PROGRAMS_OF_A_TEST
    assert compiled <= limit, f"this quick test compiles {compiled} programs, its budget is {limit}"
    if own is None:
      total = self.files[item.path] = self.files.get(item.path, 0) + compiled
      assert total <= PROGRAMS_OF_A_FILE, f"the quick tests of this file compile {total} programs"
    return outcome


def pytest_configure(config):
  config.pluginmanager.register(Programs(), "programs")
  is_first = "PYTEST_XDIST_WORKER" not in os.environ
  if is_first and sum(path.stat().st_size for path in COMPILED.glob("*/*")) > 2 << 30:
    shutil.rmtree(COMPILED, ignore_errors=True)


def pytest_terminal_summary(terminalreporter):
  """A step of continuous integration skips no more than tests/skips.txt lists for it."""
  step = os.environ.get("CI_STEP")
  if step is None:
    return
  rows = [line.split() for line in (HERE / "skips.txt").read_text().splitlines()]
  allowed = tuple(row[1] for row in rows if row and row[0] == step)
  skipped = [report.nodeid for report in terminalreporter.stats.get("skipped", [])]
  if unexpected := [name for name in skipped if not name.startswith(allowed)]:
    terminalreporter.section("skipped, and not in tests/skips.txt")
    terminalreporter.write_line("\n".join(unexpected))
    pytest.exit("tests were skipped that run here", returncode=1)


@pytest.fixture(scope="module")
def strict():
  """A user may run with these settings on; silent broadcasting and promotion become errors."""
  with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
    yield


@pytest.fixture
def way(request):
  """A way to store and step rows: `@pytest.mark.parametrize("way", ways.EACH, indirect=True)`."""
  with ways.stored(request.param):
    yield request.param
