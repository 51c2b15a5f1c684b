"""Quality where ids come and go: dynamic, hashed and static tables beside each other.

    python benchmarks/drift.py synthetic movielens --data-dir=DIR --json=drift.json

`synthetic` draws days in which items and users join and leave, with clicks of a known teacher, so
that the best possible AUC is known. `movielens` reads `u.data` of MovieLens 100K, oldest rating
first; a rating of 4 or more is a click. Every model is evaluated on each day before it is trained
on that day. The static table has a row for every id that the whole stream will bring, which no
system knows beforehand; the others have a half and a quarter of these rows.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from scipy.special import expit
from sklearn.metrics import log_loss, roc_auc_score

import embed

_DIM = 16
_BATCH = 256
_RATE, _DENSE_RATE = 0.1, 3e-3  # of the tables, and of the rest
_SEEDS = (0, 1, 2)
_DAYS, _ROWS = 30, 20_000  # of a synthetic day
_DRIFT = 0.05  # share of new ids a day
_WARM_UP = 0.2  # of the days are trained on, and not counted
_RUNS = (
  ("static", 1),
  *((method, share) for share in (2, 4) for method in ("hashed", "lru", "lfu")),
)
_POLICIES: dict[str, dict[str, Any]] = {
  "lru": {"eviction": "lru"},
  "lfu": {"eviction": "lfu", "half_life": 300},
}


class Days(NamedTuple):
  """Rows in the order of time.

  Attributes:
    ids: a uint64 `[N]` of raw ids for each table.
    label: float32 `[N]`.
    day: int32 `[N]`, ascending.
    best: the probabilities that labels were drawn with, `[N]`, or None.
  """

  ids: dict[str, np.ndarray]
  label: np.ndarray
  day: np.ndarray
  best: np.ndarray | None = None


def raw(indices: np.ndarray, salt: int) -> np.ndarray:
  """Returns uint64 ids that look like hashes (SplitMix64's finalizer, a bijection)."""
  x = indices.astype(np.uint64) + np.array([salt], np.uint64) * np.uint64(0x9E3779B97F4A7C15)
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


def synthetic(seed: int, args: argparse.Namespace) -> Days:
  """Draws days of clicks from windows of users and items that move by a share every day."""
  rng = np.random.default_rng((seed, 7))
  del args  # for files
  active, rank = {"user": 2_000, "item": 4_000}, 4
  columns: dict[str, Any] = {}
  logits = np.full(_DAYS * _ROWS, -0.5)
  vectors = []
  for name, size in active.items():
    popularity = np.arange(1, size + 1) ** -0.8
    popularity /= popularity.sum()
    joined = int(size * _DRIFT)
    total = size + joined * _DAYS
    order = rng.permutation(total)  # the popularity of an id does not follow its age
    drawn = []
    for day in range(_DAYS):
      window = np.arange(day * joined, day * joined + size)
      window = window[np.argsort(order[window])]
      drawn.append(window[rng.choice(size, _ROWS, p=popularity)])
    index = np.concatenate(drawn)
    columns[name] = raw(index, len(columns) + 1)
    logits += rng.normal(0, 0.7, total)[index]
    vectors.append(rng.normal(0, 0.8, (total, rank))[index])
  logits += (vectors[0] * vectors[1]).sum(axis=1)
  best = expit(logits)
  label = (rng.random(len(best)) < best).astype(np.float32)
  return Days(columns, label, np.repeat(np.arange(_DAYS, dtype=np.int32), _ROWS), best)


def movielens(seed: int, args: argparse.Namespace) -> Days:
  """Reads the ratings of MovieLens 100K; a seventieth of its rows is a day."""
  del seed  # of the model alone
  rows = np.loadtxt(args.data_dir / "u.data", dtype=np.int64)
  rows = rows[np.argsort(rows[:, 3], kind="stable")]
  columns = {"user": raw(rows[:, 0], 1), "item": raw(rows[:, 1], 2)}
  label = (rows[:, 2] >= 4).astype(np.float32)
  return Days(columns, label, (np.arange(len(rows)) * 70 // len(rows)).astype(np.int32))


class Clicks(nnx.Module):
  """Logits `[B]` of a user's and an item's row, their product, and a small network on top."""

  def __init__(self, tables: dict[str, Any], rngs: nnx.Rngs):
    features = {
      name: embed.FeatureConfig(embed.TableConfig(rows, _DIM, name=name))
      for name, rows in tables.items()
    }
    self.embed = embed.SparseEmbed(
      features, embed.rowwise_adagrad(_RATE, initial_accumulator_value=1e-8), rngs=rngs
    )
    self.hidden = nnx.Linear(3 * _DIM, 32, rngs=rngs)
    self.head = nnx.Linear(32, 1, rngs=rngs)
    self.linear = nnx.Linear(3 * _DIM, 1, rngs=rngs)

  def __call__(self, batch: Any) -> jax.Array:
    vectors = self.embed(batch)
    user, item = vectors["user"], vectors["item"]
    x = jnp.concatenate([user, item, user * item], axis=1)
    deep = self.head(nnx.relu(self.hidden(x)))[:, 0]
    return deep + self.linear(x)[:, 0]


def loss_fn(model: Clicks, batch: Any, label: jax.Array) -> jax.Array:
  return optax.sigmoid_binary_cross_entropy(model(batch), label).mean()


def run(method: str, tables: dict[str, Any], days: Days, seed: int) -> dict[str, Any]:
  """Evaluates on each day, trains on it, and returns the scores of all days after the warm-up."""
  model = Clicks(tables, nnx.Rngs(seed))
  optimizer = embed.Optimizer(model, optax.adam(_DENSE_RATE))

  def train_step(model, optimizer, ids, label):
    batch = model.embed.admit(ids) if method in _POLICIES else ids
    loss, grads = embed.value_and_grad(loss_fn)(model, batch, label)
    optimizer.update(model, grads)
    return loss

  @nnx.jit(graph=False)
  def predict(model, ids):
    batch = model.embed.translate(ids) if method in _POLICIES else ids
    return jax.nn.sigmoid(model(batch))

  def inputs(rows: np.ndarray) -> dict[str, Any]:
    return {name: encode[name](ids[rows]) for name, ids in days.ids.items()}

  encode = {name: encoder(method, ids, tables[name]) for name, ids in days.ids.items()}
  step = embed.jit_step(train_step, model, optimizer)
  predictions = np.zeros(len(days.label))
  for day in range(days.day[-1] + 1):
    rows = np.flatnonzero(days.day == day)
    padded = np.resize(rows, -(-len(rows) // _BATCH) * _BATCH).reshape(-1, _BATCH)
    scores = np.concatenate([predict(model, inputs(batch)) for batch in padded])
    predictions[rows] = scores[: len(rows)]
    shuffled = np.random.default_rng((seed, day)).permutation(rows)
    for batch in shuffled[: len(rows) // _BATCH * _BATCH].reshape(-1, _BATCH):
      step(inputs(batch), days.label[batch])
  counted = days.day >= _WARM_UP * (days.day[-1] + 1)
  return metrics(days.label[counted], predictions[counted])


def encoder(method: str, ids: np.ndarray, table: Any):
  """Returns the function from raw ids `[B]` to what the layer is given."""
  if method == "static":
    known = np.unique(ids)
    return lambda ids: np.asarray(np.searchsorted(known, ids), np.int32)[:, None]
  if method == "hashed":
    return lambda ids: np.asarray(ids % np.uint64(table), np.int32)[:, None]
  return lambda ids: embed.raw_ids(ids[:, None])


def metrics(label: np.ndarray, probabilities: np.ndarray) -> dict[str, float]:
  return {
    "auc": float(roc_auc_score(label, probabilities)),
    "logloss": float(log_loss(label, probabilities)),
  }


def compare(name: str, args: argparse.Namespace) -> dict[str, Any]:
  """Runs every method on a stream for every seed."""
  runs: dict[str, Any] = {}
  for seed in _SEEDS:
    days = {"synthetic": synthetic, "movielens": movielens}[name](seed, args)
    distinct = {table: len(np.unique(ids)) for table, ids in days.ids.items()}
    if days.best is not None:
      counted = days.day >= _WARM_UP * (days.day[-1] + 1)
      best = metrics(days.label[counted], days.best[counted])
      runs.setdefault("best possible", []).append(best)
    for method, share in _RUNS:
      # Whole buckets of 16 rows, for the hashed tables too.
      rows = {table: -(-size // (16 * share)) * 16 for table, size in distinct.items()}
      tables: dict[str, Any] = distinct if method == "static" else rows
      if policy := _POLICIES.get(method):
        tables = {name: embed.DynamicVocabulary(size, **policy) for name, size in rows.items()}
      scores = run(method, tables, days, seed)
      label = f"{method}, 1/{share}"
      runs.setdefault(label, []).append(scores)
      values = f"AUC {scores['auc']:.4f}, log loss {scores['logloss']:.4f}"
      print(f"{name}, seed {seed}, {label}: {values}", flush=True)
  return {"rows": len(days.label), "ids": distinct, "seeds": _SEEDS, "runs": runs}


def main() -> None:
  parser = common.parser(__doc__)
  parser.add_argument("streams", nargs="+", choices=["synthetic", "movielens"])
  parser.add_argument("--data-dir", type=Path)
  args = parser.parse_args()
  common.write(args.json, {name: compare(name, args) for name in args.streams})


if __name__ == "__main__":
  main()
