"""Prints a table of finished runs for each data set, with their baselines.

    python -m recipes.report runs/mine_0 runs/mine_1 runs/other

Runs whose settings differ by the seed alone are one row: the mean of each metric and, with ±, its
standard deviation. In place of a workdir a copy of its `result.json` will do, called `NAME.json`.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flax.traverse_util import flatten_dict

from embed.planning import aligned

from . import errors, files
from .errors import terminal

# Runs that differ only in these do the same work on the same data.
_INCIDENTAL = ("seed", "data_dir", "cache_dir")


def report(paths: Sequence[str | Path]) -> str:
  """Returns the tables of runs; see the top of the module."""
  tables: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
  names: dict[str, str] = {}  # of the rows, by their settings
  for path in map(Path, paths):
    result = files.read_json(path if path.suffix == ".json" else path / "result.json")
    config = flatten_dict(result["config"], sep=".")
    data = config.get("data_file") or config.get("files") or config.get("dataset", "table")
    hashes = json.dumps(result["data_sha256"], sort_keys=True)
    groups = tables.setdefault((f"{result['recipe']} on {data}", hashes), {})
    own = {name: x for name, x in config.items() if name not in _INCIDENTAL}
    name = path.name.removesuffix(".json").removesuffix(f"_{result['seed']}")
    name = name if name not in groups else str(path)
    key = json.dumps([result["recipe"], hashes, own], sort_keys=True)
    groups.setdefault(names.setdefault(key, name), []).append(result)
  return "\n\n".join(f"{title}\n{rows(x)}" for (title, _), x in tables.items())


def table(result: Mapping[str, Any]) -> str:
  """Returns a result as a table for a terminal: the metrics of the run and of its baselines."""
  run = "/".join(filter(None, [result["recipe"], result["config"].get("model")]))
  return (
    f"{rows({run: [result]})}\n"
    f"seed {result['seed']}, state of step {result['tested_step']} of {result['steps']}, "
    f"{result['seconds']:.0f} s on {result['device']['kind']} x {result['device']['count']}"
  )


def rows(groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
  """Returns a table of results by name and of their baselines, each baseline after its results.

  Of several results, such as of several seeds, it has the mean and the standard deviation (of
  n - 1) of each metric. They are of the test rows, or of the validation rows if nothing was tested.
  """
  every = [result["metrics"] for group in groups.values() for result in group]
  logged = dict.fromkeys(name for metrics in every for name in metrics)
  split = "test" if any(name.startswith("test_") for name in logged) else "valid"
  names = [name for name in logged if name.startswith(f"{split}_")]
  lines = [(split, *(name.removeprefix(f"{split}_") for name in names))]
  for label, group in groups.items():
    fits: dict[str, list[Mapping[str, float]]] = {}
    for result in group:
      for name, metrics in {label: result["metrics"], **result["baselines"]}.items():
        fits.setdefault(name, []).append(metrics)
    for name, of_seeds in fits.items():
      values = [[metrics[each] for metrics in of_seeds if each in metrics] for each in names]
      line = (name, *map(_cell, values))
      lines += [line] * (any(values) and line not in lines)  # a baseline of several runs once
  return aligned(lines)


def _cell(values: Sequence[float]) -> str:
  if not values:
    return ""
  mean = f"{statistics.fmean(values):.4f}"
  return mean if len(set(values)) == 1 else f"{mean} ± {statistics.stdev(values):.4f}"


def main(argv: Sequence[str]) -> None:
  parser = errors.parser(f"{__package__}.report", __doc__)
  parser.add_argument("runs", nargs="+", help="workdirs of runs that have ended, or NAME.json")
  with errors.in_one_line(parser):
    print(terminal(report(parser.parse_args(argv).runs)))


if __name__ == "__main__":
  main(sys.argv[1:])
