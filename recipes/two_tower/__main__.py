"""Command line of the recipe; `--helpfull` lists the flags."""

from absl import app, flags, logging
from ml_collections import config_flags

from recipes.two_tower import train

_CONFIG = config_flags.DEFINE_config_file(
  "config", "configs/two_tower/synthetic.py", "The settings."
)
_WORKDIR = flags.DEFINE_string("workdir", "runs/two_tower", "The run's folder.")


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)  # Orbax logs a page per checkpoint
  train.run(_CONFIG.value, _WORKDIR.value)


if __name__ == "__main__":
  app.run(main)
