"""Compiles a recipe's training step for TPUs or GPUs without having any, and reports it.

python -m recipes.aot dlrm --config=configs/dlrm/criteo_1tb.py --devices=v5p:4x4x4
"""

import functools
import importlib
import sys
from pathlib import Path

from .. import errors, main

main.flags.disclaim_key_flags()  # they are this command's, and its --help lists them

_topologies = main.flags.DEFINE_list(
  "devices",
  [],
  "TPU or GPU topologies, as v5p:4x4x4 or h100:8. Needs the extra tpu or cuda, but no device.",
)
_json = main.flags.DEFINE_string("json", None, "The report; default: <workdir>/aot.json.")
_timeout = main.flags.DEFINE_float("timeout", 1200.0, "Seconds that a topology may take.")


def _run(recipe: str, config, workdir: str) -> None:
  if not _topologies.value:
    raise errors.UserError("--devices is missing: write what to compile for, as v5p:4x4x4")
  with errors.importing():
    compiling = importlib.import_module(".compile", __package__)
    of_recipe = importlib.import_module(".parts", __package__).of_recipe
  path = Path(_json.value or Path(workdir) / "aot.json")
  parts = functools.partial(of_recipe, recipe, config)
  sys.exit(compiling.main(str(__package__), _topologies.value, parts, path, timeout=_timeout.value))


_program = main.program(_run, str(__package__))

if __name__ == "__main__":
  _program()
