"""Columns of a file to a trained and tested click model, in one file to copy and to change.

It reads a CSV file with a row for each time that an item was shown to a user, oldest first:

  user,item,city,tags,price,clicked
  u17,i203,Oslo,new|drama,12.50,1

Without `--csv` it draws such rows by a known rule, so that the best possible AUC is known too. For
other columns, change `read_rows` and `fit_transforms`. A run that is started again in the same
`--workdir` continues from its last checkpoint, and ends as if it had never been stopped.
"""

import argparse
import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.model_selection import train_test_split

import embed
from embed.transforms import Bucketized, HashBucket, Transforms, Vocabulary

DIM = 16  # columns of every table
BATCH_SIZE = 512
SAVE_EVERY = 50  # steps


# ------------------------------------------------------------------------------------------ columns
# Rows are read into memory as they are in the file. Ids are made later, batch by batch, by the same
# code that a server would run on a request.


def read_rows(path: Path) -> list[dict]:
  """Reads a CSV file; an empty price becomes NaN, an empty bag of tags has no tags."""
  with open(path, newline="", encoding="utf-8") as file:
    rows: list[dict] = list(csv.DictReader(file))
  for row in rows:
    row["tags"] = row["tags"].split("|") if row["tags"] else []
    row["price"] = float(row["price"] or "nan")
    row["clicked"] = float(row["clicked"])
  return rows


def fit_vocabulary(tokens: Iterable[str], **arguments: Any) -> Vocabulary:
  """Makes a vocabulary of the tokens that occur at least 5 times.

  All others share 8 rows of the table. The rare ones among them train these rows, so that a token
  which the training part never had is looked up in a row that has learned what rare tokens share.
  """
  frequent = sorted(token for token, count in Counter(tokens).items() if count >= 5)
  return Vocabulary(frequent, num_oov_buckets=8, **arguments)


def fit_transforms(rows: list[dict]) -> Transforms:
  """Chooses the ids of every column; `rows` are the training part, so that no test row leaks in."""
  tags = [tag for row in rows for tag in row["tags"]]
  deciles = np.nanquantile([row["price"] for row in rows], np.linspace(0.1, 0.9, 9))
  # A missing price becomes -1, which is padding: it adds nothing and trains nothing.
  price = Bucketized(np.unique(deciles).tolist(), key="price", default_value=-1)
  columns: dict[str, Any] = {
    "user": fit_vocabulary(row["user"] for row in rows),
    "item": fit_vocabulary(row["item"] for row in rows),
    "city": HashBucket(1_000),  # needs no list; a new city gets a row that nobody trained
    "tags": fit_vocabulary(tags, max_valency=4, truncate=True),  # one shape for every batch
    "price": price,
  }
  return Transforms(columns)


# -------------------------------------------------------------------------------------------- Grain
# Grain shuffles by computing the order instead of storing it, so a run that continues after a step
# gets exactly the rows that come next.


def make_batch(rows: list[dict], transforms: Transforms) -> dict[str, Any]:
  """Returns the ids of some rows, and their labels, float32 `[B]`."""
  columns = {name: [row[name] for row in rows] for name in rows[0]}
  return {"inputs": transforms(columns), "label": np.array(columns["clicked"], np.float32)}


def train_batches(rows: list[dict], transforms: Transforms, start: int) -> grain.IterDataset:
  """Returns endless batches from number `start` on, in another order in every epoch."""
  dataset = grain.MapDataset.source(rows).shuffle(seed=0).repeat()
  dataset = dataset.batch(BATCH_SIZE, batch_fn=lambda rows: make_batch(rows, transforms))
  return dataset[start:].to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=8))


# -------------------------------------------------------------------------------------------- model
# Each feature has a table with a row for each id. Where there are several devices, each of them has
# a part of the rows of every table and of the batch, and all of the dense layers.


class ClickModel(nnx.Module):
  """Concatenates the activations of all features; a small network makes logits `[B]` of them."""

  def __init__(self, transforms: Transforms, rngs: nnx.Rngs):
    features = {
      name: embed.FeatureConfig(embed.TableConfig(column.vocabulary_size, DIM, name=name))
      for name, column in transforms.columns.items()
    }
    self.embed = embed.SparseEmbed(features, embed.adam(3e-3), rngs=rngs)
    self.hidden = nnx.Linear(len(features) * DIM, 64, rngs=rngs)
    self.head = nnx.Linear(64, 1, rngs=rngs)

  def __call__(self, inputs) -> jax.Array:
    activations = self.embed(inputs)  # {"user": [B, DIM], "tags": [B, DIM], ...}
    x = jnp.concatenate(list(activations.values()), axis=1)
    return self.head(nnx.relu(self.hidden(x)))[:, 0]


# --------------------------------------------------------------------------------------------- step
# `embed.value_and_grad` returns gradients of the rows in the batch alone, and `embed.Optimizer`
# moves these rows and the dense layers only: the cost of a step does not grow with the tables.


def loss_fn(model, batch) -> jax.Array:
  return optax.sigmoid_binary_cross_entropy(model(batch["inputs"]), batch["label"]).mean()


def train_step(model, optimizer, batch) -> jax.Array:
  loss, grads = embed.value_and_grad(loss_fn)(model, batch)
  optimizer.update(model, grads)
  return loss


# --------------------------------------------------------------------------------------- checkpoint
# Tables are saved whole and by name, so a run that was saved on 8 devices continues on 1.


def train(model, optimizer, rows, transforms, workdir: Path, steps: int) -> None:
  """Takes the steps that are left after the last checkpoint of the workdir, if it has one."""
  state = {"model": model, "optimizer": optimizer}
  # An asynchronous save would read tables while the next step writes them.
  options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
  folder, handler = workdir.absolute() / "checkpoints", ocp.StandardCheckpointHandler()
  with ocp.CheckpointManager(folder, options=options, item_handlers=handler) as manager:
    done = manager.latest_step() or 0
    if done:
      print(f"continues after step {done}")
      # After a change of the model, this names the tables that differ.
      embed.checkpoint.check(manager.item_metadata(done).tree, **state)
      like = ocp.args.StandardRestore(embed.checkpoint.like(**state))
      embed.checkpoint.from_tree(manager.restore(done, args=like), **state)
    compiled = embed.jit_step(train_step, model, optimizer)  # writes tables in place
    batches = train_batches(rows, transforms, done)
    for step, batch in zip(range(done + 1, steps + 1), batches, strict=False):
      loss = compiled(batch)
      if step % SAVE_EVERY == 0 or step == steps:
        print(f"step {step:5}  loss of its batch {loss:.4f}")
        manager.save(step, args=ocp.args.StandardSave(embed.checkpoint.to_tree(**state)))


# --------------------------------------------------------------------------------------- evaluation
# The newest rows are the test, as a model in production scores what came after its training. They
# have users whom training never saw.


@nnx.jit(graph=False)  # with Flax's default every call would return a copy of all tables
def predict(model, inputs) -> jax.Array:
  return jax.nn.sigmoid(model(inputs))


def evaluate(model, rows: list[dict], transforms: Transforms) -> dict[str, float]:
  """Returns the AUC and the log loss over all of the rows."""
  dataset = grain.MapDataset.source(rows)
  batches = dataset.batch(BATCH_SIZE, batch_fn=lambda rows: make_batch(rows, transforms))
  return metrics(rows, np.concatenate([predict(model, batch["inputs"]) for batch in batches]))


def metrics(rows: list[dict], probabilities) -> dict[str, float]:
  """Compares probabilities `[N]` with the clicks of N rows."""
  clicked = [row["clicked"] for row in rows]
  return {"auc": roc_auc_score(clicked, probabilities), "logloss": log_loss(clicked, probabilities)}


# --------------------------------------------------------------------------------------------- data
# The log odds of a click are a sum of effects of the user, the item, its tags, and the price in the
# user's city. No model ranks better than the probabilities themselves, which the file holds too.


def write_clicks(path: Path, num_rows: int = 50_000) -> Path:
  """Draws rows, oldest first, and writes them with the `probability` that each was drawn with."""
  generator = np.random.default_rng(0)
  user_effect, item_effect, tag_effect = (generator.normal(size=n) for n in (400, 200, 20))
  cities, price_effect = ["Oslo", "Rome", "Lima"], [-1.0, 0.0, 1.0]
  bags = [generator.choice(20, generator.integers(1, 5), replace=False) for _ in item_effect]
  with open(path, "w", newline="", encoding="utf-8") as file:
    writer = csv.writer(file)
    writer.writerow(["user", "item", "city", "tags", "price", "clicked", "probability"])
    for joined in np.linspace(200, 400, num_rows):  # users join over time
      user, item = generator.integers(int(joined)), generator.integers(200)
      city, bag, log_price = user % len(cities), bags[item], generator.normal()
      effects = user_effect[user] + item_effect[item] + tag_effect[bag].mean()
      log_odds = effects + price_effect[city] * log_price - 1
      probability = 1 / (1 + np.exp(-log_odds))
      names = [f"u{user}", f"i{item}", cities[city], "|".join(f"tag{tag}" for tag in bag)]
      price, clicked = f"{10 * np.exp(log_price):.2f}", int(generator.random() < probability)
      writer.writerow([*names, price, clicked, probability])
  return path


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--csv", type=Path, help="the clicks; without it they are drawn")
  parser.add_argument("--workdir", type=Path, default=Path("runs/minimal"))
  parser.add_argument("--steps", type=int, default=200, help="in all, over all starts")
  args = parser.parse_args(argv)

  args.workdir.mkdir(parents=True, exist_ok=True)
  rows = read_rows(args.csv or write_clicks(args.workdir / "clicks.csv"))
  train_rows, test_rows = train_test_split(rows, test_size=0.2, shuffle=False)
  transforms = fit_transforms(train_rows)

  with jax.set_mesh(jax.make_mesh((jax.device_count(),), ("data",))):  # all devices, or the one
    model = ClickModel(transforms, nnx.Rngs(0))
    optimizer = embed.Optimizer(model, optax.adam(3e-3))
    train(model, optimizer, train_rows, transforms, args.workdir, args.steps)
    scores = {"model": evaluate(model, test_rows, transforms)}

  rate = np.mean([row["clicked"] for row in train_rows])
  scores["constant rate"] = metrics(test_rows, np.full(len(test_rows), rate))
  if "probability" in test_rows[0]:
    scores["best possible"] = metrics(test_rows, [float(row["probability"]) for row in test_rows])
  for name, score in scores.items():
    print(f"{name:13}  AUC {score['auc']:.4f}  log loss {score['logloss']:.4f}")
  return scores


if __name__ == "__main__":
  main()
