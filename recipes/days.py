"""Trains day by day: a run for each day, which starts from the run of the day before.

    python -m recipes.days dlrm --config=shop.py --config.days=folder --workdir=runs/shop

    <workdir>/<day>/          the day's run; `served` in it is its export
    <workdir>/days.json       metrics of each day, by the export of the day before
    <workdir>/days.png        the same as curves

A day is tested before it is trained on, by the very program that would have answered requests on
that day: ids that are new on it are unknown. The tables then grow by them; see `warm_start`. Clicks
train on the day alone; rankings on all days so far, since what a user has had before is the input
of their models. The same command resumes after a kill, and trains on days that
have been added since.
"""

import importlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from embed.planning import aligned

from . import arrays, evaluate, export, files, hosts, main
from .dlrm import tasks
from .errors import UserError
from .run import settings
from .run import workdir as runs
from .tables import spec

_SUFFIXES = r"(\.(csv|tsv|txt|parquet|pq|gz))+$"
_SERVED = "served"


def run(recipe: str, config, workdir: str | Path) -> list[dict[str, Any]]:
  """Trains day after day; returns the content of days.json.

  Args:
    config: of a table, with `days`, which takes the place of `files`. A day's run trains on the
      latest `days_window` days, 0 being one for dlrm and all so far for rankings. A part of their
      rows validates, as `config.split` says; rankings hold out test rows too, clicks do not.

  Returns:
    For each day `{"day", "rows", "metrics", "result"}`, `metrics` being `evaluate.of_export` of the
    day's rows by the export of the day before, {} of the first day.

  Raises:
    UserError: the days are none, or something else is configured than this can do.
  """
  hosts.start()
  train = importlib.import_module(f".{recipe}.train", __package__)
  config = settings.completed(recipe, config)
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
        about = evaluate.of_export(before / _SERVED, _config_of(recipe, config, [path], None))
      workdir.mkdir(parents=True, exist_ok=True)
      arrays.write_json(tested, about)
    result = runs.result(folder)
    if result is None or not (folder / _SERVED).exists():
      result = train.run(day, str(folder))
      export.export(folder, folder / _SERVED)
    history.append(
      {"day": name, **arrays.read_json(tested, schema={}), "result": result["metrics"]}
    )
    arrays.write_json(workdir / "days.json", history)
    before = folder
  if recipe == "dlrm":
    kinds = spec.parse({name: kind.to_dict() for name, kind in config.columns.items()})
    shown = (tasks.metric_names(spec.labels(kinds))[0], "logloss")
  else:
    shown = (f"recall@{config.ks[0]}", f"ndcg@{config.ks[0]}")
  draw(history, shown, workdir / "days.png")
  hosts.say(table(history, shown))
  return history


def entries(days: str | Sequence[str]) -> dict[str, Path]:
  """Returns the file or folder of each day by its name: a folder's, in their order, or a list's."""
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
    raise UserError("config.days is for your own table: declare config.columns")
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


if __name__ in ("__main__", "__mp_main__"):  # worker processes need the flags too
  program = main.program(run, f"{__package__}.days")
  if __name__ == "__main__":
    program()
