"""Tables and curves of finished runs, on the terminal and as a page.

    python -m recipes.report runs/a runs/b --out=docs/results/x

prints a table for every data set and writes it as `x.md`, with `x.png`: the loss and the selected
metric over steps, and how reliable a click model's probabilities are. Everything in them comes from
the runs' `result.json` and `metrics.jsonl`, or from copies of these called `NAME.json` and
`NAME.jsonl`:

    python -m recipes.report docs/results/sequence_*_[0-9].json --out=docs/results/sequence

A folder of runs, as `--seeds=0,1,2` makes one, stands for all of them.
"""

import dataclasses
import difflib
import functools
import itertools
import json
import statistics
import sys
import textwrap
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flax.traverse_util import flatten_dict

from embed.planning import aligned

from . import errors
from .errors import MissingFileError, UserError, importing, terminal
from .errors import markdown as markdown_text

with importing():
  import uniplot

  from . import config as config_lib
  from . import files
  from .results import gain

if TYPE_CHECKING:
  from matplotlib.figure import Figure

# Runs that differ only in these do the same work on the same data, and are averaged.
_INCIDENTAL = ("seed", "data_dir", "cache_dir", "num_workers", "slices")
_BOUND = "best possible"  # the baseline that no model can beat


# --- runs and groups of them ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
  """A finished run: its result.json, and the lines of its metrics.jsonl."""

  path: Path
  result: dict[str, Any]
  lines: list[dict[str, Any]]

  @functools.cached_property
  def settings(self) -> dict[str, Any]:
    """The config by dotted names, without incidental settings and settings of every run's default.

    A setting that did not exist when the run was made counts as its default.
    """
    defaults = json.loads(json.dumps(config_lib.RUN))
    return {
      name: value
      for name, value in flatten_dict(self.result["config"], sep=".").items()
      if name not in _INCIDENTAL and (name not in defaults or value != defaults[name])
    }

  @property
  def subject(self) -> str:
    """The recipe, and the model if it has several."""
    return "/".join(filter(None, [self.result["recipe"], self.result["config"].get("model")]))

  @property
  def table(self) -> tuple[str, str, str]:
    """The table that the run is in: its recipe, its data set, and the hashes of its files."""
    config, hashes = self.result["config"], self.result["data_sha256"]
    data = config.get("dataset", "")
    if data == "file":
      data = config["data_file"]
    elif data == "table" and isinstance(config.get("files"), str):
      data = Path(config["files"]).name
    return self.result["recipe"], data, json.dumps(hashes, sort_keys=True)

  @property
  def selected(self) -> str:
    """The metric that chooses the state, or the first one that was validated; "" if none was."""
    validated = (name for line in self.lines for name in line if name.startswith("valid_"))
    return self.result["config"]["select"] or next(validated, "")

  def curve(self, name: str) -> tuple[list[int], list[float]]:
    """Returns the steps at which a metric was logged, and its values."""
    logged = [line for line in self.lines if name in line]
    return [line["step"] for line in logged], [line[name] for line in logged]


def load(path: str | Path) -> Run:
  """Reads a run's folder, or a copy of its result.json with the journal next to it, if any.

  Raises:
    MissingFileError: the folder holds no result: the run has not ended, or it is another folder.
  """
  path = Path(path)
  result, journal = path / "result.json", path / "metrics.jsonl"
  if path.suffix == ".json" and path.is_file():
    result, journal = path, path.with_suffix(".jsonl")
  elif missing := [each.name for each in (result, journal) if not each.is_file()]:
    if (path / "config.json").is_file():
      raise MissingFileError(
        f"the run in {path} has not ended; the command that started it resumes it"
      )
    ended = {found.parent.name: found.parent for found in path.parent.glob("*/result.json")}
    close = difflib.get_close_matches(path.name, ended, 1)
    hint = (
      f"did you mean {ended[close[0]]}?" if close else "give the workdirs of runs that have ended"
    )
    raise MissingFileError(f"{path} has no {missing[0]}: {hint}")
  lines = journal.read_text().splitlines() if journal.is_file() else []
  return Run(path, json.loads(result.read_text()), list(map(json.loads, lines)))


def grouped(runs: Sequence[Run]) -> list[list[Run]]:
  """Returns runs of one recipe, config and data together, in order of the first one.

  Raises:
    UserError: two runs of a group have one seed, which would make the spread look smaller.
  """
  groups: dict[str, list[Run]] = {}
  for run in runs:
    group = groups.setdefault(json.dumps([run.table, run.settings], sort_keys=True), [])
    for other in group:
      if other.result["seed"] == run.result["seed"]:
        raise UserError(
          f"{other.path} and {run.path} are runs of one config and one seed: give one of them"
        )
    group.append(run)
  return list(groups.values())


def names(groups: Sequence[list[Run]]) -> list[str]:
  """Returns what to call each group: recipe, model, and the settings that tell it apart.

  A setting that one of them was made without is named only where the others do not suffice.
  """
  subject = lambda run: (run.subject, run.table)
  labels = []
  for first, *_ in groups:
    alike = [other.settings for other, *_ in groups if subject(other) == subject(first)]
    differing = _differing(alike)
    shared = [name for name in differing if all(name in each for each in alike)]
    distinct = {json.dumps([each[name] for name in shared]) for each in alike}
    told = shared if len(distinct) == len(alike) else differing
    own = {name: first.settings[name] for name in told if name in first.settings}
    labels.append(" ".join([first.subject, *(f"{n}={_short(value)}" for n, value in own.items())]))
  return labels


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
  """Names of the settings that are not the same in all of them."""
  everything = sorted({name for each in settings for name in each} - {"model"})
  return [
    name for name in everything if any(each.get(name) != settings[0].get(name) for each in settings)
  ]


def _short(value: Any) -> str:
  return f"{value:g}" if isinstance(value, float) else str(value)


# --- tables ---------------------------------------------------------------------------------------

Scores = dict[str, list[float]]  # by metric, one for each seed


class _Entry(NamedTuple):
  """A row of a table: a group of runs, or a baseline, which has no seeds and no seconds."""

  label: str
  seeds: str
  scores: Scores


class _Table:
  """The groups of runs on one data set, and the rows that compare them with baselines."""

  def __init__(self, key: tuple[str, str, str], groups: Mapping[str, list[Run]]):
    self.title, self.hashes = " on ".join(filter(None, key[:2])), json.loads(key[2])
    self.groups = {label.removeprefix(f"{key[0]}/"): group for label, group in groups.items()}
    self.runs = [run for group in groups.values() for run in group]
    logged = dict.fromkeys(name for run in self.runs for name in run.result["metrics"])
    split = "test_" if any(name.startswith("test_") for name in logged) else "valid_"
    self.metrics = [name for name in logged if name.startswith(split)]
    self.header = ["", "seeds", *(name.partition("_")[2] for name in self.metrics), "seconds"]
    self.entries = [*itertools.starmap(self._of_group, self.groups.items()), *self._baselines()]

  def _of_group(self, label: str, group: list[Run]) -> _Entry:
    seeds = ", ".join(str(run.result["seed"]) for run in group)
    scores = self._scores(run.result["metrics"] for run in group)
    return _Entry(label, seeds, scores | {"seconds": [run.result["seconds"] for run in group]})

  def _baselines(self) -> Iterator[_Entry]:
    for baseline in dict.fromkeys(name for run in self.runs for name in run.result["baselines"]):
      # Groups that are measured otherwise have another baseline.
      distinct: dict[tuple[str, ...], _Entry] = {}
      for label, group in self.groups.items():
        scores = self._scores(run.result["baselines"].get(baseline, {}) for run in group)
        settings = label.removeprefix(f"{group[0].subject} ")
        entry = _Entry(f"{baseline} ({settings})", "", scores)
        if scores:
          distinct.setdefault(tuple(self.cells(entry)), entry)
      for entry in distinct.values():
        yield entry._replace(label=baseline) if len(distinct) == 1 else entry

  def _scores(self, results: Iterator[Mapping[str, float]]) -> Scores:
    scores: Scores = {}
    for result in results:
      for name in self.metrics:
        if name in result:
          scores.setdefault(name, []).append(result[name])
    return scores

  def cells(self, entry: _Entry, space: str = " ") -> list[str]:
    """Returns the seeds of an entry, its metrics, and its seconds, as text."""
    digits = dict.fromkeys(self.metrics, 4) | {"seconds": 0}
    numbers = (_number(entry.scores.get(name, []), n, space) for name, n in digits.items())
    return [entry.seeds, *numbers]

  def best(self, name: str) -> list[str]:
    """Labels of the best entries by a metric, as far as the digits that are shown tell."""
    means = {
      entry.label: round(gain(name, round(statistics.fmean(entry.scores[name]), 4)), 4)
      for entry in self.entries
      if name in entry.scores and entry.label.partition(" (")[0] != _BOUND
    }
    return [
      label for label, mean in means.items() if len(means) > 1 and mean == max(means.values())
    ]


def _tables(groups: Sequence[list[Run]]) -> list[_Table]:
  of_table: dict[tuple[str, str, str], dict[str, list[Run]]] = {}
  for label, group in zip(names(groups), groups, strict=True):
    of_table.setdefault(group[0].table, {})[label] = group
  return [_Table(key, of_table[key]) for key in sorted(of_table)]


def _number(values: Sequence[float], digits: int, space: str) -> str:
  if not values:
    return ""
  mean = f"{statistics.fmean(values):.{digits}f}"
  if len(set(values)) == 1:  # also of a baseline, which has the same rows with every seed
    return mean
  return f"{mean}{space}±{space}{statistics.stdev(values):.{digits}f}"


def text(groups: Sequence[list[Run]]) -> str:
  """Returns a table for each data set of each recipe, for a terminal."""
  parts = []
  for table in _tables(groups):
    rows = [[entry.label, *table.cells(entry)] for entry in table.entries]
    parts.append(f"{table.title}\n{aligned([table.header, *rows])}")
  return "\n\n".join(parts)


def markdown(groups: Sequence[list[Run]], title: str, plot: str | None) -> str:
  """Returns the page: the curves, and a table for each data set of each recipe.

  A value is the mean over seeds, `±` the standard deviation (of n - 1) where there are several.
  """
  parts, tables = [f"# {markdown_text(title)}"], _tables(groups)
  if plot:
    picture = urllib.parse.quote(plot)
    parts += [f"![Training loss and validation metric over steps]({picture})", _caption(tables)]
  return "\n\n".join([*parts, *map(_section, tables)]) + "\n"


def _caption(tables: Sequence[_Table]) -> str:
  missing = []
  for table in tables:
    labels = [label for label, group in table.groups.items() if not all(r.lines for r in group)]
    part = f" ({', '.join(labels)})" if len(labels) < len(table.groups) else ""
    missing += [markdown_text(f"{table.title}{part}")] * bool(labels)
  text = "One line for each run; lines of one colour are seeds."
  if missing:
    text += f" Missing, because only the results of these runs were kept: {', '.join(missing)}."
  return text


def _section(table: _Table) -> str:
  best = [[], *(table.best(name) for name in table.metrics), []]
  lines = [list(map(markdown_text, table.header))]
  for entry in table.entries:
    cells = zip(table.cells(entry, "\u00a0"), best, strict=True)
    bold = (f"**{cell}**" if entry.label in top else cell for cell, top in cells)
    lines.append([markdown_text(entry.label).replace("=", "=<wbr>"), *bold])
  # The longer side goes down the page.
  across = len(table.entries) <= len(table.metrics) + 2
  header, *rows = zip(*lines, strict=True) if across else lines
  row = lambda cells: f"| {' | '.join(cells)} |"
  rule = [":--", *["--:"] * (len(header) - 1)]
  title = f"## {markdown_text(table.title)}"
  return "\n".join([title, "", row(header), row(rule), *map(row, rows), "", *_notes(table)])


def _notes(table: _Table) -> list[str]:
  """Returns notes on a table's figures, as a quotation, which sites and editors set apart."""
  results = [run.result for run in table.runs]
  selected = sorted({result["config"]["select"] for result in results})
  state = [
    f"of the state that was best on `{markdown_text(name)}`" if name else "of the last state"
    for name in selected
  ]
  notes = [
    f"Test metrics {' or '.join(state)}; mean and, with `±`, standard deviation over seeds."
    " Bold: the best figure of a metric. Seconds are those of the whole run, on a machine that may"
    " have had other work too."
  ]
  settings = [group[0].settings for group in table.groups.values()]
  differing = [
    f"`{markdown_text(name)}` "
    + ", ".join(markdown_text(_short(each.get(name, "none"))) for each in settings)
    for name in _differing(settings)
    if not any(f" {name}=" in label for label in table.groups)
  ]
  if differing:
    notes.append(f"Settings that differ, in the order of the models: {'; '.join(differing)}.")
  device = lambda d: f"{d['count']} x {d['kind']} ({d['host_cores']} host cores)"
  version = lambda v: ", ".join(f"{name} {v[name]}" for name in ("jax", "flax", "sparse-embed"))
  devices = sorted({device(result["device"]) for result in results})
  versions = sorted({version(result["versions"]) for result in results})
  notes.append(f"On {markdown_text('; '.join([*devices, *versions]))}.")
  sources = sorted({result["config"].get("source", "") for result in results} - {""})
  if sources:
    notes.append(f"Data from {', '.join(map(markdown_text, sources))}.")
  hashes = (f"`{markdown_text(n)}` {markdown_text(x)}" for n, x in sorted(table.hashes.items()))
  notes.append(f"Data (SHA-256): {', '.join(hashes)}.")
  return [f"> {line}" if line else ">" for line in "\n\n".join(notes).split("\n")]


# --- curves ---------------------------------------------------------------------------------------

_WIDTH, _PANEL, _TITLE, _LINE = 6.0, 2.3, 0.3, 0.165  # inches: a page, and heights


def sketch(run: Run) -> str:
  """Returns the run's curves for a terminal: the loss and the selected metric."""
  curves = {name: run.curve(name) for name in ("loss", run.selected)}
  return "\n".join(
    uniplot.plot_to_string(ys, xs, title=f"{name} / steps", lines=True, width=60, height=9)
    for name, (xs, ys) in curves.items()
    if ys
  )


def draw(groups: Sequence[list[Run]]) -> "Figure | None":
  """Returns a figure over steps: for each data set the loss and the metrics that select.

  Of click models it has the reliability on the test rows as well: the rate of clicks of rows by
  their mean prediction, in bins of equally many rows, which is on the diagonal of a calibrated one.
  A metric that no run of a data set has logged gets no panel, a data set without any no place.
  None where no run has any curve.
  """
  from matplotlib import rc_context
  from matplotlib.figure import Figure

  from . import style

  blocks = [(table, panels) for table in _tables(groups) if (panels := _panels(table))]
  if not blocks:
    return None
  titles = [textwrap.fill(terminal(table.title), 54) for table, _ in blocks]
  legends = [[textwrap.fill(terminal(label), 70) for label in table.groups] for table, _ in blocks]
  lines = lambda *texts: sum(1 + text.count("\n") for text in texts)
  heights = [
    _PANEL * len(panels) + _TITLE * lines(title) + _LINE * (1 + lines(*legend))
    for (_, panels), title, legend in zip(blocks, titles, legends, strict=True)
  ]
  with rc_context(style.SETTINGS | {"grid.color": style.GREY, "grid.alpha": 0.3}):
    figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
    places = figure.subfigures(len(blocks), 1, height_ratios=heights, squeeze=False)[:, 0]
    for place, (table, panels), title, legend in zip(places, blocks, titles, legends, strict=True):
      place.suptitle(title, x=0.01, ha="left", weight="bold")
      of_group = _draw_panels(place.subplot_mosaic(panels), table)
      drawn = {label: lines[0] for label, lines in zip(legend, of_group, strict=True) if lines}
      options = {"loc": "outside lower left", "fontsize": "small", "labelspacing": 0.3}
      place.legend(list(drawn.values()), list(drawn), **options)
  return figure


def _panels(table: _Table) -> list[list[str]]:
  """Returns the loss, the selected metrics and the curves that a run has, two in a row."""
  wanted = dict.fromkeys(["loss", *(run.selected for run in table.runs)])
  logged = [name for name in wanted if any(run.curve(name)[0] for run in table.runs)]
  logged += dict.fromkeys(name for run in table.runs for name in run.result.get("curves", {}))
  rows = [logged[i : i + 2] for i in range(0, len(logged), 2)]
  return [row if len(row) == 2 else row * 2 for row in rows]


def _draw_panels(axes: Mapping[str, Any], table: _Table) -> list[list[Any]]:
  """Draws the curves of a data set; returns the lines of each group."""
  from .style import GREY

  of_group: list[list[Any]] = []
  for i, group in enumerate(table.groups.values()):
    style = {"color": f"C{i % 10}", "linestyle": ("-", "--", ":")[i // 10 % 3], "linewidth": 1.4}
    of_group.append([])
    for run, (name, axis) in itertools.product(group, axes.items()):
      points = run.result.get("curves", {}).get(name)
      xs, ys = [*zip(*points, strict=True)][:2] if points else run.curve(name)
      if xs:
        marker = "o" if len(xs) <= 30 else None
        of_group[-1] += axis.plot(xs, ys, **style, alpha=0.85, marker=marker, markersize=3)
  for name, axis in axes.items():
    axis.set_title("training loss" if name == "loss" else name, loc="left", fontsize="medium")
    if name.endswith("reliability"):
      axis.axline((0, 0), slope=1, color=GREY, linestyle=":", linewidth=1)
      axis.set(xlabel="mean prediction", ylabel="rate of clicks")
      axis.grid()
      continue
    axis.set(xlabel="steps")
    axis.set_xlim(left=0)
    axis.xaxis.get_major_locator().set_params(nbins=5, integer=True)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.grid()
  return of_group


# --- the command line -----------------------------------------------------------------------------


def write(paths: Sequence[str | Path], out: str | Path | None = None, title: str = "") -> str:
  """Writes the page and the picture of some runs; returns what to print of them.

  Args:
    paths: workdirs, copies of results, or folders of workdirs.
    out: where to write, without suffix; None is `report` in the first folder.
    title: of the page; "" is the name of `out`, or of the first run.
  """
  first, runs = Path(paths[0]), list(map(load, _expanded(paths)))
  default = first.with_suffix("") if first.is_file() else first / "report"
  target, groups = Path(out or default), grouped(runs)
  page, image = target.with_name(f"{target.name}.md"), target.with_name(f"{target.name}.png")
  target.parent.mkdir(parents=True, exist_ok=True)
  if figure := draw(groups):
    with files.replacing(image) as file:
      figure.savefig(file, format="png", dpi=160)
  title = title or (target if out else first).name
  files.write(page, markdown(groups, title, image.name if figure else None))
  parts = [text(groups)]
  if len(runs) == 1 and runs[0].lines and sys.stdout.isatty():
    parts += ["", sketch(runs[0])]
  return "\n".join([*parts, "", str(page), *([str(image)] if figure else [])])


def _expanded(paths: Sequence[str | Path]) -> Iterator[Path]:
  """Yields the paths; in place of a folder that is no run, the runs that have ended in it."""
  for path in map(Path, paths):
    within = sorted(path.glob("*/result.json"))
    is_run = any((path / name).exists() for name in ("result.json", "config.json"))
    yield from [result.parent for result in within] if within and not is_run else [path]


def main(argv: Sequence[str]) -> None:
  command = f"{__package__}.report"
  parser = errors.parser(command, (__doc__ or "").replace("recipes.report", command))
  parser.add_argument("runs", nargs="+", help="workdirs of runs that have ended, or NAME.json")
  parser.add_argument("--out", help="where to write, without suffix; default: <first run>/report")
  parser.add_argument("--title", default="", help="default: the name of --out, or of the run")
  arguments = parser.parse_args(argv)
  with errors.in_one_line(parser):
    print(terminal(write(arguments.runs, arguments.out, arguments.title)))


if __name__ == "__main__":
  main(sys.argv[1:])
