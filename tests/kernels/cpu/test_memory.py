"""Kernels touch their arrays alone: `tests/support/guarded_kernels.py` has the calls."""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("numba", reason="the extra `cpu` is not installed")

ROOT = pathlib.Path(__file__).parents[3]


@pytest.mark.parametrize(
  ("calls", "at_least"),
  [
    pytest.param("slots", 40, marks=pytest.mark.weekly),
    pytest.param("optimizers", 144, marks=pytest.mark.weekly),
    pytest.param("bfloat16", 96, marks=pytest.mark.weekly),
    pytest.param("lookups", 1700, marks=pytest.mark.weekly),
    ("misfits", 2),
  ],
)
def test_no_access_outside_of_an_array(calls, at_least):
  done = subprocess.run(
    [sys.executable, ROOT / "tests" / "support" / "guarded_kernels.py", calls],
    env=os.environ | {"PYTHONPATH": str(ROOT), "SPARSE_EMBED_KERNELS": "1"},
    capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert done.returncode == 0, (done.returncode, done.stdout[-2000:], done.stderr[-4000:])
  assert int(done.stdout.split()[-1]) >= at_least
