"""The command line of a recipe that trains, or with `--aot` compiles its step for other devices."""

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from . import errors, main

main.flags.disclaim_key_flags()  # they are the calling recipe's, and its --help lists them


def program(recipe: str) -> Callable[[], None]:
  """Defines the flags of `main.program` and of `--aot`, and returns the program.

  Args:
    recipe: the name of its folder, with `train.run(config, workdir)` and
      `shapes.parts(config, mesh) -> aot.Parts`.
  """
  topologies = main.flags.DEFINE_list(
    "aot",
    [],
    "TPU or GPU topologies, as v5p:4x4x4 or h100:8: instead of training, compile the step for them "
    "and report memory and exchanges. Needs the extra tpu or cuda, but no device.",
  )
  report = main.flags.DEFINE_string(
    "aot_json", None, "--aot's report; default: <workdir>/aot.json."
  )
  timeout = main.flags.DEFINE_float(
    "aot_timeout", 1200.0, "Seconds that --aot may take a topology."
  )

  def run(config, workdir: str) -> None:
    if not topologies.value:
      main.train(recipe, config, workdir)
      return
    with errors.importing():
      aot = importlib.import_module(".aot", __package__)
      shapes = importlib.import_module(f".{recipe}.shapes", __package__)
    path = Path(report.value or Path(workdir) / "aot.json")
    parts = functools.partial(shapes.parts, config)
    module = f"{__package__}.{recipe}"
    sys.exit(aot.main(module, topologies.value, parts, path, timeout=timeout.value))

  return main.program(recipe, run)
