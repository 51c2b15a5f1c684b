"""The log of a run: where its metrics go, and that writers of a user's own get them too."""

import contextlib
import json
import types

import grain
import ml_collections
import optax
import pytest
from cases import each
from flax import nnx

import embed
from recipes.run import journal, loop, settings


class Kept:
  def __init__(self):
    self.lines, self.closed = [], 0

  def write(self, step, metrics):
    self.lines.append((step, dict(metrics)))

  def close(self):
    self.closed += 1


def test_writers_get_what_the_file_gets(tmp_path):
  kept = Kept()
  config = types.SimpleNamespace(steps=4, batch_size=8)
  with contextlib.closing(journal.Journal(tmp_path, 0, config, [kept])) as log:
    log.stepped()
    log.stepped()
    log.log_train(2, {"loss": 0.5})
    log.log_eval(2, {"valid_auc": 0.75})
    log.log_eval(2, {})  # nothing is held out
  lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
  assert [{"step": step} | metrics for step, metrics in kept.lines] == lines
  assert [step for step, _ in kept.lines] == [2, 2]
  assert kept.lines[0][1].keys() == {"loss", "examples_per_second"}
  assert kept.lines[1][1] == {"valid_auc": 0.75}
  assert kept.closed == 0  # whoever made it closes it


def test_the_rate_is_without_the_steps_that_compile(tmp_path, monkeypatch):
  model = nnx.jit(lambda: nnx.Linear(1, 1, rngs=nnx.Rngs(0)))()
  state = {"model": model, "optimizer": embed.Optimizer(model, optax.sgd(0.1))}

  def check(log_every, rates):
    clock, kept = [0.0], Kept()
    monkeypatch.setattr(journal, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    changes = {"batch_size": 8, "steps": 8, "log_every": log_every, "patience": 0, "select": ""}
    config = ml_collections.ConfigDict(settings.RUN | changes)
    with loop.Run("toy", config, tmp_path / str(log_every), **state, writers=[kept]) as run:
      for number in run.steps(grain.MapDataset.range(8).to_iter_dataset()):
        clock[0] += 100 if number < 2 else 1
        run.log(loss=number)
    assert [line.get("examples_per_second") for _, line in kept.lines] == rates

  each({"every 4": (4, [8.0, 8.0]), "every step": (1, [None] * 2 + [8.0] * 6)}, check)


def test_writers_are_closed_where_a_run_fails(tmp_path):
  kept = Kept()
  config = ml_collections.ConfigDict(settings.RUN | {"batch_size": 8, "steps": 4, "patience": 0})
  modules = {"model": None, "optimizer": None}
  (tmp_path / "run").write_text("")
  with pytest.raises(FileExistsError), loop.Run(
    "toy", config, tmp_path / "run", **modules, writers=[kept]
  ):  # fmt: skip
    pass
  assert kept.closed == 1
