"""What a step of HSTU as a ranker takes, by the events that its sequences have and may have.

    python benchmarks/hstu.py --json=docs/results/hstu.json

The log is of `configs/dlrm/dlrm_v4.py:nano`: users have some 80 events before a target. Rows are as
wide as the longest past that `past` allows, and have one sequence each, or as many as fit. A step
has about 64 sequences in all cases.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import loop
import numpy as np
import step as timing

from recipes.dlrm import data as data_lib

_SEQUENCES = 64  # of a step


def measure(past: int, packed: bool, seconds: float) -> dict[str, Any]:
  """Returns events, columns and seconds of a step; `past` is the most events before a target."""
  given = {"past": past, "targets": 1, "width": past + 1, "steps": 10**6, "log_every": 2}
  given["sequences"] = (past + 1) // 64 if packed else 1  # at most
  config = loop.load("dlrm/dlrm_v4:nano", [f"{name}={value}" for name, value in given.items()])
  config.hstu.length = past + 1
  data = data_lib.load(config)
  start, stop = data.splits["train"]
  segments = np.asarray(data.columns["tokens"][start:stop, :, 3])
  number = (segments.max(axis=1) + 1).mean()  # sequences of a row
  config.batch_size = round(_SEQUENCES / number)
  rates = loop.bare(config, loop.Parts("dlrm", config), seconds)
  return {
    "past": past,
    "packed": packed,
    "sequences": config.batch_size * number,
    "events": config.batch_size * (segments >= 0).sum(axis=1).mean(),
    "columns": config.batch_size * (past + 1),
    "best": config.batch_size / max(rates),
    "median": config.batch_size / statistics.median(rates),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--pasts", type=int, nargs="+", default=[127, 255, 511])
  parser.add_argument("--seconds", type=float, default=10.0, help="of each case")
  parser.add_argument("--json", type=Path)
  args = parser.parse_args()
  load, cases = timing.Load(), []
  for past in args.pasts:
    for packed in (False, True):
      cases.append(measure(past, packed, args.seconds))
      print(json.dumps(cases[-1]), flush=True)
  if args.json:
    found = {"busy_cores": load.cores(), "cases": cases}
    args.json.write_text(json.dumps(timing.about() | found, indent=1) + "\n")


if __name__ == "__main__":
  main()
