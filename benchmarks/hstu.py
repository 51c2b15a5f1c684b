"""What a step of HSTU as a ranker costs: tokens, not padding, and targets that share a history.

    python benchmarks/hstu.py --json=docs/results/hstu.json

Three layouts of the same days, of `configs/dlrm/dlrm_v4.py:nano` with longer histories and fewer
events: a target a row, as MLPerf has it; up to eight targets of a sequence, a sequence a row, all
padded to the longest; and such sequences side by side in rows. Tokens are events and targets of a
batch, padding the other columns; contextual tokens count as neither.
"""

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import loop
import numpy as np
import step as timing

_KEPT = 8  # batches on the device
LAYOUTS: dict[str, tuple[list[str], tuple[int, ...]]] = {
  "a target a row": (["targets=1"], (64,)),
  "padded": (["targets=8"], (32, 64)),
  "packed": (["targets=8", "sequences=8", "width=135"], (8, 16, 32)),
}


def measure(name: str, changes: list[str], rows: int, args: argparse.Namespace) -> dict[str, Any]:
  """Returns what a step of a layout takes, and what is in its batches, as means."""
  shared = ["past=120", "events=3.0", "hstu.length=135", "shuffle=True", "steps=1000000"]
  shared.append(f"batch_size={rows}")
  config = loop.load("dlrm/dlrm_v4:nano", changes + shared)
  parts = loop.Parts("dlrm", config)
  batches = list(itertools.islice(parts.batches(), _KEPT))
  tokens, columns, targets = (
    float(np.mean([of(batch) for batch in batches]))
    for of in (
      lambda batch: (batch["segments"] >= 0).sum(),
      lambda batch: batch["segments"].size,
      lambda batch: batch["weight"].sum(),
    )
  )
  kept, step = itertools.cycle([jax.device_put(batch) for batch in batches]), parts.step()
  times = []
  for _ in range(args.steps + 2):
    began = time.perf_counter()
    jax.block_until_ready(step(next(kept)))
    times.append(time.perf_counter() - began)
  taken = statistics.median(times[2:])  # the first two compile
  found = {
    "layout": name,
    "rows": rows,
    "tokens": tokens,
    "padding": 1 - tokens / columns,
    "targets": targets,
    "step_seconds": taken,
    "microseconds_a_token": 1e6 * taken / tokens,
    "targets_a_second": targets / taken,
  }
  print(json.dumps(found), flush=True)
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--steps", type=int, default=12, help="timed steps of a layout")
  parser.add_argument("--json", type=Path, help="where to write the results")
  args = parser.parse_args()
  load = timing.Load()
  results = [
    measure(name, changes, rows, args)
    for name, (changes, sizes) in LAYOUTS.items()
    for rows in sizes
  ]
  if args.json:
    about = timing.about() | {"busy_cores": load.cores()}
    args.json.write_text(json.dumps(about | {"results": results}, indent=2) + "\n")


if __name__ == "__main__":
  main()
