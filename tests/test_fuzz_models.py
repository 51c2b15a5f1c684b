"""Random models trained for three steps, against float64 NumPy.

A seed decides everything: tables, features and their nesting, inputs, optimizers, dense layers,
mesh and training step. A failed test prints its case.
"""

import contextlib
import dataclasses
import datetime
import string

import fuzz_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optimizer_cases import OPTIMIZERS

import embed

STEPS = 3
HIDDEN = 4
DENSE_RATE = 0.1
EPSILON = 0.1  # of layer norms: a norm over two columns has next to no gradient otherwise

# --- what a seed decides --------------------------------------------------------------------------


@dataclasses.dataclass
class Feature:
  """A feature, and what the fuzzer keeps of it. `rank` is the number of axes of its activations."""

  name: str
  config: embed.FeatureConfig
  table: str
  rank: int
  tower: str
  weighted: bool


@dataclasses.dataclass
class Input:
  """What one feature is given in a batch: for `embed`, and for the oracle."""

  value: object
  weights: object
  lookup: oracle.Lookup
  dropped: int
  text: str


@dataclasses.dataclass
class Batch:
  inputs: dict[str, Input]  # by feature; one that is missing was left out of its dict
  features: object
  weights: object
  label: np.ndarray


@dataclasses.dataclass
class Case:
  """One model and its batches."""

  seed: int
  optimizers: dict[str, tuple]  # by table: name and arguments
  tables: dict[str, embed.TableConfig]
  default: embed.RowOptimizer | None
  features: dict[str, Feature]  # in the order of the config
  config: object
  norm: bool
  where: dict
  level: str
  compiled: bool
  clip: float | None
  none_gradients: frozenset[str]
  batches: list[list[Batch]]  # by step, microbatches

  def __str__(self):
    lines = [f"seed {self.seed}: {self.where}, {self.level}, compiled {self.compiled}, "]
    lines[0] += f"clip {self.clip}, no gradient for {sorted(self.none_gradients)}"
    for name, table in self.tables.items():
      size = f"{table.vocabulary_size} x {table.dim}"
      lines.append(f"  table {name}: {size}, {table.combiner}, {self.optimizers[name]}")
    for f in self.features.values():
      length = f.config.max_sequence_length
      lines.append(f"  feature {f.name}: {f.table}, {f.tower}, max_sequence_length {length}")
    lines.append(f"  structure {nested_names(self.config, self.features)}")
    for step, batches in enumerate(self.batches):
      for batch in batches:
        lines.append(f"  step {step}: labels {len(batch.label)}")
        lines += [f"    {name}: {x.text}" for name, x in batch.inputs.items()]
    return "\n".join(lines)


# The oracle has no norms of rows and no gradients of them.
ORACLE_HAS = [case for case in OPTIMIZERS if not {"l2_factor", "max_norm"} & set(case[1])]


def pick(rng, *options):
  return options[rng.integers(len(options))]


def chance(rng, p):
  return bool(rng.random() < p)


def make_optimizer(rng):
  """A row optimizer's name and arguments."""
  name, config = pick(rng, *ORACLE_HAS)
  rate = float(pick(rng, 0.02, 0.1, 0.5)) if name != "lion" else 0.05
  schedule = lambda step: rate / (1 + step)
  return name, {"learning_rate": schedule if chance(rng, 0.25) else rate, **config}


def make_tables(rng):
  """Tables, few dims and optimizers among them so that some are stored together."""
  dims = [int(d) for d in rng.choice([1, 2, 3, 4, 8, 16], rng.integers(1, 3), replace=False)]
  pool = [make_optimizer(rng) for _ in range(rng.integers(1, 4))]
  built = [getattr(embed, name)(**args) for name, args in pool]
  default = int(rng.integers(len(pool)))
  tables, optimizers = {}, {}
  for i in range(rng.integers(1, 6)):
    which = int(rng.integers(len(pool)))
    own = pool[which], built[which]
    if chance(rng, 0.12):
      own = ("frozen", {}), embed.frozen()
    name = f"{pick(rng, *string.ascii_lowercase)}{i}"
    given = None if own[1] is built[default] and chance(rng, 0.5) else own[1]
    tables[name] = embed.TableConfig(
      vocabulary_size=int(pick(rng, 1, 2, 5, 7, 16, 40, 100)),
      dim=pick(rng, *dims),
      optimizer=given,
      combiner=pick(rng, "sum", "mean", "sqrtn"),
      name=name,
    )
    optimizers[name] = own[0]
  return tables, optimizers, built[default]


TOWERS = {2: ("linear", "norm", "mlp"), 3: ("pooled", "flat", "attention", "mha", "norms")}


def make_features(rng, tables):
  """1 to 6 features; each table has one where there are enough."""
  names = list(tables)
  number = int(rng.integers(max(1, min(len(names), 4)), 7))
  features = []
  for i in range(number):
    table = names[i] if i < len(names) else pick(rng, *names)
    rank = 3 if chance(rng, 0.4) else 2
    length = int(rng.integers(1, 5)) if rank == 3 and chance(rng, 0.6) else 0
    config = embed.FeatureConfig(tables[table], max_sequence_length=length)
    weighted = not length and chance(rng, 0.4)
    features.append(Feature(f"f{i}", config, table, rank, pick(rng, *TOWERS[rank]), weighted))
  return features


def nest(rng, features, depth=0):
  """The configs of some features in random containers."""
  if len(features) == 1 and (depth > 1 or chance(rng, 0.5)):
    return features[0].config
  cuts = sorted(rng.choice(range(1, len(features)), rng.integers(0, len(features)), replace=False))
  if depth > 1:
    cuts = range(1, len(features))
  groups = [features[a:b] for a, b in zip([0, *cuts], [*cuts, len(features)], strict=True)]
  children = [nest(rng, group, depth + 1) for group in groups]
  kind = pick(rng, "dict", "dict", "list", "tuple")
  if kind == "dict":
    keys = rng.permutation(list(string.ascii_lowercase))[: len(children)]
    return {str(key): child for key, child in zip(keys, children, strict=True)}
  return children if kind == "list" else tuple(children)


def in_order(config):
  """The feature configs of a structure; the keys of a dict are sorted."""
  if isinstance(config, embed.FeatureConfig):
    return [config]
  children = [config[k] for k in sorted(config)] if isinstance(config, dict) else config
  return [leaf for child in children for leaf in in_order(child)]


def pack(config, by_config, drop_missing=True):
  """The structure of `config` with `by_config[id(leaf)]`; a key without an entry is left out."""
  if isinstance(config, embed.FeatureConfig):
    return by_config.get(id(config))
  if isinstance(config, dict):
    missing = lambda c: isinstance(c, embed.FeatureConfig) and id(c) not in by_config
    return {
      key: pack(child, by_config, drop_missing)
      for key, child in config.items()
      if not (drop_missing and missing(child))
    }
  return type(config)(pack(child, by_config, drop_missing) for child in config)


def unpack(config, values):
  """`{id(leaf of config): value}` of values in that structure."""
  if isinstance(config, embed.FeatureConfig):
    return {id(config): values}
  if isinstance(config, dict):
    return {k: v for key in values for k, v in unpack(config[key], values[key]).items()}
  return {
    k: v for c, value in zip(config, values, strict=True) for k, v in unpack(c, value).items()
  }


def may_be_missing(config):
  """The ids of the leaves that are values of a dict."""
  if isinstance(config, embed.FeatureConfig):
    return set()
  children = list(config.values()) if isinstance(config, dict) else list(config)
  leaves = {id(c) for c in children if isinstance(c, embed.FeatureConfig)}
  deeper = set().union(*(may_be_missing(c) for c in children))
  return (leaves if isinstance(config, dict) else set()) | deeper


def nested_names(config, features):
  names = {id(f.config): f.name for f in features.values()}
  return pack(config, names)


# --- inputs ---------------------------------------------------------------------------------------


def draw_ids(rng, shape, size, absent=0.25):
  """Ids, several of them equal, some negative."""
  few = rng.integers(0, size, max(1, min(size, 6)))
  ids = np.where(rng.random(shape) < 0.5, rng.choice(few, shape), rng.integers(0, size, shape))
  return np.where(rng.random(shape) < absent, pick(rng, -1, -1, -7), ids).astype(np.int64)


def draw_weights(rng, shape):
  """Weights of which sums do not come close to 0, but for sums of nothing but zeros."""
  return np.where(rng.random(shape) < 0.15, 0.0, rng.choice([0.25, 0.5, 1.0, 1.5, 3.0], shape))


def typed(rng, ids):
  return ids.astype(pick(rng, np.int32, np.int64))


def spoil(rng, ids, size, p):
  """Puts a few ids beyond the table."""
  return np.where((ids >= 0) & (rng.random(ids.shape) < p), size + rng.integers(0, 5), ids)


def make_input(rng, feature, batch, bad):
  """One feature's input: `batch` examples, ids beyond the table with probability `bad`."""
  size, length = feature.config.table.vocabulary_size, feature.config.max_sequence_length
  if length:
    return sequence_input(rng, feature, batch, size, length, bad)
  if feature.rank == 3:
    return rank_3_input(rng, feature, batch, size, bad)
  kind = pick(rng, "dense", "dense1", "padded", "ragged", "ragged_max", "sparse")
  if feature.weighted and kind.startswith("dense"):
    kind = "padded"
  if kind.startswith("dense"):
    ids = spoil(rng, draw_ids(rng, (batch,), size), size, bad)
    shaped = ids if kind == "dense" else ids[:, None]
    if batch == 1 and kind == "dense":
      shaped = ids
    lookup = oracle.Lookup((batch,), one_each(ids, size), combines=False)
    return Input(typed(rng, shaped), None, lookup, int((ids >= size).sum()), f"{kind} {ids.shape}")
  longest = int(pick(rng, 0, 1, 3, 5))
  ids = spoil(rng, draw_ids(rng, (batch, longest), size), size, bad)
  if chance(rng, 0.15):
    ids[:] = -1  # a feature without ids beside others
  return bags_input(rng, feature, ids, kind, size)


def one_each(ids, size):
  return [(i, int(x), 1.0) for i, x in enumerate(ids.ravel()) if 0 <= x < size]


def bags_input(rng, feature, ids, kind, size):
  """Bags along the last axis of `ids`, in some form; with weights if the feature has them."""
  weights = draw_weights(rng, ids.shape)
  batch_shape, longest = ids.shape[:-1], ids.shape[-1]
  number = int(np.prod(batch_shape))
  flat_ids, flat_weights = ids.reshape(number, longest), weights.reshape(number, longest)
  used = lambda row, column: (
    row,
    int(flat_ids[row, column]),
    float(flat_weights[row, column]) if feature.weighted else 1.0,
  )
  good = (flat_ids >= 0) & (flat_ids < size)
  dropped = int((flat_ids >= size).sum())
  text = f"{kind} {ids.shape}, {int(good.sum())} ids, weighted {feature.weighted}"
  cells = [(r, c) for r in range(number) for c in range(longest)]
  value = lambda wrap: wrap(typed(rng, ids), np.float32(weights))
  if kind == "padded":
    pair = value(lambda i, w: (embed.Padded(i), embed.Padded(w)))
  elif kind == "sparse":
    cells = [cell for cell in cells if flat_ids[cell] >= 0 or chance(rng, 0.2)]
    if chance(rng, 0.5):
      cells = [cells[i] for i in rng.permutation(len(cells))]
    rows = np.array([np.unravel_index(r, batch_shape) for r, _ in cells], np.int64)
    rows = rows.reshape(len(cells), len(batch_shape))
    columns = np.array([c for _, c in cells], np.int64).reshape(-1, 1)
    indices = np.concatenate([rows, columns], axis=1)
    at = tuple(np.array(cells, np.int64).reshape(-1, 2).T)
    make = lambda v: embed.Sparse(indices, v, (*batch_shape, longest))
    pair = make(typed(rng, flat_ids[at])), make(np.float32(flat_weights[at]))
  else:  # bags of different lengths: the cells that are not negative, and some that are
    keep = (flat_ids >= 0) | (rng.random(flat_ids.shape) < 0.1)
    cells = [cell for cell in cells if keep[cell]]
    behind = int(rng.integers(0, 4))
    splits = np.concatenate([[0], np.cumsum(keep.sum(axis=1))])
    most = max(1, longest) + int(rng.integers(0, 2)) if kind == "ragged_max" else None
    make = lambda v, fill: embed.Ragged(np.concatenate([v[keep], np.full(behind, fill, v.dtype)]),
                                        typed(rng, splits), most)  # fmt: skip
    pair = make(typed(rng, flat_ids), 0), make(np.float32(flat_weights), 1.0)
  occurrences = [used(r, c) for r, c in cells if good[r, c]]
  lookup = oracle.Lookup(batch_shape, occurrences)
  return Input(pair[0], pair[1] if feature.weighted else None, lookup, dropped, text)


def rank_3_input(rng, feature, batch, size, bad):
  """Activations `[batch, M, dim]` of a dense array, or of bags of rank 3."""
  kind = pick(rng, "dense", "padded", "sparse")
  if feature.weighted and kind == "dense":
    kind = "padded"
  middle = int(pick(rng, 2, 3, 0))
  if kind == "dense":
    ids = spoil(rng, draw_ids(rng, (batch, middle), size), size, bad)
    lookup = oracle.Lookup((batch, middle), one_each(ids, size), combines=False)
    return Input(typed(rng, ids), None, lookup, int((ids >= size).sum()), f"dense {ids.shape}")
  ids = spoil(rng, draw_ids(rng, (batch, middle, int(pick(rng, 0, 1, 3))), size), size, bad)
  return bags_input(rng, feature, ids, kind, size)


def sequence_input(rng, feature, batch, size, length, bad):
  """The first `length` ids of each example, by column (of a Ragged, by position in the bag)."""
  kind = pick(rng, "padded", "ragged", "ragged_max", "sparse")
  longest = int(pick(rng, 0, 1, 3, 6))
  ids = spoil(rng, draw_ids(rng, (batch, longest), size), size, bad)
  if chance(rng, 0.15):
    ids[:] = -1
  if kind == "padded":
    value, placed = embed.Padded(typed(rng, ids)), ids
  elif kind == "sparse":
    cells = np.argwhere(ids >= 0)
    cells = cells[rng.permutation(len(cells))]
    value = embed.Sparse(cells, typed(rng, ids[tuple(cells.T)]), ids.shape)
    placed = ids
  else:
    lengths = rng.integers(0, longest + 1, batch)
    bags = [row[:n] for row, n in zip(ids, lengths, strict=True)]
    values = np.concatenate([*bags, np.zeros(int(rng.integers(0, 3)), np.int64)])
    most = max(1, longest) if kind == "ragged_max" else None
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    value = embed.Ragged(typed(rng, values), typed(rng, splits), most)
    placed = np.where(np.arange(longest) < lengths[:, None], ids, -1)
  kept = np.full((batch, length), -1, np.int64)
  kept[:, : min(length, longest)] = placed[:, :length]
  lookup = oracle.Lookup((batch, length), one_each(kept, size), combines=False)
  text = f"sequence {kind} {ids.shape}, {len(lookup.ids)} ids"
  return Input(value, None, lookup, int((kept >= size).sum()), text)


def make_batch(rng, features, config, size, bad):
  inputs, optional = {}, may_be_missing(config)
  for name, feature in features.items():
    if id(feature.config) in optional and chance(rng, 0.12):
      continue
    none = size and chance(rng, 0.06)  # a batch of 0 beside others
    inputs[name] = make_input(rng, feature, 0 if none else size, bad)
  values = {id(features[n].config): x.value for n, x in inputs.items()}
  weights = {id(features[n].config): x.weights for n, x in inputs.items()}
  packed = pack(config, weights)
  if all(w is None for w in weights.values()) and chance(rng, 0.7):
    packed = None
  label = rng.integers(0, 2, size).astype(np.float32)
  return Batch(inputs, pack(config, values), packed, label)


def make_where(rng, devices):
  """Arguments for a mesh: none on one device, most of the time."""
  if devices == 1 and chance(rng, 0.75):
    return {}
  number = 1 if devices == 1 else int(pick(rng, 8, 8, 8, 8, 2, 1))
  shape, names, axis = (number,), ("data",), "data"
  if number == 8 and chance(rng, 0.25):
    shape = pick(rng, (2, 4), (4, 2))
    names, axis = ("data", "model"), pick(rng, "data", ("data", "model"))
  return {
    "shape": shape,
    "names": names,
    "axis": axis,
    "kind": pick(rng, "Explicit", "Auto"),
    "how": pick(rng, "mesh", "set_mesh", "both", "plan", "plan_set_mesh"),
    "sharding": pick(rng, "mod", "div", "column", "replicated"),
    "split_inputs": chance(rng, 0.3),
  }


def make_case(seed, devices):
  rng = np.random.default_rng([seed, devices])
  tables, optimizers, default = make_tables(rng)
  made = make_features(rng, tables)
  config = nest(rng, made)
  by_id = {id(f.config): f for f in made}
  features = {by_id[id(c)].name: by_id[id(c)] for c in in_order(config)}
  used = {f.table for f in made}
  tables = {name: table for name, table in tables.items() if name in used}
  optimizers = {name: optimizers[name] for name in tables}
  where = make_where(rng, devices)
  level = "mid" if chance(rng, 0.2) else "high"
  compiled = not chance(rng, 0.12)
  micro = 2 if level == "high" and chance(rng, 0.2) else 1
  clip = float(pick(rng, 0.05, 0.5, 5.0)) if level == "high" and chance(rng, 0.4) else None
  bad = 0.1 if compiled and chance(rng, 0.2) else 0.0
  sizes = [int(rng.choice([8, 16, 5, 3, 1]))] * STEPS
  same = chance(rng, 0.5)
  if not same:
    sizes = [int(rng.choice([8, 16, 5, 1, 0])) for _ in range(STEPS)]
  drawn = [[make_batch(rng, features, config, size, bad) for _ in range(micro)] for size in sizes]
  if same:
    drawn[2] = drawn[1]  # compiled once
  none = {name for name in features if level == "mid" and chance(rng, 0.15)}
  return Case(
    seed, optimizers, tables, default, features, config, chance(rng, 0.5), where, level,
    compiled, clip, frozenset(none), drawn,
  )  # fmt: skip


# --- the model ------------------------------------------------------------------------------------


class Tower(nnx.Module):
  """Activations of one feature to `[batch, HIDDEN]`."""

  def __init__(self, kind, dim, rngs):
    self.kind = kind
    width = dim
    if kind in ("norm", "norms"):
      self.norm = nnx.LayerNorm(dim, epsilon=EPSILON, use_fast_variance=False, rngs=rngs)
    if kind == "mlp":
      self.first = nnx.Linear(dim, 2 * HIDDEN, rngs=rngs)
      width = 2 * HIDDEN
    if kind == "attention":
      self.query = nnx.Linear(dim, HIDDEN, rngs=rngs)
      self.key = nnx.Linear(dim, HIDDEN, rngs=rngs)
    if kind == "mha":
      self.attention = nnx.MultiHeadAttention(2, dim, 4, decode=False, rngs=rngs)
    self.last = nnx.Linear(width, HIDDEN, rngs=rngs)

  def __call__(self, x):
    if self.kind in ("norm", "norms"):
      x = self.norm(x)
    if self.kind == "mlp":
      x = jnp.tanh(self.first(x))
    if self.kind == "flat":
      x = jnp.einsum("bld,dh->bh", x, self.last.kernel[...]) + self.last.bias[...]
      return jnp.tanh(x)
    if self.kind == "attention":
      scores = jnp.einsum("bqh,bkh->bqk", self.query(x), self.key(x)) / HIDDEN**0.5
      x = jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), x)
    if self.kind == "mha":
      x = self.attention(x)
    x = jnp.tanh(self.last(x))
    return x.sum(axis=1) if x.ndim == 3 else x


class Head(nnx.Module):
  def __init__(self, case, rngs):
    self.towers = nnx.Dict(
      {f.name: Tower(f.tower, f.config.table.dim, rngs) for f in case.features.values()}
    )
    self.dropout = nnx.Dropout(0.5, deterministic=True)
    if case.norm:
      self.norm = nnx.LayerNorm(HIDDEN, epsilon=EPSILON, use_fast_variance=False, rngs=rngs)
    self.out = nnx.Linear(HIDDEN, 1, rngs=rngs)

  def __call__(self, activations, label):
    """The loss, from `{feature name: activations}`; others than the batch's number count for 0."""
    hidden = {name: self.towers[name](x) for name, x in activations.items()}
    loss = sum((jnp.sum(h) for h in hidden.values() if len(h) != len(label)), jnp.zeros(()))
    together = [h for h in hidden.values() if len(h) == len(label)]
    if not together:
      return loss
    x = sum(together[1:], together[0])
    if len(together) > 1:
      x = x + together[0] * together[1]
    x = self.dropout(x)
    if hasattr(self, "norm"):
      x = self.norm(x)
    logits = self.out(x)[:, 0]
    return loss + optax.sigmoid_binary_cross_entropy(logits, label).sum() / 8


class Model(nnx.Module):
  def __init__(self, case, **where):
    rngs = nnx.Rngs(case.seed)
    features = {} if "plan" in where else {"features": case.config, "optimizer": case.default}
    self.embed = embed.SparseEmbed(**features, **where, rngs=rngs)
    self.head = Head(case, rngs)


def named(case, activations):
  """Nested activations by feature name, in the order of the config."""
  flat = unpack(case.config, activations)
  return {f.name: flat[id(f.config)] for f in case.features.values() if id(f.config) in flat}


def make_step(case):
  def loss_fn(model, features, weights, label):
    return model.head(named(case, model.embed(features, weights)), label)

  def high(model, optimizer, batches):
    found = [embed.value_and_grad(loss_fn)(model, *batch) for batch in batches]
    grads = found[0][1] if len(found) == 1 else embed.accumulate([g for _, g in found])
    if case.clip is not None:
      grads = embed.clip_by_global_norm(grads, case.clip)
    optimizer.update(model, grads)
    return sum(loss for loss, _ in found)

  def mid(model, optimizer, batches):
    ((features, weights, label),) = batches
    activations, residual = model.embed.lookup(features, weights)
    head_loss = lambda activations, head: head(named(case, activations), label)
    loss, (grads, dense) = nnx.value_and_grad(head_loss, argnums=(0, 1))(activations, model.head)
    flat = unpack(case.config, grads)
    none = {id(case.features[name].config) for name in case.none_gradients}
    grads = pack(case.config, {key: None if key in none else g for key, g in flat.items()})
    model.embed.apply_gradients(grads, residual, optimizer.step[...])
    optimizer.update(model.head, dense)
    return loss

  step = high if case.level == "high" else mid
  if not case.compiled:
    return step
  return nnx.jit(step, donate_argnames=("model", "optimizer"))


def on_mesh(case, mesh, tree):
  """Inputs split over the mesh where their first axis divides by it."""
  axis = case.where["axis"]
  number = int(np.prod([mesh.shape[a] for a in np.atleast_1d(axis)]))

  def put(x):
    if x.ndim and x.shape[0] and x.shape[0] % number == 0:
      return jax.device_put(np.int32(x) if x.dtype == np.int64 else x, NamedSharding(mesh, P(axis)))
    return x

  return jax.tree.map(put, tree)


def make_mesh(where):
  types = (getattr(AxisType, where["kind"]),) * len(where["names"])
  devices = jax.devices()[: int(np.prod(where["shape"]))]
  return jax.make_mesh(where["shape"], where["names"], axis_types=types, devices=devices)


def make_model(case, mesh):
  if mesh is None:
    return Model(case)
  where = case.where
  if where["how"].startswith("plan"):
    plan = embed.plan(
      case.config, mesh, case.batches[0][0].features, case.default, axis=where["axis"]
    )
    rng = np.random.default_rng(case.seed)
    for name in plan:
      if chance(rng, 0.6):
        plan[name].strategy = pick(rng, "mod", "div", "column", "replicated")
    return Model(case, plan=plan)
  given = {} if where["how"] == "set_mesh" else {"mesh": mesh}
  return Model(case, **given, axis=where["axis"], sharding=where["sharding"])


@dataclasses.dataclass
class Outcome:
  """What is compared after a step."""

  loss: float
  tables: dict[str, dict[str, np.ndarray]]
  dense: dict[str, np.ndarray]
  dropped: int


def observe(model, loss):
  tables = jax.tree.map(np.array, model.embed.variables)
  flat = dict(nnx.to_flat_state(nnx.state(model.head, nnx.Param)))
  dense = {"/".join(map(str, path)): np.array(v[...]) for path, v in flat.items()}
  return Outcome(float(loss), tables, dense, int(model.embed.report["dropped_ids"]))


def train(case):
  """The outcomes of `embed`: before the first step, and after each."""
  mesh = make_mesh(case.where) if case.where else None
  sets = mesh is not None and case.where["how"] in ("set_mesh", "both", "plan_set_mesh")
  if mesh is not None and case.level == "mid" and case.where["split_inputs"]:
    sets = True  # JAX differentiates, so labels on Explicit axes need it
  with jax.set_mesh(mesh) if sets else contextlib.nullcontext():
    model = make_model(case, mesh)
    trained = model if case.level == "high" else model.head
    make = (
      embed.Optimizer if case.level == "high" else lambda m, tx: nnx.Optimizer(m, tx, wrt=nnx.Param)
    )
    optimizer, step = make(trained, optax.sgd(DENSE_RATE)), make_step(case)
    outcomes = [observe(model, 0.0)]
    for batches in case.batches:
      given = [(b.features, b.weights, b.label) for b in batches]
      if case.where and case.where["split_inputs"]:
        given = on_mesh(case, mesh, given)
      loss = step(model, optimizer, given)
      outcomes.append(observe(model, loss))
  return outcomes


# --- the same in NumPy ----------------------------------------------------------------------------


def tower(kind, p, x):
  """As `Tower`, on nodes."""
  last = lambda x: oracle.linear(x, p["last/kernel"], p["last/bias"])
  if kind in ("norm", "norms"):
    x = oracle.layer_norm(x, p["norm/scale"], p["norm/bias"], EPSILON)
  if kind == "mlp":
    x = oracle.tanh(oracle.linear(x, p["first/kernel"], p["first/bias"]))
  if kind == "flat":
    summed = oracle.total(x, axis=1)
    return oracle.tanh(last(summed))
  if kind == "attention":
    query = oracle.linear(x, p["query/kernel"], p["query/bias"])
    key = oracle.linear(x, p["key/kernel"], p["key/bias"])
    scores = oracle.scale(oracle.einsum("bqh,bkh->bqk", query, key), HIDDEN**-0.5)
    x = oracle.einsum("bqk,bkd->bqd", oracle.softmax(scores), x)
  if kind == "mha":
    project = lambda name: oracle.add(
      oracle.einsum("bld,dnh->blnh", x, p[f"attention/{name}/kernel"]), p[f"attention/{name}/bias"]
    )
    query, key, value = (project(name) for name in ("query", "key", "value"))
    width = query.value.shape[-1]
    scores = oracle.scale(oracle.einsum("bqnh,bknh->bnqk", query, key), width**-0.5)
    mixed = oracle.einsum("bnqk,bknh->bqnh", oracle.softmax(scores), value)
    x = oracle.einsum("bqnh,nhd->bqd", mixed, p["attention/out/kernel"])
    x = oracle.add(x, p["attention/out/bias"])
  x = oracle.tanh(last(x))
  return oracle.total(x, axis=1) if x.value.ndim == 3 else x


def head(case, params, activations, label):
  """As `Head`, on nodes."""
  inner = lambda prefix: {k[len(prefix) :]: v for k, v in params.items() if k.startswith(prefix)}
  hidden = {
    n: tower(case.features[n].tower, inner(f"towers/{n}/"), x) for n, x in activations.items()
  }
  loss = oracle.Node(0.0)
  for h in hidden.values():
    if len(h.value) != len(label):
      loss = oracle.add(loss, oracle.total(h))
  together = [h for h in hidden.values() if len(h.value) == len(label)]
  if not together:
    return loss
  x = together[0]
  for h in together[1:]:
    x = oracle.add(x, h)
  if len(together) > 1:
    x = oracle.add(x, oracle.mul(together[0], together[1]))
  if case.norm:
    x = oracle.layer_norm(x, params["norm/scale"], params["norm/bias"], EPSILON)
  logits = oracle.total(oracle.linear(x, params["out/kernel"], params["out/bias"]), axis=1)
  losses = oracle.add(
    oracle.softplus(logits), oracle.scale(oracle.mul(logits, oracle.Node(label)), -1)
  )
  return oracle.add(loss, oracle.scale(oracle.total(losses), 1 / 8))


class Reference:
  """The model in float64; `noise` perturbs what two programs round differently."""

  def __init__(self, case, initial, noise=0.0):
    self.case, self.noise = case, noise
    self.rng = np.random.default_rng(case.seed)
    self.tables = {
      name: oracle.Table(initial.tables[name]["parameters"], optimizer)
      for name, optimizer in case.optimizers.items()
    }
    self.dense = {name: np.float64(value) for name, value in initial.dense.items()}
    self.touched = {name: set() for name in self.tables}
    self.dropped = 0

  def gradients(self, batch):
    """Loss, dense gradients, and `{table: [(ids, gradients)]}` of a batch."""
    case, activations = self.case, {}
    for name, x in batch.inputs.items():
      f = case.features[name]
      value = x.lookup.activations(self.tables[f.table].rows, f.config.table.combiner)
      signs = self.rng.choice([-1, 1], value.shape)
      activations[name] = oracle.Node(value * (1 + 0.2 * self.noise * signs))
    params = {name: oracle.Node(value) for name, value in self.dense.items()}
    loss = head(case, params, activations, batch.label)
    found = oracle.gradients(loss, [*params.values(), *activations.values()])
    dense = dict(zip(params, found, strict=False))
    rows = {name: [] for name in self.tables}
    for (name, x), grad in zip(batch.inputs.items(), found[len(params) :], strict=True):
      f = case.features[name]
      grad = grad * (name not in case.none_gradients)
      grads = x.lookup.row_gradients(grad, f.config.table.combiner)
      rows[f.table].append((x.lookup.ids, grads))
      self.touched[f.table] |= set(x.lookup.ids.tolist())
      self.dropped += x.dropped
    return float(loss.value), dense, rows

  def step(self, batches, number):
    found = [self.gradients(batch) for batch in batches]
    dense = {name: sum(f[1][name] for f in found) for name in self.dense}
    rows = {}
    for name, table in self.tables.items():
      parts = [part for f in found for part in f[2][name]]
      empty = (np.zeros(0, np.int64), np.zeros((0, table.rows.shape[1])))
      rows[name] = [np.concatenate(x) for x in zip(empty, *parts, strict=True)]
    if self.case.clip is not None:
      factor = min(1.0, self.case.clip / max(self.norm(dense, rows), 1e-300))
      dense = {name: g * factor for name, g in dense.items()}
      rows = {name: (ids, g * factor) for name, (ids, g) in rows.items()}
    for name, (ids, grads) in rows.items():
      self.tables[name].step(ids, grads, number, self.noise)
    for name, grad in dense.items():
      self.dense[name] = self.dense[name] - DENSE_RATE * oracle.shifted(grad, self.noise)
    return sum(f[0] for f in found)

  def norm(self, dense, rows):
    """Of all gradients together, each row's summed first; those of frozen tables clip no other."""
    squares = sum(np.sum(g * g) for g in dense.values())
    for name, (ids, grads) in rows.items():
      if self.tables[name].name == "frozen":
        continue
      summed = np.zeros_like(self.tables[name].rows)
      np.add.at(summed, ids, grads)
      squares += np.sum(summed * summed)
    return np.sqrt(squares)

  def outcome(self, loss):
    tables = {n: {k: v.copy() for k, v in t.variables.items()} for n, t in self.tables.items()}
    return Outcome(loss, tables, dict(self.dense), self.dropped)


# --- the comparison -------------------------------------------------------------------------------

NOISE = 2e-6  # some 16 units in the last place of float32: the depth of a head


def mismatch(what, found, exact, low, high):
  """None, or what differs.

  Float32 sums differ from float64 ones by some units in the last place of the largest value. An
  equation may amplify that (a gradient near 0 under Adam, a sign under Lion), so the reference is
  run twice more with every gradient moved up and down by `NOISE`; what these runs differ by is
  allowed for on top.
  """
  found, exact = np.asarray(found, np.float64), np.asarray(exact, np.float64)
  if found.shape != exact.shape:
    return f"{what}: shape {found.shape}, not {exact.shape}"
  spread = np.maximum(np.abs(low - exact), np.abs(high - exact))
  largest = np.max(np.abs(exact), initial=0.0)
  allowed = 3 * spread + 1e-5 * np.abs(exact) + 2e-6 * largest + 1e-7
  wrong = ~(np.abs(found - exact) <= allowed)
  if not wrong.any():
    return None
  worst = tuple(int(i) for i in np.argwhere(wrong)[0])
  return (
    f"{what}: {int(wrong.sum())} of {wrong.size} differ, first at {worst}: "
    f"{found[worst]!r} is not {exact[worst]!r} (allowed {np.asarray(allowed)[worst]:.2e})"
  )


def compare(found, exact, low, high):
  """All mismatches of one step."""
  checks = [("loss", found.loss, exact.loss, low.loss, high.loss)]
  for name, arrays in exact.tables.items():
    for key in sorted(set(arrays) | set(found.tables[name])):
      triple = (o.tables[name][key] for o in (exact, low, high))
      checks.append((f"{name}.{key}", found.tables[name][key], *triple))
  for name in exact.dense:
    checks.append((name, found.dense[name], *(o.dense[name] for o in (exact, low, high))))
  problems = [mismatch(*check) for check in checks]
  if found.dropped != exact.dropped:
    problems.append(f"dropped_ids: {found.dropped}, not {exact.dropped}")
  return [p for p in problems if p]


def untouched_moved(case, reference, initial, last):
  """Rows that no batch looked up keep their bits."""
  for name, (optimizer, arguments) in case.optimizers.items():
    if optimizer == "adam" and not arguments.get("lazy_adam", True):
      continue
    size = case.tables[name].vocabulary_size
    rest = (
      sorted(set(range(size)) - reference.touched[name]) if optimizer != "frozen" else range(size)
    )
    for key, value in last.tables[name].items():
      if not np.array_equal(value[list(rest)], initial.tables[name][key][list(rest)]):
        yield f"{name}.{key}: a row that was not looked up moved"


def problems_of(case):
  """Everything that differs from the reference, as lines; the first step that differs ends it."""
  outcomes = train(case)
  exact, low, high = (Reference(case, outcomes[0], s * NOISE) for s in (0, -1, 1))
  problems = []
  for number, (batches, found) in enumerate(zip(case.batches, outcomes[1:], strict=True)):
    wanted = [r.outcome(r.step(batches, number)) for r in (exact, low, high)]
    problems = [f"step {number}: {p}" for p in compare(found, *wanted)]
    if problems:
      return problems
  return list(untouched_moved(case, exact, outcomes[0], outcomes[-1]))


# --- tests ----------------------------------------------------------------------------------------


def from_numpy(seed):
  """A case and a random initial state for its reference, without a model."""
  case, rng = make_case(seed, 1), np.random.default_rng(seed)
  shapes = nnx.eval_shape(lambda: nnx.state(Head(case, nnx.Rngs(0)), nnx.Param))
  dense = {
    "/".join(map(str, path)): rng.normal(size=x.shape) for path, x in nnx.to_flat_state(shapes)
  }
  rows = lambda table: rng.normal(size=(table.vocabulary_size, table.dim))
  return case, Outcome(0.0, {n: {"parameters": rows(t)} for n, t in case.tables.items()}, dense, 0)


@pytest.mark.weekly
def test_a_small_fault_is_seen():
  """The reference agrees with itself, and no longer where one row of a table is off by 1e-3."""
  case, initial = from_numpy(5)
  references = [Reference(case, initial, s * NOISE) for s in (0, -1, 1)]
  exact, low, high = (r.outcome(r.step(case.batches[0], 0)) for r in references)
  assert not compare(exact, exact, low, high)
  for name, arrays in exact.tables.items():
    for key in arrays:
      tables = {n: {k: v.copy() for k, v in a.items()} for n, a in exact.tables.items()}
      tables[name][key][0] += 1e-3 * np.max(np.abs(arrays[key])) + 1e-6
      assert compare(dataclasses.replace(exact, tables=tables), exact, low, high)


@pytest.mark.weekly
def test_the_reference_differentiates_rightly():
  """Its gradients, of rows and of dense parameters, are the slope of its loss in any direction."""
  case, initial = from_numpy(0)
  rng, batch = np.random.default_rng(0), case.batches[0][0]
  _, dense, rows = Reference(case, initial).gradients(batch)
  turn = lambda tree: jax.tree.map(lambda x: rng.normal(size=x.shape), tree)
  ways, row_ways = turn(initial.dense), turn(initial.tables)

  def along(t):
    move = lambda x, way: x + t * way
    tables = jax.tree.map(move, initial.tables, row_ways)
    moved = Outcome(0.0, tables, jax.tree.map(move, initial.dense, ways), 0)
    return Reference(case, moved).gradients(batch)[0]

  wanted = sum(np.sum(dense[n] * ways[n]) for n in dense)
  for name, parts in rows.items():
    wanted += sum(np.sum(g * row_ways[name]["parameters"][ids]) for ids, g in parts)
  slope = (along(1e-6) - along(-1e-6)) / 2e-6
  np.testing.assert_allclose(slope, wanted, rtol=1e-5, atol=1e-7)


# Others each week; a seed is in the name of its test.
_YEAR, _WEEK, _ = datetime.date.today().isocalendar()
FIRST = 60 * (53 * _YEAR + _WEEK)


@pytest.mark.weekly
@pytest.mark.parametrize("seed", range(FIRST, FIRST + 60))
@pytest.mark.parametrize("devices", [1, 8])
def test_a_random_model(seed, devices):
  case = make_case(seed, devices)
  problems = problems_of(case)
  assert not problems, "\n".join([*problems, str(case)])
