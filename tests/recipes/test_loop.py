"""The loop: resumes exactly, wherever a kill falls; selects on validation; tests once."""

import functools
import json
import os
import signal

import filelock
import grain
import ml_collections
import numpy as np
import optax
import pytest
from cases import refused
from flax import nnx

import embed
from recipes import arrays, errors, pipeline
from recipes.run import checkpoints, journal, loop, results, settings, warm_start
from recipes.run import workdir as runs
from recipes.training import train_step

STEPS = 12


class Toy(nnx.Module):
  """One table, a linear layer and dropout, so that every kind of state has to survive."""

  def __init__(self, rows=20):
    rngs = nnx.Rngs(0)
    table = embed.TableConfig(rows, 4, name="item")
    self.embed = embed.SparseEmbed(
      {"item": embed.FeatureConfig(table)}, optimizer=embed.adam(0.05), rngs=rngs
    )
    self.dropout = nnx.Dropout(0.3, rngs=rngs)
    self.head = nnx.Linear(4, 1, rngs=rngs)

  def __call__(self, batch):
    return self.head(self.dropout(self.embed({"item": batch["item"]})["item"]))[:, 0]


def loss_fn(model, batch):
  return optax.squared_error(model(batch), batch["label"]).mean()


@functools.partial(nnx.jit, static_argnames=("rows", "decay"))
def make_state(rows=20, decay=0.0):
  """Returns a new model and its optimizer."""
  model = Toy(rows)
  train_step.keep_averages(model, decay)
  return model, embed.Optimizer(model, optax.adam(0.01))


@functools.cache
def make_step(loss_fn, options):
  """Returns the step, whose program all runs share."""
  return train_step.make_train_step(loss_fn, options)


compiled_loss = nnx.jit(loss_fn)


def toy_config(**changes):
  config = {
    "seed": 0, "steps": STEPS, "batch_size": 8, "log_every": 2, "eval_every": 3,
    "checkpoint_every": 5, "select": "valid_loss", "patience": 0,
    "writers": (),
  }  # fmt: skip
  return ml_collections.ConfigDict(settings.RUN | config | changes)


def run_toy(workdir, evaluate=None, *, rows=20, loss=loss_fn, **changes):
  """Does what a recipe does; returns the result."""
  config = toy_config(**changes)
  result = runs.finished(config, workdir)
  if result is not None:
    return result
  model, optimizer = make_state(rows, config.ema)
  folder = workdir.parent / "columns"
  folder.mkdir(exist_ok=True)
  draw = np.random.default_rng(0)
  arrays.column(folder, "item", (50,), np.int32)[:] = draw.integers(0, 20, 50)
  arrays.column(folder, "label", (50,), np.float32)[:] = draw.normal(size=50)
  columns = arrays.Columns(folder)
  source = pipeline.ShuffledBatches(
    columns, (0, 40), batch_size=8, seed=0, num_batches=config.steps
  )
  held_out = {name: np.array(column[40:]) for name, column in columns.items()}

  def held_out_loss(model, split):
    del split
    return {"loss": float(compiled_loss(train_step.evaluated(model), held_out))}

  evaluate, options = evaluate or held_out_loss, train_step.options(config)
  with loop.Run("toy", config, workdir, model=model, optimizer=optimizer) as run:
    warm_start.start(run)
    step = make_step(loss, options)
    for batch in run.steps(pipeline.batches(source, dict)):
      run.log(**step(model, optimizer, batch))
      if run.evaluates:
        run.score(evaluate(model, "valid"))
    return run.finish(evaluate(run.best(), "test"))


def lines(workdir):
  """What the run logged, without how fast it was."""
  found = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  return [{k: v for k, v in line.items() if k != "examples_per_second"} for line in found]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("toy") / "whole"
  return run_toy(workdir), lines(workdir)


class Killed(BaseException):
  """Not an `Exception`: nothing may catch it on the way, as nothing catches SIGKILL."""


def kill(monkeypatch, workdir, save, *, moment="after", **changes):
  """Runs the toy until a save, before or after which it is killed, as SIGKILL does."""
  real, saves = checkpoints.Manager.save, []

  def killing(*args, **nodes):
    saves.append(None)
    if len(saves) == save and moment == "before":
      raise Killed
    real(*args, **nodes)
    if len(saves) == save:
      raise Killed

  with monkeypatch.context() as patch:
    patch.setattr(checkpoints.Manager, "save", killing)
    with pytest.raises(Killed):
      run_toy(workdir, **changes)


def run_until(monkeypatch, workdir, step, do, error):
  """Runs the toy, and calls `do` after a step, which ends the run with `error`; returns that."""
  real, steps = journal.Journal.stepped, []

  def stepped(self):
    real(self)
    steps.append(None)
    if len(steps) == step:
      do()

  with monkeypatch.context() as patch:
    patch.setattr(journal.Journal, "stepped", stepped)
    with pytest.raises(error) as raised:
      run_toy(workdir)
  return raised.value


def assert_as_whole(whole, workdir, **changes):
  """Runs the toy to its end, as if nothing had happened before."""
  result = run_toy(workdir, **changes)
  assert result["metrics"] == whole[0]["metrics"]
  assert result["tested_step"] == whole[0]["tested_step"]
  assert lines(workdir) == whole[1]


KILLS = [
  (1, "before", 1), (1, "after", 1), (4, "after", 1), (6, "before", 1), (6, "after", 1),
  (1, "after", 3), (3, "before", 3), (4, "after", 3), (6, "after", 3),
]  # fmt: skip


@pytest.mark.parametrize(
  ("save", "moment", "full_every"),
  [
    (2, "before", 1),
    pytest.param(5, "after", 3, marks=pytest.mark.ci),
    *(pytest.param(*case, marks=pytest.mark.weekly) for case in KILLS),
  ],
)
def test_a_kill_around_a_checkpoint_leaves_no_trace(
  whole, tmp_path, monkeypatch, save, moment, full_every
):
  """Saves are at 3, 5, 6, 9, 10 and 12; in a chain of deltas every third is full."""
  changes = {"full_checkpoint_every": full_every}
  kill(monkeypatch, tmp_path / "run", save, moment=moment, **changes)
  assert_as_whole(whole, tmp_path / "run", **changes)
  chain = checkpoints.of_step(tmp_path / "run" / "checkpoints", 12)
  assert full_every == 1 or moment == "before" or chain == [9, 10, 12]


def test_a_kill_between_checkpoints_leaves_no_trace(whole, tmp_path, monkeypatch):
  def killed():
    # As SIGKILL may leave it: a line cut in half at the end of the file.
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
      file.write('{"step": 1, "lo')
    raise Killed

  run_until(monkeypatch, tmp_path / "run", 8, killed, Killed)
  assert_as_whole(whole, tmp_path / "run")


def test_a_finished_run_only_reports(tmp_path, monkeypatch, capsys):
  result = run_toy(tmp_path / "run", steps=3)
  assert "has ended" not in capsys.readouterr().err
  monkeypatch.setattr(loop, "Run", None)
  assert run_toy(tmp_path / "run", steps=3) == result
  assert f"{tmp_path / 'run'} holds a run that has ended" in capsys.readouterr().err


def test_a_step_logs_means_and_functions_of_the_step(tmp_path):
  config = toy_config(steps=4, log_every=2, eval_every=4, select="")
  state = dict(zip(("model", "optimizer"), make_state(), strict=True))
  numbers = grain.MapDataset.source([1, 2, 3, 4]).to_iter_dataset()
  with loop.Run("toy", config, tmp_path / "run", **state) as run:
    for number in run.steps(numbers):
      run.log(loss=number, twice=lambda steps: 2 * steps)
      if run.evaluates:
        run.score({"loss": 7.0})
    result = run.finish({"loss": 8.0})
  logged = [line for line in lines(tmp_path / "run") if "loss" in line]
  assert [line["loss"] for line in logged] == [1.5, 3.5]
  assert [line["twice"] for line in logged] == [4.0, 8.0]
  assert result["metrics"] == {"valid_loss": 7.0, "test_loss": 8.0}


def test_a_batch_size_that_the_data_decided_is_kept_on_other_devices(tmp_path):
  asked = toy_config(batch_size=0)
  decided = toy_config(batch_size=72)  # a multiple of the nine devices that it began on
  assert runs.resumed(asked, tmp_path).batch_size == 0
  with runs.held(asked, decided, tmp_path):
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
  assert runs.resumed(asked, tmp_path).batch_size == 72
  assert arrays.read_json(tmp_path / "config.json")["batch_size"] == 0
  assert runs.finished(asked, tmp_path) is None


def test_what_may_not_change_is_named_with_what_may(tmp_path):
  assert runs.finished(toy_config(), tmp_path) is None
  assert not list(tmp_path.iterdir())  # a run that fails before it trains leaves the folder free
  stored = toy_config().to_dict()
  arrays.write_json(tmp_path / "config.json", stored)
  assert runs.finished(toy_config(batch_size=16), tmp_path) is None  # nothing has been trained
  (tmp_path / "checkpoints" / "5").mkdir(parents=True)
  assert runs.finished(toy_config(), tmp_path) is None
  changed = {name: 3 for name in settings.MAY_CHANGE if isinstance(stored.get(name), int)}
  assert runs.finished(toy_config(**changed, checkpoint_minutes=1.0), tmp_path) is None
  names = ("seed", "batch_size", "select", "table_dtype")
  cases = [(name, f"{name}: .* there, 7 now.*may change: steps, ") for name in names]
  refused(cases, lambda name: runs.finished(toy_config(**{name: 7}), tmp_path), errors.UserError)


def test_reports_are_added_up_or_the_largest_is_taken():
  model = nnx.Dict(a=make_state()[0], b=make_state()[0])
  for module, fill in ((model["a"], 0.25), (model["b"], 0.5)):
    values = np.int32(3), np.int32(4 * fill), np.float32(fill)
    names = ("dropped_ids", "exchange_rounds", "buffer_fill")
    module.embed.report.set_value(dict(zip(names, values, strict=True)))
  found = loop._reports(model)
  assert found == {"dropped_ids": 6, "exchange_rounds": 2, "buffer_fill": 0.5}
  assert [type(found[name]) for name in ("dropped_ids", "buffer_fill")] == [int, float]


def scripted(scores):
  """An evaluation that reads its validation scores off a list, and remembers what was tested."""
  seen = []

  def evaluate(model, split):
    values = np.asarray(model.embed.tables["item"])
    if split == "test":
      seen.append(values)
      return {"auc": 0.0}
    if len(seen) < len(scores):
      seen.append(values)
      return {"auc": scores[len(seen) - 1]}
    return {"auc": 0.0}

  return evaluate, seen


@pytest.mark.parametrize(
  ("select", "scores", "tested"),
  [
    ("valid_auc", [0.9, 0.1, 0.9, 0.2], 2),  # of equals, the later
    ("", [0.9, 0.1, 0.3, 0.2], 3),
  ],
)
def test_the_state_that_validation_prefers_is_tested(tmp_path, select, scores, tested):
  evaluate, seen = scripted(scores)
  result = run_toy(tmp_path / "run", evaluate, select=select)
  assert result["tested_step"] == 3 * (tested + 1)
  np.testing.assert_array_equal(seen[-1], seen[tested])


def test_losses_are_best_small_and_a_calibration_at_one():
  names = ("valid_loss", "valid_ne", "valid_auc[a=b]", "valid_ndcg@10")
  assert [results.gain(name, 0.5) for name in names] == [-0.5, -0.5, 0.5, 0.5]
  assert results.gain("valid_calibration", 1.25) == results.gain("calibration", 0.75) == -0.25
  assert np.isnan(results.gain("valid_popularity@5", 3.0))


def test_patience_ends_a_run_that_no_longer_improves(tmp_path, capsys):
  evaluate, _ = scripted([0.5, 0.4, 0.3, 0.9])
  result = run_toy(tmp_path / "run", evaluate, select="valid_auc", patience=2)
  assert (result["steps"], result["tested_step"]) == (9, 3)
  assert result["metrics"] == {"valid_auc": 0.5, "test_auc": 0.0}
  said = capsys.readouterr().err
  assert "stopping early at step 9 of 12: valid_auc has not improved in 2 evaluations" in said
  assert "since 0.5000 at step 3" in said


def test_a_metric_that_the_recipe_has_not_is_rejected():
  loop.check_select("", [])
  cases = [
    (["valid_loss"], r"config.select is 'valid_auc'; the metrics are \['valid_loss'\]"),
    ([], r"'valid_auc', and no rows validate: pass --config.select= to test the state of the last"),
  ]
  refused(cases, lambda metrics: loop.check_select("valid_auc", metrics), errors.UserError)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
  nan = lambda model, batch: model(batch).sum() * np.nan
  with pytest.raises(FloatingPointError, match="the loss is nan before step 1"):
    run_toy(tmp_path / "run", loss=nan, log_every=1)


# --- one run in a folder -------------------------------------------------------------------------


def test_a_second_run_in_a_folder_is_refused_until_the_first_has_ended(tmp_path):
  """The lock is of the open file: another object in this process is as another process."""
  (tmp_path / "run").mkdir()
  with filelock.FileLock(tmp_path / "run" / "run.lock"):
    with pytest.raises(errors.UserError, match=r"another process trains in .*run: wait for it"):
      runs.finished(toy_config(), tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()
  assert runs.finished(toy_config(), tmp_path / "run") is None


def test_a_folder_that_cannot_be_written_to_is_named_before_any_work(tmp_path, monkeypatch):
  (tmp_path / "file").touch()
  with pytest.raises(errors.UserError, match=r"workdir=.*file/run cannot be written to, because"):
    runs.finished(toy_config(), tmp_path / "file" / "run")
  monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write anywhere
  with pytest.raises(errors.UserError, match="choose another one"):
    runs.finished(toy_config(), tmp_path / "run")
  with pytest.raises(errors.UserError, match=r"is a URL.* Mount the bucket"):
    runs.finished(toy_config(), "gs://bucket/run")


def test_ctrl_c_says_where_it_stopped_and_where_it_goes_on(whole, tmp_path, monkeypatch):
  def stop():
    raise KeyboardInterrupt

  error = run_until(monkeypatch, tmp_path / "run", 7, stop, errors.Stopped)
  assert str(error) == "stopped at step 7 of 12; the same command resumes from step 6"
  assert_as_whole(whole, tmp_path / "run")


def test_sigterm_saves_and_the_same_command_goes_on_from_there(whole, tmp_path, monkeypatch):
  before, tell = signal.getsignal(signal.SIGTERM), lambda: os.kill(os.getpid(), signal.SIGTERM)
  error = run_until(monkeypatch, tmp_path / "run", 7, tell, errors.Preempted)
  assert str(error) == "stopped at step 7 of 12; the same command resumes from step 7"
  assert error.code == 75
  assert signal.getsignal(signal.SIGTERM) == before
  assert_as_whole(whole, tmp_path / "run")


# --- longer runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ended", [True, pytest.param(False, marks=pytest.mark.weekly)])
def test_a_run_is_lengthened(whole, tmp_path, monkeypatch, ended):
  workdir = tmp_path / "run"
  if ended:
    assert run_toy(workdir, steps=6)["steps"] == 6
  else:
    monkeypatch.setattr(loop.Run, "finish", lambda *args: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
      run_toy(workdir, steps=6)
    monkeypatch.undo()
  result = run_toy(workdir)
  assert result["steps"] == STEPS
  assert result["metrics"] == whole[0]["metrics"]
  assert lines(workdir) == whole[1]
  assert (workdir / "result-6.json").exists() == ended
  assert arrays.read_json(workdir / "config.json")["steps"] == STEPS
  with pytest.raises(errors.UserError, match=r"has taken 12 steps, and config\.steps is 6"):
    run_toy(workdir, steps=6)
  assert run_toy(workdir) == result  # the refusal has changed nothing
