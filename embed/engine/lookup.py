"""Gather, combine, and the way a gradient leaves: pure arrays.

A lookup's result is marked with a primitive, `mark`, that carries the table, ids and gains that
made it and computes nothing. `routing.value_and_grad` finds the marks in the traced loss and
attaches a **tap** to each: an input of zeros of the activations' shape, whose cotangent, by the
custom VJP `attach`, is the gradient of the activations. With the ids and gains that is all of the
row gradients, in O(batch) memory; a `[V, D]` gradient never exists.
"""

import dataclasses
import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from embed import config as config_lib
from embed import inputs as ragged

UNROLLED = 8  # places of a bag gathered in one fused loop; longer bags loop over them


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Occurrences:
  """Which rows a lookup read into which activation, and how much of each.

  `ids` `[*batch, L]`, or `[N]` with `segments`: int32, `vocabulary_size` is padding.
  `gains` float32 of the shape of `ids`, or `[*batch, 1]` (one per activation), or None (all 1).
  `segments` int32 `[N]`: the flat activation of each id, or None.
  `shape`: of the activations without dim, where segments do not tell.
  """

  ids: jax.Array
  gains: jax.Array | None
  segments: jax.Array | None
  shape: tuple[int, ...] | None = dataclasses.field(default=None, metadata={"static": True})

  @property
  def batch(self) -> tuple[int, ...]:
    """The shape of the activations without dim."""
    return self.ids.shape[:-1] if self.shape is None else self.shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reads:
  """What one call read of the tables that are stored together: the unit of an exchange.

  `parts`: the occurrences of each feature, ids being those of its own table.
  `tables`: the name of each part's table.
  `route`: how the ids went to the shards that own them (an `exchange.Route`), or None.
  """

  parts: tuple[Occurrences, ...]
  tables: tuple[str, ...] = dataclasses.field(metadata={"static": True})
  route: Any = None


def quantize(x: jax.Array, config: config_lib.QuantizationConfig | None) -> jax.Array:
  """The nearest of the quantized values, halves up: `floor(x + 0.5)`, not NumPy's half-to-even."""
  if config is None:
    return x
  step = (config.upper - config.lower) / (config.num_buckets - 1)
  x = jnp.clip(x, config.lower, config.upper)
  return jnp.floor((x - config.lower) / step + 0.5) * step + config.lower


def gains(weights: jax.Array, combiner: str) -> jax.Array:
  """Weights `[..., L]` with the combiner's normalisation over the last axis."""
  if combiner == "sum":
    return weights
  power = weights if combiner == "mean" else weights * weights
  return weights * _scale(jnp.sum(power, axis=-1, keepdims=True), combiner)


def _scale(total: jax.Array, combiner: str) -> jax.Array:
  """1 / total, or 1 / sqrt(total); 0 where that is 0."""
  # Guarded inside: 1 / 0 under a `where` outside would still make NaN of a gradient.
  safe = jnp.where(total == 0, 1, total)
  return jnp.where(total == 0, 0, 1 / (safe if combiner == "mean" else jnp.sqrt(safe)))


def occurrences(bags: ragged.Bags, combiner: str, vocabulary_size: int) -> Occurrences:
  """Folds the combiner's normalisation into the user's weights: act = sum of gain * row.

  mean divides by the sum of weights, sqrtn by the root of the sum of their squares; where that
  is 0 the gain is 0. Weights are constants: no gradient reaches them.
  """
  ids, weights, segments = bags.ids, bags.weights, bags.segments
  shape = None if segments is None else bags.shape
  if weights is not None:
    weights = jax.lax.stop_gradient(weights)
  if combiner == "sum" or (weights is None and segments is None and ids.shape[-1] == 1):
    return Occurrences(ids, weights, segments, shape)
  w = (ids < vocabulary_size).astype(jnp.float32) if weights is None else weights
  power = w if combiner == "mean" else w * w
  if segments is None:
    total = jnp.sum(power, axis=-1, keepdims=True)
  else:
    total = jnp.zeros(math.prod(bags.shape), jnp.float32).at[segments].add(power, mode="drop")
    total = total.at[segments].get(mode="fill", fill_value=0)
  scale = _scale(total, combiner)
  found = scale if weights is None and segments is None else w * scale
  return Occurrences(ids, found, segments, shape)


def lookup(
  table: jax.Array,
  occ: Occurrences,
  shape: tuple[int, ...],
  quantization: config_lib.QuantizationConfig | None = None,
  dtype: Any = None,
) -> jax.Array:
  """Activations `[*shape, D]`: the gained sum of rows, accumulated in float32.

  Args:
    table: `[V, D]`.
    occ: ids, gains and segments.
    shape: of the activations without D.
    quantization: applied to rows before they are summed.
    dtype: of the activations; None is the table's.
  """
  dtype = table.dtype if dtype is None else dtype

  size, dim = table.shape

  def rows(ids, gains=None):
    """Rows `[n, D]` times their gains; padding is V, out of range, hence zeros."""
    # Multiplied in any case: on its own, XLA:CPU makes a gather one scalar load per element.
    one = (ids < size).astype(jnp.float32)
    picked = table.at[ids].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    picked = quantize(picked.astype(jnp.float32), quantization)
    return picked * (one if gains is None else one * gains)[:, None]

  if occ.segments is not None:
    act = jnp.zeros((math.prod(shape), dim), jnp.float32)
    act = act.at[occ.segments].add(rows(occ.ids, occ.gains), mode="drop")
    return act.reshape(*shape, dim).astype(dtype)
  length = occ.ids.shape[-1]
  if length == 0:
    return jnp.zeros((*shape, dim), dtype)
  per_id = occ.gains is not None and occ.gains.shape[-1] == length
  # Columns of gathers added up: on CPU each is a row copy, ten times as fast as gather-and-reduce.
  ids = occ.ids.reshape(-1, length).T
  gains = occ.gains.reshape(-1, length).T if occ.gains is not None and per_id else None

  def add(first, columns, act):
    for k in range(columns):
      at = lambda x, k=k: jax.lax.dynamic_index_in_dim(x, first + k, keepdims=False)
      picked = rows(at(ids), None if gains is None else at(gains))
      act = picked if act is None else act + picked
    return act

  start = length % UNROLLED or UNROLLED
  more = lambda j, act: add(start + j * UNROLLED, UNROLLED, act)
  act = jax.lax.fori_loop(0, (length - start) // UNROLLED, more, add(0, start, None))
  act = act.reshape(*shape, dim)
  if occ.gains is not None and not per_id:
    act = act * occ.gains
  return act.astype(dtype)


# --- the marks that `routing` finds --------------------------------------------------------------


class Owner(NamedTuple):
  """A stack or a table of a model: the path of its module, "a/b", and its own name."""

  path: str
  name: str

  @property
  def key(self) -> str:
    return f"{self.path}/{self.name}" if self.path else self.name


class Layer:
  """The SparseEmbed of a lookup: a weak reference, and whether it has tables to train."""

  __slots__ = ("ref", "trains")

  def __init__(self, layer: Any, trains: bool):
    self.ref, self.trains = weakref.ref(layer), trains


# *activations, table, *leaves of Reads -> activations
mark_p = jex_core.Primitive("sparse_embed_lookup")
mark_p.multiple_results = True
read_p = jex_core.Primitive("sparse_embed_table")  # table -> [table]
read_p.multiple_results = True


def mark(
  activations: Sequence[jax.Array], reads: Reads, table: jax.Array, layer: Layer
) -> list[jax.Array]:
  """The activations themselves, with the table and the occurrences behind them on record."""
  leaves, treedef = jax.tree.flatten(reads)
  number = len(activations)
  return mark_p.bind(
    *activations, table, *leaves, treedef=treedef, number=number, layer=layer, batched=False
  )


def read(table: jax.Array, purpose: str) -> jax.Array:
  """A table or slot itself, with the purpose on record: "lookup", "tables" or "update"."""
  return read_p.bind(table, purpose=purpose, number=1, batched=False)[0]


def _mark_jvp(primals, tangents, *, number, **params):
  if any(type(t) is not ad.Zero for t in tangents[: number + 1]):
    reads = jax.tree.unflatten(params["treedef"], primals[number + 1 :])
    raise ValueError(
      f"Table {reads.tables[0]!r} is being differentiated by JAX directly, which would build a "
      "dense gradient of the whole table. Write embed.value_and_grad(loss_fn)(model, ...) instead "
      "of nnx.value_and_grad, and leave embed.Table out of `wrt` and `argnums`."
    )
  return mark_p.bind(*primals, number=number, **params), list(tangents[:number])


def _read_jvp(primals, tangents, **params):
  return read_p.bind(*primals, **params), list(tangents)


def _batched(primitive):
  def rule(args, dims, **params):
    params["batched"] = True
    return primitive.bind(*args, **params), dims[: params["number"]]

  return rule


def _same(*args, number, **_):
  return list(args[:number])


for _primitive, _jvp in ((mark_p, _mark_jvp), (read_p, _read_jvp)):
  _primitive.def_impl(_same)
  _primitive.def_abstract_eval(_same)
  mlir.register_lowering(_primitive, mlir.lower_fun(_same, multiple_results=True))
  batching.primitive_batchers[_primitive] = _batched(_primitive)
  ad.primitive_jvps[_primitive] = _jvp


@jax.custom_vjp
def attach(act: jax.Array, tap: jax.Array) -> jax.Array:
  """`act`, and the cotangent of it goes to `tap`: the row gradient's way out of the loss."""
  del tap
  return act


attach.defvjp(lambda act, tap: (act, None), lambda _, cotangent: (None, cotangent))


# --- the order of a lookup and an update ---------------------------------------------------------


def in_order(
  activations: Sequence[jax.Array], table: jax.Array, reads: Reads
) -> tuple[list[jax.Array], jax.Array]:
  """The same arrays, in such a way that an update of the table comes after the activations.

  Where nothing else orders the two, the compiler may update first, and pays for the reads that
  come after with a copy of the whole table.
  """
  ids = [occ.ids for occ in reads.parts if occ.ids.size]
  if not isinstance(table, jax.core.Tracer):
    return [jnp.copy(act) for act in activations], table  # the table itself may be among them
  if not ids:
    return list(activations), table

  def on_cpu(activations, table, ids):
    # XLA:CPU drops barriers early. It cannot look into how often a loop runs: never, ids being
    # rows or padding.
    runs = (jnp.min(ids) < 0).astype(jnp.int32)
    return jax.lax.fori_loop(
      0, runs, lambda _, x: jax.tree.map(jnp.negative, x), (activations, table)
    )

  def elsewhere(activations, table, ids):
    del ids
    return jax.lax.optimization_barrier((activations, table))

  return jax.lax.platform_dependent(list(activations), table, ids[0], cpu=on_cpu, default=elsewhere)
