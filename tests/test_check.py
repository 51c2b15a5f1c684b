"""The self-test passes, and does not where something is wrong."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

import embed
from embed import check, optimizers
from embed.engine.bags import Bags


@pytest.fixture
def failing(monkeypatch, capsys):
  """What two cases on one device say that fail, one of them weighted; the rest is left out."""
  monkeypatch.setattr(check, "places", lambda: {"one device": (None, "mod", check.DIM)})
  monkeypatch.setattr(check, "CASES", {name: check.CASES[name] for name in ("sgd", "adagrad")})

  def run():
    assert check.main() == 1
    return [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]

  return run


def test_an_error_is_relative_to_the_largest_value():
  assert check.relative_error([1.0, 4.0], [1.0, 4.5]) == 0.5 / 4.5
  assert check.relative_error([0.5], [0.0]) == 0.5
  assert check.relative_error(np.zeros((0, 2)), np.zeros((0, 2))) == 0
  assert check.relative_error([1.0], [1.0, 1.0]) == math.inf
  assert check.relative_error([np.nan], [1.0]) == math.inf


def test_nothing_is_left_out():
  trained = {name for name, make in optimizers.named().items() if make().equation is not None}
  cases = check.CASES.values()
  assert {case.optimizer.name for case in cases} == trained
  assert {case.combiner for case in cases} == set(embed.config.COMBINERS)
  kinds = {"padded", "ragged", "max_valency", "sparse", "dense", "sequence"}
  assert {case.kind for case in cases} == kinds
  strategies = {"one device", "8 devices, mod", "8 devices, div", "8 devices, replicated"}
  assert strategies <= set(check.places())


@pytest.mark.weekly
def test_everything_passes_here(capsys):
  assert check.main() == 0
  out = capsys.readouterr().out
  assert f"All {4 * len(check.CASES)} checks passed" in out
  assert "8 devices, replicated" in out
  assert "FAILED" not in out


@pytest.mark.ci
def test_a_wrong_optimizer_fails(failing, monkeypatch):
  wrong = embed.adagrad(check.rate, initial_accumulator_value=0.1001)
  monkeypatch.setitem(check.CASES, "adagrad", check.CASES["adagrad"]._replace(optimizer=wrong))
  line, last = failing()
  assert line.startswith("adagrad  ")
  assert check.TOLERANCE["float32"] < float(line.split()[3]) < 1e-2
  assert last.startswith("1 of 2 checks FAILED")


@pytest.mark.ci
def test_a_wrong_combiner_fails(failing, monkeypatch):
  """A mean divides by the sum of weights."""
  right = Bags.normalized
  wrong = lambda bags, combiner, size: right(bags, combiner.replace("mean", "sqrtn"), size)
  monkeypatch.setattr(Bags, "normalized", wrong)
  assert [line.split("  ")[0] for line in failing()[:-1]] == ["sgd", "adagrad"]


def test_what_is_compared():
  """Activations, rows with gradients and their values, slots by name, and rows left alone."""
  table = np.array([[2.0], [1.0]])
  grads = SimpleNamespace(ids=np.array([0, check.ROWS]), values=np.ones((2, 1)))

  def wrong(**changed):
    truth = {
      "activations": np.array([[3.0]]),
      "ids": np.array([0]),
      "row gradients": np.ones((1, 1)),
    }
    truth |= {"parameters": table, "momenta": table} | changed
    found = ([[3.0]], grads, {"parameters": table, "momenta": table})
    errors = check.compare(found, truth, untouched=np.array([False, True]))
    return {name: error for name, error in errors.items() if error}

  assert wrong() == {}
  assert wrong(activations=np.array([[4.0]])) == {"activations": 0.25}
  assert wrong(**{"row gradients": np.full((1, 1), 2.0)}) == {"row gradients": 0.5}
  assert wrong(momenta=2 * table) == {"momenta": 0.5}
  for ids in ([], [0, 1]):
    assert wrong(ids=np.array(ids)) == {"ids": math.inf}
  assert wrong(linears=table) == {"linears": math.inf}
  moved = np.array([[2.0], [1.0 - 2**-50]])
  assert wrong(parameters=moved)["rows never looked up"] == math.inf


def test_an_error_is_a_failure_and_the_rest_goes_on(monkeypatch, capsys):
  def broken(mesh, strategy, dim):
    if mesh is None:
      raise NotImplementedError("no such instruction")
    return {"sgd": (0.25, 1.0, "parameters")}

  places = {"here": (None, "mod", 16), "there": ("mesh", "mod", 16)}
  monkeypatch.setattr(check, "places", lambda: places)
  monkeypatch.setattr(check, "check", broken)
  assert check.main() == 1
  out = capsys.readouterr().out
  assert "NotImplementedError: no such instruction" in out
  passed = next(line for line in out.splitlines() if line.startswith("sgd"))
  assert passed.split() == ["sgd", "there", "2.5e-01", "ok"]
  assert "1 of 2 checks FAILED" in out
