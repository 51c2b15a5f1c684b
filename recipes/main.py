"""The command line that all recipes share: `--config`, `--workdir`, and quiet logs."""

from collections.abc import Callable
from typing import Any

from absl import app, flags, logging
from ml_collections import config_flags

flags.disclaim_key_flags()  # they are the calling recipe's, and its --help lists them


def program(recipe: str, run: Callable[[Any, str], Any]) -> Callable[[list[str]], None]:
  """Defines the flags and returns what `app.run` wants, which calls `run(config, workdir)`.

  Call it where the recipe's `__main__` is imported: worker processes import it and parse the flags
  as well.
  """
  config = config_flags.DEFINE_config_file(
    "config", f"configs/{recipe}/synthetic.py", "The settings."
  )
  workdir = flags.DEFINE_string("workdir", f"runs/{recipe}", "The run's folder.")

  def main(argv: list[str]) -> None:
    if len(argv) > 1:
      raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if not flags.FLAGS["verbosity"].present:
      logging.set_verbosity(logging.WARNING)  # Orbax logs a page per checkpoint
    run(config.value, workdir.value)

  return main
