"""Day by day: a run for each day, which starts from the run of the day before.

    <workdir>/<day>/          the day's run; `served` in it is its export
    <workdir>/days.json       metrics of each day, by the export of the day before
    <workdir>/days.png        the same as curves

A day is tested before it is trained on, by the very program that would have answered requests on
that day: ids that are new on it are unknown. The tables then grow by them; see `warm_start`. Clicks
train on the day alone; rankings on all days so far, since what a user has had before is the input
of their models. The same command goes on after a kill, and with days that have been added since.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
from sklearn.metrics import log_loss, roc_auc_score

from embed.planning import aligned

from . import arrays, export, files, hosts, runs, serving, settings
from .errors import UserError
from .metrics import RankingMetrics
from .tables import entities, interactions, spec
from .tables import settings as table_settings
from .tables.rows import RowReader

_SUFFIXES = r"(\.(csv|tsv|txt|parquet|pq|gz))+$"
_SERVED = "served"
_USERS = 4096  # ranked at once


def run(
  recipe: str, config, workdir: str | Path, train: Callable[[Any, str], dict[str, Any]]
) -> list[dict[str, Any]]:
  """Trains day after day; returns the content of days.json.

  Args:
    recipe: its name.
    config: of a table, with `days`, which takes the place of `files`. A day's run trains on the
      latest `days_window` days, 0 being one for dlrm and all so far for rankings. A part of their
      rows validates, as `config.split` says; rankings hold out test rows too, clicks do not.
    workdir: holds a folder for each day.
    train: `(config, workdir) -> result`, a day's run.

  Returns:
    For each day `{"day", "rows", "metrics", "result"}`, `metrics` being those of the day's rows by
    the export of the day before, {} of the first day: `auc` (if both outcomes are there) and
    `logloss`, or what `RankingMetrics` computes of one ranking for each user.

  Raises:
    UserError: the days are none, or something else is configured than this can do.
  """
  days = _checked(recipe, config)
  window = config.days_window or (1 if recipe == "dlrm" else len(days))
  workdir, before = Path(workdir).resolve(), None
  history: list[dict[str, Any]] = []
  paths: list[Path] = []
  for name, path in days.items():
    paths.append(path)
    day, folder = _config_of(recipe, config, paths[-window:], before), workdir / name
    hosts.say(f"day {name}")
    # Kept before the day is trained on, so that a kill does not test it again.
    tested = folder.with_name(f"{name}.json")
    if not tested.exists():
      about: dict[str, Any] = {"rows": None, "metrics": {}}
      if before is not None:
        about = _test(before / _SERVED, _config_of(recipe, config, [path], None))
      workdir.mkdir(parents=True, exist_ok=True)
      arrays.write_json(tested, about)
    result = runs.result(folder)
    if result is None or not runs.is_complete(result) or not (folder / _SERVED).exists():
      result = train(day, str(folder))
      export.export(folder, folder / _SERVED)
    history.append(
      {"day": name, **arrays.read_json(tested, schema={}), "result": result["metrics"]}
    )
    arrays.write_json(workdir / "days.json", history)
    before = folder
  shown = ("auc", "logloss")
  if recipe != "dlrm":
    shown = (f"recall@{config.ks[0]}", f"ndcg@{config.ks[0]}")
  draw(history, shown, workdir / "days.png")
  hosts.say(table(history, shown))
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
    paths = [path for path in folder.iterdir() if not path.name.startswith((".", "_"))]
    # day_2 is before day_10.
    parts = lambda path: [int(x) if x.isdecimal() else x for x in re.split(r"(\d+)", path.name)]
    paths.sort(key=lambda path: (parts(path), path.name))
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
  if recipe != "dlrm" and not any(kind["kind"] == "user" for kind in config.columns.values()):
    raise UserError(
      "no column is declared as 'user', by which a day's rows continue the rows before: add it to "
      "config.columns"
    )
  if config.days_window < 0:
    raise UserError(f"config.days_window is {config.days_window}: choose a number of days, or 0")
  if config.files:
    hosts.say("config.days takes the place of config.files, which are not read")
  if config.split.by in ("files", "column"):
    raise UserError(f"config.split.by is {config.split.by!r}, and days have no such split")
  known = ("", "last") if recipe == "sequence" else ("", "last", "time")
  if recipe != "dlrm" and config.split.by not in known:
    raise UserError(
      f"config.split.by is {config.split.by!r}, which can put rows that an earlier day trained on "
      f"into the test of a later one: choose {' or '.join(map(repr, known[1:]))}"
    )
  columns = [name for name, kind in config.columns.items() if kind["kind"] == "split"]
  if columns or config.split.valid_from or config.split.test_from:
    what = f"column {columns[0]!r}" if columns else "config.split.valid_from or test_from"
    raise UserError(f"{what} splits rows once and for all, and days come one by one: remove it")
  if jax.process_count() > 1:
    raise UserError("config.days trains in one process: train each day with config.init_from")
  days = entries(config.days)
  if "days" in days:
    raise UserError("a day is called 'days', as the file of all days' metrics is: rename it")
  return days


def _config_of(recipe: str, config, paths: Sequence[Path], before: Path | None) -> Any:
  """Returns the config of a run on the rows of some days."""
  day = settings.copied(config)
  resolved = [str(path.resolve()) for path in paths]
  with day.ignore_type():
    day.days, day.days_window = "", 0
    day.files = resolved if len(resolved) > 1 else resolved[0]
  day.split = config.split.copy_and_resolve_references()
  if recipe == "dlrm":
    day.split.test = 0.0
  else:
    day.split.by = config.split.by or "last"
  if before is not None:
    day.init_from, day.init_parts, day.init_rename = str(before), "all", ""
  return day


def _test(served: Path, config) -> dict[str, Any]:
  """Returns the number of a day's rows, and the metrics of an exported model on them."""
  table = table_settings.parsed(table_settings.settings(config))
  model = serving.load(served)
  if isinstance(model, serving.ClickModel):
    return _test_clicks(model, table)
  return _test_ranking(model, table, config.ks)


def _test_clicks(model: serving.ClickModel, table: table_settings.Table) -> dict[str, Any]:
  scores: list[np.ndarray] = []
  labels: list[np.ndarray] = []
  weights: list[np.ndarray] = []
  weight_name = table.name_of(spec.Weight)
  for rows in RowReader(table, ""):
    assert rows.label is not None  # dlrm has asked for one
    values, count = rows.chunk.columns, len(rows.chunk.rows)
    scores.append(model.answers(values, np.zeros(count, bool)).scores)
    labels.append(rows.label)
    weights.append(values[weight_name] if weight_name else np.ones(count))
  score, label = np.concatenate(scores), np.concatenate(labels)
  weight = np.concatenate(weights).astype(np.float64)
  metrics = {}
  if weight.sum():
    metrics["logloss"] = float(log_loss(label, score, labels=[0, 1], sample_weight=weight))
  if 0 < weight[label == 1].sum() < weight.sum():
    metrics = {"auc": float(roc_auc_score(label, score, sample_weight=weight))} | metrics
  return {"rows": len(label), "metrics": metrics}


def _test_ranking(
  model: serving.Recommender, table: table_settings.Table, ks: Sequence[int]
) -> dict[str, Any]:
  """Ranks once for each user of a day, who asks with what they had before it.

  All items that the user has on the day are to be found, each once. Items that the model does not
  know cannot be, and count as misses. With `config.exclude_seen`, items that the user had before
  are left out of the ranking, and do not count. Users of whom nothing is known get the most popular
  items.
  """
  pairs = interactions.pairs(table)
  repeats = model.leaves_out(pairs.users.take(pairs.user), pairs.items.take(pairs.item))
  user, item = pairs.user[~repeats], pairs.item[~repeats]
  order = np.argsort(user, kind="stable")
  wanted = np.split(item[order], np.cumsum(np.bincount(user, minlength=len(pairs.users)))[:-1])
  codes, metrics, popular = entities.Codes(pairs.items.to_pylist()), RankingMetrics(ks), 0
  asked = {"": pairs.users, **pairs.values}
  for start in range(0, len(pairs.users), _USERS):
    of_part = wanted[start : start + _USERS]
    values = {name: x[start : start + _USERS] for name, x in asked.items()}
    answers = model.answers(values, np.zeros(len(of_part), bool), max(ks), is_cut=True)
    found = codes.find(pa.array(answers.items.ravel(), pa.string()))
    relevant = np.full((len(of_part), max(map(len, of_part))), -1, np.int32)
    for row, items in enumerate(of_part):
      relevant[row, : len(items)] = items
    metrics.update(found.reshape(answers.items.shape), relevant)
    popular += int(answers.is_popular.sum())
  hosts.say(
    f"{len(pairs.users):,} users ask for {len(item):,} items, {popular:,} of them unknown; "
    f"{int(repeats.sum()):,} items that they had before do not count"
  )
  return {"rows": len(item), "metrics": metrics.compute() if len(item) else {}}


def table(history: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
  """Returns the days as lines of text, with the metrics of these names."""
  show = lambda x: "" if x is None else f"{x:,}" if isinstance(x, int) else f"{x:.4f}"
  lines = [("day", "rows", *names)]
  for day in history:
    lines.append((day["day"], *map(show, (day["rows"], *map(day["metrics"].get, names)))))
  return aligned(lines)


def draw(history: Sequence[Mapping[str, Any]], names: Sequence[str], path: Path) -> None:
  """Writes a picture of two metrics by day."""
  import matplotlib
  from matplotlib.figure import Figure

  from . import style

  with matplotlib.rc_context(style.SETTINGS):
    figure = Figure(figsize=(8, 3), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), names, strict=True):
      days = [day for day in history if name in day["metrics"]]
      values = [day["metrics"][name] for day in days]
      axes.plot([day["day"] for day in days], values, marker="o", color=style.BLUE)
      axes.set_title(f"{name} by the export of the day before")
      axes.tick_params(axis="x", rotation=30)
    with files.replacing(path) as file:
      figure.savefig(file, format="png", dpi=120)
