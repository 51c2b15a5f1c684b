"""The config that `recipes.describe` writes, untouched, against baselines, on tables of many kinds.

    python benchmarks/first_config.py --data-dir=data --json=docs/results/first_config.json

Compares DCN-V2, the recipe's default, with the run's own logistic regression and with LightGBM
(`pip install lightgbm`; 31 leaves, rate .05, stopped on validation log loss), which gets the
prepared columns: numbers, ids as its categories, and a column of 0 and 1 for each value of a bag.
`--data-dir` has the folders `criteo`, `ml-100k` and `ml-1m`, of which a fifth is drawn; the other
tables are drawn here from a known teacher.
"""

import argparse
import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
import pyarrow as pa
import pyarrow.csv
from scipy.optimize import brentq
from scipy.special import expit
from sklearn.metrics import log_loss, roc_auc_score

from recipes import baselines, describe
from recipes import config as config_lib
from recipes.dlrm import data as data_lib
from recipes.dlrm import train
from recipes.training.features import cut_ids

# Rows, the rate of clicks, values of each column of ids, numbers, and values of the tags.
_DRAWN: dict[str, tuple[int, float, tuple[int, ...], int, int]] = {
  "access": (32_000, 0.94, (7_500, 4_200, 2_300, 450, 340, 340, 180, 130, 70), 0, 0),
  "ctr": (200_000, 0.02, (5_000, 1_000, 200, 50, 24, 10), 3, 0),
  "income": (45_000, 0.24, (42, 16, 15, 7, 6, 5, 2), 6, 0),
  "numbers": (60_000, 0.4, (), 20, 0),
  "tags": (50_000, 0.2, (300, 40), 1, 400),
}


def draw(name: str) -> pa.Table:
  """Draws a table: ids by a power law, whose effects and pairs of effects add up with numbers'."""
  rows, rate, sizes, num_numbers, num_tags = _DRAWN[name]
  rng = np.random.default_rng((len(name), rows))
  columns: dict[str, Any] = {}
  logits, vectors = np.zeros(rows), []
  for place, size in enumerate(sizes):
    popularity = 1 / np.arange(1, size + 1)
    ids = rng.permutation(size)[rng.choice(size, rows, p=popularity / popularity.sum())]
    columns[f"group_{place}"] = [f"{value:05x}" for value in ids]
    logits += rng.normal(0, 0.5, size)[ids]
    vectors.append(rng.normal(0, 0.4, (size, 4))[ids])
  if vectors:
    total = np.sum(vectors, axis=0)
    logits += ((total**2).sum(axis=1) - np.sum(np.square(vectors), axis=(0, 2))) / 2
  x = rng.normal(size=(rows, num_numbers))
  for place in range(num_numbers):
    columns[f"amount_{place}"] = np.round(np.exp(x[:, place]) if place % 2 else x[:, place], 4)
    slope, bend, pair = rng.normal(0, 0.4, 3)
    logits += slope * x[:, place] + bend * np.sin(2 * x[:, place])
    logits += pair * x[:, place] * x[:, place - 1]
  if num_tags:
    effects, count = rng.normal(0, 0.8, num_tags), rng.integers(0, 6, rows)
    drawn = (rng.random((rows, 5)) ** 2 * num_tags).astype(int)
    has = np.arange(5) < count[:, None]
    logits += (effects[drawn] * has).sum(axis=1) / np.sqrt(np.maximum(count, 1))
    texts = [[f"tag{tag}" for tag in row[there]] for row, there in zip(drawn, has, strict=True)]
    columns["tags"] = ["|".join(text) for text in texts]
  bias = brentq(lambda bias: expit(logits + bias).mean() - rate, -20, 20)
  columns["clicked"] = (rng.random(rows) < expit(logits + bias)).astype(int)
  return pa.table(columns)


def tables(args: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
  """Yields names, and arguments of `describe`."""
  data = args.data_dir
  names = ",".join(f"c{place}" for place in range(1, 41))
  yield "criteo", [str(data / "criteo/first10k.txt"), "--label=c1", f"--names={names}"]
  names = "--names=user,item,rating,time"
  yield "ml100k", [str(data / "ml-100k/u.data"), "--label=rating", names]
  args.folder.mkdir(parents=True, exist_ok=True)
  ratings = pyarrow.csv.read_csv(data / "ml-1m/ratings_no_timestamp.csv")
  fifth = np.random.default_rng(0).permutation(len(ratings))[: len(ratings) // 5]
  for name in ("ml1m", *_DRAWN):
    path = args.folder / f"{name}.csv"
    pyarrow.csv.write_csv(ratings.take(fifth) if name == "ml1m" else draw(name), path)
    yield name, [str(path), f"--label={'rating' if name == 'ml1m' else 'clicked'}"]


def described(name: str, arguments: list[str], folder: Path) -> dict[str, Any]:
  """Returns the config that `describe` writes for a table, with its cache in the folder of runs."""
  out = folder / f"{name}.py"
  out.unlink(missing_ok=True)
  describe.main([*arguments, f"--out={out}"])
  return runpy.run_path(str(out))["get_config"]() | {"cache_dir": str(folder / "cache")}


def lightgbm(data: data_lib.ClickData) -> dict[str, float]:
  """Returns LightGBM's test metrics on the columns that the run has prepared."""
  import lightgbm as lgb

  blocks, categories = [np.asarray(data.columns["dense"])], list[int]()
  for name, ids in cut_ids(np.asarray(data.columns["ids"]), data.features).items():
    size = next(f.vocabulary_size for f in data.features if f.name == name)
    if ids.ndim == 1:
      categories.append(sum(block.shape[1] for block in blocks))
      blocks.append(ids[:, None])
    else:
      flags = np.zeros((len(ids), size + 1), np.float32)
      np.put_along_axis(flags, np.where(ids < 0, size, ids), 1, axis=1)
      blocks.append(flags[:, :size])
  x, y = np.concatenate(blocks, axis=1).astype(np.float32), np.asarray(data.columns["label"])
  of = {split: slice(*rows) for split, rows in data.splits.items()}
  sets = {
    split: lgb.Dataset(x[rows], y[rows], categorical_feature=categories, free_raw_data=False)
    for split, rows in of.items()
  }
  options = {"objective": "binary", "learning_rate": 0.05, "seed": 0, "verbosity": -1}
  stop = lgb.early_stopping(50, verbose=False)
  model = lgb.train(options, sets["train"], 1000, valid_sets=[sets["valid"]], callbacks=[stop])
  scores, label = np.asarray(model.predict(x[of["test"]])), y[of["test"]]
  return {
    "test_auc": float(roc_auc_score(label, scores)),
    "test_logloss": float(log_loss(label, scores)),
  }


def main() -> None:
  parser = common.parser(__doc__)
  parser.add_argument("--data-dir", type=Path, required=True)
  parser.add_argument("--folder", type=Path, default=Path("runs/first_config"), help="of the runs")
  args = parser.parse_args()
  found: dict[str, Any] = {}
  if args.json and args.json.exists():  # of a run that was stopped
    found = json.loads(args.json.read_text())["tables"]
  for name, arguments in tables(args):
    if name in found:
      continue
    config = described(name, arguments, args.folder)
    folder = args.folder / name
    results = [train.run(config | {"seed": seed}, f"{folder}/{seed}") for seed in range(3)]
    data = data_lib.load(config_lib.complete("dlrm", config))
    found[name] = {
      "rows": len(data.columns["label"]),
      "runs": [{key: of[key] for key in ("seed", "seconds", "metrics")} for of in results],
      "baselines": baselines.fit(folder / "0")["baselines"] | {"LightGBM": lightgbm(data)},
    }
    print(name, json.dumps(found[name]), flush=True)
    common.write(args.json, {"tables": found})


if __name__ == "__main__":
  main()
