"""The benchmark of a step on a GPU, run on CPU with little."""

import argparse
import json

import jax
import pytest
from pages import ROOT


@pytest.fixture
def step(monkeypatch):
  jax.devices()  # the CPU, however the program sets JAX up
  monkeypatch.syspath_prepend(ROOT / "benchmarks")
  import step

  platforms = jax.config.jax_platforms
  monkeypatch.setattr(step, "TINY", [(60, 4, 32, 8)])
  monkeypatch.setattr(step, "OPTIMIZERS", ["sgd"])
  yield step
  jax.config.update("jax_platforms", platforms)


def test_a_gpu_that_is_not_there(step):
  with pytest.raises(SystemExit, match="found no GPU, but cpu"):
    step.on_gpu(argparse.Namespace(tiny=False, json=None))


@pytest.mark.ci
@pytest.mark.parametrize("sign", [1, -1])
def test_contenders_are_timed_if_their_tables_are_equal(step, monkeypatch, tmp_path, sign):
  alone = step.ON_GPUS["plain JAX"]
  other = lambda problem, name: alone(problem._replace(grads=sign * problem.grads), name)
  monkeypatch.setitem(step.ON_GPUS, "plain JAX", other)
  path = tmp_path / "step.json"
  assert step.on_gpu(argparse.Namespace(tiny=True, json=path)) == (sign != 1)
  (point,) = json.loads(path.read_text())["points"]
  assert point["results"]["lookup"]["plain JAX"]["each_ms"] > 0
  if sign == 1:
    assert all(point["results"]["sgd"][label]["in_a_row_ms"] > 0 for label in ("ours", "plain JAX"))
  else:
    assert "plain JAX differs" in point["results"]["sgd"]["failed"]
