"""Small tables, and runs on them that have ended without training: random parameters."""

import json

import jax
import numpy as np
import parts
from etils import epath
from flax import nnx
from ml_collections import ConfigDict

from recipes import checkpoints
from recipes import config as config_lib
from recipes import run as run_lib
from recipes.evaluation import retrieval

CLICKS = {
  "clicked": "label",
  "price": "number",
  "age": {"kind": "number", "buckets": 4},
  "city": "category",
  "shop": {"kind": "category", "oov": 0},
  "tags": "bag",
  "part": "split",
}
LOG = {
  "who": "user",
  "what": "item",
  "when": "time",
  "country": {"kind": "bag", "max_length": 1, "side": "user"},  # a bag of one id is a single id
  "genre": {"kind": "category", "side": "item"},
  "name": "title",
}


def write_clicks(path, *, rows=1000):
  """Writes a table whose last half has values that the training rows have not, and blanks."""
  draw = np.random.default_rng(0)
  lines = ["clicked,price,age,city,shop,tags,part"]
  for i in range(rows):
    late = i >= rows // 2
    part = ("valid" if i < 3 * rows // 4 else "test") if late else "train"
    price = f"{draw.normal(5, 2):.3f}" if draw.random() < 0.9 else ""
    age = str(draw.integers(18, 80)) if draw.random() < 0.9 else "NA"
    city = f"c{draw.integers(40 if late else 20)}" if draw.random() < 0.9 else ""
    shop = f"s{draw.integers(12 if late else 6)}" if draw.random() < 0.9 else ""
    tags = "|".join(f"t{t}" for t in draw.choice(9, draw.integers(0, 4), replace=False))
    lines.append(f"{draw.integers(2)},{price},{age},{city},{shop},{tags},{part}")
  path.write_text("\n".join(lines) + "\n")
  return path


def write_log(path, *, users=1000, items=40):
  """Writes four to seven interactions of each user, with different items.

  One more user ends with item i99, which nobody else has: it is in the catalogue, and in no batch.
  """
  draw = np.random.default_rng(1)
  lines = ["who,what,when,country,genre,name"]
  for user in range(users):
    for when, item in enumerate(draw.choice(items, draw.integers(4, 8), replace=False)):
      title = f'"No. {item}, the film"'
      lines.append(f"u{user},i{item},{when},k{user % 7},g{item % 5},{title}")
  lines += [f'late,i{item},{item},k0,g0,"No. {item}, the film"' for item in (0, 1, 2, 99)]
  path.write_text("\n".join(lines) + "\n")
  return path


def run_of(recipe, table, workdir):
  """Returns the parts of a run, and writes its folder: config, serve, checkpoint and result.

  Args:
    recipe: its name.
    table: the config of a table, or the whole config of a published one.
    workdir: of the run; its data are prepared beside it.
  """
  config = table
  if not isinstance(table, ConfigDict):
    table = {"cache_dir": str(workdir.parent / "cache"), "epochs": 1} | table
    config = config_lib.complete(recipe, table)
  config.table.init_scale = 0.2
  training = parts.prepare(recipe, config)
  keys = iter(jax.random.split(jax.random.key(7), 1000))
  noisy = lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape)
  nnx.update(training.model, jax.tree.map(noisy, nnx.state(training.model, nnx.Param)))
  folder = epath.Path(workdir)
  run_lib.begin(training.config, folder, training.data, training.model)
  with checkpoints.opened(folder, "") as manager:
    checkpoints.save(manager, 3, **training.state, metrics={}, memory={})
  result = {
    "recipe": recipe, "config": run_lib.plain(training.config), "seed": 0, "steps": 3,
    "tested_step": 3, "seconds": 1.0, "metrics": {}, "baselines": {}, "data": {}, "data_sha256": {},
    "device": run_lib.device(), "versions": run_lib.versions(),
  }  # fmt: skip
  (workdir / "result.json").write_text(json.dumps(result))
  return training


def evaluated(model):
  """Returns a model as it is evaluated, without dropout."""
  return nnx.view(model, deterministic=True, raise_if_not_found=False)


def own_probabilities(training, splits=("train", "valid", "test")):
  """Returns the probabilities by the model of a run, float64 [N], of its prepared rows."""
  from recipes.dlrm import data, train

  view, logits = evaluated(training.model), []
  for split in splits:
    for batch in data.eval_batches(training.data, split, 256):
      logits.append(np.asarray(train.predict(view, batch))[np.asarray(batch["mask"])])
  return 1 / (1 + np.exp(-np.concatenate(logits).astype(np.float64)))


def asked_towers(training, served, users):
  """Returns the ids of users as texts, and lists of the items that each had before its test."""
  items = np.array(served._items.texts, object)
  before = training.data.matrix("train", "valid")[users]
  histories = [items[row.indices].tolist() for row in before]
  return [served._users.texts[user] for user in users], histories


def asked_sequences(training, served, users):
  """Returns the items that users had before their test, in order, as texts with "|" between."""
  columns = training.data.columns
  items, offsets = np.array(served._items.texts, object), columns["offsets"]
  stored = [columns["items"][offsets[user] : offsets[user + 1] - 1] for user in users]
  return ["|".join(items[each]) for each in stored]


def own_towers(training, top=10):
  """Returns users, scores and ids of the items by the towers of a run for its test."""
  from recipes.two_tower import data, train

  config, loaded = training.config, training.data
  view, encode = evaluated(training.model), train.make_encode(None)
  # An export knows all interactions.
  popular = loaded.popularity("train", "valid", "test")
  vectors = [np.asarray(encode(view, batch)) for batch in train.catalogue(loaded, config, popular)]
  candidates = np.concatenate(vectors)[: loaded.num_items]
  parts = []

  @nnx.jit(graph=False)  # as an evaluation: operations one by one round otherwise
  def ranked(view, batch):
    vectors = view.queries({name: batch["query"][name] for name in config.query})
    return retrieval.top_k(vectors, candidates, top, batch["seen"])

  for batch in data.eval_batches(loaded, "test", config):
    mask = np.asarray(batch["mask"])
    found = (batch["query"]["user"], *ranked(view, batch))
    parts.append([np.asarray(x)[mask] for x in found])
  return [np.concatenate(part) for part in zip(*parts, strict=True)]


def own_sequences(training, top=10):
  """Returns users, scores and ids of the items by the sequence model of a run for its test."""
  from recipes.sequence import data, model

  config, loaded = training.config, training.data
  view, parts = evaluated(training.model), []

  @nnx.jit(graph=False)  # as an evaluation: operations one by one round otherwise
  def ranked(view, batch):
    seen = batch["seen"] if config.exclude_seen else None
    return retrieval.top_k(model.queries(view, batch), view.embed.tables[model.ITEM], top, seen)

  for batch in data.eval_batches(loaded, "test", config):
    mask = batch["user"] >= 0
    parts.append([np.asarray(x)[mask] for x in (batch["user"], *ranked(view, batch))])
  return [np.concatenate(part) for part in zip(*parts, strict=True)]
