"""Tables and curves of finished runs, on the terminal and as a page.

    python -m recipes.report runs/a runs/b --out=docs/results/x

prints a table for every data set and writes it as `x.md`, with `x.png`: the loss and the selected
metric over steps, and how reliable a click model's probabilities are. Everything in them comes from
the runs' `result.json` and `metrics.jsonl`, or from copies of these called `NAME.json` and
`NAME.jsonl`:

    python -m recipes.report docs/results/sequence_*_[0-9].json --out=docs/results/sequence

A folder of runs, as `--seeds=0,1,2` makes one, stands for all of them. Runs that differ by their
seed alone are averaged, and have the name of the first one without its seed.
"""

import dataclasses
import itertools
import json
import statistics
import sys
import textwrap
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flax.traverse_util import flatten_dict

from embed.planning import aligned

from . import errors
from .errors import MissingFileError, importing, terminal
from .errors import markdown as escaped

with importing():
  from . import files, log, results

if TYPE_CHECKING:
  from matplotlib.figure import Figure

# Runs that differ only in these do the same work on the same data, and are averaged.
_INCIDENTAL = ("seed", "data_dir", "cache_dir", "num_workers", "slices")
_BOUND = "best possible"  # the baseline that no model can beat


@dataclasses.dataclass(frozen=True)
class Run:
  """A finished run: its result.json, and the lines of its metrics.jsonl."""

  path: Path
  result: dict[str, Any]
  lines: list[dict[str, Any]]

  @property
  def name(self) -> str:
    """The name of its folder or file, without the seed."""
    name, seed = self.path.name.removesuffix(".json"), self.result["seed"]
    if name in (f"{seed}", f"seed_{seed}"):
      name = self.path.absolute().parent.name
    return name.removesuffix(f"_{seed}").removeprefix(f"{self.result['recipe']}_")

  @property
  def settings(self) -> dict[str, Any]:
    """The config by dotted names, without incidental settings."""
    settings = flatten_dict(self.result["config"], sep=".")
    return {name: value for name, value in settings.items() if name not in _INCIDENTAL}

  @property
  def data(self) -> str:
    """The name of the data set."""
    config = self.result["config"]
    data = config.get("dataset", "")
    if data == "file":
      return config["data_file"]
    return Path(config["files"]).name if isinstance(config.get("files"), str) else data

  @property
  def selected(self) -> str:
    """The metric that chooses the state, or the first one that was validated; "" if none was."""
    validated = (name for line in self.lines for name in line if name.startswith("valid_"))
    return self.result["config"]["select"] or next(validated, "")

  def curve(self, name: str) -> tuple[list[float], list[float]]:
    """Returns the steps at which a metric was logged, and its values, or the points of a curve."""
    if points := self.result.get("curves", {}).get(name):
      return [x for x, *_ in points], [y for _, y, *_ in points]
    logged = [line for line in self.lines if name in line]
    return [line["step"] for line in logged], [line[name] for line in logged]


def load(path: str | Path) -> Run:
  """Reads a run's folder, or a copy of its result.json with the lines next to it, if any."""
  path = Path(path)
  result, lines = path / "result.json", path / "metrics.jsonl"
  if path.suffix == ".json":
    result, lines = path, path.with_suffix(".jsonl")
  if not result.is_file():
    raise MissingFileError(f"there is no {result}: give the workdirs of runs that have ended")
  return Run(path, files.read_json(result), log.lines(lines))


# --- tables ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Table:
  """The runs of a recipe on one data set, in groups that differ by the seed alone."""

  title: str
  hashes: dict[str, str]  # of the files of the data
  groups: dict[str, list[Run]]

  @property
  def runs(self) -> list[Run]:
    return list(itertools.chain(*self.groups.values()))

  @property
  def metrics(self) -> list[str]:
    """The metrics of the test, or of the validation where nothing was tested."""
    logged = dict.fromkeys(name for run in self.runs for name in run.result["metrics"])
    tested = [name for name in logged if name.startswith("test_")]
    return tested or [name for name in logged if name.startswith("valid_")]

  @property
  def columns(self) -> dict[str, list[dict[str, float]]]:
    """The metrics of each group, with its seconds, and of each baseline, by seed."""
    columns = {
      label: [run.result["metrics"] | {"seconds": run.result["seconds"]} for run in group]
      for label, group in self.groups.items()
    }
    for name in dict.fromkeys(name for run in self.runs for name in run.result["baselines"]):
      # Groups that are measured otherwise have other scores of a baseline.
      distinct: dict[str, tuple[str, list]] = {}
      for label, group in self.groups.items():
        if fits := [fit for run in group if (fit := run.result["baselines"].get(name))]:
          distinct.setdefault(json.dumps(fits[0]), (label, fits))
      for label, fits in distinct.values():
        columns[name if len(distinct) == 1 else f"{name} ({label})"] = fits
    return columns

  def grid(self, strong: str = "", space: str = " ") -> list[list[str]]:
    """Returns the cells, line by line: names, seeds, and a line for each metric.

    Args:
      strong: is put around the best figure of a metric, to the digits that are shown.
      space: around a `±`, the standard deviation (of n - 1) of values that differ.
    """
    columns = self.columns
    seeds = {label: [run.result["seed"] for run in group] for label, group in self.groups.items()}
    lines = [["", *columns], ["seeds", *(", ".join(map(str, seeds.get(x, ()))) for x in columns)]]
    for name in [*self.metrics, "seconds"]:
      digits, cells, gains = 0 if name == "seconds" else 4, {}, {}
      for label, column in columns.items():
        values = [metrics[name] for metrics in column if name in metrics]
        cells[label] = _number(values, digits, space)
        if values and digits and not label.startswith(_BOUND):
          gains[label] = results.gain(name, round(statistics.fmean(values), digits))
      for label, gain in gains.items():
        if len(gains) > 1 and gain == max(gains.values()):
          cells[label] = f"{strong}{cells[label]}{strong}"
      lines.append([name.partition("_")[2] or name, *cells.values()])
    return lines


def collect(runs: Sequence[Run]) -> list[Table]:
  """Returns a table for each recipe and data set, with runs of one config in one group."""
  by_data: dict[str, Table] = {}
  labels: dict[str, str] = {}
  for run in runs:
    data = [run.result["recipe"], run.data, run.result["data_sha256"]]
    title = " on ".join(filter(None, data[:2]))
    table = by_data.setdefault(json.dumps(data, sort_keys=True), Table(title, data[2], {}))
    config = json.dumps([data, run.settings], sort_keys=True)
    label = run.name if run.name not in table.groups else str(run.path)
    table.groups.setdefault(labels.setdefault(config, label), []).append(run)
  return [by_data[key] for key in sorted(by_data)]


def _number(values: Sequence[float], digits: int, space: str) -> str:
  """Returns the mean, and the standard deviation where the values differ."""
  if not values:
    return ""
  mean = f"{statistics.fmean(values):.{digits}f}"
  if len(set(values)) == 1:  # also of a baseline, which has the same rows with every seed
    return mean
  return f"{mean}{space}±{space}{statistics.stdev(values):.{digits}f}"


def text(tables: Sequence[Table]) -> str:
  """Returns the tables for a terminal."""
  return "\n\n".join(
    f"{table.title}\n{aligned(list(zip(*table.grid(), strict=True)))}" for table in tables
  )


# --- the page -------------------------------------------------------------------------------------


def markdown(tables: Sequence[Table], title: str, picture: str | None) -> str:
  """Returns the page: the curves, and a section for each table."""
  parts = [f"# {escaped(title)}"]
  if picture:
    image = f"![Training loss and validation metric over steps]({urllib.parse.quote(picture)})"
    parts += [image, "One line for each run; lines of one colour are seeds."]
  return "\n\n".join([*parts, *map(_section, tables)]) + "\n"


def _section(table: Table) -> str:
  row = lambda cells: f"| {' | '.join(cells)} |"
  header, *lines = table.grid("**", "\u00a0")
  rule = row([":--", *["--:"] * (len(header) - 1)])
  names = (row([escaped(name), *cells]) for name, *cells in lines)
  notes = "\n>\n".join(f"> {note}" for note in _notes(table))
  return "\n".join(
    [f"## {escaped(table.title)}", "", row(map(escaped, header)), rule, *names, "", notes]
  )


def _notes(table: Table) -> Iterator[str]:
  """Yields notes on a table's figures."""
  of_runs = [run.result for run in table.runs]
  selected = sorted({result["config"]["select"] for result in of_runs})
  states = (
    f"that was best on `{escaped(name)}`" if name else "of the last step" for name in selected
  )
  yield (
    f"Test metrics of the state {' or '.join(states)}; mean and, with `±`, standard deviation over"
    " seeds. Bold: the best figure of a metric. Seconds: of the whole run, on a machine that may"
    " have had other work too."
  )
  settings = [group[0].settings for group in table.groups.values()]
  shared = [name for name in settings[0] if all(name in other for other in settings)]
  differing = [name for name in shared if any(x[name] != settings[0][name] for x in settings)]
  if differing:
    values = {name: ", ".join(str(x[name]) for x in settings) for name in differing}
    listed = (f"`{escaped(name)}` {escaped(text)}" for name, text in values.items())
    yield f"Settings that differ, in the order of the models: {'; '.join(listed)}."
  devices = {"{count} x {kind} ({host_cores} host cores)".format(**x["device"]) for x in of_runs}
  packages = ("jax", "flax", "sparse-embed")
  versions = {", ".join(f"{name} {x['versions'][name]}" for name in packages) for x in of_runs}
  yield f"On {escaped('; '.join([*sorted(devices), *sorted(versions)]))}."
  sources = sorted({result["config"].get("source", "") for result in of_runs} - {""})
  if sources:
    yield f"Data from {', '.join(map(escaped, sources))}."
  hashes = (f"`{escaped(name)}` {escaped(x)}" for name, x in sorted(table.hashes.items()))
  yield f"Data (SHA-256): {', '.join(hashes)}."


def draw(tables: Sequence[Table]) -> "Figure | None":
  """Returns a figure over steps: for each table the loss and the metrics that select.

  Of click models it has the reliability on the test rows as well: the rate of clicks of rows by
  their mean prediction, in bins of equally many rows, which is on the diagonal of a calibrated one.
  None where no run has any curve.
  """
  from matplotlib import rc_context
  from matplotlib.figure import Figure

  from . import style

  panels: list[tuple[Table, str] | None] = []
  for table in tables:  # two in a row
    panels += [(table, name) for name in _curves(table)]
    panels += [None] * (len(panels) % 2)
  if not panels:
    return None
  grid = {"axes.grid": True, "grid.color": style.GREY, "grid.alpha": 0.3}
  with rc_context(style.SETTINGS | grid):
    figure = Figure(figsize=(8.0, 1.5 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels) // 2, 2, squeeze=False).ravel()
    for axis, panel in zip(axes, panels, strict=True):
      if panel is None:
        axis.remove()
        continue
      table, name = panel
      title = f"{table.title}\n{'training loss' if name == 'loss' else name}"
      axis.set_title(textwrap.fill(terminal(title), 50, replace_whitespace=False), loc="left")
      for i, (label, group) in enumerate(table.groups.items()):
        look = {"color": f"C{i % 10}", "linestyle": ("-", "--", ":")[i // 10 % 3], "alpha": 0.85}
        for place, run in enumerate(group):
          legend = f"_{label}" if place else textwrap.shorten(terminal(label), 40)
          axis.plot(*run.curve(name), **look, marker=".", markersize=3, label=legend)
      if name.endswith("reliability"):
        axis.axline((0, 0), slope=1, color=style.GREY, linestyle=":", linewidth=1)
        axis.set(xlabel="mean prediction", ylabel="rate of clicks")
      else:
        axis.set(xlabel="steps", xlim=(0, None))
      if len(table.groups) > 1:
        axis.legend(fontsize="small")
  return figure


def _curves(table: Table) -> list[str]:
  """Returns the loss, the selected metrics and the curves that a run has."""
  names = dict.fromkeys(["loss", *(run.selected for run in table.runs)])
  names |= dict.fromkeys(name for run in table.runs for name in run.result.get("curves", {}))
  return [name for name in names if any(run.curve(name)[0] for run in table.runs)]


# --- the command line -----------------------------------------------------------------------------


def write(paths: Sequence[str | Path], out: str | Path | None = None, title: str = "") -> str:
  """Writes the page and the picture of some runs; returns what to print of them.

  Args:
    paths: workdirs, copies of results, or folders of workdirs.
    out: where to write, without suffix; None is `report` in the first folder.
    title: of the page; "" is the name of `out`, or of the first run.
  """
  first, tables = Path(paths[0]), collect(list(map(load, _expanded(paths))))
  target = Path(out or (first.with_suffix("") if first.is_file() else first / "report"))
  page, image = (target.with_name(f"{target.name}.{suffix}") for suffix in ("md", "png"))
  target.parent.mkdir(parents=True, exist_ok=True)
  if figure := draw(tables):
    with files.replacing(image) as file:
      figure.savefig(file, format="png", dpi=110)
  title = title or (target if out else first).name
  files.write(page, markdown(tables, title, image.name if figure else None))
  return "\n".join([text(tables), "", str(page), *([str(image)] if figure else [])])


def _expanded(paths: Sequence[str | Path]) -> Iterator[Path]:
  """Yields the paths; in place of a folder that is no run, the runs that have ended in it."""
  for path in map(Path, paths):
    within = sorted(path.glob("*/result.json"))
    is_run = (path / "config.json").exists() or not within
    yield from [path] if is_run else [result.parent for result in within]


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
