"""The self-test passes, and does not where something is wrong."""

import math

import numpy as np
import pytest
import reference

import embed
from embed import check
from embed.engine import update
from embed.engine.bags import Bags


@pytest.fixture
def one_device(monkeypatch):
  monkeypatch.setattr(check, "places", lambda: {"one device": {}})


@pytest.fixture
def small(one_device, monkeypatch):
  """A single kind of lookup, and two optimizers."""
  lookups = check.lookups
  some = lambda draw, brief: {"mean, weights": lookups(draw, brief)["mean, weights"]}
  monkeypatch.setattr(check, "lookups", some)
  cases = check.optimizers
  monkeypatch.setattr(
    check, "optimizers", lambda: {name: cases()[name] for name in ("sgd", "adagrad")}
  )
  monkeypatch.setattr(check, "OTHER_WAYS", ("sgd",))


def test_an_error_is_relative_to_the_largest_value():
  assert check.relative_error([1.0, 4.0], [1.0, 4.5]) == 0.5 / 4.5
  assert check.relative_error([0.5], [0.0]) == 0.5
  assert check.relative_error(np.zeros((0, 2)), np.zeros((0, 2))) == 0
  assert check.relative_error([1.0], [1.0, 1.0]) == math.inf
  assert check.relative_error([np.nan], [1.0]) == math.inf


def test_nothing_is_left_out():
  assert {kind for kind, _ in check.optimizers().values()} == set(reference.RULES)
  assert set(check.OTHER_WAYS) < set(check.optimizers())
  cases = check.lookups(np.random.default_rng(0), False)
  named = {"padded", "ragged", "max_valency", "sparse", "dense"}
  assert {kind for case in cases.values() for kind in case.kinds} == named
  assert {"one device", "8 devices, mod", "8 devices, div", "8 devices, replicated"} <= set(
    check.places()
  )


@pytest.mark.weekly
def test_everything_passes_here(one_device, capsys):
  assert check.main() == 0
  out = capsys.readouterr().out
  names = len(check.optimizers()) + 2 * 7
  assert f"All {names} checks passed" in out
  assert "FAILED" not in out


RESULTS = [
  check.Result("lookup, mean", "one device", 0.25, 1.0),
  check.Result("adagrad", "one device", 0.5, 0.125),
]


def test_one_wrong_result_is_a_failure(monkeypatch, capsys):
  monkeypatch.setattr(check, "run", lambda *_, **__: iter(RESULTS))
  assert check.main() == 1
  right, wrong, *_, last = [
    x for x in capsys.readouterr().out.splitlines() if " device " in x or "FAILED" in x
  ]
  assert right.endswith("  ok")
  assert "FAILED" in wrong
  assert "1 of 2 checks FAILED" in last


@pytest.mark.weekly
def test_every_strategy_passes(capsys):
  assert check.main() == 0
  assert "8 devices, replicated" in capsys.readouterr().out


def failing(capsys):
  """What a failing check says, but for the table."""
  assert check.main() == 1
  return [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]


@pytest.mark.ci
def test_a_wrong_update_fails(small, monkeypatch, capsys):
  right = update.step_rows
  wrong = lambda o, g, w, s, rate, step=None: right(o, g, w, s, 1.001 * rate, step)
  monkeypatch.setattr(update, "step_rows", wrong)
  monkeypatch.setattr(check, "optimizers", lambda: {"adagrad": ("adagrad", {})})
  line, last = failing(capsys)
  assert line.startswith("adagrad  ")
  assert check.TOLERANCE["float32"] < float(line.split()[3]) < 1e-2
  assert last.startswith("1 of 3 checks FAILED")


def test_variables_are_compared():
  """Slots by name, values, and rows that were not looked up."""
  initial, looked_up = np.ones((2, 1)), np.array([True, False])
  moved = np.array([[2.0], [1.0]])
  both = np.array([[2.0], [3.0]])

  def compare(found, wanted):
    return check.compare_variables("adam", found, wanted, initial, looked_up)

  found = {"parameters": moved, "momenta": moved}
  assert compare(found, found).ok
  assert compare(found, found | {"momenta": both}).error == 2 / 3
  assert compare(found, {"parameters": moved}).note == "its slots are ['momenta']"
  found = {"parameters": both}
  assert compare(found, found).note == "a row moved that was not looked up"
  assert not compare(found, found).ok


@pytest.mark.ci
def test_a_wrong_combiner_fails(small, monkeypatch, capsys):
  """mean must divide by the sum of weights."""
  right = Bags.normalized
  wrong = lambda bags, combiner, size: right(bags, combiner.replace("mean", "sqrtn"), size)
  monkeypatch.setattr(Bags, "normalized", wrong)
  assert [line.split("  ")[0] for line in failing(capsys)[:-1]] == [
    "lookup, mean, weights",
    "rows, mean, weights",
  ]


def test_other_rows_fail():
  """A row that was looked up and is not among the gradients, or the other way round."""
  rows = embed.RowGrads(np.array([4, 2, check.ROWS]), np.ones((3, 2), np.float32))
  one = np.ones(2)
  assert check.compare_rows("rows", rows, {2: one, 4: one}).ok
  for wanted in ({2: one}, {2: one, 4: one, 5: one}):
    result = check.compare_rows("rows", rows, wanted)
    assert (result.ok, result.note) == (False, "other rows were touched")


def test_an_error_is_a_failure_and_the_rest_goes_on(one_device, monkeypatch):
  def broken(*args, **kwargs):
    raise NotImplementedError("no such instruction\nand more")

  monkeypatch.setattr(check, "_check_lookups", broken)
  monkeypatch.setattr(check, "_check_optimizers", lambda *args: iter(RESULTS[:1]))
  lookups, rest = check.run()
  assert (lookups.what, lookups.ok, rest) == ("lookups", False, RESULTS[0])
  assert lookups.note == "NotImplementedError: no such instruction"
