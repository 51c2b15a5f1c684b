"""The best k of many candidates, exact, over any number of devices.

B is the number of queries, N of candidates, D the width of both, E the ids listed per query.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

_MAX_SCORES = 1 << 24  # that a device holds at once, at least a candidate's: 64 MB of float32


def list_width(longest: int) -> int:
  """Returns the width of lists of ids, of few sizes, since each of them is compiled.

  >>> [list_width(longest) for longest in (1, 16, 17, 65)]
  [16, 16, 64, 256]
  """
  width = 16
  while width < longest:
    width *= 4
  return width


def top_k(
  query: jax.Array,
  candidates: jax.Array,
  k: int,
  listed: jax.Array | None = None,
  mesh: Mesh | None = None,
  size: int | None = None,
  only: jax.Array | None = None,
  among: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Finds the k candidates of the largest dot products, by brute force; jittable.

  Of equal scores the lower id is first, so that the order does not depend on how the candidates
  are cut. The rounding of a dot product may depend on it; equal vectors keep equal products.

  Args:
    query: float `[B, D]`.
    candidates: float `[N, D]`; a candidate's id is its row.
    k: at most N.
    listed: int `[B, E]`, ids that are left out for the query of this row, such as items that the
      user has seen; a negative one is none.
    mesh: every device scores its own N / n candidates and sends its k best, which are merged.
      Candidates that are split over the mesh already, as by `joined`, stay where they are.
    size: the number of candidates, the first rows; None means all N. Other rows fill up the last
      devices' parts.
    only: bool `[B]`, queries that find nothing but their listed ids.
    among: bool `[N]`, the candidates that any query may find, in place of `size`.

  Returns:
    scores float32 `[B, k]` and ids int32 `[B, k]`, the best first. Where fewer than k candidates
    are left, -inf and -1.
  """
  batch, rows = query.shape[0], candidates.shape[0]
  listed = jnp.full((batch, 1), -1, jnp.int32) if listed is None else listed
  only = jnp.zeros(batch, bool) if only is None else only
  if among is None:
    among = jnp.arange(rows) < (rows if size is None else size)
  if mesh is None:
    return _without_ids(*_scan(query, candidates, among, 0, listed, only, k))
  axes, shards = mesh.axis_names, mesh.size
  per_shard = -(-rows // shards)
  if missing := per_shard * shards - rows:
    candidates = jnp.pad(candidates, ((0, missing), (0, 0)))
    among = jnp.pad(among, (0, missing))

  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(P(), P(axes), P(axes), P(), P()),
    out_specs=(P(None, axes), P(None, axes)),
    check_vma=False,  # the scan's first carry, -inf everywhere, is the same on all devices
  )
  def best_of_shard(query, candidates, among, listed, only):
    first = jax.lax.axis_index(axes) * per_shard
    return _scan(query, candidates, among, first, listed, only, min(k, per_shard))

  # In order of the shards, so that the first of equal scores is still the one with the lowest id.
  scores, ids = best_of_shard(query, candidates, among, listed, only)
  return _without_ids(*_best(scores, ids, k))


def catalogue_batches(size: int, batch_size: int, mesh: Mesh | None) -> np.ndarray:
  """Returns the items to encode in each batch, so that every device encodes its own part.

  Device d of n has the items from `d * C` on; C is the steps times a device's share of a batch. A
  batch has the next items of every device: what `joined` makes of the results is in order, and
  nothing has been sent.

  Args:
    size: N, the number of items.
    batch_size: items encoded at once, on all devices; a multiple of their number.
    mesh: from `mesh.start`; None is one device.

  Returns:
    int32 `[steps, batch_size]`. The last item fills up.

  >>> catalogue_batches(5, 2, None).tolist()
  [[0, 1], [2, 3], [4, 4]]
  """
  devices, steps = 1 if mesh is None else mesh.size, -(-size // batch_size)
  share = batch_size // devices
  first = share * (steps * np.arange(devices) + np.arange(steps)[:, None])
  items = first[..., None] + np.arange(share)
  return np.minimum(items, size - 1).reshape(steps, batch_size).astype(np.int32)


def joined(vectors: Sequence[jax.Array], mesh: Mesh | None) -> jax.Array:
  """Returns the vectors of all items, float `[steps * batch_size, D]`: an item's id is its row.

  Args:
    vectors: `[batch_size, D]` of each of the `catalogue_batches`, split over the mesh.
    mesh: each device joins its own vectors, and keeps them; None is one device.
  """
  join = lambda *parts: jnp.concatenate(parts)
  if mesh is not None:
    part = P(mesh.axis_names)
    join = jax.shard_map(join, mesh=mesh, in_specs=part, out_specs=part)
  return jax.jit(join)(*vectors)


def _scan(query, candidates, among, first, listed, only, k: int):
  """Finds the k best of candidates whose ids start at `first`, in chunks."""
  batch, count = query.shape[0], candidates.shape[0]
  chunks = -(-count // max(_MAX_SCORES // max(batch, 1), 1))
  width = -(-count // chunks)

  def step(best, start):
    # Cut out where it is, the last chunk over the one before it: padding would copy all of them.
    begin = jnp.minimum(start, count - width)
    rows, keep = (jax.lax.dynamic_slice_in_dim(x, begin, width) for x in (candidates, among))
    place = begin + jnp.arange(width, dtype=jnp.int32)
    ids = first + place
    scores = _scores(query, rows, ids, keep & (place >= start), listed, only)
    return _merged(best, scores, ids, k), None

  starts = width * jnp.arange(chunks, dtype=jnp.int32)
  nothing = jnp.full((batch, k), -jnp.inf), jnp.full((batch, k), -1, jnp.int32)
  return jax.lax.scan(step, nothing, starts)[0]


def _merged(best, scores, ids, k: int) -> tuple[jax.Array, jax.Array]:
  """Merges the k best so far with a chunk's scores `[B, W]` of ids `[W]`.

  Earlier chunks come first: they have the lower ids.
  """
  chunk = _best(scores, jnp.broadcast_to(ids, scores.shape), min(k, len(ids)))
  scores, ids = (jnp.concatenate(pair, axis=1) for pair in zip(best, chunk, strict=True))
  return _best(scores, ids, k)


def _scores(query, rows, ids, keep, listed, only) -> jax.Array:
  """Returns scores `[B, W]` of rows `[W, D]` with consecutive ids, -inf at those to leave out."""
  scores = jnp.einsum("bd,nd->bn", query, rows, preferred_element_type=jnp.float32)
  # Negative columns would count from the end; beyond the end they are dropped.
  column = jnp.where(listed >= ids[0], listed - ids[0], len(ids))
  is_listed = jnp.zeros(scores.shape, bool)
  is_listed = is_listed.at[jnp.arange(len(query))[:, None], column].set(True, mode="drop")
  return jnp.where(keep[None] & (is_listed == only[:, None]), scores, -jnp.inf)


def _best(scores: jax.Array, ids: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
  """Finds the k best, the first of equal ones first; to `top_k` -0.0 would be less than 0.0."""
  scores, places = jax.lax.top_k(jnp.where(scores == 0, 0.0, scores), k)
  return scores, jnp.take_along_axis(ids, places, axis=1)


def _without_ids(scores: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Puts -1 in place of the ids of what was left out."""
  return scores, jnp.where(scores == -jnp.inf, -1, ids)
