"""Trains a run for each trial of a sweep, chooses one on validation, and tests that one only.

    python -m recipes.sweep sequence --config=my.py --workdir=runs/sweep

The config file says what to try, by the names of settings. A dict of lists is a grid, all
combinations of the values; a list of dicts holds the trials themselves:

    def get_sweep():
      return {"dropout": [0.1, 0.3], "table.learning_rate": [1e-3, 1e-2]}

    <workdir>/trial_0/      the run of the first trial, and so on
    <workdir>/sweep.json    the trials' settings, validation metrics, steps and time; the choice
    <workdir>/sweep.md      the same as a table

Trials run with `config.test=False`, so that no test row is scored before the choice on
`config.select` is written down. The same command resumes a sweep that was stopped.

All trials are known before the first one: each is a run that can be repeated by its settings, in
any order, which is not so where a sampler such as Optuna's proposes trials from earlier ones.
"""

import hashlib
import importlib
import itertools
import json
import math
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from flax.traverse_util import unflatten_dict
from ml_collections import config_flags

from . import arrays, catalogue, errors, files, hosts, main
from .errors import UserError
from .run import results, settings
from .run import workdir as runs
from .tables.settings import merged

_KNOWN = {"sha256": str, "trials": [dict]}  # of sweep.json, see `arrays.check_schema`

Sweep = Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]


def run(recipe: str, config, workdir: str | Path, sweep: Sweep) -> dict[str, Any]:
  """Trains the trials, chooses, and tests the chosen one; returns the content of sweep.json.

  Args:
    config: what all trials share.
    sweep: a dict of lists, or a list of dicts, by dotted names of settings.

  Returns:
    `trials`, for each its `settings`, and `metrics`, `steps`, `tested_step` and `seconds` of its
    result, or `error` if its loss was not finite; `select`; `chosen`, the number of the best trial;
    `test`, that trial's test metrics; and `device`, `versions` and `data_sha256` of its result.

  Raises:
    UserError: a setting is unknown or of another type, the config selects by no metric, no trial
      has a finite loss, or the workdir is of other trials or of another config.
  """
  mesh = hosts.start()
  train = importlib.import_module(f".{recipe}.train", __package__)
  config, workdir = settings.completed(recipe, config), Path(workdir).resolve()
  if not config.select:
    raise UserError("config.select is '', and a sweep chooses by it: name a metric of validation")
  changes = trials(sweep)
  configs = [config_of(recipe, config, change) for change in changes]
  for trial in configs:
    train.check(trial, mesh)
  names = list(dict.fromkeys(name for change in changes for name in change))
  plain = [trial.to_dict() for trial in configs]
  rows = [{"settings": {name: settings.value(trial, name) for name in names}} for trial in plain]
  about: dict[str, Any] = {"recipe": recipe, "select": config.select, "trials": rows}
  about["sha256"] = _digest(configs)
  about = json.loads(json.dumps(about))  # as it is read again: tuples are lists
  path = workdir / "sweep.json"
  read = lambda: arrays.read_json(path, schema=_KNOWN) if path.exists() else {}
  known = hosts.from_main(read)
  if "chosen" in known:
    if known["sha256"] != about["sha256"]:
      raise UserError(
        f"{path} has chosen among other trials or with another config: choose another --workdir"
      )
    about = known
  else:
    _write(workdir, about)
    for number, (row, trial) in enumerate(zip(about["trials"], configs, strict=True)):
      hosts.say(f"trial {number} of {len(configs)}: {errors.terminal(str(row['settings']))}")
      try:
        result = train.run(trial, str(workdir / f"trial_{number}"))
        row |= {name: result[name] for name in ("metrics", "steps", "tested_step", "seconds")}
        if result["data_sha256"] != about.setdefault("data_sha256", result["data_sha256"]):
          raise UserError(f"the data have changed before trial {number}: choose another --workdir")
      except errors.DivergedError as error:
        row["error"] = str(error)
        hosts.say(f"trial {number} is left out: {error}")
      _write(workdir, about)
    about["chosen"] = best(about["trials"], config.select)
    _write(workdir, about)
  chosen = about["chosen"]
  hosts.say(f"{table(about)}\n\nchosen on {config.select}: trial {chosen}")
  folder = workdir / f"trial_{chosen}"
  main.train_one(recipe, settings.copied(configs[chosen], test=True), folder)
  result = hosts.from_main(lambda: runs.result(folder))
  about["test"] = {k: v for k, v in result["metrics"].items() if k.startswith("test_")}
  about |= {name: result[name] for name in ("device", "versions", "data_sha256")}
  _write(workdir, about)
  return about


def trials(sweep: Sweep) -> list[dict[str, Any]]:
  """Returns the trials of a grid or of a list, each a dict of settings.

  >>> trials({"dropout": [0.1, 0.3], "table.learning_rate": [0.01]})
  [{'dropout': 0.1, 'table.learning_rate': 0.01}, {'dropout': 0.3, 'table.learning_rate': 0.01}]
  >>> trials([{"loss": "softmax"}, {"loss": "bce", "negatives.shared": False}])
  [{'loss': 'softmax'}, {'loss': 'bce', 'negatives.shared': False}]
  """
  is_list = lambda value: isinstance(value, Sequence) and not isinstance(value, str)
  if isinstance(sweep, Mapping) and all(map(is_list, sweep.values())):
    found = [dict(zip(sweep, values, strict=True)) for values in itertools.product(*sweep.values())]
  elif is_list(sweep) and all(isinstance(trial, Mapping) for trial in sweep):
    found = [dict(trial) for trial in sweep]  # type: ignore[arg-type]
  else:
    raise UserError(
      f'a sweep is {sweep!r:.200}: write a dict of lists, as {{"dropout": [0.1, 0.3]}}, or a list '
      "of dicts"
    )
  if not found or not sweep:
    raise UserError("a sweep has no trials: write at least one value for every setting")
  return found


def best(rows: Sequence[Mapping[str, Any]], select: str) -> int:
  """Returns the number of the trial with the best validation metric, the first of equal ones.

  >>> rows = [{"metrics": {"valid_auc": 0.7, "valid_logloss": 0.3}}, {"error": "the loss is nan"},
  ...         {"metrics": {"valid_auc": 0.8, "valid_logloss": 0.4}}]
  >>> best(rows, "valid_auc"), best(rows, "valid_logloss")
  (2, 0)
  """
  scores = {n: row["metrics"][select] for n, row in enumerate(rows) if "metrics" in row}
  if not scores:
    raise UserError("no trial has a finite loss: lower the learning rates")
  return max(scores, key=lambda number: results.gain(select, scores[number]))


def table(about: Mapping[str, Any]) -> str:
  """Returns the trials as a table in Markdown, the chosen one bold."""
  rows, select = about["trials"], about["select"]
  header = ["trial", *rows[0]["settings"], select, "steps", "best step", "minutes"]
  lines = ["| " + " | ".join(map(errors.markdown, header)) + " |"]
  lines.append("|" + " :-- |" * (1 + len(rows[0]["settings"])) + " --: |" * 4)
  for number, row in enumerate(rows):
    cells = [str(number), *map(str, row["settings"].values())]
    if "metrics" in row:
      score, minutes = row["metrics"][select], math.ceil(row["seconds"] / 60)
      cells += [f"{score:.4f}", str(row["steps"]), str(row["tested_step"]), str(minutes)]
    else:
      cells += ["diverged" if "error" in row else "", "", "", ""]
    bold = "**" if number == about.get("chosen") else ""
    lines.append("| " + " | ".join(f"{bold}{errors.markdown(c)}{bold}" if c else "" for c in cells))
    lines[-1] += " |"
  return "\n".join(lines)


def config_of(recipe: str, config, changes: Mapping[str, Any]) -> Any:
  """Returns the config of a trial; its run ends without a test."""
  nested = unflatten_dict({**changes, "test": False}, sep=".")
  return settings.completed(recipe, merged(config.to_dict(), nested, "config"))


def _digest(configs: Sequence[Any]) -> str:
  """Returns a hash of what decides the trials' metrics."""
  free = set(settings.MAY_CHANGE) - {*settings.LENGTH, "eval_every"}
  kept = [{k: v for k, v in config.to_dict().items() if k not in free} for config in configs]
  return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _write(workdir: Path, about: Mapping[str, Any]) -> None:
  def write() -> None:
    workdir.mkdir(parents=True, exist_ok=True)
    arrays.write_json(workdir / "sweep.json", about)
    files.write(workdir / "sweep.md", table(about) + "\n")

  hosts.from_main(write)


def command(recipe: str, config, workdir: str) -> None:
  """Runs the sweep of the config file that `--config` names."""
  name = config_flags.get_config_filename(flags.FLAGS["config"])
  file = catalogue.config_file(name.partition(":")[0])
  assert file is not None  # the flag has read it
  get_sweep = runpy.run_path(str(file)).get("get_sweep")
  if get_sweep is None:
    raise UserError(
      f"{file} has no get_sweep(): define one that returns a dict of lists, as "
      '{"dropout": [0.1, 0.3]}, or a list of dicts'
    )
  run(recipe, config, workdir, get_sweep())


if __name__ in ("__main__", "__mp_main__"):  # worker processes need the flags too
  program = main.program(command, f"{__package__}.sweep")
  if __name__ == "__main__":
    program()
