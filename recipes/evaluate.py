"""Measures the tested state of a run again: on its validation and test rows, or on other files.

    python -m recipes.evaluate runs/clicks
    python -m recipes.evaluate runs/clicks --files=new_rows.csv

The exported program scores other files, as it would answer requests: ids that the run has not seen
are unknown. They have the columns of the run's table, labels included. Rankings are measured on the
rows of the run alone.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from scipy.special import logit

from . import config as config_lib
from . import errors, export, serving
from . import mesh as mesh_lib
from . import run as run_lib
from .errors import UserError
from .evaluation.metrics import Users, label_metrics
from .tables import clicks, source, spec
from .tables import settings as table_settings
from .tables.transforms import numbers_of
from .training.features import cut_ids


def evaluate(workdir: str | Path) -> dict[str, float]:
  """Returns `{"valid_...", "test_..."}` of the tested state of a run, on the devices that are here.

  Raises:
    UserError: the run has not ended, or its data have changed.
  """
  mesh, run = mesh_lib.start(), run_lib.opened(workdir)
  data = run.load()
  config, model = config_lib.with_even_evaluation(run.config, mesh), run.model(data, mesh)
  measure = run.train.evaluator(data, config, mesh)
  valid, test = (run_lib.scalars(split, measure(model, split)) for split in ("valid", "test"))
  return valid | test


def evaluate_files(workdir: str | Path, files: str | Sequence[str]) -> dict[str, Any]:
  """Returns the number of `rows` and the `metrics` of a run on a table, on other files of clicks.

  Metrics are those of `evaluation.metrics.label_metrics`.

  Raises:
    UserError: the run is of rankings, or a file cannot be read.
  """
  run = run_lib.opened(workdir)
  if run.recipe != "dlrm":
    raise UserError(
      f"{workdir} is a run of {run.recipe}, and other files measure dlrm alone: make them the "
      "`test` files of a run that starts from this one with init_from, or take the items of "
      "recipes.predict and metrics of your own"
    )
  settings = table_settings.settings(config_lib.copied(run.config, files=files))
  table = table_settings.parsed(settings)
  with tempfile.TemporaryDirectory() as folder:
    model = serving.load(export.export(workdir, Path(folder) / "served"))
  assert isinstance(model, serving.ClickModel)
  users, weight_name, chunks = Users.load(Path(workdir) / "serve"), table.name_of(spec.Weight), []
  with source.connect() as con, tempfile.TemporaryDirectory() as stage:
    rows = source.read(con, table.rows, Path(stage), table.on_bad_row)
    for values, place, _ in rows.batches():
      inputs = model.transforms.encode(values, len(place))
      user = users.ids(cut_ids(inputs["ids"], model.transforms.features))
      weight = numbers_of(values[weight_name]) if weight_name else np.ones(len(place))
      label = clicks.labels_of(table, values)
      chunks.append((model.scores(**inputs), label, weight, user))
  score, label, weight, user = jax.tree.map(lambda *x: np.concatenate(x), *chunks)
  # The table may declare its labels in another order than the model's.
  places = [list(table.labels).index(name) for name in model.labels]
  targets = label.reshape(len(label), -1)[:, places]
  metrics = label_metrics(model.labels, logit(score), targets, weight, users.codes(user))
  return {"rows": len(label), "metrics": metrics}


def main(argv: Sequence[str]) -> None:
  parser = errors.parser(f"{__package__}.evaluate", __doc__)
  parser.add_argument("run", help="the workdir of a run that has ended")
  parser.add_argument("--files", help="other files, in place of validation and test rows")
  arguments = parser.parse_args(argv)
  logging.set_verbosity(logging.ERROR)
  with errors.in_one_line(parser):
    if arguments.files:
      measured = evaluate_files(arguments.run, arguments.files.split(os.pathsep))
      print(f"{measured['rows']:,} rows")
      metrics = measured["metrics"]
    else:
      metrics = evaluate(arguments.run)
  for name, value in metrics.items():
    print(f"{name:24}{value:.4f}")


if __name__ == "__main__":
  main(sys.argv[1:])
