"""Tables and curves of finished runs, on the terminal and as a page.

    python -m recipes.report runs/a runs/b --out=docs/results/x

prints a table for every data set and writes it as `x.md`, beside `x.png`, the loss and the selected
metric against time. Everything in them comes from the runs' `result.json` and `metrics.jsonl`.
"""

import argparse
import dataclasses
import difflib
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uniplot

from embed.text import aligned

if TYPE_CHECKING:
  from matplotlib.figure import Figure

# Runs that differ in nothing else are one row: what is the same work on the same data.
_INCIDENTAL = ("seed", "data_dir", "cache_dir", "num_workers")


@dataclasses.dataclass(frozen=True)
class Run:
  """A finished run: its result.json, and the lines of its metrics.jsonl."""

  folder: Path
  result: dict[str, Any]
  lines: list[dict[str, Any]]

  @property
  def settings(self) -> dict[str, Any]:
    """The config by dotted names, without what is incidental."""
    flat = dict(_flat(self.result["config"]))
    return {name: value for name, value in flat.items() if name not in _INCIDENTAL}

  def curve(self, name: str) -> tuple[list[float], list[float]]:
    """Returns seconds of training and values of a metric, wherever it was logged.

    Evaluations and checkpoints do not count as training; the journal leaves them out of its rates.
    """
    seconds, step, times, values = 0.0, 0, [], []
    for line in self.lines:
      if "examples_per_second" in line:
        examples = (line["step"] - step) * self.result["config"]["batch_size"]
        seconds, step = seconds + examples / line["examples_per_second"], line["step"]
      if name in line:
        times.append(seconds)
        values.append(line[name])
    return times, values


def load(folder: str | Path) -> Run:
  """Reads a run's folder.

  Raises:
    FileNotFoundError: it holds no result, because the run has not ended or the folder is another.
  """
  folder = Path(folder)
  missing = [n for n in ("result.json", "metrics.jsonl") if not (folder / n).is_file()]
  if missing and (folder / "config.json").is_file():
    raise FileNotFoundError(
      f"the run in {folder} has not ended; the command that started it goes on with it"
    )
  if missing:
    ended = {path.parent.name: path.parent for path in folder.parent.glob("*/result.json")}
    close = [ended[name] for name in difflib.get_close_matches(folder.name, ended, 1)]
    close += [path.parent for path in folder.glob("*/result.json")]  # one folder up
    hint = f"did you mean {close[0]}?" if close else "give the workdirs of runs that have ended"
    raise FileNotFoundError(f"{folder} has no {missing[0]}: {hint}")
  lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
  return Run(folder, json.loads((folder / "result.json").read_text()), lines)


def grouped(runs: Sequence[Run]) -> list[list[Run]]:
  """Returns runs of one recipe, config and data together, in order of the first one.

  Raises:
    ValueError: two runs of a group have one seed, which would make the spread look smaller.
  """
  groups: dict[str, list[Run]] = {}
  for run in runs:
    key = [run.result["recipe"], run.result["data_sha256"], run.settings]
    group = groups.setdefault(json.dumps(key, sort_keys=True), [])
    for other in group:
      if other.result["seed"] == run.result["seed"]:
        raise ValueError(
          f"{other.folder} and {run.folder} are runs of one config and one seed: give one of them"
        )
    group.append(run)
  return list(groups.values())


def names(groups: Sequence[list[Run]]) -> list[str]:
  """Returns what to call each group: recipe, model, and the settings that tell it apart."""
  found = []
  for group in groups:
    result, mine = group[0].result, group[0].settings
    rivals = [other[0].settings for other in groups if _table(other) == _table(group)]
    differing = [
      f"{name}={mine[name]}"
      for name in sorted(mine)
      if name != "model" and any(rival.get(name, mine[name]) != mine[name] for rival in rivals)
    ]
    title = "/".join(filter(None, [result["recipe"], result["config"].get("model")]))
    found.append(" ".join([title, *differing]))
  return found


def markdown(groups: Sequence[list[Run]], title: str, plot: str) -> str:
  """Returns the page: a table for each data set of each recipe, and where its numbers are from.

  A value is the mean over seeds, `±` the standard deviation (of n - 1) where there are several.
  """
  parts = [f"# {title}", f"![Loss and selected metric against seconds of training]({plot})"]
  for table, pairs in _tables(groups):
    parts.append(_section(table, pairs))
  return "\n\n".join(parts) + "\n"


def text(groups: Sequence[list[Run]]) -> str:
  """Returns the page's tables for a terminal."""
  parts = [f"{_title(table)}\n{aligned(_rows(pairs))}" for table, pairs in _tables(groups)]
  return "\n\n".join(parts)


def sketch(run: Run) -> str:
  """Returns the run's curves for a terminal: the loss, and the metric that selects beside it."""
  curves = {name: run.curve(name) for name in ("loss", _selected(run))}
  plots = [
    uniplot.plot_to_string(
      ys, xs, title=f"{name} / seconds of training", lines=True, width=30, height=9
    ).splitlines()
    for name, (xs, ys) in curves.items()
    if ys
  ]
  width = max(len(line) for plot in plots for line in plot)
  rows = itertools.zip_longest(*plots, fillvalue="")
  return "\n".join("  ".join(half.ljust(width) for half in row).rstrip() for row in rows)


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
    yield table, list(pairs)


def _title(table: tuple[str, str, str]) -> str:
  return " on ".join(filter(None, table[:2]))


def _rows(pairs: _Pairs) -> list[list[str]]:
  """The cells of a table, the header first."""
  metrics = list(
    dict.fromkeys(
      name for _, group in pairs for name in group[0].result["metrics"] if name.startswith("test_")
    )
  )
  rows = []
  for label, group in pairs:
    seeds = ", ".join(str(run.result["seed"]) for run in group)
    seconds = _number([run.result["seconds"] for run in group], "{:.0f}")
    values = [_cell([run.result["metrics"] for run in group], name) for name in metrics]
    rows.append([label, seeds, *values, seconds])
  everyone = [run for _, group in pairs for run in group]
  for baseline in dict.fromkeys(name for run in everyone for name in run.result["baselines"]):
    cells: dict[tuple[str, ...], str] = {}
    for label, group in pairs:
      found = [run.result["baselines"].get(baseline, {}) for run in group]
      cells.setdefault(tuple(_cell(found, name) for name in metrics), label)
    # Groups that are measured otherwise have another baseline; a group without it has no cells.
    cells = {values: label for values, label in cells.items() if any(values)}
    for scores, label in cells.items():
      rows.append([baseline if len(cells) == 1 else f"{baseline} ({label})", "", *scores, ""])
  return [["", "seeds", *(name.removeprefix("test_") for name in metrics), "seconds"], *rows]


def _section(table: tuple[str, str, str], pairs: _Pairs) -> str:
  header, *rows = _rows(pairs)
  lines = [f"## {_title(table)}", "", _row(header), _row(["---"] * len(header))]
  lines += [_row(row) for row in rows]
  everyone = [run for _, group in pairs for run in group]
  devices = {_device(run.result["device"]) for run in everyone}
  versions = {
    ", ".join(f"{name} {run.result['versions'][name]}" for name in ("jax", "flax", "sparse-embed"))
    for run in everyone
  }
  lines += ["", f"Test metrics; on {'; '.join(sorted(devices))}; {'; '.join(sorted(versions))}."]
  hashes = (f"`{name}` {digest}" for name, digest in sorted(json.loads(table[2]).items()))
  return "\n".join([*lines, "", "Data (SHA-256): " + ", ".join(hashes) + "."])


def _cell(found: Sequence[Mapping[str, float]], name: str) -> str:
  values = [metrics[name] for metrics in found if name in metrics]
  # The same rows give a baseline the same value with every seed.
  return _number(values, "{:.4f}") if len(set(values)) > 1 else _number(values[:1], "{:.4f}")


def _number(values: Sequence[float], form: str) -> str:
  if not values:
    return ""
  mean = form.format(statistics.fmean(values))
  return f"{mean} ± {form.format(statistics.stdev(values))}" if len(values) > 1 else mean


def _row(cells: Sequence[str]) -> str:
  return f"| {' | '.join(cells)} |"


def _device(device: Mapping[str, Any]) -> str:
  return f"{device['count']} x {device['kind']} ({device['host_cores']} host cores)"


def draw(groups: Sequence[list[Run]]) -> "Figure":
  """Returns a figure: on the left the loss, on the right the metric that selects, by data set."""
  from matplotlib.figure import Figure  # a run's end needs `sketch` alone, and at once

  tables = list(dict.fromkeys(_table(group) for group in groups))
  figure = Figure(figsize=(10, 3.5 * len(tables)), layout="constrained")
  axes = figure.subplots(len(tables), 2, squeeze=False)
  labelled = list(zip(names(groups), groups, strict=True))
  for (left, right), table in zip(axes, tables, strict=True):
    own = [(label, group) for label, group in labelled if _table(group) == table]
    for color, (label, group) in zip(
      itertools.cycle(f"C{i}" for i in range(10)), own, strict=False
    ):
      for number, run in enumerate(group):
        style = {"color": color, "alpha": 0.8, "label": None if number else label}
        left.plot(*run.curve("loss"), **style)
        right.plot(*run.curve(_selected(run)), marker=".", **style)
    left.set(title=_title(table), ylabel="training loss")
    right.set(ylabel=next(filter(None, (_selected(group[0]) for _, group in own)), ""))
    right.legend(fontsize="small")
    for axis in (left, right):
      axis.set(xlabel="seconds of training")
      axis.grid(alpha=0.3)
    if not any(_selected(group[0]) for _, group in own):
      right.set_axis_off()  # trained on the validation data as well; the legend stays
  return figure


def _selected(run: Run) -> str:
  """The metric that chooses the state, or the first one that was validated; "" if none was."""
  if run.result["config"]["select"]:
    return run.result["config"]["select"]
  return next((name for line in run.lines for name in line if name.startswith("valid_")), "")


def _flat(config: Mapping[str, Any], prefix: str = ""):
  for name, value in config.items():
    if isinstance(value, Mapping):
      yield from _flat(value, f"{prefix}{name}.")
    else:
      yield f"{prefix}{name}", value


def main(argv: Sequence[str]) -> None:
  parser = argparse.ArgumentParser("python -m recipes.report", description=__doc__)
  parser.add_argument("runs", nargs="+", help="workdirs of runs that have ended")
  parser.add_argument("--out", help="where to write, without suffix; default: <first run>/report")
  parser.add_argument("--title", help="of the page; default: the name of --out, or of the run")
  arguments = parser.parse_args(argv)
  first = Path(arguments.runs[0])
  out = Path(arguments.out or first / "report")
  title = arguments.title or (out if arguments.out else first).name
  try:
    runs = [load(folder) for folder in arguments.runs]
    groups = grouped(runs)
  except (FileNotFoundError, ValueError) as error:
    parser.exit(2, f"error: {error}\n")
  page, image = out.with_name(f"{out.name}.md"), out.with_name(f"{out.name}.png")
  out.parent.mkdir(parents=True, exist_ok=True)
  draw(groups).savefig(image, dpi=80)
  page.write_text(markdown(groups, title, image.name))
  print(text(groups))
  if len(runs) == 1 and sys.stdout.isatty():
    print(f"\n{sketch(runs[0])}")
  print(f"\n{page}\n{image}")


if __name__ == "__main__":
  main(sys.argv[1:])
