"""A run: resumes exactly, wherever a kill falls; selects on validation; tests once."""

import json
import os
import signal

import pytest
from cases import refused
from etils import epath
from recipe_runs import dlrm_smoke

from recipes import checkpoints, config, errors, log, run
from recipes.dlrm import train

STEPS = 12
SETTINGS = {
  "rows": 2_000, "batch_size": 128, "dropout": 0.2, "steps": STEPS, "log_every": 2, "eval_every": 3,
  "checkpoint_every": 5, "select": "valid_logloss", "baseline.max_rows": 0, "clip_norm": 1.0,
  "tensorboard": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  return tmp_path_factory.mktemp("data")


@pytest.fixture
def trained(cache):
  """Trains a run of clicks in a folder; returns its result."""
  return lambda workdir, **changes: train.run(
    dlrm_smoke("synthetic", cache, **SETTINGS | changes), str(workdir)
  )


def lines(workdir):
  """What the run logged, without how fast it was."""
  return [
    {k: v for k, v in line.items() if k != "examples_per_second"}
    for line in log.lines(epath.Path(workdir) / log.FILE)
  ]


@pytest.fixture(scope="module")
def whole(cache, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("run") / "whole"
  result = train.run(dlrm_smoke("synthetic", cache, **SETTINGS), str(workdir))
  return result, lines(workdir)


def assert_as_whole(whole, result, workdir):
  for name in ("metrics", "tested_step", "steps"):
    assert result[name] == whole[0][name]
  assert lines(workdir) == whole[1]


class Killed(BaseException):
  """Not an `Exception`: nothing may catch it on the way, as nothing catches SIGKILL."""


def interrupted(monkeypatch, where, number, do):
  """Calls `do` after the call of this number of a function, `(module, name)`."""
  module, name = where
  real, calls = getattr(module, name), []

  def call(*args, **kwargs):
    result = real(*args, **kwargs)
    calls.append(None)
    if len(calls) == number:
      do()
    return result

  monkeypatch.setattr(module, name, call)


def killed():
  raise Killed


@pytest.mark.parametrize(
  ("where", "number"),
  [
    pytest.param("saved", 2, marks=pytest.mark.ci),  # saves are after 3, 5, 6, 9, 10 and 12 steps
    ("stepped", 8),
    *(pytest.param("saved", n, marks=pytest.mark.weekly) for n in (1, 4, 6)),
    *(pytest.param("stepped", n, marks=pytest.mark.weekly) for n in (1, 3, 12)),
  ],
)
def test_a_kill_leaves_no_trace(whole, trained, tmp_path, monkeypatch, where, number):
  places = {"saved": (checkpoints, "save"), "stepped": (log.Log, "train")}
  with monkeypatch.context() as patch:
    interrupted(patch, places[where], number, killed)
    with pytest.raises(Killed):
      trained(tmp_path / "run")
  assert_as_whole(whole, trained(tmp_path / "run"), tmp_path / "run")


def test_sigterm_saves_and_the_same_command_resumes(whole, trained, tmp_path, monkeypatch, capsys):
  before = signal.getsignal(signal.SIGTERM)
  with monkeypatch.context() as patch:
    stop = lambda: os.kill(os.getpid(), signal.SIGTERM)
    interrupted(patch, (log.Log, "train"), 7, stop)
    with pytest.raises(run.Preempted) as stopped:
      trained(tmp_path / "run")
  assert stopped.value.code == 75
  assert "stopped at step 7; the same command resumes there" in capsys.readouterr().err
  assert signal.getsignal(signal.SIGTERM) == before
  assert 7 in checkpoints.steps(epath.Path(tmp_path / "run"))
  assert_as_whole(whole, trained(tmp_path / "run"), tmp_path / "run")


@pytest.mark.ci
def test_a_finished_run_only_reports_and_a_longer_one_goes_on(
  whole, trained, tmp_path, monkeypatch, capsys
):
  workdir = tmp_path / "run"
  # The schedule of the rates goes by the steps, so that it is fixed here.
  half = trained(workdir, steps=6, final_rate=1.0, warmup_steps=0)
  monkeypatch.setattr(train, "make_state", None)
  assert trained(workdir, steps=6, final_rate=1.0, warmup_steps=0) == half
  assert f"{workdir} holds a run that has ended" in capsys.readouterr().err
  monkeypatch.undo()
  longer = trained(workdir, final_rate=1.0, warmup_steps=0)
  at_once = trained(tmp_path / "at_once", final_rate=1.0, warmup_steps=0)
  assert (longer["steps"], longer["metrics"]) == (STEPS, at_once["metrics"])
  with pytest.raises(errors.UserError, match=r"has taken 12 steps: config\.steps cannot be 6"):
    trained(workdir, steps=6, final_rate=1.0, warmup_steps=0)


# --- which state is tested ------------------------------------------------------------------------


def scripted(monkeypatch, scores):
  """Makes evaluations return these scores of validation."""
  left = iter(scores)
  evaluate = lambda model, split: {"auc": next(left) if split == "valid" else 0.0}
  monkeypatch.setattr(train, "evaluator", lambda *args: evaluate)


@pytest.mark.parametrize(
  ("select", "scores", "tested"),
  [
    ("valid_auc", [0.9, 0.1, 0.9, 0.2], 9),  # of equals, the later
    pytest.param("", [0.9, 0.1, 0.3, 0.2], 12, marks=pytest.mark.ci),
  ],
)
def test_the_best_state_is_tested(trained, tmp_path, monkeypatch, select, scores, tested):
  scripted(monkeypatch, scores)
  result = trained(tmp_path / "run", select=select, checkpoint_every=1)
  assert result["tested_step"] == tested
  assert result["metrics"] == {"valid_auc": scores[tested // 3 - 1], "test_auc": 0.0}
  assert set(checkpoints.steps(epath.Path(tmp_path / "run"))) == {tested, 11, 12}


@pytest.mark.ci
def test_patience_ends_a_run_also_after_a_kill(trained, tmp_path, monkeypatch, capsys):
  settings = {"select": "valid_auc", "patience": 2}
  with monkeypatch.context() as patch:
    scripted(patch, [0.5, 0.4, 0.3])
    patch.setattr(run, "finish", lambda *args: killed())
    with pytest.raises(Killed):
      trained(tmp_path / "run", **settings)
  scripted(monkeypatch, [])
  result = trained(tmp_path / "run", **settings)
  assert "valid_auc has not improved in 2 evaluations" in capsys.readouterr().err
  assert (result["steps"], result["tested_step"]) == (9, 3)
  assert result["metrics"] == {"valid_auc": 0.5, "test_auc": 0.0}


def test_a_metric_that_the_recipe_has_not_is_rejected():
  run.check_select("", [])
  cases = [
    (["valid_loss"], r"is 'valid_auc': choose one of \['valid_loss'\], or pass --config.select="),
    ([], r"'valid_auc': no rows validate: pass --config.select= to test the last state"),
  ]
  refused(cases, lambda names: run.check_select("valid_auc", names), errors.UserError)


# --- the folder -----------------------------------------------------------------------------------


def completed(**changes):
  return config.complete("dlrm", {"dataset": "synthetic", **changes})


def test_what_may_not_change_is_named_with_what_may(tmp_path):
  workdir = epath.Path(tmp_path)
  stored = completed(batch_size=64, steps=10, table={"optimizer": "adam"})
  (tmp_path / "config.json").write_text(json.dumps(run.plain(stored)))
  assert run.resumed(completed(seed=7), workdir).seed == 7  # nothing has been trained
  (tmp_path / "checkpoints" / "5").mkdir(parents=True)
  adam = {"table": {"optimizer": "adam"}}
  assert run.resumed(completed(**adam), workdir).batch_size == 64  # that it began with
  assert run.resumed(completed(batch_size=64, steps=20, **adam), workdir).steps == 20
  cases = [
    (adam | {"seed": 7}, "seed: 0 there, 7 now.*may change: steps, "),
    ({}, "table.optimizer: 'adam' there, 'rowwise_adagrad' now"),
  ]
  refused(cases, lambda given: run.resumed(completed(**given), workdir), errors.UserError)


@pytest.mark.ci
def test_a_loss_that_is_not_finite_ends_the_run(trained, tmp_path):
  with pytest.raises(errors.UserError, match=r"the (loss|grad_norm) is not finite before step"):
    trained(tmp_path / "run", learning_rate=1e30, warmup_steps=0)


# --- the log --------------------------------------------------------------------------------------


def log_of(folder, start=0, memory=None, **settings):
  settings = {"batch_size": 8, "tensorboard": False} | settings
  return log.Log(epath.Path(folder), completed(**settings), start, memory or {})


def test_a_line_has_means_since_the_last_one(tmp_path, monkeypatch):
  monkeypatch.setattr(log, "_reports", lambda model: {"dropped_ids": 0})
  settings = {"steps": 5, "log_every": 2}
  with log_of(tmp_path, **settings) as writer:
    for step, loss in enumerate([1, 2, 3, 4, 9], 1):
      writer.train(step, None, {"loss": loss})
      if step == 3:
        memory = json.loads(json.dumps(writer.memory(3)))
    writer.eval(5, {"valid_auc": 0.75})
    writer.eval(5, {})  # nothing is held out
  found = lines(tmp_path)
  assert [(line["step"], line["loss"]) for line in found[:-1]] == [(2, 1.5), (4, 3.5), (5, 9.0)]
  assert found[-1] == {"step": 5, "valid_auc": 0.75}
  # A run that is killed after step 5 and resumes from step 3 writes the same lines once more.
  with log_of(tmp_path, 3, memory, **settings) as writer:
    assert lines(tmp_path) == found
    for step, loss in ((4, 4), (5, 9)):
      writer.train(step, None, {"loss": loss})
    writer.eval(5, {"valid_auc": 0.75})
  assert lines(tmp_path) == found


def test_the_rate_is_without_the_steps_that_compile_and_without_saves(tmp_path, monkeypatch):
  monkeypatch.setattr(log, "_reports", lambda model: {})
  clock = [0.0]
  monkeypatch.setattr(log.time, "perf_counter", lambda: clock[0])
  with log_of(tmp_path, steps=8, log_every=4) as writer:
    for step in range(1, 9):
      clock[0] += 100 if step <= 2 else 1
      writer.train(step, None, {"loss": step})
      if step == 4:
        writer.memory(step)
        clock[0] += 50
  found = log.lines(tmp_path / log.FILE)
  assert [line["examples_per_second"] for line in found] == [8.0, 8.0]
