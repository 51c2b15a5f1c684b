"""Day by day: a run on each day's clicks, which starts from the run of the day before.

    <workdir>/<day>/          the day's run; `served` in it is its export
    <workdir>/days.json       metrics of each day, by the export of the day before
    <workdir>/days.png        the same as curves

A day is tested before it is trained on, by the very program that would have answered requests on
that day: ids that are new on it are unknown. The tables then grow by them; see `warm_start`. The
same command goes on after a kill, and with the days that have been added since.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from sklearn.metrics import log_loss, roc_auc_score

from embed.tools.text import aligned

from . import arrays, export, files, hosts, runs, serving, settings
from .errors import UserError
from .tables import settings as table_settings
from .tables.rows import RowReader, values_of

_SUFFIXES = r"(\.(csv|tsv|txt|parquet|pq|array_?record|gz))+$"
_SERVED = "served"


def run(
  recipe: str, config, workdir: str | Path, train: Callable[[Any, str], dict[str, Any]]
) -> list[dict[str, Any]]:
  """Trains day after day; returns the content of days.json.

  Args:
    recipe: its name; dlrm.
    config: of a table, with `days`, which takes the place of `files`. Each day's rows train and, as
      `config.split` says, validate; none of them are held out as a test.
    workdir: holds a folder for each day.
    train: `(config, workdir) -> result`, a day's run.

  Returns:
    For each day `{"day", "rows", "metrics", "result"}`, `metrics` being `auc` (if both outcomes are
    there) and `logloss` of the day's rows by the export of the day before, {} of the first day.

  Raises:
    UserError: the days are none, or something else is configured than this can do.
  """
  days = _checked(recipe, config)
  workdir, before = Path(workdir).resolve(), None
  history: list[dict[str, Any]] = []
  for name, path in days.items():
    day, folder = _config_of(config, path, before), workdir / name
    hosts.say(f"day {name}")
    # Kept before the day is trained on, so that a kill does not test it again.
    tested = folder.with_name(f"{name}.json")
    if not tested.exists():
      about: dict[str, Any] = {"rows": None, "metrics": {}}
      if before is not None:
        about = _test(before / _SERVED, day)
      workdir.mkdir(parents=True, exist_ok=True)
      arrays.write_json(tested, about)
    result = runs.result(folder)
    if result is None or not runs.is_complete(result) or not (folder / _SERVED).exists():
      result = train(day, str(folder))
      export.export(folder, folder / _SERVED)
    history.append({"day": name, **arrays.read_json(tested), "result": result["metrics"]})
    arrays.write_json(workdir / "days.json", history)
    before = folder
  draw(history, workdir / "days.png")
  hosts.say(table(history))
  return history


def entries(days: str | Sequence[str]) -> dict[str, Path]:
  """Returns the file or folder of each day by its name: a folder's, in their order, or a list's.

  Raises:
    UserError: there are none, or two of one name.
  """
  if isinstance(days, str):
    folder = Path(days).expanduser()
    if not folder.is_dir():
      raise UserError(f"config.days is {days!r}, which is no folder: give one, or a list of files")
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith((".", "_")))
  else:
    paths = [Path(day).expanduser() for day in days]
  by_name: dict[str, Path] = {}
  for path in paths:
    name = re.sub(_SUFFIXES, "", path.name)
    if name in by_name:
      raise UserError(f"two days of config.days are called {name!r}: {by_name[name]} and {path}")
    by_name[name] = path
  if not by_name:
    raise UserError(f"config.days is {days!r}, which has no files")
  return by_name


def _checked(recipe: str, config) -> dict[str, Path]:
  if config.get("dataset") != "table":
    raise UserError("config.days is for tables of one's own: declare config.columns")
  if recipe != "dlrm":
    raise UserError(
      f"config.days is for dlrm: train {recipe} on all rows so far as config.files, and give the "
      "run before as config.init_from"
    )
  if config.files:
    hosts.say("config.days takes the place of config.files, which are not read")
  if config.split.by in ("files", "column"):
    raise UserError(f"config.split.by is {config.split.by!r}, and days have no such split")
  columns = [name for name, kind in config.columns.items() if kind["kind"] == "split"]
  if columns or config.split.valid_from or config.split.test_from:
    what = f"column {columns[0]!r}" if columns else "config.split.valid_from or test_from"
    raise UserError(f"{what} splits rows once and for all, and days come one by one: remove it")
  if jax.process_count() > 1:
    raise UserError("config.days trains in one process: train each day with config.init_from")
  return entries(config.days)


def _config_of(config, path: Path, before: Path | None) -> Any:
  """Returns the config of a day's run."""
  day = settings.copied(config)
  day.days = ""
  with day.ignore_type():
    day.files = str(path.resolve())
  day.split = config.split.copy_and_resolve_references()
  day.split.test = 0.0
  if before is not None:
    day.init_from, day.init_parts, day.init_rename = str(before), "all", ""
  return day


def _test(served: Path, config) -> dict[str, Any]:
  """Returns the number of a day's rows, and the metrics of an exported model on them."""
  table = table_settings.parsed(table_settings.settings(config))
  model = serving.load(served)
  assert isinstance(model, serving.ClickModel)
  scores: list[np.ndarray] = []
  labels: list[np.ndarray] = []
  for rows in RowReader(table, ""):
    assert rows.label is not None  # dlrm has asked for one
    scores.append(model.scores(values_of(rows.chunk, table.kinds), len(rows.chunk.rows)))
    labels.append(rows.label)
  score, label = np.concatenate(scores).astype(np.float64), np.concatenate(labels)
  metrics = {"logloss": float(log_loss(label, score, labels=[0, 1]))}
  if 0 < label.sum() < len(label):
    metrics = {"auc": float(roc_auc_score(label, score))} | metrics
  return {"rows": len(label), "metrics": metrics}


def table(history: Sequence[Mapping[str, Any]]) -> str:
  """Returns the days as lines of text."""
  show = lambda x: "" if x is None else f"{x:,}" if isinstance(x, int) else f"{x:.4f}"
  lines = [("day", "rows", "auc", "logloss")]
  for day in history:
    metrics = day["metrics"]
    lines.append(
      (day["day"], *map(show, (day["rows"], metrics.get("auc"), metrics.get("logloss"))))
    )
  return aligned(lines)


def draw(history: Sequence[Mapping[str, Any]], path: Path) -> None:
  """Writes a picture of the metrics by day."""
  import matplotlib
  from matplotlib.figure import Figure

  from . import style

  with matplotlib.rc_context(style.SETTINGS):
    figure = Figure(figsize=(8, 3), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("auc", "logloss"), strict=True):
      days = [day for day in history if name in day["metrics"]]
      values = [day["metrics"][name] for day in days]
      axes.plot([day["day"] for day in days], values, marker="o", color=style.BLUE)
      axes.set_title(f"{name} by the export of the day before")
      axes.tick_params(axis="x", rotation=30)
    with files.replacing(path) as file:
      figure.savefig(file, format="png", dpi=120)
