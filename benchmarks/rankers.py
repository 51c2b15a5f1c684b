"""Rankers beside each other: what a user's past is worth.

    python benchmarks/rankers.py --data-dir=ml-100k --json=docs/results/histories.json

It reads `u.data` of MovieLens 100K, split in the order of time; a rating of 4 or more is a click.

Runs are `recipes.dlrm`'s: DCN-V2 with full cross layers and without a linear model, at a
learning rate of 2e-3. They are tested in the state of the best validation log loss. Again with the
same `--folder`, it trains what is missing.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import duckdb
import pyarrow.parquet as pq

from recipes.dlrm import train
from recipes.dlrm.model import CHOICES

_DATA = "MovieLens 100K"
_PAST = 30  # positions of a history, the same for all models
_DCNV2 = {"linear": False, "dcnv2": {"rank": 0}, "dropout": 0.2, "learning_rate": 2e-3}


def histories(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields models and their configs."""
  columns: dict[str, Any] = {
    # By their numbers, so that users who are new in the test are several ones for its GAUC.
    "user": {"kind": "user", "size": 944},
    "movie": "item",
    "liked": {"kind": "label", "column": "rating", "at_least": 4},
    "when": "time",
  }
  past = {
    "likes": {"kind": "sequence", "table": "movie", "max_length": _PAST},
    "others": {"kind": "sequence", "table": "movie", "max_length": _PAST},
    "outcomes": {"kind": "bag", "min_count": 1, "max_length": _PAST},
  }
  rows = duckdb.sql(f"""
    SELECT * EXCLUDE past,
      list_transform(list_filter(past, lambda x: x.liked), lambda x: x.movie) AS likes,
      list_transform(list_filter(past, lambda x: NOT x.liked), lambda x: x.movie) AS others,
      list_transform(past, lambda x: x.liked) AS outcomes
    FROM (
      SELECT *, list_filter(list({{movie: movie, liked: rating >= 4, time: "when"}}) OVER (
        PARTITION BY "user" ORDER BY "when", movie ROWS BETWEEN {_PAST} PRECEDING AND 1 PRECEDING
      ), lambda x: x.time < "when") AS past
      FROM read_csv('{args.data_dir}/u.data', names=['user', 'movie', 'rating', 'when'])
    ) ORDER BY "when", "user", movie
  """).to_arrow_table()
  path = args.folder / "with_past"
  path.mkdir(parents=True, exist_ok=True)
  pq.write_table(rows, path / "rows.parquet")
  table = {"files": str(path), "columns": columns, "split": {"by": "time"}}
  yield "none", table
  for model in CHOICES["history.model"]:
    more = {"columns": columns | past, "history": {"model": model}}
    yield model, table | more


def main() -> None:
  parser = common.parser(__doc__)
  parser.add_argument("--data-dir", type=Path, required=True)
  parser.add_argument("--folder", type=Path, default=Path("runs/rankers"), help="of the runs")
  parser.add_argument("--epochs", type=int, default=3, help="at most")
  args = parser.parse_args()
  found: dict[str, list[Any]] = {}
  for model, config in histories(args):
    results = found[model] = []
    config |= _DCNV2 | {"epochs": args.epochs, "cache_dir": str(args.folder / "cache")}
    for seed in (0, 1, 2):
      result = train.run(config | {"seed": seed}, str(args.folder / _DATA / model / str(seed)))
      kept = {name: result[name] for name in ("steps", "tested_step", "seconds", "metrics")}
      results.append({"seed": seed} | kept)
      print(model, results[-1], flush=True)
  common.write(args.json, {"results": {_DATA: found}})


if __name__ == "__main__":
  main()
