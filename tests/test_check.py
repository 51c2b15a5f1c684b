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
  monkeypatch.setattr(check, "places", lambda: {"one device": check.Place()})
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
  assert {case.optimizer for case in cases} == trained
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
  right = embed.adagrad
  wrong = lambda *args, **kwargs: right(*args, initial_accumulator_value=0.1001, **kwargs)
  monkeypatch.setitem(optimizers.OPTIMIZERS, "adagrad", wrong)
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
  table, looked_up = np.array([[2.0], [1.0]]), np.array([True, False])
  rows = SimpleNamespace(ids=np.array([0, check.ROWS]), values=np.ones((2, 1)))

  def errors(activations=3.0, gradients=None, touched=(0,), **variables):
    truth = {"parameters": table, "momenta": table}
    found = ([[3.0]], rows, {"parameters": table, "momenta": table})
    gradients = np.ones((2, 1)) if gradients is None else gradients
    at, expected = np.array(touched), np.array([[activations]])
    return check.compare(found, expected, gradients, at, truth | variables, looked_up)

  assert set(errors().values()) == {0.0}
  assert errors(activations=4.0)["activations"] == 0.25
  assert errors(gradients=np.full((2, 1), 2.0))["row gradients"] == 0.5
  assert errors(momenta=2 * table)["momenta"] == 0.5
  for touched in ((), (0, 1)):
    assert errors(touched=touched) == {"other rows have gradients": math.inf}
  assert errors(linears=table) == {"its slots are ['momenta']": math.inf}
  moved = np.array([[2.0], [3.0]])
  assert errors(parameters=moved) == {"a row moved that was not looked up": math.inf}


def test_an_error_is_a_failure_and_the_rest_goes_on(monkeypatch):
  def broken(place):
    if place.mesh is None:
      raise NotImplementedError("no such instruction\nand more")
    return iter([check.Result("sgd", "one device", 0.25, 1.0)])

  monkeypatch.setattr(check, "places", lambda: {"a": check.Place(), "b": check.Place("mesh")})
  monkeypatch.setattr(check, "check", broken)
  failed, rest = check.run()
  assert (failed.where, failed.ok, rest.where) == ("a", False, "b")
  assert failed.note == "NotImplementedError: no such instruction"
