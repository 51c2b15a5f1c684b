"""The self-test passes, and does not where something is wrong."""

import math

import numpy as np
import pytest

import embed
from embed import check, optimizers
from embed.engine.bags import Bags


@pytest.fixture
def one_device(monkeypatch):
  monkeypatch.setattr(check, "places", lambda: {"one device": check.Place()})


@pytest.fixture
def small(one_device, monkeypatch):
  """Two cases, one weighted."""
  monkeypatch.setattr(check, "CASES", {name: check.CASES[name] for name in ("sgd", "adagrad")})


def test_an_error_is_relative_to_the_largest_value():
  assert check.relative_error([1.0, 4.0], [1.0, 4.5]) == 0.5 / 4.5
  assert check.relative_error([0.5], [0.0]) == 0.5
  assert check.relative_error(np.zeros((0, 2)), np.zeros((0, 2))) == 0
  assert check.relative_error([1.0], [1.0, 1.0]) == math.inf
  assert check.relative_error([np.nan], [1.0]) == math.inf


def test_gains_and_gradients_by_hand():
  ids, weights = np.array([[3, 7, -1], [-1, -1, -1]]), np.array([[1.0, 3, 9], [1, 1, 1]])
  gains = check.gains("mean", ids, weights)
  assert gains.tolist() == [[0.25, 0.75, 0], [0, 0, 0]]
  assert check.lookup(np.arange(8.0)[:, None], ids, gains).tolist() == [[6.0], [0.0]]
  rows = check.row_gradients(ids, gains, np.array([[4.0], [5.0]]))[:, 0]
  assert {i: x for i, x in enumerate(rows.tolist()) if x} == {3: 1.0, 7: 3.0}
  np.testing.assert_allclose(check.gains("sqrtn", ids, weights)[0, :2], [1, 3] / np.sqrt(10))


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


RESULTS = [
  check.Result("sgd", "one device", 0.25, 1.0),
  check.Result("adagrad", "one device", 0.5, 0.125, "accumulators"),
]


def test_one_wrong_result_is_a_failure(monkeypatch, capsys):
  monkeypatch.setattr(check, "run", lambda: iter(RESULTS))
  assert check.main() == 1
  right, wrong, *_, last = [
    x for x in capsys.readouterr().out.splitlines() if " device " in x or "FAILED" in x
  ]
  assert right.endswith("  ok")
  assert wrong.endswith("FAILED: accumulators")
  assert "1 of 2 checks FAILED" in last


def failing(capsys):
  """What a failing check says, but for the table."""
  assert check.main() == 1
  return [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]


@pytest.mark.ci
def test_a_wrong_optimizer_fails(small, monkeypatch, capsys):
  right = embed.adagrad
  wrong = lambda *args, **kwargs: right(*args, initial_accumulator_value=0.1001, **kwargs)
  monkeypatch.setitem(optimizers.OPTIMIZERS, "adagrad", wrong)
  line, last = failing(capsys)
  assert line.startswith("adagrad  ")
  assert check.TOLERANCE["float32"] < float(line.split()[3]) < 1e-2
  assert last.startswith("1 of 2 checks FAILED")


@pytest.mark.ci
def test_a_wrong_combiner_fails(small, monkeypatch, capsys):
  """mean must divide by the sum of weights."""
  right = Bags.normalized
  wrong = lambda bags, combiner, size: right(bags, combiner.replace("mean", "sqrtn"), size)
  monkeypatch.setattr(Bags, "normalized", wrong)
  assert [line.split("  ")[0] for line in failing(capsys)[:-1]] == ["sgd", "adagrad"]


def test_what_is_compared():
  """Activations, rows with gradients and their values, slots by name, and rows left alone."""
  table, looked_up = np.array([[2.0], [1.0]]), np.array([True, False])
  rows = embed.RowGrads(np.array([0, check.ROWS]), np.ones((2, 1), np.float32))

  def errors(activations=3.0, gradients=None, **variables):
    truth = {"parameters": table, "momenta": table}
    found = ([[3.0]], rows, {"parameters": table, "momenta": table})
    gradients = {0: np.ones(1)} if gradients is None else gradients
    return check.compare(found, np.array([[activations]]), gradients, truth | variables, looked_up)

  assert set(errors().values()) == {0.0}
  assert errors(activations=4.0)["activations"] == 0.25
  assert errors(gradients={0: np.full(1, 2.0)})["row gradients"] == 0.5
  assert errors(momenta=2 * table)["momenta"] == 0.5
  for gradients in ({}, {0: np.ones(1), 1: np.ones(1)}):
    assert errors(gradients=gradients) == {"other rows have gradients": math.inf}
  assert errors(linears=table) == {"its slots are ['momenta']": math.inf}
  moved = np.array([[2.0], [3.0]])
  assert errors(parameters=moved) == {"a row moved that was not looked up": math.inf}


def test_an_error_is_a_failure_and_the_rest_goes_on(monkeypatch):
  def broken(place):
    if place.mesh is None:
      raise NotImplementedError("no such instruction\nand more")
    return iter(RESULTS[:1])

  monkeypatch.setattr(check, "places", lambda: {"a": check.Place(), "b": check.Place("mesh")})
  monkeypatch.setattr(check, "check", broken)
  failed, rest = check.run()
  assert (failed.where, failed.ok, rest.where) == ("a", False, "b")
  assert failed.note == "NotImplementedError: no such instruction"
