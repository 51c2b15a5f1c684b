"""Fits the baselines of a run and adds them to its result.json.

    python -m recipes.baselines runs/dlrm

`python -m recipes.dlrm` does the same at its end where the data are small.
"""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import logging

from . import errors, files, results
from . import mesh as mesh_lib
from . import run as run_lib
from .errors import terminal

SMALL = 2_000_000  # rows that train: a minute or two of baselines


def fit(workdir: str | Path, *, most_rows: float = float("inf")) -> dict[str, Any]:
  """Fits the baselines that a finished run lacks; returns its result with them.

  The result is written before and after each baseline. A baseline that failed, or that ended the
  process, has no metrics there.

  Args:
    most_rows: fits nothing where more rows train, and nothing that has failed before.
  """
  run = run_lib.opened(workdir)
  result, path = run.result, Path(workdir) / "result.json"
  recipe = importlib.import_module(f".{run.recipe}.baselines", __package__)
  data = run.load()
  tasks = recipe.tasks(data, run.config) if data.num_examples <= most_rows else {}
  if not tasks:
    mesh_lib.say(f"baselines: python -m {__package__}.baselines {workdir}")
  known = result["baselines"]
  for name, task in tasks.items():
    if known.get(name) or (name in known and most_rows < float("inf")):
      continue
    mesh_lib.say(f"fitting the baseline {name}")
    known[name] = {}
    files.write_json(path, result)
    try:
      known[name] = dict(task())
    except KeyboardInterrupt:
      del known[name]
      raise
    except Exception as error:  # a library's, which must not hide the result of the run
      mesh_lib.say(f"the baseline {name} failed: {type(error).__name__}: {error}")
    finally:
      files.write_json(path, result)
  if data.best:
    known["best possible"] = dict(data.best)
  files.write_json(path, result)
  return result


def main(argv: Sequence[str]) -> None:
  parser = errors.parser(f"{__package__}.baselines", __doc__)
  parser.add_argument("run", help="the workdir of a run that has ended")
  arguments = parser.parse_args(argv)
  logging.set_verbosity(logging.ERROR)
  with errors.in_one_line(parser):
    result = fit(arguments.run)
  print(terminal(results.table(result)))


if __name__ == "__main__":
  main(sys.argv[1:])
