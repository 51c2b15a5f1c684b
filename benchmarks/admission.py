"""What a dynamic vocabulary costs in a training step, and how near it comes to the exact policy.

Cost: a training step on the rows that `translate` has found, and the same step with `admit`, in
turns in one process on CPU; of a table alone and of one under a dense head of three layers; also
with four times the capacity, since the cost must follow the batch. Before, all ids of the stream
but those that it drifts to are admitted. Hit rate: beside an exact LRU of as many rows, on a power
law over ids that look like hashes, of which the most frequent move on by `drift` ids a batch.
Turned away: distinct ids of a stream that fills 90 % of the rows.

  python benchmarks/admission.py --json admission.json
"""

import argparse
import collections
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import step as timing
from flax import nnx

import embed

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def stream(steps: int, size: int, drift: int, ids: int, power: float = 1.1) -> list[np.ndarray]:
  """Batches of raw ids uint64 `[size]`."""
  draw = np.random.default_rng(0)
  ranks = lambda step: draw.zipf(power, size).astype(np.uint64) % np.uint64(ids)
  return [(ranks(step) + np.uint64(step * drift)) * GOLDEN for step in range(steps)]


class Model(nnx.Module):
  """A table, alone or under a dense head."""

  def __init__(self, capacity: int, dim: int, layers: tuple[int, ...] = ()):
    table = embed.TableConfig(embed.DynamicVocabulary(capacity), dim, name="id")
    features = {"id": embed.FeatureConfig(table)}
    self.embed = embed.SparseEmbed(features, embed.adagrad(0.1), rngs=nnx.Rngs(0))
    sizes = zip((dim, *layers), layers, strict=False)
    self.head = nnx.List([nnx.Linear(*size, rngs=nnx.Rngs(1)) for size in sizes])

  def __call__(self, batch: Any) -> jax.Array:
    x = self.embed(batch)["id"]
    for layer in self.head:
      x = layer(nnx.relu(x))
    return x


def train_step(model: Any, optimizer: Any, batch: Any) -> jax.Array:
  loss_of = lambda model, batch: jnp.mean(jnp.square(model(batch) - 1))
  loss, grads = embed.value_and_grad(loss_of)(model, batch)
  optimizer.update(model, grads)
  return loss


def admit_and_train(model: Any, optimizer: Any, batch: Any) -> jax.Array:
  return train_step(model, optimizer, model.embed.admit(batch))


def cost(capacity: int, layers: tuple[int, ...], args: argparse.Namespace) -> dict[str, Any]:
  """Milliseconds of steps with and without `admit`, in turns, and what was admitted."""
  model = Model(capacity, args.dim, layers)
  optimizer = embed.Optimizer(model, optax.sgd(0.1))
  count = int(0.8 * args.capacity)
  admit = embed.jit_step(lambda model, batch: model.embed.admit(batch)["id"][:1], model)
  for start in range(0, count, args.ids):
    ids = np.arange(start, start + args.ids, dtype=np.uint64) * GOLDEN
    admit({"id": jnp.asarray(embed.raw_ids(ids))})
  find = nnx.jit(lambda model, batch: model.embed.translate(batch), graph=False)
  with_admit = embed.jit_step(admit_and_train, model, optimizer)
  without = embed.jit_step(train_step, model, optimizer)
  times: dict[str, list[float]] = {"step": [], "step_with_admit": []}
  counts = collections.Counter[str]()
  batches = stream(args.warm_up + args.steps, args.ids, args.drift, count, args.power)
  for number, ids in enumerate(batches):
    batch = {"id": jnp.asarray(embed.raw_ids(ids))}
    start_of = time.perf_counter()
    jax.block_until_ready(with_admit(batch))
    middle = time.perf_counter()
    rows = jax.block_until_ready(find(model, batch))
    again = time.perf_counter()
    jax.block_until_ready(without(rows))
    end = time.perf_counter()
    if number >= args.warm_up:
      times["step_with_admit"].append(middle - start_of)
      times["step"].append(end - again)
      report = model.embed.vocabulary_report["id"]
      counts.update({key: int(report[key]) for key in ("ids", "hits", "admissions")})
  ms = {key: float(np.median(x)) * 1e3 for key, x in times.items()}
  best = {f"best_{key}": float(np.min(x)) * 1e3 for key, x in times.items()}
  return {
    "capacity": capacity, "layers": layers, **ms, **best,
    "share": ms["step_with_admit"] / ms["step"] - 1,
    "best_share": best["best_step_with_admit"] / best["best_step"] - 1,
    "admissions": counts["admissions"] / args.steps, "hit_rate": counts["hits"] / counts["ids"],
  }  # fmt: skip


def hit_rates(drift: int, args: argparse.Namespace) -> dict[str, float]:
  """The share of distinct ids of a batch that had a row: by buckets, and by an exact LRU."""
  capacity, size, steps = 8192, 2048, 120
  model = Model(capacity, 1).embed
  admit = nnx.jit(lambda model, batch: model.admit(batch))
  exact: collections.OrderedDict[int, None] = collections.OrderedDict()
  counts = collections.Counter[str]()
  known = nnx.jit(lambda model, batch: model.translate(batch), graph=False)
  for step, raw in enumerate(stream(steps, size, drift, 200_000)):
    distinct = np.unique(raw)
    pairs = np.full((size, 2), 2**32 - 1, np.uint32)
    pairs[: len(distinct)] = embed.raw_ids(distinct)
    if step >= steps // 2:
      counts["ids"] += len(distinct)
      counts["hits"] += int((np.asarray(known(model, {"id": pairs})["id"]) >= 0).sum())
      counts["exact"] += sum(x in exact for x in distinct.tolist())
    admit(model, {"id": pairs})
    counts["turned_away"] += int(model.vocabulary_report["id"]["turned_away"])
    for x in distinct.tolist():
      exact.pop(x, None)
      exact[x] = None
    while len(exact) > capacity:
      exact.popitem(last=False)
  hits, best = counts["hits"] / counts["ids"], counts["exact"] / counts["ids"]
  away = counts["turned_away"] / counts["ids"]
  return {"drift": drift, "hit_rate": hits, "exact": best, "of_exact": hits / best, "away": away}


def turned_away(args: argparse.Namespace) -> dict[str, float]:
  """Ids that find no room while 90 % of the rows are filled, in batches of fresh ids."""
  capacity = 1 << 20
  model = Model(capacity, 1).embed
  admit = nnx.jit(lambda model, batch: model.admit(batch))
  count = int(0.9 * capacity) // args.ids
  for step in range(count):
    raw = np.arange(step * args.ids, (step + 1) * args.ids, dtype=np.uint64) * GOLDEN
    admit(model, {"id": embed.raw_ids(raw)})
  report = {key: float(x) for key, x in model.vocabulary_report["id"].items()}
  return {
    "ids": report["total_ids"], "turned_away": report["total_turned_away"],
    "evictions": report["total_evictions"], "fill": report["fill"],
  }  # fmt: skip


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  for name, default in (("ids", 65_536), ("capacity", 1_000_000), ("dim", 64), ("drift", 200)):
    parser.add_argument(f"--{name}", type=int, default=default)
  parser.add_argument("--power", type=float, default=1.2)
  parser.add_argument("--steps", type=int, default=30)
  parser.add_argument("--warm_up", type=int, default=30)
  parser.add_argument("--json", type=Path)
  args = parser.parse_args()
  head = (256, 64, 1)
  settings = ((args.capacity, ()), (4 * args.capacity, ()), (args.capacity, head))
  costs = [cost(capacity, layers, args) for capacity, layers in settings]
  for of in costs:
    print(json.dumps(of))
  rates = [hit_rates(drift, args) for drift in (0, 200)]
  for of in rates:
    print(json.dumps(of))
  away = turned_away(args)
  print(json.dumps(away))
  if args.json:
    given = {key: x for key, x in vars(args).items() if key != "json"}
    where = timing.about() | {"load": os.getloadavg()[0]}
    result = {"settings": given, "cost": costs, "hit_rate": rates, "turned_away": away}
    args.json.write_text(json.dumps({**result, **where}, indent=2) + "\n")


if __name__ == "__main__":
  main()
