"""Rankers beside each other: what a user's past, several labels and experts are worth.

    python benchmarks/rankers.py histories --data-dir=ml-100k --json=docs/results/histories.json
    python benchmarks/rankers.py labels --data-dir=ml-1m --json=docs/results/labels.json

`histories` reads `u.data` of MovieLens 100K, split in the order of time; a rating of 4 or more is a
click. `labels` reads `ratings_no_timestamp.csv` of MovieLens 1M, a third of its rows drawn at
random: 4 or more is `liked`, 5 is `loved`. It also draws clicks of two teachers whose correlation
is known, and with them the best possible scores.

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
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from recipes import config as config_lib
from recipes.dlrm import data as data_lib
from recipes.dlrm import train
from recipes.dlrm.model import CHOICES
from recipes.training.features import cut_ids

_PAST = 30  # positions of a history, the same for all models
_DCNV2 = {"linear": False, "dcnv2": {"rank": 0}, "learning_rate": 2e-3}
_CORRELATIONS, _ROWS = (0.0, 0.9), 150_000  # of the teachers' clicks
_Runs = Iterator[tuple[str, str, dict[str, Any]]]  # data, model and config


def histories(args: argparse.Namespace) -> _Runs:
  columns: dict[str, Any] = {
    # By their numbers, so that users who are new in the test are several ones for its GAUC.
    "user": {"kind": "user", "size": 944},
    "movie": "item",
    "liked": {"kind": "label", "column": "rating", "at_least": 4},
    "when": "time",
  }
  past = {
    "seen": {"kind": "sequence", "table": "movie", "max_length": _PAST},
    "seen_liked": {"kind": "sequence", "beside": "seen", "min_count": 1},
  }
  rows = duckdb.sql(f"""
    SELECT * EXCLUDE past, list_transform(past, lambda x: x.movie) AS seen,
      list_transform(past, lambda x: x.liked) AS seen_liked
    FROM (
      SELECT *, list_filter(list({{movie: movie, liked: rating >= 4, time: "when"}}) OVER (
        PARTITION BY "user" ORDER BY "when", movie ROWS BETWEEN {_PAST} PRECEDING AND 1 PRECEDING
      ), lambda x: x.time < "when") AS past
      FROM read_csv('{args.data_dir}/u.data', names=['user', 'movie', 'rating', 'when'])
    ) ORDER BY "when", "user", movie
  """).to_arrow_table()
  table = as_table(rows, columns, args.folder / "with_past") | {"split": {"by": "time"}}
  yield "MovieLens 100K", "none", table
  for model in CHOICES["history.model"]:
    more = {"columns": columns | past, "history": {"model": model}}
    yield "MovieLens 100K", model, table | more


def labels(args: argparse.Namespace) -> _Runs:
  ratings = pyarrow.csv.read_csv(args.data_dir / "ratings_no_timestamp.csv")
  drawn = np.random.default_rng(0).permutation(len(ratings))[: len(ratings) // 3]
  stars = [{"kind": "label", "column": "rating", "at_least": number} for number in (4, 5)]
  two: dict[str, Any] = dict(zip(("liked", "loved"), stars, strict=True))
  table = as_table(ratings.take(drawn), {"user": "user", "movie": "item"}, args.folder / "ratings")
  yield from structures("MovieLens 1M", table, two)
  for correlation in _CORRELATIONS:
    table, best = teachers(correlation, args)
    data = f"correlation {correlation}"
    yield data, "best possible", {"metrics": best}
    yield from structures(data, table, {"clicked": "label", "liked": "label"})


def structures(data: str, table: dict[str, Any], two: dict[str, Any]) -> _Runs:
  """Yields each label alone, and both in each structure."""
  for name, kind in two.items():
    yield data, f"{name} alone", table | {"columns": table["columns"] | {name: kind}}
  for structure in CHOICES["tasks.structure"]:
    more = {"columns": table["columns"] | two, "tasks": {"structure": structure}}
    yield data, structure, table | more


def teachers(correlation: float, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
  """Draws two labels as the data set `synthetic` does; returns a table and the best scores."""
  drawn: dict[str, Any] = {"dataset": "synthetic", "labels": 2, "correlation": correlation}
  drawn |= {"rows": _ROWS, "cache_dir": str(args.folder / "cache")}
  data = data_lib.load(config_lib.complete("dlrm", drawn))
  columns: dict[str, Any] = {}
  values: dict[str, Any] = dict(zip(data.labels, np.asarray(data.columns["label"]).T, strict=True))
  for feature in data.features:
    ids = cut_ids(data.columns["ids"], [*data.features])[feature.name]
    is_bag = feature.valency > 1
    values[feature.name] = pa.array([row[row >= 0] for row in ids]) if is_bag else ids
    kind = "bag" if is_bag else "category"
    columns[feature.name] = {"kind": kind, "size": feature.vocabulary_size}
  for place, number in enumerate(np.asarray(data.columns["dense"]).T):
    columns[f"number_{place}"], values[f"number_{place}"] = "number", number
  table = as_table(pa.table(values), columns, args.folder / f"teachers_{correlation}")
  return table, dict(data.best)


def as_table(rows: pa.Table, columns: dict[str, Any], path: Path) -> dict[str, Any]:
  """Writes rows, of which the last ones test, and returns the settings that declare them."""
  path.mkdir(parents=True, exist_ok=True)
  pq.write_table(rows, path / "rows.parquet")
  return {"files": str(path), "columns": columns, "split": {"by": "order"}}


def main() -> None:
  parser = common.parser(__doc__)
  parser.add_argument("compared", choices=["histories", "labels"])
  parser.add_argument("--data-dir", type=Path, required=True)
  parser.add_argument("--folder", type=Path, default=Path("runs/rankers"), help="of the runs")
  parser.add_argument("--epochs", type=int, default=3, help="at most")
  args = parser.parse_args()
  found: dict[str, dict[str, list[Any]]] = {}
  for data, model, config in {"histories": histories, "labels": labels}[args.compared](args):
    results = found.setdefault(data, {})[model] = []
    if "metrics" in config:  # known without a run
      results.append(config)
      continue
    config |= _DCNV2 | {"epochs": args.epochs, "cache_dir": str(args.folder / "cache")}
    for seed in (0, 1, 2):
      result = train.run(config | {"seed": seed}, str(args.folder / data / model / str(seed)))
      kept = {name: result[name] for name in ("steps", "tested_step", "seconds", "metrics")}
      results.append({"seed": seed} | kept)
      print(data, model, results[-1], flush=True)
  common.write(args.json, {"results": found})


if __name__ == "__main__":
  main()
