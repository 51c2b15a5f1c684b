"""The cost of a dynamic vocabulary in a training step, and its hit rate beside the exact policy's.

Cost: a training step on the rows that `translate` has found, and the same step with `admit`, in
turns in one process on CPU; of a table alone and of one under a dense head of three layers; also
with four times the capacity, since the cost must follow the batch. Before, all ids of the stream
but those that it drifts to are admitted. Hit rate: beside an exact LRU of as many rows, on a power
law over ids that look like hashes, of which the most frequent move on by `drift` ids a batch.

  python benchmarks/admission.py --json admission.json
"""

import collections
import json
import os
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import embed

IDS, CAPACITY, DIM, DRIFT, POWER = 65_536, 1_000_000, 64, 200, 1.2
WARM_UP, STEPS = 30, 30
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


def cost(capacity: int, layers: tuple[int, ...]) -> dict[str, Any]:
  """Milliseconds of steps with and without `admit`, in turns, and what was admitted."""
  model = Model(capacity, DIM, layers)
  optimizer = embed.Optimizer(model, optax.sgd(0.1))
  count = int(0.8 * CAPACITY)
  admit = embed.jit_step(lambda model, batch: model.embed.admit(batch)["id"][:1], model)
  for start in range(0, count, IDS):
    ids = np.arange(start, start + IDS, dtype=np.uint64) * GOLDEN
    admit({"id": jnp.asarray(embed.raw_ids(ids))})
  find = nnx.jit(lambda model, batch: model.embed.translate(batch), graph=False)
  with_admit = embed.jit_step(admit_and_train, model, optimizer)
  without = embed.jit_step(train_step, model, optimizer)
  times: dict[str, list[float]] = {"step": [], "step_with_admit": []}
  counts = collections.Counter[str]()
  batches = stream(WARM_UP + STEPS, IDS, DRIFT, count, POWER)
  for number, ids in enumerate(batches):
    batch = {"id": jnp.asarray(embed.raw_ids(ids))}
    start_of = time.perf_counter()
    jax.block_until_ready(with_admit(batch))
    middle = time.perf_counter()
    rows = jax.block_until_ready(find(model, batch))
    again = time.perf_counter()
    jax.block_until_ready(without(rows))
    end = time.perf_counter()
    if number >= WARM_UP:
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
    "admissions": counts["admissions"] / STEPS, "hit_rate": counts["hits"] / counts["ids"],
  }  # fmt: skip


def hit_rates(drift: int) -> dict[str, float]:
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


def main() -> None:
  args = common.parser(__doc__).parse_args()
  models: list[tuple[int, tuple[int, ...]]] = [(CAPACITY, ()), (4 * CAPACITY, ())]
  costs = [cost(*model) for model in (*models, (CAPACITY, (256, 64, 1)))]
  rates = [hit_rates(drift) for drift in (0, DRIFT)]
  for of in (*costs, *rates):
    print(json.dumps(of))
  common.write(args.json, {"load": os.getloadavg()[0], "cost": costs, "hit_rate": rates})


if __name__ == "__main__":
  main()
