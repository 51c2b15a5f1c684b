"""The settings that every run has, whatever it trains; a config may leave them out."""

from typing import Any

from ..errors import UserError

# On the command line each is `--config.<name>=<value>`.
RUN: dict[str, Any] = {
  # Save after that many minutes as well as every `checkpoint_every` steps; 0 does not. A pipelined
  # run does not either: its numbers depend on where it pauses.
  "checkpoint_minutes": 10.0,
  # Every so many saves are full; those in between write the rows that have changed since the last
  # save, and everything that is no table. 1: all are full. Each row takes 8 bytes on its device.
  "full_checkpoint_every": 1,
  # The --workdir of another run to start from: its tables, slots and dense parameters by name.
  "init_from": "",
  "init_parts": "all",  # or "tables"
  "init_rename": "",  # tables of another name there, "new=old,new=old"
  # Scale all gradients, of tables and dense parameters together, down to that norm; 0 does not.
  "clip_norm": 0.0,
  # Cut each batch into that many equal parts, whose gradients are added up before one update: the
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
}

# What may differ when a run resumes: nothing that decides the numbers of steps already taken.
MAY_CHANGE = (
  "steps",  # also below the steps taken, which is refused where they are known
  "epochs",
  "patience",
  "log_every",
  "eval_every",
  "checkpoint_every",
  "checkpoint_minutes",
  "full_checkpoint_every",
  "eval_batch_size",
  "cache_dir",
  "num_workers",
  "data_dir",  # the data are compared by their hashes
  "profile_steps",
  "hbm_bytes",
)
# Those that the data decide where a config leaves them open; see `tables.settings.steps_of_data`.
DECIDED = ("batch_size", "steps", "eval_every", "log_every", "warmup_steps")
# A run that has ended resumes if one of these has changed.
LENGTH = ("steps", "epochs", "patience")


def value(config, name: str) -> Any:
  """Returns a setting of `RUN`, or its default where the config leaves it out.

  >>> from ml_collections import ConfigDict
  >>> value(ConfigDict(), "checkpoint_minutes")
  10.0
  """
  return config.get(name, RUN[name])


def copied(config, **changes: Any) -> Any:
  """Returns a copy of a config with some settings changed; its groups are the same objects.

  ConfigDict's own copies sort the columns of a table.
  """
  copy = type(config)(allow_dotted_keys=True, sort_keys=False)
  for name in config:
    copy[name] = changes.get(name, config[name])
  return copy


def check(config) -> None:
  """Raises UserError for a number that makes no sense; those of a step are checked with it."""
  minutes, full_every = value(config, "checkpoint_minutes"), value(config, "full_checkpoint_every")
  if not minutes >= 0:
    raise UserError(f"config.checkpoint_minutes is {minutes}: choose a number of minutes, or 0")
  if full_every < 1:
    raise UserError(f"config.full_checkpoint_every is {full_every}: choose 1 or more")
  if config.get("days"):
    program = str(__package__).rpartition(".")[0]
    raise UserError(f"config.days trains day by day: python -m {program}.days RECIPE ...")


def add(config) -> None:
  """Adds what a config leaves out of `RUN`, so that flags can set it."""
  with config.unlocked():
    for name, default in RUN.items():
      if name not in config:
        config[name] = default
