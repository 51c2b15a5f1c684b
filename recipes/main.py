"""The command line that all recipes share: `--config`, `--workdir`, and mistakes in one line."""

import importlib
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from ml_collections import config_flags

from . import config as config_lib
from . import errors
from .__main__ import ROOT, modes
from .errors import terminal
from .tables.spec import nearest

flags.disclaim_key_flags()  # they are the calling recipe's, and its --help lists them

_RESUMES = "stopped; the same command resumes from the last checkpoint"


def train(recipe: str, config, workdir: str) -> None:
  """Trains by the recipe's `train.run`, fits the baselines of small data, and shows the result."""
  # Import slow modules here, so that a wrong flag is reported at once.
  module = importlib.import_module(f".{recipe}.train", __package__)
  from . import baselines, report
  from . import mesh as mesh_lib

  result = module.run(config, workdir)
  if not mesh_lib.is_main():
    return
  if config.test and mesh_lib.shard()[1] == 1:  # other processes would wait for them
    result = baselines.fit(workdir, most_rows=baselines.SMALL)
  print(terminal(report.table(result)))
  print(f"\nresults: {Path(workdir) / 'result.json'}")


def program(run: Callable[[str, Any, str], Any], recipe: str) -> Callable[[], None]:
  """Defines the flags and returns the program, which calls `run(recipe, config, workdir)`."""
  default = f"configs/{recipe}/synthetic.py"
  config = config_flags.DEFINE_config_file("config", None, "The settings.")
  flag: Any = flags.FLAGS["config"]
  flag.parser, flag.default_as_str = _ConfigFile(recipe, flag.parser), repr(default)
  workdir = flags.DEFINE_string("workdir", f"runs/{recipe}", "The run's folder.")

  def parse(argv: list[str]) -> list[str]:
    # Not by DEFINE_config_file, which would load it, and fail, before there are flags to report.
    if not any(re.match("--?config(=|$)", arg) for arg in argv):
      argv = [argv[0], f"--config={default}", *argv[1:]]
    try:
      rest = flags.FLAGS(argv)[1:]
    except flags.Error as error:
      sys.exit(terminal(f"error: {error}"))
    except (AttributeError, KeyError) as error:  # of ConfigDict, with the setting that is nearest
      reason = error.args[0].args[0] if isinstance(error.args[0], KeyError) else error.args[0]
      unknown = ". ".join(reason.splitlines())
      sys.exit(f"error: no setting {unknown} (recipes/{recipe}/defaults.py lists them)")
    if rest:
      sys.exit(f"error: unexpected {rest}: settings are given as --config.steps=100")
    return argv

  def main(argv: list[str]) -> None:
    del argv
    if not flags.FLAGS["verbosity"].present:
      # Orbax logs a page per checkpoint, and the traceback of what it raises as well.
      logging.set_verbosity(logging.FATAL)
    signal.signal(signal.SIGTERM, _preempted)  # until a run, which saves, handles it itself
    # Importing JAX takes seconds; say first what they are for.
    print(f"{config_flags.get_config_filename(flag)} -> {workdir.value}", file=sys.stderr)
    try:
      run(recipe, config.value, workdir.value)
    except KeyboardInterrupt:
      print(f"\n{_RESUMES}", file=sys.stderr)
      sys.exit(130)  # of a shell, for a program that SIGINT has ended
    except (errors.UserError, OSError) as error:
      if logging.level_debug():
        raise
      sys.exit(terminal(f"error: {error} (--verbosity=1 shows the traceback)"))

  return lambda: app.run(main, flags_parser=parse)


def _preempted(number: int, frame: Any) -> None:
  """Ends at once: an exception in the import of an extension module is lost, or crashes it."""
  os.write(2, f"\n{_RESUMES}\n".encode())
  os._exit(os.EX_TEMPFAIL)


class _ConfigFile(flags.ArgumentParser):
  """Loads a config, from any working directory, and completes it by the recipe's defaults."""

  def __init__(self, recipe: str, plain: flags.ArgumentParser):
    self._recipe, self._plain = recipe, plain

  def parse(self, path: str) -> Any:
    """Returns the config; absl reports a ValueError as the flag's."""
    name, _, mode = path.partition(":")
    file = next((x for x in (Path(name), ROOT / name) if x.is_file()), None)
    if file is None:
      raise ValueError(f"there is no such file; `python -m {__package__}` lists the configs")
    known = modes(file)
    if mode and known and mode not in known:
      raise ValueError(f"it has no mode {mode!r}; {nearest(mode, known)}")
    try:
      config = self._plain.parse(f"{file}:{mode}" if mode else str(file))
    except (AttributeError, KeyError) as error:  # which absl would take for an unknown setting
      raise ValueError(f"{type(error).__name__}: {error}") from error
    return None if config is None else config_lib.complete(self._recipe, config)
