"""Several labels of one model: structures of heads, losses and metrics.

A label is a task; `tables.spec.Label` has its options. B is the batch, H the backbone's features, T
the number of labels. A label that does not count in a row, since its value is missing, is NaN.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ..evaluation.metrics import CLICK_NAMES, click_metrics, gauc
from ..tables.spec import Label
from ..training import layers

Labels = Mapping[str, Label]
ONE_CLICK: Labels = {"label": Label()}
STRUCTURES = ("shared_bottom", "mmoe", "ple")
_TINY = 1e-30  # a batch in which a label never counts has no loss, and no gradient


# --- heads ----------------------------------------------------------------------------------------


class GatedExperts(nnx.Module):
  """Experts, which are MLPs, and for each task a gate that mixes its own and the shared ones.

  `y[k] = softmax(W[k] x[k] + b[k]) · experts(x[k])` over the experts that the gate of task k sees:
  equations 1 to 6 of PLE, and 6 and 7 of MMoE, whose tasks have no experts of their own.

  Args:
    width: of the inputs.
    num_tasks: T.
    own: experts of each task.
    shared: experts that all gates see.
    expert: width of an expert.
    is_last: whether no level follows; else one more gate mixes all experts, for the shared experts
      of the next level.
    options: of the experts, as of `layers.MLP`.
  """

  def __init__(
    self, width: int, num_tasks: int, own: int, shared: int, expert: int, is_last: bool,
    **options: Any,
  ):  # fmt: skip
    mlp = functools.partial(layers.MLP, width, (expert,), **options)
    experts = lambda number: nnx.List(mlp() for _ in range(number))
    self.own, self.shared = nnx.List(experts(own) for _ in range(num_tasks)), experts(shared)
    seen = [own + shared] * num_tasks + [num_tasks * own + shared] * (not is_last)
    self.gates = nnx.List(nnx.Linear(width, number, rngs=options["rngs"]) for number in seen)

  def __call__(self, inputs: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns `[B, expert]` for each task, and for the shared experts where a level follows.

    Args:
      inputs: `[B, width]` of each task, and of the shared experts.
    """
    shared = [expert(inputs[-1]) for expert in self.shared]
    own = [[mlp(x) for mlp in experts] for experts, x in zip(self.own, inputs, strict=False)]
    seen = [[*experts, *shared] for experts in own] + [[*itertools.chain(*own), *shared]]
    return [
      jnp.einsum("be,ebw->bw", weights_BxE, jnp.stack(experts))
      for weights_BxE, experts in zip(self.weights(inputs), seen, strict=False)
    ]

  def weights(self, inputs: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the weights of each gate's experts `[B, experts]`, which sum to 1."""
    return [jax.nn.softmax(gate(x)) for gate, x in zip(self.gates, inputs, strict=False)]


class PLE(nnx.Module):
  """Tang et al. 2020, "Progressive Layered Extraction": `[B, H]` to `[B, T]`.

  Each of two levels has an expert of each label's own, and four that all labels share.
  """

  own, num_levels = 1, 2

  def __init__(self, width: int, *, labels: Labels, expert: int, **options: Any):
    self.levels = nnx.List[GatedExperts]()
    for number in range(1, self.num_levels + 1):
      inputs, is_last = width if number == 1 else expert, number == self.num_levels
      level = GatedExperts(inputs, len(labels), self.own, 4, expert, is_last, **options)
      self.levels.append(level)
    self.out = nnx.List(nnx.Linear(expert, 1, rngs=options["rngs"]) for _ in labels)

  def __call__(self, hidden_BxH: jax.Array) -> jax.Array:
    inputs = [hidden_BxH] * (len(self.out) + 1)
    for level in self.levels:
      inputs = level(inputs)
    return jnp.concatenate([out(x) for out, x in zip(self.out, inputs, strict=False)], axis=1)


class MMoE(PLE):
  """Ma et al. 2018, "Multi-gate Mixture-of-Experts": one level of four experts, all shared."""

  own, num_levels = 0, 1


def head(config, labels: Labels, *, expert: int, dtype: Any) -> Any:
  """Returns `(H, rngs=rngs) -> module`, by `config.tasks.structure`; experts have this width."""
  if config.tasks.structure == "shared_bottom":
    return functools.partial(nnx.Linear, out_features=len(labels))
  kind = MMoE if config.tasks.structure == "mmoe" else PLE
  return functools.partial(kind, labels=labels, expert=expert, dropout=config.dropout, dtype=dtype)


# --- losses ---------------------------------------------------------------------------------------


def cut(labels: Labels, outputs: Any, targets: Any) -> Iterator[tuple[Any, ...]]:
  """Yields, for each label, its name, options, outputs, targets and where it counts, all `[B]`.

  A target that does not count is NaN, and yielded as 0.
  """
  columns = (x.reshape(len(x), -1).T for x in (outputs, targets))
  for (name, label), own, target in zip(labels.items(), *columns, strict=True):
    counts = ~jnp.isnan(target)
    yield name, label, own, jnp.where(counts, target, 0), counts


def loss_fn(model: Any, batch: Any, *, labels: Labels) -> Any:
  """Returns the sum of the labels' cross-entropies by their weights, and of several each by name.

  A label's loss is a mean over the rows where it counts, by the batch's `weight` if there is one.

  Args:
    batch: has `label` `[B]` or `[B, T]`, in the order of the labels.
  """
  rows = batch.get("weight", jnp.ones(len(batch["label"]), jnp.float32))
  metrics, total = {}, jnp.float32(0)
  for name, label, outputs, targets, counts in cut(labels, model(batch), batch["label"]):
    weights = jnp.where(counts, rows, 0)
    weighted = optax.sigmoid_binary_cross_entropy(outputs, targets) * weights
    metrics[f"{name}_loss"] = jnp.sum(weighted) / jnp.maximum(jnp.sum(weights), _TINY)
    total += label.weight * metrics[f"{name}_loss"]
  return total, metrics if len(labels) > 1 else {}


# --- metrics --------------------------------------------------------------------------------------


def metrics(
  labels: Labels,
  outputs: np.ndarray,
  targets: np.ndarray,
  weights: np.ndarray,
  users: np.ndarray | None = None,
) -> dict[str, float]:
  """Returns the metrics of all rows of a split by name: `click_metrics`, and `gauc` of users.

  Args:
    outputs: float `[N]` or `[N, T]`.
    targets: like `outputs`, NaN where a label does not count.
    weights: float `[N]`, how often a row counts.
    users: int `[N]`, negative where none is known.
  """
  scores: dict[str, dict[str, float]] = {}
  for name, _, *rows in cut(labels, outputs, targets):
    own, target, counts = map(np.asarray, rows)
    counts = counts & (weights > 0)
    scores[name] = click_metrics(own[counts], target[counts], weights[counts])
    if counts.any() and users is not None:
      scores[name] |= gauc(own[counts], target[counts], users[counts], weights[counts])
  return named(labels, scores)


def metric_names(labels: Labels, *, has_users: bool = False) -> list[str]:
  """Returns the names of the metrics that can select a state."""
  names = [*CLICK_NAMES, *["gauc"] * has_users]
  if len(labels) == 1:
    return names
  return [f"{label}_{metric}" for label in labels for metric in names] + ["logloss"]


def named(labels: Labels, scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
  """Returns the metrics of labels under their names, and the weighted sum of all losses.

  A label that is alone keeps the metrics' own names.

  >>> scores = {"seen": {"auc": 0.5, "logloss": 0.75}, "liked": {"auc": 0.5, "logloss": 0.25}}
  >>> named({"seen": Label(), "liked": Label(weight=2.0)}, scores)["logloss"]
  1.25
  """
  if len(labels) == 1:
    return dict(*scores.values())
  named = {f"{n}_{metric}": value for n, own in scores.items() for metric, value in own.items()}
  losses = {f"{name}_logloss": label.weight for name, label in labels.items()}
  if not losses.keys() <= named.keys():
    return named
  return named | {"logloss": sum(weight * named[loss] for loss, weight in losses.items())}
