"""The settings of a run: those that its config gives, and defaults for all others.

A config is a Python file whose `get_config(mode)` returns a dict of the settings that differ from
the defaults: `RUN` here, `DEFAULTS` in the recipe's `defaults.py`, `DATA_SETS` there for those of a
published or generated data set, and `TABLE` here for those of your own table.
"""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from . import mesh as mesh_lib
from .errors import UserError
from .tables import spec

# On the command line each is `--config.<name>=<value>`.
RUN: dict[str, Any] = {
  "seed": 0,  # of parameters, the order of examples, and all draws
  "cache_dir": "~/.cache/sparse_embed",  # where prepared data sets and downloads are
  "batch_size": 0,  # examples of a step, on all devices; 0 goes by the number of examples
  "steps": 0,  # of the whole run; 0 is as many as the epochs have
  "log_every": 0,  # steps from one line of the log to the next; 0 logs ten times an epoch
  "eval_every": 0,  # steps from one validation to the next; 0 is an epoch
  "checkpoint_every": 0,  # saves after this many steps, as well as after validations
  "warmup_steps": -1,  # over which learning rates rise; -1 is a tenth of the steps, up to 100
  "final_rate": 0.1,  # share of the learning rates that a cosine leaves at the end
  "weight_decay": 0.0,  # of dense parameters; tables have their own
  "init_from": "",  # the --workdir of a run whose tables, slots and dense parameters to start from
  # Scales all gradients, of tables and dense parameters together, down to this norm; 0 does not.
  "clip_norm": 0.0,
  # The computation between tables and loss: "float32" or "bfloat16". Parameters, slots and
  # losses are float32 in any case.
  "dtype": "float32",
  # The rows of tables: "float32" or "bfloat16", whose updates are rounded at random.
  "table_dtype": "float32",
  # The memory of a device for tables, slots and exchange. With it, `embed.plan` chooses a strategy
  # for each table in place of `table.sharding`, and the plan is printed; 0 plans nothing.
  "hbm_bytes": 0,
  "test": True,  # whether the run ends with its test; a False one is tested by changing it later
  "tensorboard": True,  # whether metrics also go to TensorBoard
}

# Settings of your own table, shared by all recipes.
TABLE: dict[str, Any] = {
  "dataset": "table",
  "files": "",  # a file, a folder, a pattern, several, or {"train": ..., "valid": ..., "test": ...}
  "format": dataclasses.asdict(spec.Format()),
  "columns": {},
  "on_bad_row": "raise",  # or "skip", which counts
  "split": {
    "by": "",  # hash, time, order, user, last, column; "" goes by files and columns, see docs
    "valid": 0.1,  # of the rows
    "test": 0.1,
    "seed": 0,
    "on": "",  # by hash: the column whose equal values stay together; "" is the row
  },
  "exclude_seen": True,  # whether rankings leave out what the user has had, and repeats are merged
  "core": 0,  # users and items with fewer interactions are dropped, repeatedly
}

# A run that has ended resumes if one of these has changed.
LENGTH = ("steps", "epochs", "patience", "test", "files")
# The settings that may differ when a run resumes: they change no number of a step already taken.
MAY_CHANGE = (
  *LENGTH, "log_every", "eval_every", "checkpoint_every", "eval_batch_size", "cache_dir",
  "data_dir", "hbm_bytes", "tensorboard",
)  # fmt: skip


def complete(recipe: str, config: Mapping[str, Any] | ConfigDict) -> ConfigDict:
  """Returns the config of a run: the settings that are given, and defaults for all others.

  Args:
    recipe: the name of its folder.
    config: names a `dataset` of the recipe, or declares the `columns` of `files`.

  Raises:
    UserError: a setting is unknown or of another type, or there are neither columns nor a data set.

  >>> config = complete("dlrm", {"dataset": "synthetic", "rows": 5_000, "table": {"dim": 1}})
  ... # doctest: +ELLIPSIS
  Traceback (most recent call last):
  recipes.errors.UserError: config.table has no setting 'dim'; ...
  >>> config = complete("dlrm", {"dataset": "synthetic", "rows": 5_000, "model": "dlrm"})
  >>> config.rows, config.data_seed, config.table.optimizer
  (5000, 0, 'rowwise_adagrad')
  """
  defaults = importlib.import_module(f"..{recipe}.defaults", __name__)
  if "columns" in config:
    if config.get("dataset", "table") != "table":
      raise UserError("the config has a dataset and columns: remove one of them")
    return of_table(config, RUN | defaults.DEFAULTS)
  if "dataset" not in config:
    raise UserError(
      'the config declares no columns: give {"files": ..., "columns": {...}}, or a config of '
      "`configs`"
    )
  given = config.to_dict() if isinstance(config, ConfigDict) else config
  if (name := given["dataset"]) not in defaults.DATA_SETS:
    raise UserError(f"unknown dataset {name!r}; {spec.nearest(name, list(defaults.DATA_SETS))}")
  own = defaults.DATA_SETS[name]
  known = {"dataset": "", **own, **RUN, **defaults.DEFAULTS}
  return ConfigDict(spec.merged(known, given, "config"))


def of_table(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> ConfigDict:
  """Returns the settings of a table that are given, and defaults for all others.

  Raises:
    UserError: an unknown setting, one of another type, or a column that is declared wrongly;
      names it.
  """
  given = given.to_dict() if isinstance(given, ConfigDict) else dict(given)
  settings = spec.merged(TABLE | dict(defaults), given, "config")
  # A dict within a ConfigDict would lose its order.
  in_order = lambda columns: ConfigDict(columns, allow_dotted_keys=True, sort_keys=False)
  settings["columns"] = in_order(spec.as_dicts(spec.parse(settings["columns"])))
  return ConfigDict(settings, allow_dotted_keys=True, sort_keys=False)


def copied(config: ConfigDict, **changes: Any) -> ConfigDict:
  """Returns a copy of a config with some settings changed; its groups are the same objects.

  ConfigDict's own copies sort the columns of a table.
  """
  copy = type(config)(allow_dotted_keys=True, sort_keys=False)
  for name in config:
    copy[name] = changes.get(name, config[name])
  return copy


def check(config: ConfigDict, mesh: Any) -> None:
  """Raises UserError for settings of all recipes that make no sense, before any data is read."""
  mesh_lib.check_batch_sizes(mesh, batch_size=config.batch_size or mesh_lib.num_devices(mesh))


def with_schedule(
  config: ConfigDict, examples: int, mesh: Any, smallest_batch: int = 64
) -> ConfigDict:
  """Returns the config with what depends on the number of training examples filled in.

  A config without `epochs` says all itself, and stays as it is. In the others, settings of 0 are
  chosen: `batch_size` so that an epoch has about 100 steps or more, `steps` as `epochs` say,
  `eval_every` an epoch, `log_every` a tenth of it; `warmup_steps` of -1 becomes a tenth of the
  steps, up to 100.

  >>> config = ConfigDict(dict(batch_size=0, steps=0, epochs=2, eval_every=0, log_every=0,
  ...                          warmup_steps=-1, eval_batch_size=512))
  >>> chosen = with_schedule(config, 10_000, None)
  >>> chosen.batch_size, chosen.steps, chosen.eval_every, chosen.warmup_steps
  (64, 314, 157, 31)
  """
  if "epochs" in config:
    config = copied(config)
    devices = mesh_lib.num_devices(mesh)
    if not config.batch_size:
      size = smallest_batch
      while size < 4096 and size * 200 <= examples:
        size *= 2
      config.batch_size = -(-size // devices) * devices
    epoch = max(-(-examples // config.batch_size), 1)
    config.steps = config.steps or config.epochs * epoch
    config.eval_every = config.eval_every or epoch
    config.log_every = config.log_every or max(epoch // 10, 1)
    if config.warmup_steps < 0:
      config.warmup_steps = min(config.steps // 10, 100)
  return with_even_evaluation(config, mesh)


def with_even_evaluation(config: ConfigDict, mesh: Any) -> ConfigDict:
  """Returns the config with an `eval_batch_size` that is a multiple of the devices.

  It is rounded up, since last batches are padded anyway.
  """
  count, size = mesh_lib.num_devices(mesh), config.eval_batch_size
  return copied(config, eval_batch_size=-(-size // count) * count)
