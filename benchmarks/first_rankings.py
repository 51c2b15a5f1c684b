"""The config that `recipes.describe` writes, untouched, against popularity and item kNN on logs.

    python benchmarks/first_rankings.py --data-dir=data --json=docs/results/first_rankings.json

Trains `two_tower` on every log, and `sequence` on all but `gowalla`, whose rows have no order.
`--data-dir` has the folders `beauty-bert4rec`, `gowalla`, `ml-100k`, `ml-1m-sasrec` and `s3rec`;
the log `fading` is drawn here. The same command resumes a run that was stopped and skips finished
runs in `--folder`; measure a change in another folder.
"""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
import pyarrow as pa
import pyarrow.csv
from first_config import described

from recipes import baselines


def draw() -> pa.Table:
  """Draws a log with times: items appear at any time, and are half as popular a tenth later."""
  rng = np.random.default_rng(0)
  rows, users, items, groups = 200_000, 4_000, 3_000, 20
  born, group = rng.uniform(-0.5, 1, items), rng.integers(groups, size=items)
  taste = rng.dirichlet(np.full(groups, 0.2), users)
  popularity = rng.pareto(1.5, items) + 0.1
  time, who = np.sort(rng.random(rows)), rng.integers(users, size=rows)
  chosen = np.empty(rows, np.int32)
  for start in range(0, rows, 500):
    chunk = slice(start, start + 500)
    age = time[start] - born
    weights = popularity * np.exp2(-age / 0.1) * (age >= 0)
    odds = np.cumsum(taste[who[chunk]][:, group] * weights, axis=1)
    chosen[chunk] = (odds < rng.random((len(odds), 1)) * odds[:, -1:]).sum(axis=1)
  seconds = (time * 90 * 86_400).astype(int) + 1_700_000_000
  return pa.table({"user": who, "item": chosen, "time": seconds})


def by_user(*paths: Path) -> pa.Table:
  """Reads files with a user a line, `user item item …`."""
  lines = [line.split() for path in paths for line in path.read_text().splitlines()]
  users = [f"u{user}" for user, *items in lines for _ in items]
  return pa.table({"user": users, "item": [f"i{item}" for _, *items in lines for item in items]})


def logs(data: Path, folder: Path) -> Iterator[tuple[str, list[str]]]:
  """Yields names, and arguments of `describe`."""
  yield "ml100k", [str(data / "ml-100k/u.data"), "--names=user,item,rating,time"]
  files = [data / f"gowalla/{name}.txt" for name in ("train", "valid", "test")]
  written = {
    "fading": draw,
    "beauty": lambda: by_user(data / "s3rec/Beauty.txt"),
    "gowalla": lambda: by_user(*files),
  }
  for name, table in written.items():
    pyarrow.csv.write_csv(table(), folder / f"{name}.csv")
    yield name, [str(folder / f"{name}.csv")]
  pairs = ["--names=user,item", "--delimiter= "]
  yield "beauty_bert4rec", [str(data / "beauty-bert4rec/beauty.txt"), *pairs]
  yield "ml1m", [str(data / "ml-1m-sasrec/ml-1m.txt"), *pairs]


def main() -> None:
  parser = common.parser(__doc__)
  parser.add_argument("--data-dir", type=Path, required=True)
  parser.add_argument(
    "--folder", type=Path, default=Path("runs/first_rankings"), help="of the runs"
  )
  args = parser.parse_args()
  args.folder.mkdir(parents=True, exist_ok=True)
  found: dict[str, Any] = {}
  for name, arguments in logs(args.data_dir, args.folder):
    config = described(name, arguments, args.folder)
    for recipe in ("two_tower",) if name == "gowalla" else ("two_tower", "sequence"):
      workdir = args.folder / f"{name}_{recipe}"
      importlib.import_module(f"recipes.{recipe}.train").run(config, str(workdir))
      result = baselines.fit(workdir)
      found.setdefault(name, {})[recipe] = {
        key: result[key] for key in ("seed", "seconds", "metrics", "baselines", "data")
      }
      print(name, recipe, json.dumps(found[name][recipe]), flush=True)
  common.write(args.json, {"logs": found})


if __name__ == "__main__":
  main()
