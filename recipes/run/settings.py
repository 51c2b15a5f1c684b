"""The settings of a run: what its config says, and defaults for what it leaves out.

A config is a Python file whose `get_config(mode)` returns a dict of the settings that differ from
the defaults: `RUN` here, `DEFAULTS` in the recipe's `defaults.py`, `DATA_SETS` there for those of a
published or generated data set, and `tables.settings.DEFAULTS` for those of your own table.
The comments there say what they mean.
"""

import functools
import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from ..errors import MissingPackageError, UserError
from ..tables import settings as table_settings

# On the command line each is `--config.<name>=<value>`.
RUN: dict[str, Any] = {
  "seed": 0,  # of parameters, the order of examples, and all draws
  "cache_dir": "~/.cache/sparse_embed",  # where prepared data sets and downloads are
  "num_workers": 0,  # processes that make batches; 0 makes them in the run's own
  "batch_size": 0,  # examples of a step, on all devices; 0 goes by the number of examples
  "steps": 0,  # of the whole run; 0 is as many as the epochs have
  "log_every": 0,  # steps from one line of the log to the next; 0 logs ten times an epoch
  "eval_every": 0,  # steps from one validation to the next; 0 is an epoch
  "checkpoint_every": 0,  # saves after this many steps, as well as after validations
  "warmup_steps": -1,  # over which learning rates rise; -1 is a tenth of the steps, up to 100
  "final_rate": 0.1,  # share of the learning rates that a cosine leaves at the end
  "weight_decay": 0.0,  # of dense parameters; tables have their own
  # Saves after this many minutes as well as every `checkpoint_every` steps; 0 does not.
  "checkpoint_minutes": 10.0,
  # Every n-th save is full; the others hold the rows that have changed since the last save, and all
  # dense state. 1: all are full. Each row takes 8 bytes on its device.
  "full_checkpoint_every": 1,
  # The --workdir of another run to start from: its tables, slots and dense parameters by name.
  "init_from": "",
  "init_parts": "all",  # what to take from there: "all" or "tables"
  "init_rename": "",  # tables of another name there, "new=old,new=old"
  # Scales all gradients, of tables and dense parameters together, down to this norm; 0 does not.
  "clip_norm": 0.0,
  # The decay of moving averages of the dense parameters, such as 0.999, by which the model is
  # validated, tested and exported; 0 averages nothing. Tables have none, and `init_from` takes the
  # parameters themselves.
  "ema": 0.0,
  # Cuts each batch into this many equal parts, whose gradients are added up before one update: the
  # memory of one part, and the step of the whole batch.
  "accumulate": 1,
  # The first and the last step to trace, as (10, 15), into <workdir>/profile; () traces none.
  "profile_steps": (),
  # Of the computation between tables and loss: "float32" or "bfloat16". Parameters, slots and
  # losses are float32 in any case.
  "dtype": "float32",
  # Of the rows of tables: "float32" or "bfloat16", whose updates are rounded at random.
  "table_dtype": "float32",
  # The memory of a device for tables, slots and exchange. With it, `embed.plan` chooses a strategy
  # for each table in place of `table.sharding`, and the plan is printed; 0 plans nothing.
  "hbm_bytes": 0,
  "test": True,  # whether the run ends with its test; a False one is tested by changing it later
  # Where metrics go besides metrics.jsonl: some of "tensorboard", "wandb" and "mlflow".
  "writers": ("tensorboard",),
}

# What may differ when a run resumes: nothing that decides the numbers of steps already taken.
MAY_CHANGE = (
  "steps",  # fewer than the steps taken raise where these are known
  "epochs",
  "patience",
  "test",
  "log_every",
  "eval_every",
  "checkpoint_every",
  "checkpoint_minutes",
  "full_checkpoint_every",
  "eval_batch_size",
  "slices",
  "cache_dir",
  "num_workers",
  "data_dir",  # the data are compared by their hashes
  "files",  # of a table, and of its users and items
  "profile_steps",
  "hbm_bytes",
  "writers",
)
# Those that the data decide where a config leaves them open: see `tables.settings.steps_of_data`,
# and of two_tower `train.decide`.
DECIDED = (
  "batch_size", "steps", "eval_every", "log_every", "warmup_steps",
  "query", "candidate", "popularity",
)  # fmt: skip
# A run that has ended resumes if one of these has changed.
LENGTH = ("steps", "epochs", "patience", "test", "files")


_NUMBER = (int, float)
_SCORES = {str: _NUMBER}
# Schemas of result.json, and of a line of metrics.jsonl: see `arrays.check_schema`.
RESULT = {
  "recipe": str,
  "config": {"select": str, "model?": str, "dataset?": str, "data_file?": str, "source?": str},
  "seed": int, "steps": int, "tested_step": int, "seconds": _NUMBER,
  "metrics": _SCORES, "baselines": {str: _SCORES},
  "curves?": {str: [[_NUMBER]]},
  "notes?": [str],
  "data_sha256": {str: str},
  "device": {"kind": str, "count": int, "host_cores": (int, None)},
  "versions": {"jax": str, "flax": str, "sparse-embed": str},
}  # fmt: skip
LINE = {"step": int, str: _NUMBER}

_WRITERS = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}  # their packages


def completed(recipe: str, config: Mapping[str, Any] | ConfigDict) -> ConfigDict:
  """Returns the config of a run: as given, and defaults for what it leaves out.

  Args:
    config: names a `dataset` of the recipe, or declares the `columns` of `files`.

  Raises:
    UserError: a setting is unknown or of another type, or there are neither columns nor a data set.

  >>> config = completed("dlrm", {"dataset": "synthetic", "rows": 5_000, "table": {"dim": 1}})
  ... # doctest: +ELLIPSIS
  Traceback (most recent call last):
  recipes.errors.UserError: config.table has no setting 'dim'; ...
  >>> config = completed("dlrm", {"dataset": "synthetic", "rows": 5_000, "model": "dlrm"})
  >>> config.rows, config.zipf_exponent, config.table.optimizer
  (5000, 1.05, 'rowwise_adagrad')
  """
  defaults = importlib.import_module(f"...{recipe}.defaults", __name__)
  if "columns" in config:
    return table_settings.complete(config, RUN | defaults.DEFAULTS)
  if "dataset" not in config:
    raise UserError(
      'the config declares no columns: give {"files": ..., "columns": {...}}, or a config of '
      "`configs`"
    )
  given = config.to_dict() if isinstance(config, ConfigDict) else config
  own = defaults.DATA_SETS.get(given["dataset"], {})
  known = {"dataset": "", **own, **RUN, **defaults.DEFAULTS}
  return ConfigDict(table_settings.merged(known, given, "config"))


def copied(config: ConfigDict, **changes: Any) -> ConfigDict:
  """Returns a copy of a config with some settings changed; its groups are the same objects.

  ConfigDict's own copies sort the columns of a table.
  """
  copy = type(config)(allow_dotted_keys=True, sort_keys=False)
  for name in config:
    copy[name] = changes.get(name, config[name])
  return copy


def value(config: Mapping[str, Any] | ConfigDict, name: str) -> Any:
  """Returns the setting of a dotted name.

  >>> value({"negatives": {"number": 8}}, "negatives.number")
  8
  """
  return functools.reduce(lambda group, part: group[part], name.split("."), config)


def at_least(config: ConfigDict, least: Mapping[str, int]) -> None:
  """Raises UserError for a setting, by its dotted name, that is below its least value."""
  for name, number in least.items():
    if (found := value(config, name)) < number:
      raise UserError(f"config.{name} is {found}: choose {number} or more")


def check(config: ConfigDict) -> None:
  """Raises UserError for a value that makes no sense; those of a step are checked with it."""
  if not config.checkpoint_minutes >= 0:
    raise UserError(
      f"config.checkpoint_minutes is {config.checkpoint_minutes}: choose a number of minutes, or 0"
    )
  at_least(config, {"full_checkpoint_every": 1})
  if not 0 <= config.get("dropout", 0.0) < 1:
    raise UserError(f"config.dropout is {config.dropout}: choose 0 or more, below 1")
  steps = tuple(config.profile_steps)
  whole = all(isinstance(step, int) and not isinstance(step, bool) for step in steps)
  if steps and not (whole and len(steps) == 2 and 1 <= steps[0] <= steps[1]):
    raise UserError(
      f"profile_steps is {steps}: write the first and the last step to trace, as (10, 15), or ()"
    )
  if steps and config.steps and steps[0] > config.steps:
    raise UserError(
      f"profile_steps is {steps}, and the run has {config.steps} steps: choose earlier ones"
    )
  for name in config.writers:
    if name not in _WRITERS:
      raise UserError(f"config.writers has {name!r}: choose some of {', '.join(_WRITERS)}")
    if importlib.util.find_spec(_WRITERS[name]) is None:
      raise MissingPackageError(
        f"config.writers has {name!r}, and its package is not installed: pip install "
        f"{_WRITERS[name]}"
      )
