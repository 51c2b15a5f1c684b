"""Measures the tested state of a run of dlrm on other files.

    python -m recipes.evaluate runs/clicks --files=new_rows.csv

They have the columns of the run's table, the label included. Ids that the run has not seen are
unknown, as in requests.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from . import cache, errors
from . import config as config_lib
from . import mesh as mesh_lib
from . import run as run_lib
from .dlrm.data import ClickData
from .errors import UserError
from .files import read_json
from .tables import clicks, source, spec
from .tables.formats import paths
from .tables.settings import READING
from .tables.transforms import Transforms


def evaluate(workdir: str | Path, files: str | Sequence[str]) -> dict[str, Any]:
  """Returns the number of `rows` and the `metrics` of a run on a table, on other files of clicks.

  Raises:
    UserError: the run is of rankings, or a file cannot be read.
  """
  mesh, run = mesh_lib.start(), run_lib.opened(workdir)
  if run.recipe != "dlrm":
    raise UserError(f"{workdir} is a run of {run.recipe}; other files measure runs of dlrm alone")
  reading, transforms = read_json(run.serve / READING), Transforms.load(run.serve)
  declared, text_format = spec.parse(reading["columns"]), spec.Format(**reading["format"])
  kinds = {name: kind for name, kind in declared.items() if not isinstance(kind, spec.Title)}
  given = source.Source({"": tuple(paths(files))}, text_format, kinds, {})
  with (
    source.connect() as con,
    tempfile.TemporaryDirectory() as stage,
    tempfile.TemporaryDirectory() as columns,
  ):
    rows = source.read(con, given, Path(stage), run.config.get("on_bad_row", "raise"))
    count = len(rows)
    clicks.write_columns(rows, transforms, Path(columns), np.array([count, 0, 0]))
    meta = {"splits": {"test": (0, count)}} | clicks.meta_of(kinds, transforms)
    data = ClickData(cache.Columns(columns), meta)
    config = config_lib.with_even_evaluation(run.config, mesh)
    measure = run.train.evaluator(data, config, mesh)
    return {"rows": count, "metrics": measure(run.model(data, mesh), "test")}


def main(argv: Sequence[str]) -> None:
  parser = errors.parser(f"{__package__}.evaluate", __doc__)
  parser.add_argument("run", help="the workdir of a run that has ended")
  parser.add_argument("--files", nargs="+", required=True, help="with the columns of its table")
  arguments = parser.parse_args(argv)
  logging.set_verbosity(logging.ERROR)
  with errors.in_one_line(parser):
    measured = evaluate(arguments.run, arguments.files)
  metrics = (f"{name:24}{value:.4f}" for name, value in measured["metrics"].items())
  print(f"{measured['rows']:,} rows", *metrics, sep="\n")


if __name__ == "__main__":
  main(sys.argv[1:])
