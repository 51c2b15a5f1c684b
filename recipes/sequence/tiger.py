"""TIGER: predicts the codes of the next item one after the other, and finds items by a beam search.

Rajput et al. 2023, "Recommender Systems with Generative Retrieval". Each item has codes of M levels
(see `recipes.semantic_ids`); similar items share the first ones. So few rows represent many items,
and an item without interactions can be predicted.

The paper's network is a T5: its encoder reads every code of the history as a token, and its decoder
learns one target per history. This network has decoders only, arranged as in the RQ-Transformer
(Lee et al. 2022, "Autoregressive Image Generation using Residual Quantization", section 3.2): an
item is the sum of its codes' vectors, a causal encoder over items summarizes the history at each of
them, and a small decoder over levels generates M codes from each summary. It reads 1 / M of the
tokens, learns from every item of a packed row, and a beam repeats the small decoder only.

The softmax of a level is over the codes that continue the prefix in the catalogue, in training as
in the search: a hierarchical softmax over items (Morin and Bengio 2005). The probabilities of all
codes of items add up to 1, and the model need not learn which ones exist. After three epochs on
S3-Rec's Beauty its validation NDCG@10 was .0213, against .0148 with a softmax over all codes.

B is rows, L items of a row, D the width, M levels, K codes of a level, W the beam's width, N items.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import embed

from ..errors import UserError
from ..run import settings
from ..training import build, losses
from . import model as model_lib

_NEVER = -1e9  # not -inf, whose gradients would be NaN


class Block(model_lib.SASRecBlock):
  """SASRec's block with a wider feed-forward layer, since codes have few rows to learn by heart."""

  widening = 4


class Fixed(nnx.Variable):
  """An array of a model that is not trained."""


class Trie(nnx.Module):
  """The prefixes of the codes of all items, as arrays; the nodes of a depth are in order.

  The children of a node are consecutive nodes of the next depth. Below the M levels of codes, items
  of equal codes are children of one node, the most popular first.

  Args:
    codes: int `[N, M]`, from 0 on.
    counts: `[N]`, how popular the items are.
  """

  def __init__(self, codes: np.ndarray, counts: np.ndarray):
    order = np.lexsort((-counts, *codes.T[::-1]))
    rows, size = codes[order], len(codes)
    differs = np.cumsum(rows[1:] != rows[:-1], axis=1) > 0
    starts = [np.zeros(1, np.int64)]  # the first row of every node
    starts += [np.flatnonzero(np.r_[True, differs[:, level]]) for level in range(codes.shape[1])]
    starts.append(np.arange(size))
    first = [
      np.append(np.searchsorted(below, nodes), len(below))
      for nodes, below in itertools.pairwise(starts)
    ]
    fixed = lambda x: Fixed(jnp.asarray(x, jnp.int32))
    self.rows, self.items = fixed(rows), fixed(order)
    paths = np.empty((size, len(starts) - 1), np.int64)  # the nodes that lead to every item
    for depth, nodes in enumerate(starts[:-1]):
      paths[order, depth] = np.searchsorted(nodes, np.arange(size), side="right") - 1
    self.paths = fixed(paths)
    self.starts, self.first = nnx.List(map(fixed, starts)), nnx.List(map(fixed, first))
    self.widest = tuple(int(np.diff(x).max()) for x in first)

  def children(self, depth: int, nodes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the children `[..., F]` of nodes `[...]` of a depth, and which of them there are."""
    first = self.first[depth][...]
    children = first[nodes][..., None] + jnp.arange(self.widest[depth])
    is_there = children < first[nodes + 1][..., None]
    return jnp.where(is_there, children, 0), is_there

  def prefixes(self, depth: int, nodes: jax.Array) -> jax.Array:
    """Returns the codes `[..., depth]` that lead to nodes `[...]` of a depth."""
    return self.rows[...][self.starts[depth][...][nodes], :depth]


class Tiger(model_lib.SequenceModel):
  """The encoder over items, the decoder over levels, and the codes of all items.

  Args:
    tables: of the codes, `code_0` to `code_{M - 1}`.
    encoder, decoder: over items and over levels.
    codes: int `[N, M]`.
    counts: of `Trie`.
    config: as of `SequenceModel`.
    rngs: draws parameters and dropout.
  """

  def __init__(
    self,
    tables: embed.SparseEmbed,
    encoder: model_lib.Encoder,
    decoder: model_lib.Encoder,
    codes: np.ndarray,
    counts: np.ndarray,
    config,
    *,
    rngs: nnx.Rngs,
  ):
    super().__init__(tables, encoder, config, rngs=rngs)
    self.decoder, self.levels, self.beam = decoder, codes.shape[1], config.tiger.beam
    self.codes, self.trie = Fixed(jnp.asarray(codes, jnp.int32)), Trie(codes, counts)
    self.places = nnx.Param(0.02 * jax.random.normal(rngs.params(), (self.levels, config.dim)))

  def codes_of(self, items: jax.Array) -> jax.Array:
    """Returns the codes `[..., M]` of items `[...]`, -1 of those that are negative."""
    return jnp.where((items < 0)[..., None], -1, self.codes[...][items])

  def vectors(self, items: jax.Array) -> jax.Array:
    """Returns the sums of the vectors of items' codes, float32 `[..., D]`."""
    return jnp.sum(self._of_levels(self.codes_of(items)), axis=-2)

  def _of_levels(self, codes: jax.Array) -> jax.Array:
    """Returns the vectors `[..., M, D]` of codes `[..., M]`, the first ones `[..., :J]` as well."""
    absent = self.levels - codes.shape[-1]
    codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, absent)], constant_values=-1)
    found = self.embed({f"code_{level}": codes[..., level] for level in range(self.levels)})
    vectors = [found[f"code_{level}"] for level in range(self.levels - absent)]
    # The layer takes ids `[B, 1]` for bags of one, and drops their axis.
    vectors = [x.astype(jnp.float32).reshape(*codes.shape[:-1], -1) for x in vectors]
    return jnp.stack(vectors, axis=-2)

  def decode(self, hidden: jax.Array, codes: jax.Array) -> jax.Array:
    """Returns the decoder's outputs `[..., J + 1, D]` after summaries `[..., D]` and J codes.

    Lee et al. 2022, equation 5: place 0 gets the summary, and each of the others the sum of the
    vectors of the codes before it.
    """
    x = hidden[..., None, :]
    if codes.shape[-1]:
      before = jnp.cumsum(self._of_levels(codes), axis=-2) * self.scale
      x = jnp.concatenate([x, before], axis=-2)
    length, dim = x.shape[-2:]
    x = self.dropout(x + self.places[...][:length]).astype(self.dtype)
    flat = self.decoder(x.reshape(-1, length, dim), jnp.zeros((1, length), jnp.int32))
    return flat.reshape(x.shape).astype(jnp.float32)

  def code_scores(
    self, outputs: jax.Array, level: int, nodes: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the children `[..., F]` of nodes `[...]` at a level, and the scores of their codes.

    Args:
      outputs: of the decoder at that level, `[..., D]`.
      level: 0 to M - 1.
      nodes: prefixes of `level` codes. A place without a child scores `_NEVER`.
    """
    children, is_there = self.trie.children(level, nodes)
    codes = self.trie.prefixes(level + 1, children)[..., -1]
    scores = jnp.take_along_axis(self.embed.attend(outputs, f"code_{level}"), codes, axis=-1)
    return children, jnp.where(is_there, scores, _NEVER)


def build_model(
  config,
  codes: np.ndarray,
  counts: np.ndarray,
  mesh: jax.sharding.Mesh | None = None,
  inputs: Callable[[], Any] | None = None,
) -> Tiger:
  """Returns the model of items' codes `[N, M]`; `inputs` is as of `model.build_model`."""
  features = {
    f"code_{level}": embed.FeatureConfig(
      embed.TableConfig(
        int(column.max()) + 1,
        config.dim,
        initializer=build.table_initializer(config),
        optimizer=build.table_optimizer(config),
        name=f"code_{level}",
        dtype=build.dtype(config, "table_dtype"),
      )
    )
    for level, column in enumerate(codes.T)
  }
  by_level = None
  if inputs is not None:
    by_level = lambda: dict.fromkeys(features, inputs()[model_lib.ITEM])
  rngs = nnx.Rngs(config.seed)
  encoder = model_lib.Encoder(config, block=Block, rngs=rngs)
  over_levels = settings.copied(config, blocks=config.tiger.blocks)
  decoder = model_lib.Encoder(over_levels, block=Block, rngs=rngs)
  tables = build.tables(config, features, None, rngs=rngs, mesh=mesh, inputs=by_level)
  return Tiger(tables, encoder, decoder, codes, counts, config, rngs=rngs)


def loss_fn(model: Tiger, batch) -> jax.Array:
  """Returns the mean over targets of `-log p(target | items before it)`, by its codes."""
  targets = batch["targets"]
  codes, paths = model.codes_of(targets), model.trie.paths[...][targets]
  outputs, each = model.decode(model(batch), codes[..., :-1]), []
  for level in range(model.levels):
    children, scores = model.code_scores(outputs[..., level, :], level, paths[..., level])
    right = paths[..., level + 1] - children[..., 0]
    each.append(losses.cross_entropy(scores, right))
  return losses.mean(jnp.sum(jnp.stack(each), axis=0), targets >= 0)


def top_k(
  model: Tiger, query: jax.Array, k: int, exclude: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the k items of the largest probability that a beam search finds; jittable.

  The search goes down the trie and expands codes of items only. An item has the log-probability of
  its codes; of items of equal codes the more popular one is first. The last level keeps as many
  more nodes as `exclude` is wide, so that what is left out takes no place there. A beam as wide as
  the widest level ranks all items.

  Args:
    model: with dropout off; its `beam` is W, the nodes of a level that are kept.
    query: float `[B, D]`, the encoder's outputs.
    k: at most N.
    exclude: int `[B, E]`, items that are left out; a negative one is none.

  Returns:
    scores float32 `[B, k]` and ids int32 `[B, k]`, the best first. Where fewer than k items are
    found, -inf and -1.
  """
  trie, rows = model.trie, query.shape[0]
  nodes, scores = jnp.zeros((rows, 1), jnp.int32), jnp.zeros((rows, 1), jnp.float32)
  for level in range(model.levels):
    hidden = jnp.broadcast_to(query[:, None], (*nodes.shape, query.shape[1]))
    outputs = model.decode(hidden, trie.prefixes(level, nodes))[..., -1, :]
    children, each = model.code_scores(outputs, level, nodes)
    each = jnp.where(each == _NEVER, -jnp.inf, jax.nn.log_softmax(each, axis=-1))
    width = model.beam if level < model.levels - 1 else max(model.beam, k + exclude.shape[1])
    scores, nodes = _best(scores[..., None] + each, children, width)
  places, is_there = trie.children(model.levels, nodes)
  items, exclude = trie.items[...][places], jnp.sort(exclude, axis=1)
  found = jax.vmap(jnp.searchsorted)(exclude, items.reshape(rows, -1)).reshape(items.shape)
  found = jnp.minimum(found, exclude.shape[1] - 1)
  is_left = jnp.take_along_axis(exclude[:, None], found, axis=2) != items
  scores, items = _best(jnp.where(is_there & is_left, scores[..., None], -jnp.inf), items, k)
  missing = [(0, 0), (0, k - items.shape[1])]
  scores = jnp.pad(scores, missing, constant_values=-jnp.inf)
  items = jnp.pad(items, missing, constant_values=-1)
  return scores, jnp.where(scores == -jnp.inf, -1, items)


def _best(scores: jax.Array, ids: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """The best of `[B, W, F]`, up to `count`; the first of equal ones is first."""
  scores, ids = (x.reshape(len(x), -1) for x in (scores, ids))
  scores, places = jax.lax.top_k(scores, min(count, scores.shape[1]))
  return scores, jnp.take_along_axis(ids, places, axis=1)


def check(config) -> None:
  """Raises UserError for settings that make no sense, before any data is read."""
  codes, first_id, blocks, beam = (
    config.tiger[name] for name in ("codes", "first_id", "blocks", "beam")
  )
  if min(beam, blocks) < 1 or first_id < 0:
    raise UserError(
      f"tiger.beam is {beam}, tiger.blocks {blocks}, tiger.first_id {first_id}: choose 1 or more, "
      "and a first id of 0 or more"
    )
  if config.model != "tiger":
    return
  if not codes:
    raise UserError(
      "tiger.codes is empty: give the file of the items' codes, which `python -m "
      "recipes.semantic_ids` writes"
    )
  if config.loss != "softmax":
    raise UserError(f"loss is {config.loss!r}, and tiger has a softmax per level: write 'softmax'")
  if beam < max(config.ks):
    raise UserError(
      f"tiger.beam is {beam}, fewer than the {max(config.ks)} items of config.ks: choose more"
    )
