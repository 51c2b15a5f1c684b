"""The command line that all recipes share: `--config`, `--workdir`, and mistakes in one line."""

import difflib
import importlib
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import catalogue, errors
from .errors import terminal

with errors.importing():
  from absl import app, flags, logging
  from ml_collections import ConfigDict, config_flags

  from . import config as config_lib
  from .tables.spec import nearest

flags.disclaim_key_flags()  # they are the calling recipe's, and its --help lists them


def train(recipe: str, config, workdir: str) -> None:
  """Trains by the recipe's `train.run`, fits the baselines of small data, and shows the result.

  With `--seeds` it does so once for each seed, in a folder of its own, and shows all in one table.
  """
  seeds = flags.FLAGS["seeds"].value if "seeds" in flags.FLAGS else []
  if not seeds:
    train_one(recipe, config, Path(workdir))
    return
  folders = [Path(workdir) / f"seed_{seed}" for seed in seeds]
  for seed, folder in zip(seeds, folders, strict=True):
    train_one(recipe, config_lib.copied(config, seed=int(seed)), folder, is_first=seed == seeds[0])
  from . import mesh as mesh_lib
  from . import report

  if mesh_lib.is_main():
    print(f"\n{terminal(report.write(folders, Path(workdir) / 'report'))}")


def train_one(recipe: str, config, workdir: Path, is_first: bool = True) -> None:
  """Trains one run, fits its baselines if it is the first of its data, and shows the result."""
  # What takes seconds is imported here, so that a wrong flag is answered at once.
  with errors.importing():
    module = importlib.import_module(f".{recipe}.train", __package__)
    from . import baselines, results
    from . import mesh as mesh_lib
  result = module.run(config, str(workdir))
  if not mesh_lib.is_main():
    return
  # Of other seeds the baselines are the same; and other processes would wait for them.
  if config.test and is_first and mesh_lib.shard()[1] == 1:
    result = baselines.fit(workdir, most_rows=baselines.SMALL)
  print(terminal(results.table(result)))
  print(f"\nresults: {workdir / 'result.json'}")
  print(f"curves:  python -m {__package__}.report {workdir}")


def program(run: Callable[[str, Any, str], Any], recipe: str) -> Callable[[], None]:
  """Defines the flags and returns the program, which calls `run(recipe, config, workdir)`.

  Call it where the command is imported: worker processes import it and need the flags defined as
  well.

  Args:
    run: imports what takes long when it is called.
    recipe: the name of its folder.
  """
  default = f"configs/{recipe}/synthetic.py"
  config = config_flags.DEFINE_config_file("config", None, "The settings.")
  flag: Any = flags.FLAGS["config"]
  flag.parser, flag.default_as_str = _ConfigFile(recipe, flag.parser), repr(default)
  workdir = flags.DEFINE_string("workdir", f"runs/{recipe}", "The run's folder.")
  if run is train:
    flags.DEFINE_list("seeds", [], "Trains with each, as 0,1,2, and shows mean and deviation.")

  def parse(argv: list[str]) -> list[str]:
    argv = flags.FLAGS.read_flags_from_files(argv, force_gnu=False)
    # Not by DEFINE_config_file, which would load it, and fail, before there are flags to report.
    if not any(re.match("--?config(=|$)", arg) for arg in argv):
      argv = [argv[0], f"--config={default}", *argv[1:]]
    try:
      rest = flags.FLAGS(argv)[1:]
    except flags.Error as error:
      sys.exit(terminal(f"error: {error}"))
    if rest:
      sys.exit(f"error: unexpected {rest}: settings are given as --config.steps=100")
    seeds: list[str] = (flags.FLAGS["seeds"].value or []) if run is train else []
    if not all(seed.isdecimal() for seed in seeds) or len(set(seeds)) < len(seeds):
      sys.exit(f"error: --seeds={','.join(seeds)}: write different numbers, as 0,1,2")
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
      print("\nstopped; the same command resumes from the last checkpoint", file=sys.stderr)
      sys.exit(130)  # of a shell, for a program that SIGINT has ended
    except (errors.UserError, OSError) as error:
      if logging.level_debug():
        raise
      sys.exit(f"error: {errors.message(error)} (--verbosity=1 shows the traceback)")

  return lambda: app.run(main, flags_parser=parse)


def _preempted(number: int, frame: Any) -> None:
  """Ends at once: an exception in the import of an extension module is lost, or crashes it."""
  os.write(2, b"\nstopped; the same command resumes from the last checkpoint\n")
  os._exit(os.EX_TEMPFAIL)


class _ConfigFile(flags.ArgumentParser):
  """Loads a config, from any working directory, and names what is nearest to a mistake."""

  def __init__(self, recipe: str, plain: flags.ArgumentParser):
    self._recipe, self._plain = recipe, plain

  def parse(self, path: str) -> Any:
    """Returns the config; absl reports a ValueError as the flag's."""
    name, _, mode = path.partition(":")
    file = catalogue.config_file(name)
    if file is None:
      configs = {p.stem: p for recipe in catalogue.recipes() for p in catalogue.configs(recipe)}
      configs |= {p.stem: p for p in catalogue.configs(self._recipe)}
      close = difflib.get_close_matches(Path(name).stem, configs, 1)
      hint = (
        f"did you mean {configs[close[0]]}?" if close else f"`python -m {__package__}` lists them"
      )
      raise ValueError(f"there is no such file; {hint}")
    for other in catalogue.recipes().keys() - {self._recipe}:
      if file.resolve().parent == catalogue.ROOT / "configs" / other:
        raise ValueError(f"that is a config for `python -m {__package__}.{other}`")
    modes = catalogue.modes(file)
    if mode and modes and mode not in modes:
      raise ValueError(f"it has no mode {mode!r}; {nearest(mode, modes)}")
    config = self._plain.parse(f"{file}:{mode}" if mode else str(file))
    if config is not None:
      config = config_lib.complete(self._recipe, config)
    for arg in sys.argv:  # as ml_collections does
      if setting := re.match(r"--?(?:no)?config\.([^=\[]+)", arg):
        _check(config, setting[1])
    return config


def _check(config: ConfigDict, setting: str) -> None:
  path, node = "config", config
  for part in setting.split("."):
    known = list(node) if isinstance(node, ConfigDict) else []
    if part not in known:
      raise ValueError(f"{path} has no setting {part!r}; {nearest(part, known or ['none'])}")
    path, node = f"{path}.{part}", node[part]
