"""Measures the tested state of a run again: on its validation and test rows, or on other files.

    python -m recipes.evaluate runs/clicks
    python -m recipes.evaluate runs/clicks --files=new_rows.csv

The exported program scores other files, as it would answer requests: ids that the run has not seen
are unknown. They have the columns of the run's table, the label or the item included.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
from absl import logging
from scipy.special import logit

from . import config as config_lib
from . import errors, export, packing, serving
from . import mesh as mesh_lib
from . import run as run_lib
from .dlrm import tasks
from .evaluation.metrics import RankingMetrics, groups_of
from .tables import clicks, interactions, source, spec
from .tables import settings as table_settings
from .tables.transforms import Codes, numbers_of

_USERS = 4096  # ranked at once


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
  """Returns as `of_export`, of a run on a table and other files."""
  config = config_lib.copied(run_lib.opened(workdir).config, files=files)
  with tempfile.TemporaryDirectory() as folder:
    return of_export(export.export(workdir, Path(folder) / "served"), config)


def of_export(served: Path, config) -> dict[str, Any]:
  """Returns the number of `rows` and the `metrics` of an exported model on the files of a table.

  Metrics are those of `dlrm.tasks.metrics`, or of one ranking for each user by `RankingMetrics`.

  Raises:
    UserError: a file cannot be read.
  """
  table = table_settings.parsed(table_settings.settings(config))
  model = serving.load(served)
  if isinstance(model, serving.ClickModel):
    return _clicks(model, table, config.slices)
  return _ranking(model, table, config.ks)


def _clicks(
  model: serving.ClickModel, table: table_settings.Table, slices: Sequence[str]
) -> dict[str, Any]:
  grouping = groups_of(model.encoder.features, slices, model.served.transforms)
  weight_name, chunks = table.name_of(spec.Weight), []
  with source.connect() as con, tempfile.TemporaryDirectory() as stage:
    rows = source.read(con, table.rows, Path(stage), table.on_bad_row)
    positions = clicks.positions_of(table, rows, model.encoder)
    for values, place, _ in rows.batches():
      inputs = model.inputs(values, len(place), next(positions))
      grouped = {name: inputs["features"][name] for name in grouping.features}
      weight = numbers_of(values[weight_name]) if weight_name else np.ones(len(place))
      chunks.append((model.scores(inputs), clicks.labels_of(table, values), weight, grouped))
  score, label, weight, grouped = jax.tree.map(lambda *x: np.concatenate(x), *chunks)
  outputs = logit(score)
  # The table may declare its labels in another order than the model's.
  places = [list(table.labels).index(name) for name in model.labels]
  targets = label.reshape(len(label), -1)[:, places]
  metrics = tasks.metrics(model.labels, outputs, targets, weight, grouping, grouped)
  return {"rows": len(label), "metrics": {k: x for k, x in metrics.items() if not np.ndim(x)}}


def _ranking(
  model: serving.Recommender, table: table_settings.Table, ks: Sequence[int]
) -> dict[str, Any]:
  """Ranks once for each user of a day, who asks with what they had before it.

  All items that the user has on the day are to be found, each once. Items that the model does not
  know cannot be, and count as misses. With `config.exclude_seen`, items that the user had before
  are left out of the ranking, and do not count. Unknown users get the most popular items.
  """
  pairs = interactions.pairs(table)
  repeats = model.leaves_out(pairs.users.take(pairs.user), pairs.items.take(pairs.item))
  user, item = pairs.user[~repeats], pairs.item[~repeats]
  ends = np.cumsum(np.bincount(user, minlength=len(pairs.users)))
  targets = np.split(item[np.argsort(user, kind="stable")], ends[:-1])
  codes, metrics, popular = Codes(pairs.items.to_pylist()), RankingMetrics(ks), 0
  columns = {model.user: pairs.users, **pairs.values}
  for start in range(0, len(targets), _USERS):
    part = targets[start : start + _USERS]
    values = {name: x[start : start + _USERS] for name, x in columns.items()}
    answers = model.answers(values, len(part), max(ks))
    top_ids = codes.find(pa.array(answers.items.ravel(), pa.string()))
    lengths = [*map(len, part)]
    relevant = packing.padded(np.concatenate(part), lengths, max(lengths))
    metrics.update(top_ids.reshape(answers.items.shape), relevant)
    popular += int(answers.is_popular.sum())
  mesh_lib.say(
    f"{len(targets):,} users ask for {len(item):,} items, {popular:,} of them unknown; "
    f"{int(repeats.sum()):,} items that they had before do not count"
  )
  return {"rows": len(item), "metrics": metrics.compute() if len(item) else {}}


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
