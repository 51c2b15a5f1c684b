"""Prints a table of finished runs for each data set, with their baselines.

    python -m recipes.report runs/mine_0 runs/mine_1 runs/other

Runs whose settings differ by the seed alone are one row: the mean of each metric and, with ±, its
standard deviation. In place of a workdir a copy of its `result.json` will do, called `NAME.json`.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flax.traverse_util import flatten_dict

from . import errors, files, results
from .errors import MissingFileError, terminal

# Runs that differ only in these do the same work on the same data.
_INCIDENTAL = ("seed", "data_dir", "cache_dir", "num_workers", "slices")


def report(paths: Sequence[str | Path]) -> str:
  """Returns the tables of runs; see the top of the module.

  Args:
    paths: workdirs, or copies of results.
  """
  tables: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
  names: dict[str, str] = {}  # of the rows, by their settings
  for path in map(Path, paths):
    result = _result(path)
    config = flatten_dict(result["config"], sep=".")
    data = config.get("data_file") or config.get("files") or config.get("dataset", "table")
    hashes = json.dumps(result["data_sha256"], sort_keys=True)
    groups = tables.setdefault((f"{result['recipe']} on {data}", hashes), {})
    own = {name: x for name, x in config.items() if name not in _INCIDENTAL}
    name = path.name.removesuffix(".json").removesuffix(f"_{result['seed']}")
    name = name if name not in groups else str(path)
    key = json.dumps([result["recipe"], hashes, own], sort_keys=True)
    groups.setdefault(names.setdefault(key, name), []).append(result)
  return "\n\n".join(f"{title}\n{results.rows(x)}" for (title, _), x in tables.items())


def _result(path: Path) -> dict[str, Any]:
  file = path if path.suffix == ".json" else path / "result.json"
  if not file.is_file():
    raise MissingFileError(f"there is no {file}: give the workdirs of runs that have ended")
  return files.read_json(file)


def main(argv: Sequence[str]) -> None:
  parser = errors.parser(f"{__package__}.report", __doc__)
  parser.add_argument("runs", nargs="+", help="workdirs of runs that have ended, or NAME.json")
  with errors.in_one_line(parser):
    print(terminal(report(parser.parse_args(argv).runs)))


if __name__ == "__main__":
  main(sys.argv[1:])
