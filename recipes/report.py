"""Tables and curves of finished runs, on the terminal and as a page.

    python -m recipes.report runs/a runs/b --out=docs/results/x

prints a table for every data set and writes it as `x.md`, with `x.png`: the loss and the selected
metric over steps. Everything in them comes from the runs' `result.json` and `metrics.jsonl`, or
from copies of these called `NAME.json` and `NAME.jsonl`:

    python -m recipes.report docs/results/sequence_*_[0-9].json --out=docs/results/sequence
"""

import argparse
import dataclasses
import difflib
import itertools
import json
import statistics
import sys
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from embed.planning import aligned

from .errors import MissingFileError, UserError, importing
from .escaping import markdown as markdown_text
from .escaping import terminal

with importing():
  import uniplot

  from . import arrays, files, schemas
  from .run import settings as run_settings

if TYPE_CHECKING:
  from matplotlib.figure import Figure

# Runs that differ only in these do the same work on the same data, and are averaged.
_INCIDENTAL = ("seed", "data_dir", "cache_dir", "num_workers")
_BOUND = "best possible"  # the baseline that no model can beat


@dataclasses.dataclass(frozen=True)
class Run:
  """A finished run: its result.json, and the lines of its metrics.jsonl."""

  path: Path
  result: dict[str, Any]
  lines: list[dict[str, Any]]

  @property
  def settings(self) -> dict[str, Any]:
    """The config by dotted names, without what is incidental and settings of every run's default.

    Results of earlier versions do not name the settings that came later.
    """
    flat = dict(_flat(self.result["config"]))
    unset = {
      n for n, default in json.loads(json.dumps(run_settings.RUN)).items() if flat.get(n) == default
    }
    return {name: flat[name] for name in flat if name not in {*_INCIDENTAL, *unset}}

  @property
  def selected(self) -> str:
    """The metric that chooses the state, or the first one that was validated; "" if none was."""
    if self.result["config"]["select"]:
      return self.result["config"]["select"]
    return next((name for line in self.lines for name in line if name.startswith("valid_")), "")

  def curve(self, name: str) -> tuple[list[int], list[float]]:
    """Returns the steps at which a metric was logged, and its values."""
    points = [(line["step"], line[name]) for line in self.lines if name in line]
    return [step for step, _ in points], [value for _, value in points]


def load(path: str | Path) -> Run:
  """Reads a run's folder, or a copy of its result.json with the journal next to it, if any.

  Raises:
    MissingFileError: the folder holds no result: the run has not ended, or it is another folder.
    DamagedFileError: a file is not JSON, no regular file, or lacks a part; names it.
  """
  path = Path(path)
  if path.suffix == ".json" and path.is_file():
    journal = path.with_suffix(".jsonl")
    return _read(path, path, journal if journal.is_file() else None)
  missing = [n for n in ("result.json", "metrics.jsonl") if not (path / n).is_file()]
  if missing and (path / "config.json").is_file():
    raise MissingFileError(
      f"the run in {path} has not ended; the command that started it resumes it"
    )
  if missing:
    ended = {result.parent.name: result.parent for result in path.parent.glob("*/result.json")}
    close = [result.parent for result in path.glob("*/result.json")]  # one folder up
    close += [ended[name] for name in difflib.get_close_matches(path.name, ended, 1)]
    hint = f"did you mean {close[0]}?" if close else "give the workdirs of runs that have ended"
    raise MissingFileError(f"{path} has no {missing[0]}: {hint}")
  return _read(path, path / "result.json", path / "metrics.jsonl")


def _read(path: Path, result: Path, journal: Path | None) -> Run:
  lines = files.read(journal, at_most=1 << 30).splitlines() if journal else []
  return Run(
    path,
    arrays.read_json(result, schema=schemas.RESULT),
    [arrays.parse_json(line, str(journal), schema=schemas.LINE) for line in lines],
  )


def grouped(runs: Sequence[Run]) -> list[list[Run]]:
  """Returns runs of one recipe, config and data together, in order of the first one.

  Raises:
    UserError: two runs of a group have one seed, which would make the spread look smaller.
  """
  groups: dict[str, list[Run]] = {}
  for run in runs:
    key = [run.result["recipe"], run.result["data_sha256"], run.settings]
    group = groups.setdefault(json.dumps(key, sort_keys=True), [])
    for other in group:
      if other.result["seed"] == run.result["seed"]:
        raise UserError(
          f"{other.path} and {run.path} are runs of one config and one seed: give one of them"
        )
    group.append(run)
  return list(groups.values())


def names(groups: Sequence[list[Run]]) -> list[str]:
  """Returns what to call each group: recipe, model, and the settings that tell it apart."""
  labels = []
  for group in groups:
    title, settings = _subject(group), group[0].settings
    rivals = [
      other[0].settings
      for other in groups
      if _subject(other) == title and _table(other) == _table(group)
    ]
    differing = [
      f"{name}={_short(settings[name])}" for name in _differing(rivals) if name in settings
    ]
    labels.append(" ".join([title, *differing]))
  return labels


def markdown(groups: Sequence[list[Run]], title: str, plot: str | None) -> str:
  """Returns the page: the curves, and a table for each data set of each recipe.

  A value is the mean over seeds, `±` the standard deviation (of n - 1) where there are several.

  Args:
    groups: as `grouped` returns them.
    title: the page's.
    plot: the picture's file, or None where there are no curves.
  """
  parts = [f"# {markdown_text(title)}"]
  if plot:
    picture = urllib.parse.quote(plot)
    parts += [f"![Training loss and validation metric over steps]({picture})", _caption(groups)]
  for table, pairs in _tables(groups):
    parts.append(_section(table, pairs))
  return "\n\n".join(parts) + "\n"


def text(groups: Sequence[list[Run]]) -> str:
  """Returns the page's tables for a terminal."""
  parts = []
  for table, pairs in _tables(groups):
    metrics, entries = _entries(pairs)
    header = ["", "seeds", *(name.removeprefix("test_") for name in metrics), "seconds"]
    rows = [
      [
        entry.label,
        entry.seeds,
        *(_number(entry.scores.get(name, []), "{:.4f}") for name in metrics),
        _number(entry.seconds, "{:.0f}"),
      ]
      for entry in entries
    ]
    parts.append(f"{_title(table)}\n{aligned([header, *rows])}")
  return "\n\n".join(parts)


def sketch(run: Run) -> str:
  """Returns the run's curves for a terminal: the loss and, to its right, the selected metric."""
  curves = {name: run.curve(name) for name in ("loss", run.selected)}
  plots = [
    uniplot.plot_to_string(
      ys, xs, title=f"{name} / steps", lines=True, width=30, height=9
    ).splitlines()
    for name, (xs, ys) in curves.items()
    if ys
  ]
  width = max((len(line) for plot in plots for line in plot), default=0)
  rows = itertools.zip_longest(*plots, fillvalue="")
  return "\n".join("  ".join(half.ljust(width) for half in row).rstrip() for row in rows)


def _subject(group: list[Run]) -> str:
  result = group[0].result
  return "/".join(filter(None, [result["recipe"], result["config"].get("model")]))


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
  """Names of the settings that are not the same in all of them."""
  everything = sorted({name for each in settings for name in each} - {"model"})
  return [
    name for name in everything if any(each.get(name) != settings[0].get(name) for each in settings)
  ]


def _table(group: list[Run]) -> tuple[str, str, str]:
  result = group[0].result
  hashes = json.dumps(result["data_sha256"], sort_keys=True)
  data = result["config"].get("dataset", "")
  return result["recipe"], result["config"]["data_file"] if data == "file" else data, hashes


_Pairs = list[tuple[str, list[Run]]]  # a group's name, and its runs


def _tables(groups: Sequence[list[Run]]) -> Iterator[tuple[tuple[str, str, str], _Pairs]]:
  labelled = list(zip(names(groups), groups, strict=True))
  by_table = lambda pair: _table(pair[1])
  for table, pairs in itertools.groupby(sorted(labelled, key=by_table), key=by_table):
    # The title names the recipe.
    yield table, [(label.removeprefix(f"{table[0]}/"), group) for label, group in pairs]


def _title(table: tuple[str, str, str]) -> str:
  return " on ".join(filter(None, table[:2]))


class _Entry(NamedTuple):
  """A row of a table: a group of runs, or a baseline. `scores` are by metric, one a seed."""

  label: str
  seeds: str
  scores: dict[str, list[float]]
  seconds: list[float]


def _entries(pairs: _Pairs) -> tuple[list[str], list[_Entry]]:
  """The test metrics of a table, and what it compares: the runs first."""
  everyone = [run for _, group in pairs for run in group]
  metrics = dict.fromkeys(name for run in everyone for name in run.result["metrics"])
  tested = [name for name in metrics if name.startswith("test_")]

  def scores(results: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {
      name: [result[name] for result in results if name in result]
      for name in tested
      if any(name in result for result in results)
    }

  entries = [
    _Entry(
      label,
      ", ".join(str(run.result["seed"]) for run in group),
      scores([run.result["metrics"] for run in group]),
      [run.result["seconds"] for run in group],
    )
    for label, group in pairs
  ]
  for baseline in dict.fromkeys(name for run in everyone for name in run.result["baselines"]):
    # Groups that are measured otherwise have another baseline; a group without it has no scores.
    distinct: dict[tuple[str, ...], _Entry] = {}
    for label, group in pairs:
      scored = scores([run.result["baselines"].get(baseline, {}) for run in group])
      if scored:
        key = tuple(_number(scored.get(name, []), "{:.4f}") for name in tested)
        label = label.removeprefix(f"{_subject(group)} ")  # the settings alone, if there are any
        distinct.setdefault(key, _Entry(f"{baseline} ({label})", "", scored, []))
    only = len(distinct) == 1
    entries += [each._replace(label=baseline) if only else each for each in distinct.values()]
  return tested, entries


def _section(table: tuple[str, str, str], pairs: _Pairs) -> str:
  metrics, entries = _entries(pairs)
  titles = [markdown_text(name.removeprefix("test_")) for name in metrics]
  columns = [["", "seeds", *titles, "seconds"]]
  best = {name: _best(name, entries) for name in metrics}
  for entry in entries:
    cells = [_number(entry.scores.get(name, []), "{:.4f}", "\u00a0") for name in metrics]
    bold = [
      f"**{cell}**" if entry.label in best[name] else cell
      for name, cell in zip(metrics, cells, strict=True)
    ]
    name = markdown_text(entry.label).replace("=", "=<wbr>")
    columns.append([name, entry.seeds, *bold, _number(entry.seconds, "{:.0f}", "\u00a0")])
  # The longer side goes down the page.
  across = len(entries) <= len(metrics) + 2
  header, *rows = zip(*columns, strict=True) if across else columns
  lines = [
    f"## {markdown_text(_title(table))}",
    "",
    _row(header),
    _row([":--", *["--:"] * (len(header) - 1)]),
  ]
  lines += [_row(row) for row in rows]
  return "\n".join([*lines, "", *_box(table, pairs)])


def _best(name: str, entries: Sequence[_Entry]) -> list[str]:
  """Labels of the best entries by a metric, as far as the digits that are shown tell."""
  sign = -1 if name.endswith("loss") else 1
  means = {
    entry.label: round(sign * statistics.fmean(entry.scores[name]), 4)
    for entry in entries
    if name in entry.scores and entry.label.partition(" (")[0] != _BOUND
  }
  return [label for label, mean in means.items() if len(means) > 1 and mean == max(means.values())]


def _box(table: tuple[str, str, str], pairs: _Pairs) -> list[str]:
  """Returns notes on a table's figures, as a quotation, which sites and editors set apart."""
  everyone = [run for _, group in pairs for run in group]
  selected = sorted({run.result["config"]["select"] for run in everyone})
  state = [
    f"of the state that was best on `{markdown_text(name)}`" if name else "of the last state"
    for name in selected
  ]
  box = [
    f"Test metrics {' or '.join(state)}; mean and, with `±`, standard deviation over seeds."
    " Bold: the best figure of a metric. Seconds are those of the whole run, on a machine that may"
    " have had other work too."
  ]
  settings = [group[0].settings for _, group in pairs]
  differing = [
    f"`{markdown_text(name)}` "
    + ", ".join(markdown_text(_short(each.get(name, "none"))) for each in settings)
    for name in _differing(settings)
    if not any(f" {name}=" in label for label, _ in pairs)
  ]
  if differing:
    box.append(f"Settings that differ, in the order of the models: {'; '.join(differing)}.")
  devices = {_device(run.result["device"]) for run in everyone}
  versions = {
    ", ".join(f"{name} {run.result['versions'][name]}" for name in ("jax", "flax", "sparse-embed"))
    for run in everyone
  }
  box.append(f"On {markdown_text('; '.join([*sorted(devices), *sorted(versions)]))}.")
  sources = sorted({run.result["config"].get("source", "") for run in everyone} - {""})
  if sources:
    box.append(f"Data from {', '.join(map(markdown_text, sources))}.")
  hashes = (
    f"`{markdown_text(name)}` {markdown_text(digest)}"
    for name, digest in sorted(json.loads(table[2]).items())
  )
  box.append(f"Data (SHA-256): {', '.join(hashes)}.")
  return [f"> {line}" if line else ">" for line in "\n\n".join(box).split("\n")]


def _caption(groups: Sequence[list[Run]]) -> str:
  lines = ["One line for each run; lines of one colour are seeds."]
  missing = []
  for table, pairs in _tables(groups):
    labels = [label for label, group in pairs if not all(run.lines for run in group)]
    if labels:
      part = f" ({', '.join(labels)})" if len(labels) < len(pairs) else ""
      missing.append(markdown_text(f"{_title(table)}{part}"))
  if missing:
    lines.append(
      f"Missing, because only the results of these runs were kept: {', '.join(missing)}."
    )
  return " ".join(lines)


def _number(values: Sequence[float], form: str, space: str = " ") -> str:
  if not values:
    return ""
  mean = form.format(statistics.fmean(values))
  # The same rows give a baseline the same value with every seed.
  if len(set(values)) == 1:
    return mean
  return f"{mean}{space}±{space}{form.format(statistics.stdev(values))}"


def _short(value: Any) -> str:
  return f"{value:g}" if isinstance(value, float) else str(value)


def _row(cells: Sequence[str]) -> str:
  return f"| {' | '.join(cells)} |"


def _device(device: Mapping[str, Any]) -> str:
  return f"{device['count']} x {device['kind']} ({device['host_cores']} host cores)"


def draw(groups: Sequence[list[Run]]) -> "Figure | None":
  """Returns the curves of each data set, or None where no run has any."""
  from .evaluation import curves

  return curves.draw(
    [
      (terminal(_title(table)), [(terminal(label), group) for label, group in pairs])
      for table, pairs in _tables(groups)
    ]
  )


def _flat(config: Mapping[str, Any], prefix: str = ""):
  for name, value in config.items():
    if isinstance(value, Mapping):
      yield from _flat(value, f"{prefix}{name}.")
    else:
      yield f"{prefix}{name}", value


def main(argv: Sequence[str]) -> None:
  command = f"python -m {__package__}.report"
  about = __doc__.replace("python -m recipes.report", command)
  parser = argparse.ArgumentParser(command, description=about)
  parser.add_argument("runs", nargs="+", help="workdirs of runs that have ended, or NAME.json")
  parser.add_argument("--out", help="where to write, without suffix; default: <first run>/report")
  parser.add_argument("--title", help="of the page; default: the name of --out, or of the run")
  arguments = parser.parse_args(argv)
  first = Path(arguments.runs[0])
  default = first.with_suffix("") if first.is_file() else first / "report"
  out = Path(arguments.out or default)
  title = arguments.title or (out if arguments.out else first).name
  try:
    runs = [load(folder) for folder in arguments.runs]
    groups = grouped(runs)
  except UserError as error:
    parser.exit(2, terminal(f"error: {error}\n"))
  page, image = out.with_name(f"{out.name}.md"), out.with_name(f"{out.name}.png")
  out.parent.mkdir(parents=True, exist_ok=True)
  figure = draw(groups)
  if figure:
    with files.replacing(image) as file:
      figure.savefig(file, format="png", dpi=160)
  files.write(page, markdown(groups, title, image.name if figure else None))
  print(terminal(text(groups)))
  if len(runs) == 1 and runs[0].lines and sys.stdout.isatty():
    print(f"\n{terminal(sketch(runs[0]))}")
  print(terminal("\n".join(map(str, ["", page, *([image] if figure else [])]))))


if __name__ == "__main__":
  main(sys.argv[1:])
