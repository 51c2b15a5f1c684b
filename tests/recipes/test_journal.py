"""The log of a run: where its metrics go, and that writers of a user's own get them too."""

import contextlib
import json

import ml_collections
import pytest

from recipes import errors
from recipes.run import journal, loop


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


def test_writers_are_closed_where_a_run_fails(tmp_path):
  kept = Kept()
  config = ml_collections.ConfigDict({"batch_size": 8, "steps": 4, "patience": 0})
  modules = {"model": None, "optimizer": None}
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "run.lock").symlink_to(tmp_path / "victim")
  with pytest.raises(errors.UserError), loop.Run(
    "toy", config, tmp_path / "run", **modules, writers=[kept]
  ):  # fmt: skip
    pass
  assert kept.closed == 1


def test_writers_are_closed_once_however_a_run_ends(tmp_path):
  @journal.closes_writers
  def run(config, workdir, writers):
    if config == "wrong":
      raise errors.UserError("a setting is wrong")
    for writer in writers:
      writer.write(1, {"loss": 0.5})
      writer.close()  # as `Run` does
    return {"metrics": {}}

  for config in ("right", "wrong"):
    kept = Kept()
    with contextlib.suppress(errors.UserError):
      assert run(config, tmp_path, [kept]) == {"metrics": {}}
    assert kept.closed == 1
