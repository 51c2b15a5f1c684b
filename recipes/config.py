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
  "seed": 0,  # for initial parameters, the order of examples, and all other draws
  "cache_dir": "~/.cache/sparse_embed",  # folder of prepared data sets and downloads
  "batch_size": 0,  # examples per step, over all devices; 0 chooses by the number of examples
  "steps": 0,  # of the whole run; 0 takes as many as `epochs` need
  "log_every": 0,  # steps between two lines of the log; 0 logs ten times per epoch
  "eval_every": 0,  # steps between two validations; 0 validates once per epoch
  "checkpoint_every": 0,  # steps between two checkpoints; every validation also saves one
  "warmup_steps": -1,  # during which learning rates rise; -1 is a tenth of all steps, up to 100
  "final_rate": 0.1,  # learning rates at the end of the cosine, as a share of their peak
  "weight_decay": 0.0,  # of dense parameters; tables have their own
  "init_from": "",  # --workdir of the run that supplies initial tables, slots and dense parameters
  # Largest norm of all gradients together, of tables and dense parameters; 0 does not clip.
  "clip_norm": 0.0,
  # Dtype of the computation between tables and loss: "float32" or "bfloat16". Dense parameters,
  # slots and losses are always float32.
  "dtype": "float32",
  # Dtype of the tables' rows: "float32", or "bfloat16" with stochastic rounding.
  "table_dtype": "float32",
  # Bytes on each device for tables, slots and exchange. If set, `embed.plan` chooses a strategy for
  # each table instead of `table.sharding`, and the run prints the plan; 0 does not plan.
  "hbm_bytes": 0,
  "test": True,  # whether the run ends with a test; to test a finished run, change False to True
  "tensorboard": True,  # whether to write metrics for TensorBoard as well
}

# Settings of your own table, shared by all recipes.
TABLE: dict[str, Any] = {
  "dataset": "table",
  "files": "",  # a file, a folder, a pattern, a list, or {"train": ..., "valid": ..., "test": ...}
  "format": dataclasses.asdict(spec.Format()),
  "columns": {},
  "on_bad_row": "raise",  # or "skip", which leaves bad rows out and counts them
  "split": {
    "by": "",  # hash, time, order, user, last or column; "" depends on the files and columns
    "valid": 0.1,  # share of the rows
    "test": 0.1,
    "seed": 0,
    "on": "",  # for hash: a column whose equal values stay together; "" hashes the row
  },
  "exclude_seen": True,  # whether rankings leave out a user's previous items; repeats are merged
  "core": 0,  # drops users and items with fewer interactions, until none is left
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
