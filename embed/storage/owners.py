"""The owners of the rows of a dynamic table, row by row, and their move to another geometry.

As users and checkpoints see them they do not depend on the mesh: "raw_ids" uint32 `[V, 2]` (all
ones without an owner), "last_used" int32 `[V]` (the number of a batch, 0 without an owner), with
"lfu" "uses" int32 `[V]`, and with sightings the sketch, "sightings" uint32 `[buckets, cells]`.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from embed.config import DynamicVocabulary
from embed.engine import admission
from embed.engine.mesh import Placement, settled
from embed.engine.stack import Arrays
from embed.storage import tables as stored_tables

BY_ROW = ("raw_ids", "last_used", "uses")


def names(vocabulary: DynamicVocabulary) -> tuple[str, ...]:
  """The arrays of a vocabulary."""
  uses = ("uses",) if vocabulary.eviction == "lfu" else ()
  return ("raw_ids", "last_used", *uses, *(("sightings",) if vocabulary.sightings > 1 else ()))


def shapes(vocabulary: DynamicVocabulary, placement: Placement) -> dict[str, jax.ShapeDtypeStruct]:
  """The arrays of `read`, as shapes with shardings."""
  capacity, cells = vocabulary.capacity, (vocabulary.buckets, 4 * vocabulary.bucket_width)
  of = {
    "raw_ids": ((capacity, 2), jnp.uint32),
    "last_used": ((capacity,), jnp.int32),
    "uses": ((capacity,), jnp.int32),
    "sightings": (cells, jnp.uint32),
  }
  where = None if placement.is_local else placement.sharding(_spec(vocabulary, placement))
  struct = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=where)
  return {name: struct(*of[name]) for name in names(vocabulary)}


def _spec(vocabulary: DynamicVocabulary, placement: Placement) -> P:
  """How rows are split: as buckets are where these divide by the shards, else not at all."""
  return P(placement.row_axes or None) if vocabulary.buckets % placement.shards == 0 else P()


@functools.partial(jax.jit, static_argnums=(0, 1))
def read(vocabulary: DynamicVocabulary, placement: Placement, state: Arrays) -> Arrays:
  """The arrays of a vocabulary, by name."""
  width, splits = vocabulary.bucket_width, vocabulary.buckets % placement.shards == 0

  def per_device(state):
    if not splits:
      gather = lambda x: lax.all_gather(x, placement.row_axes, tiled=True)[: vocabulary.buckets]
      state = jax.tree.map(gather, state)
    word = lambda k: state["buckets"][:, k * width : (k + 1) * width].reshape(-1)
    arrays = {
      "raw_ids": jnp.stack([word(0), word(1)], axis=1),
      "last_used": word(2).astype(jnp.int32),
    }
    if vocabulary.eviction == "lfu":
      arrays["uses"] = word(3).astype(jnp.int32)
    return arrays | ({"sightings": state["sightings"]} if "sightings" in state else {})

  of_state = {key: state[key] for key in ("buckets", "sightings") if key in state}
  spec = {key: admission.specs(vocabulary, placement)[key] for key in of_state}
  return placement.run(per_device, (spec,), _spec(vocabulary, placement))(of_state)


def store(
  vocabulary: DynamicVocabulary, placement: Placement, arrays: Mapping[str, Any]
) -> dict[str, Any]:
  """The part of an `admission` state that holds owners, from arrays in the form of `read`."""
  spec = _spec(vocabulary, placement)
  if placement.is_local:
    placed = {name: jnp.asarray(x) for name, x in arrays.items()}
  else:
    place = lambda x: stored_tables.place_whole(placement, x, stored_tables.dtype_of(x), spec)
    placed = {name: place(x) for name, x in arrays.items()}
  return settled(_store(vocabulary, placement, placed))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _store(vocabulary, placement, arrays):
  width, shards = vocabulary.bucket_width, placement.shards
  local = admission.padded_buckets(vocabulary, placement) // shards
  is_split = vocabulary.buckets % shards == 0

  def per_device(arrays):
    owned = jnp.sum(arrays["last_used"] > 0, dtype=jnp.int32)
    if is_split and placement.row_axes:
      owned = lax.psum(owned, placement.row_axes)

    def own(x, fill):
      if is_split:
        return x
      missing = local * shards - vocabulary.buckets
      x = jnp.pad(x, ((0, missing), (0, 0)), constant_values=fill)
      return lax.dynamic_slice_in_dim(x, lax.axis_index(placement.row_axes) * local, local)

    by_bucket = lambda x: x.reshape(-1, width).astype(jnp.uint32)
    words = [own(by_bucket(arrays["raw_ids"][:, half]), admission.EMPTY) for half in (0, 1)]
    words += [own(by_bucket(arrays[name]), 0) for name in ("last_used", "uses") if name in arrays]
    state = {"buckets": jnp.concatenate(words, axis=1), "filled": owned}
    if "sightings" in arrays:
      state["sightings"] = own(arrays["sightings"].astype(jnp.uint32), 0)
    return state

  spec, specs = _spec(vocabulary, placement), admission.specs(vocabulary, placement)
  out = {"buckets": specs["buckets"], "filled": P()}
  out |= {"sightings": specs["buckets"]} if "sightings" in arrays else {}
  return placement.run(per_device, (dict.fromkeys(arrays, spec),), out)(arrays)


# --- another geometry, in NumPy ------------------------------------------------------------------


def order(vocabulary: DynamicVocabulary, owners: Mapping[str, np.ndarray], step: int) -> np.ndarray:
  """The rows with an owner, the most valuable first: those that eviction takes last.

  Args:
    vocabulary: the policy.
    owners: the arrays by row, of any vocabulary.
    step: the number of the last batch.
  """
  last = np.asarray(owners["last_used"]).astype(np.int64)
  values = [last]
  if vocabulary.eviction == "lfu":
    uses = np.asarray(owners.get("uses", np.ones_like(last))).astype(np.int64)
    if vocabulary.half_life is not None:
      uses >>= np.clip(step // vocabulary.half_life - last // vocabulary.half_life, 0, 31)
    values = [last, uses]
  raw = np.asarray(owners["raw_ids"])
  by_value = np.lexsort((raw[:, 1], raw[:, 0], *(-x for x in values)))
  is_live = last > 0
  if vocabulary.time_to_live is not None:
    is_live &= step - last <= vocabulary.time_to_live
  return by_value[is_live[by_value]]


def fits(vocabulary: DynamicVocabulary, raw_ids: Any) -> bool:
  """Whether each raw id, uint32 `[V, 2]` by row, is in a row of its bucket."""
  return bool(_fits(vocabulary, jnp.asarray(raw_ids)))


@functools.partial(jax.jit, static_argnums=0)
def _fits(vocabulary, raw_ids):
  high, low = raw_ids[:, 0], raw_ids[:, 1]
  bucket = admission.scaled_to(admission.mixed(high, low)[0], vocabulary.buckets)
  row = jnp.arange(raw_ids.shape[0], dtype=jnp.int32)
  is_empty = (high == admission.EMPTY) & (low == admission.EMPTY)
  return jnp.all(is_empty | (bucket == row // vocabulary.bucket_width))


def rows_for(vocabulary: DynamicVocabulary, raw_ids: np.ndarray) -> np.ndarray:
  """Rows of distinct raw ids uint32 `[N, 2]`, int64 `[N]`, the first ids first; -1 for no room."""
  high, low = (jnp.asarray(raw_ids[:, half]) for half in (0, 1))
  hashed = admission.mixed(high, low)[0]
  bucket = np.asarray(admission.scaled_to(hashed, vocabulary.buckets)).astype(np.int64)
  by_bucket = np.argsort(bucket, kind="stable")
  ordered = bucket[by_bucket]
  lane = np.empty(len(bucket), np.int64)
  lane[by_bucket] = np.arange(len(bucket)) - np.searchsorted(ordered, ordered)
  room = np.full(vocabulary.buckets, vocabulary.bucket_width)
  room[-1] -= vocabulary.trains_unknown  # the last row of the last bucket
  return np.where(lane < room[bucket], bucket * vocabulary.bucket_width + lane, -1)
