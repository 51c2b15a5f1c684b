"""The best k of many candidates: exact, over any number of devices, or approximate.

B is the number of queries, N of candidates, D the width of both, E the ids to leave out per query.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ..errors import MissingPackageError, UserError

# Scores that are held at once, in all: 64 MB of float32.
_MAX_SCORES = 1 << 24
# Rows that a device looks up at once.
_MAX_ROWS = 1 << 12


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
  exclude: jax.Array | None = None,
  mesh: Mesh | None = None,
  max_scores: int = _MAX_SCORES,
  size: int | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns the k candidates of the largest dot products, by brute force; jittable.

  Of equal scores the lower id is first, so that the order does not depend on how the candidates
  are cut. The rounding of a dot product may depend on it; equal vectors keep equal products.

  Args:
    query: float `[B, D]`.
    candidates: float `[N, D]`; a candidate's id is its row.
    k: at most N.
    exclude: int `[B, E]`, ids that are left out for the query of this row, such as items that the
      user has seen; a negative one is none.
    mesh: every device scores its own N / n candidates and sends its k best, which are merged.
      Candidates that are split over the mesh already, as by `joined`, stay where they are.
    max_scores: how many scores a device holds at once, at least one candidate for every query.
    size: how many candidates there are, the first ones; None means all N. The rest fill up the last
      devices' parts.

  Returns:
    scores float32 `[B, k]` and ids int32 `[B, k]`, the best first. Where fewer than k candidates
    are left, -inf and -1.

  Raises:
    UserError: k is larger than the number of candidates.
    ValueError: shapes do not fit.
  """
  size = candidates.shape[0] if size is None else size
  _check(query.shape, (size, *candidates.shape[1:]), k, exclude)
  if exclude is None:
    exclude = jnp.full((query.shape[0], 1), -1, jnp.int32)
  if mesh is None:
    return _named(*_scan(query, candidates, 0, size, exclude, k, max_scores))
  axes, shards = mesh.axis_names, mesh.size
  own = -(-candidates.shape[0] // shards)
  missing = own * shards - candidates.shape[0]
  padded = jnp.pad(candidates, ((0, missing), (0, 0))) if missing else candidates

  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(P(), P(axes), P()),
    out_specs=(P(None, axes), P(None, axes)),
    check_vma=False,  # the scan's first carry, -inf everywhere, is the same on all devices
  )
  def best_of_own(query, candidates, exclude):
    first = jax.lax.axis_index(axes) * own
    return _scan(query, candidates, first, size, exclude, min(k, own), max_scores)

  # In order of the shards, so that the first of equal scores is still the one with the lowest id.
  scores, ids = best_of_own(query, padded, exclude)
  return _named(*_best(scores, ids, k))


def catalogue_batches(size: int, batch_size: int, mesh: Mesh | None) -> np.ndarray:
  """Returns which items to encode in each batch, so that every device encodes its own part.

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


def top_k_of_rows(
  query: jax.Array,
  rows: Callable[[jax.Array], jax.Array],
  size: int,
  k: int,
  exclude: jax.Array,
  mesh: Mesh,
  max_scores: int = _MAX_SCORES,
) -> tuple[jax.Array, jax.Array]:
  """Does `top_k` for candidates that are looked up in chunks: no device ever holds all of them.

  Args:
    query: float `[B, D]`.
    rows: the candidates `[W, D]` of ids int32 `[W]`, such as a lookup in a sharded table.
    size: N, the number of candidates.
    k: at most N.
    exclude: int `[B, E]`, as in `top_k`.
    mesh: every device scores its part of a chunk, and keeps its own k best until the end.
    max_scores: how many scores a device holds at once.

  Returns:
    scores float32 `[B, k]` and ids int32 `[B, k]`, as `top_k`.
  """
  _check(query.shape, (size, query.shape[1]), k, exclude)
  axes, shards, batch = mesh.axis_names, mesh.size, query.shape[0]
  width = max(min(max_scores // max(batch, 1), -(-size // shards), _MAX_ROWS), 1) * shards

  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=((P(axes), P(axes)), P(), P(axes), P(axes), P()),
    out_specs=(P(axes), P(axes)),
    check_vma=False,
  )
  def add(best, query, ids, chunk, exclude):
    scores = _scores(query, chunk, ids, ids < size, exclude)
    return tuple(x[None] for x in _merged((best[0][0], best[1][0]), scores, ids, k))

  def step(best, start):
    ids = start + jnp.arange(width, dtype=jnp.int32)
    return add(best, query, ids, rows(jnp.minimum(ids, size - 1)), exclude), None

  none = _none(shards, batch, k)
  scores, ids = jax.lax.scan(step, none, jnp.arange(0, size, width, dtype=jnp.int32))[0]
  flat = lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, -1)
  # A device's ids are not consecutive: of equal scores the lower id is put first here.
  scores, ids = jax.lax.sort((-flat(scores), flat(ids)), num_keys=2)
  return _named(-scores[:, :k], ids[:, :k])


def _scan(query, candidates, first, size, exclude, k: int, max_scores: int):
  """The k best of candidates whose ids start at `first` and end before `size`, in chunks."""
  batch, count = query.shape[0], candidates.shape[0]
  chunks = -(-count // max(max_scores // max(batch, 1), 1))
  width = -(-count // chunks)

  def step(best, start):
    # Cut out where it is, the last chunk over the one before it: padding would copy all of them.
    begin = jnp.minimum(start, count - width)
    rows = jax.lax.dynamic_slice_in_dim(candidates, begin, width)
    place = begin + jnp.arange(width, dtype=jnp.int32)
    # Rows past this shard's own belong to the next shard, or to nobody.
    is_own = (place >= start) & (first + place < jnp.minimum(first + count, size))
    ids = first + place
    return _merged(best, _scores(query, rows, ids, is_own, exclude), ids, k), None

  starts = width * jnp.arange(chunks, dtype=jnp.int32)
  return jax.lax.scan(step, _none(batch, k), starts)[0]


def _none(*shape: int) -> tuple[jax.Array, jax.Array]:
  """Scores and ids of no candidate."""
  return jnp.full(shape, -jnp.inf, jnp.float32), jnp.full(shape, -1, jnp.int32)


def _merged(best, scores, ids, k: int) -> tuple[jax.Array, jax.Array]:
  """The k best of those so far and of a chunk's scores `[B, W]` of ids `[W]`.

  Earlier chunks come first: they have the lower ids.
  """
  of_chunk = _best(scores, jnp.broadcast_to(ids, scores.shape), min(k, len(ids)))
  scores, ids = (jnp.concatenate(pair, axis=1) for pair in zip(best, of_chunk, strict=True))
  return _best(scores, ids, k)


def _scores(query, rows, ids, keep, exclude) -> jax.Array:
  """Scores `[B, W]` of rows `[W, D]` with consecutive ids, -inf at those to leave out."""
  scores = jnp.einsum("bd,nd->bn", query, rows, preferred_element_type=jnp.float32)
  scores, column = jnp.where(keep[None], scores, -jnp.inf), exclude - ids[0]
  # Negative columns would count from the end; beyond the end they are dropped.
  column = jnp.where((exclude >= 0) & (column >= 0), column, scores.shape[1])
  return scores.at[jnp.arange(scores.shape[0])[:, None], column].set(-jnp.inf, mode="drop")


def _best(scores: jax.Array, ids: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
  """The k best, the first of equal ones first; to `top_k` -0.0 would be less than 0.0."""
  scores, places = jax.lax.top_k(jnp.where(scores == 0, 0.0, scores), k)
  return scores, jnp.take_along_axis(ids, places, axis=1)


def _named(scores: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
  return scores, jnp.where(scores == -jnp.inf, -1, ids)


def _check(query: tuple[int, ...], candidates: tuple[int, ...], k: int, exclude: Any) -> None:
  if len(query) != 2 or len(candidates) != 2 or query[1] != candidates[1]:
    raise ValueError(
      f"queries {query} and candidates {candidates} must be [queries, width] and "
      "[candidates, width]"
    )
  if not 0 < k <= candidates[0]:
    raise UserError(f"k is {k}: choose 1 to {candidates[0]}, the number of candidates")
  if exclude is not None and (exclude.ndim != 2 or exclude.shape[0] != query[0]):
    raise ValueError(f"exclude {exclude.shape} must be [{query[0]} queries, ids to leave out]")


_SEARCHED = 128  # candidates that a search of the index looks at; more find more, and take longer


class Approximate:
  """A graph index (HNSW, Malkov and Yashunin 2018) by usearch: finds most of the best, sooner.

  Args:
    candidates: float `[N, D]`; compared by dot product.

  Raises:
    MissingPackageError: usearch is not installed.
  """

  def __init__(self, candidates: np.ndarray):
    self._index = self._class()(
      ndim=candidates.shape[1], metric="ip", dtype="f32", expansion_search=_SEARCHED
    )
    self._size = len(candidates)
    self._index.add(np.arange(self._size), np.asarray(candidates, np.float32))

  @staticmethod
  def _class() -> Any:
    try:
      from usearch.index import Index
    except ImportError as error:
      raise MissingPackageError(
        "the approximate index needs usearch: pip install -e '.[ann]'"
      ) from error
    return Index

  def save(self, path: Path) -> None:
    """Writes the index, which holds the candidates, for `load`."""
    self._index.save(str(path))

  @classmethod
  def load(cls, path: Path) -> "Approximate":
    """Opens a file of `save`.

    Raises:
      OSError: there is none, or it is none of an index.
    """
    index, own = cls._class(), cls.__new__(cls)
    if (read := index.restore(str(path))) is None:
      raise OSError(f"{path.name} is no index")
    own._index, own._size = read, len(read)
    own._index.expansion_search = _SEARCHED  # not in the file
    return own

  def top_k(
    self, query: np.ndarray, k: int, exclude: np.ndarray | None = None
  ) -> tuple[np.ndarray, np.ndarray]:
    """Does the function `top_k` on the host, except that some of the best may be missing.

    As many more are searched for as there are ids to leave out in the fullest row of `exclude`.
    """
    _check(np.shape(query), (self._size, np.shape(query)[1]), k, exclude)
    extra = 0 if exclude is None else int((exclude >= 0).sum(axis=1).max(initial=0))
    matches = self._index.search(np.asarray(query, np.float32), min(k + extra, self._size))
    keys = np.asarray(matches.keys).reshape(len(query), -1).astype(np.int64)
    scores = 1.0 - np.asarray(matches.distances, np.float32).reshape(keys.shape)
    # An unfilled place has the largest key there is.
    keep = (keys >= 0) & (keys < self._size)
    if exclude is not None:
      keep &= np.array([~np.isin(*row) for row in zip(keys, exclude, strict=True)])
    scores = np.where(keep, scores, -np.inf)
    order = np.lexsort((keys, -scores))[:, :k]
    scores = np.take_along_axis(scores, order, axis=1)
    ids = np.where(scores == -np.inf, -1, np.take_along_axis(keys, order, axis=1))
    return scores, ids.astype(np.int32)


def recall(approximate: np.ndarray, exact: np.ndarray) -> float:
  """Returns the share of the exact best ids `[B, k]` that an approximate answer `[B, k]` holds."""
  hits = (exact[:, :, None] == approximate[:, None, :]).any(axis=2) & (exact >= 0)
  return float(hits.sum() / max((exact >= 0).sum(), 1))
