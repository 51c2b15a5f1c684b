"""Fits the baselines of a run and adds them to its result.json.

    python -m recipes.baselines runs/dlrm

`python -m recipes.dlrm` does the same at its end where the data are small.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import logging

from . import errors, files, report
from . import mesh as mesh_lib
from . import run as run_lib
from .errors import terminal

SMALL = 2_000_000  # rows that train: a minute or two of baselines


def fit(workdir: str | Path, *, most_rows: float = float("inf")) -> dict[str, Any]:
  """Fits the baselines that a finished run lacks; returns its result with them.

  The result is written after each baseline.

  Args:
    most_rows: fits nothing where more rows train.
  """
  run = run_lib.opened(workdir)
  data, known = run.load(), run.result["baselines"]
  if data.num_examples > most_rows:
    mesh_lib.say(f"baselines: python -m {__package__}.baselines {workdir}")
    return run.result
  best = {"best possible": lambda: data.best} if data.best else {}
  for name, task in {**data.baseline_tasks(run.config), **best}.items():
    if name not in known:
      mesh_lib.say(f"fitting the baseline {name}")
      known[name] = dict(task())
      files.write_json(run.workdir / "result.json", run.result)
  return run.result


def main(argv: Sequence[str]) -> None:
  parser = errors.parser(f"{__package__}.baselines", __doc__)
  parser.add_argument("run", help="the workdir of a run that has ended")
  arguments = parser.parse_args(argv)
  logging.set_verbosity(logging.ERROR)
  with errors.in_one_line(parser):
    result = fit(arguments.run)
  print(terminal(report.table(result)))


if __name__ == "__main__":
  main(sys.argv[1:])
