"""Command line of the recipe; `--helpfull` lists the flags."""

import functools
import sys
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

from recipes import aot
from recipes.dlrm import shapes, train

_CONFIG = config_flags.DEFINE_config_file("config", "configs/dlrm/synthetic.py", "The settings.")
_WORKDIR = flags.DEFINE_string("workdir", "runs/dlrm", "The run's folder.")
_AOT = flags.DEFINE_list(
  "aot",
  [],
  "TPU topologies, as v5p:4x4x4: instead of training, compile the step for them and report memory "
  "and exchanges. Needs libtpu, but no TPU and, for most configs, no data.",
)
_AOT_JSON = flags.DEFINE_string("aot_json", None, "--aot's report; default: <workdir>/aot.json.")
_AOT_TIMEOUT = flags.DEFINE_float("aot_timeout", 1200.0, "Seconds that --aot may take a topology.")


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)  # Orbax logs a page per checkpoint
  if _AOT.value:
    path = Path(_AOT_JSON.value or Path(_WORKDIR.value) / "aot.json")
    parts = functools.partial(shapes.parts, _CONFIG.value)
    sys.exit(aot.main("recipes.dlrm", _AOT.value, parts, path, timeout=_AOT_TIMEOUT.value))
  train.run(_CONFIG.value, _WORKDIR.value)


if __name__ == "__main__":
  app.run(main)
