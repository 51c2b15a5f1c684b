"""The log of a run: where its metrics go, and that writers of a user's own get them too."""

import json

import ml_collections
import pytest

from recipes import hosts, journal, loop, runs


class Kept:
  def __init__(self):
    self.lines, self.closed = [], 0

  def write(self, step, metrics):
    self.lines.append((step, dict(metrics)))

  def close(self):
    self.closed += 1


def test_writers_get_what_the_file_gets(tmp_path):
  kept = Kept()
  with journal.Journal(tmp_path, step=0, steps=4, batch_size=8, writers=[kept]) as log:
    log.stepped()
    log.stepped()
    log.log_train({"loss": 0.5})
    log.log_eval({"valid_auc": 0.75})
    log.log_eval({})  # nothing is held out
  lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
  assert [{"step": step} | metrics for step, metrics in kept.lines] == lines
  assert [step for step, _ in kept.lines] == [2, 2]
  assert kept.lines[0][1].keys() == {"loss", "examples_per_second"}
  assert kept.lines[1][1] == {"valid_auc": 0.75}
  assert kept.closed == 0  # whoever made it closes it


def config():
  return ml_collections.ConfigDict({"batch_size": 8, "steps": 4})


def test_writers_are_closed_where_a_run_fails(tmp_path, monkeypatch):
  monkeypatch.setattr(hosts, "start", lambda: None)
  kept = Kept()

  def prepare(config, mesh):
    raise ValueError("no data")

  with pytest.raises(ValueError, match="no data"):
    loop.run("toy", config(), str(tmp_path / "run"), prepare, [kept])
  assert kept.closed == 1


def test_writers_are_closed_where_a_run_has_ended_already(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(hosts, "start", lambda: None)
  result = {
    "recipe": "toy", "metrics": {"test_auc": 0.5}, "baselines": {}, "config": {}, "seed": 0,
    "tested_step": 4, "steps": 4, "seconds": 1.0, "device": {"kind": "cpu", "count": 1},
  }  # fmt: skip
  monkeypatch.setattr(runs, "finished", lambda *args: result)
  kept = Kept()
  loop.run("toy", config(), str(tmp_path / "run"), None, [kept])
  assert (kept.closed, kept.lines) == (1, [])
  assert "0.5000" in capsys.readouterr().out
