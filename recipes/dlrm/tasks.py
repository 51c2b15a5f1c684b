"""Several labels of one model: structures of heads, losses and metrics.

A label is a task; `tables.spec.Label` has its options. B is the batch, H the backbone's features, T
the number of labels, O of outputs: one of a label, or as many as its classes. A label that does not
count in a row, since its value is missing or its mask is not 1, is NaN.
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
from scipy.special import logit

from ..evaluation.groups import Groups, group_metrics
from ..evaluation.metrics import CLICK_NAMES, click_metrics
from ..tables.spec import Label, is_one_click
from ..training import layers, losses

Labels = Mapping[str, Label]
ONE_CLICK: Labels = {"label": Label()}
STRUCTURES = ("shared_bottom", "mmoe", "ple")
_NO_GROUPS = Groups()
_TINY = 1e-30  # a batch in which a label never counts has no loss, and no gradient


def num_outputs(labels: Labels) -> int:
  """Returns O."""
  return sum(label.num_outputs for label in labels.values())


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
  """

  def __init__(
    self, width: int, num_tasks: int, own: int, shared: int, expert: int, is_last: bool,
    *, dropout: float, dtype: Any, rngs: nnx.Rngs,
  ):  # fmt: skip
    mlp = functools.partial(layers.MLP, width, (expert,), dropout=dropout, dtype=dtype, rngs=rngs)
    experts = lambda number: nnx.List(mlp() for _ in range(number))
    self.own, self.shared = nnx.List(experts(own) for _ in range(num_tasks)), experts(shared)
    seen = [own + shared] * num_tasks + [num_tasks * own + shared] * (not is_last)
    self.gates = nnx.List(nnx.Linear(width, number, rngs=rngs) for number in seen)

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
  """Tang et al. 2020, "Progressive Layered Extraction": `[B, H]` to `[B, O]`.

  Each of two levels has an expert of each label's own, and four that all labels share.
  """

  own, num_levels = 1, 2

  def __init__(
    self, width: int, *, labels: Labels, expert: int, dropout: float, dtype: Any, rngs: nnx.Rngs
  ):
    options: Any = {"dropout": dropout, "dtype": dtype, "rngs": rngs}
    self.levels = nnx.List[GatedExperts]()
    for number in range(1, self.num_levels + 1):
      inputs, is_last = width if number == 1 else expert, number == self.num_levels
      level = GatedExperts(inputs, len(labels), self.own, 4, expert, is_last, **options)
      self.levels.append(level)
    self.out = nnx.List(
      nnx.Linear(expert, label.num_outputs, rngs=rngs) for label in labels.values()
    )

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
    return functools.partial(nnx.Linear, out_features=num_outputs(labels))
  kind = MMoE if config.tasks.structure == "mmoe" else PLE
  return functools.partial(kind, labels=labels, expert=expert, dropout=config.dropout, dtype=dtype)


# --- losses ---------------------------------------------------------------------------------------


def loss_of(label: Label, outputs: Any, targets: Any) -> jax.Array:
  """Returns the loss of each row `[B]`.

  Args:
    outputs: `[B, O of the label]`: a logit, a logit of each class, or log(1 + value).
    targets: `[B]`: 0 or 1, the number of the class, or log(1 + value).
  """
  if label.loss == "softmax":
    return losses.cross_entropy(outputs, targets.astype(jnp.int32))
  if label.loss == "squared_log":
    return jnp.square(outputs[:, 0] - targets)
  return optax.sigmoid_binary_cross_entropy(outputs[:, 0], targets)


def cut(labels: Labels, outputs: Any, targets: Any) -> Iterator[tuple[Any, ...]]:
  """Yields, for each label, its name, options, outputs, targets and where it counts, bool `[B]`.

  Args:
    outputs: `[B]` or `[B, O]`.
    targets: `[B]` or `[B, T]`, NaN where a label does not count, which is 0 in what is yielded.
  """
  outputs, targets = (x.reshape(len(x), -1) for x in (outputs, targets))
  start = 0
  for column, (name, label) in enumerate(labels.items()):
    own, target = outputs[:, start : start + label.num_outputs], targets[:, column]
    counts = ~jnp.isnan(target)
    yield name, label, own, jnp.where(counts, target, 0), counts
    start += label.num_outputs


def loss_fn(model: Any, batch: Any, *, labels: Labels) -> Any:
  """Returns the sum of the labels' losses, each by its weight, and the losses by name.

  A label's loss is a mean over the rows where it counts, by the batch's `weight` if there is one.

  Args:
    batch: has `label` `[B]` or `[B, T]`, in the order of the labels.
  """
  rows = batch.get("weight", jnp.ones(len(batch["label"]), jnp.float32))
  metrics, total = {}, jnp.float32(0)
  for name, label, outputs, targets, counts in cut(labels, model(batch), batch["label"]):
    weights = jnp.where(counts, rows, 0)
    weighted = loss_of(label, outputs, targets) * weights
    metrics[f"{name}_loss"] = jnp.sum(weighted) / jnp.maximum(jnp.sum(weights), _TINY)
    total += label.weight * metrics[f"{name}_loss"]
  return total, metrics


# --- metrics --------------------------------------------------------------------------------------


def metrics(
  labels: Labels,
  outputs: np.ndarray,
  targets: np.ndarray,
  weights: np.ndarray,
  groups: Groups = _NO_GROUPS,
  ids: Mapping[str, np.ndarray] = {},
) -> dict[str, float]:
  """Returns the metrics of all rows of a split by name.

  A label of clicks has the metrics of `click_metrics` and `group_metrics`, one of classes `logloss`
  and `accuracy`, a regression `squared_loss`, the mean squared error of log(1 + value); see
  `named`.

  Args:
    outputs: float `[N]` or `[N, O]`.
    targets: `[N]` or `[N, T]`, NaN where a label does not count.
    weights: float `[N]`, how often a row counts.
    groups, ids: see `group_metrics`.
  """
  scores: dict[str, dict[str, float]] = {}
  for name, label, *rows in cut(labels, outputs, targets):
    own, target, counts = map(np.asarray, rows)
    counts = counts & (weights > 0)
    own, target, amount = own[counts], target[counts], weights[counts]
    if label.loss == "binary":
      examples = own[:, 0], target, amount
      scores[name] = click_metrics(*examples)
      if len(target):
        scores[name] |= group_metrics(groups, *examples, {k: x[counts] for k, x in ids.items()})
      continue
    own = np.maximum(own, 0) if label.loss == "squared_log" else own  # none below 0 is served
    mean = lambda x, amount=amount: float(np.average(x, weights=amount))
    scores[name] = {label.metric: mean(np.asarray(loss_of(label, own, target)))}
    if label.loss == "softmax":
      scores[name]["accuracy"] = mean(own.argmax(axis=1) == target)
  return named(labels, scores)


def of_served(labels: Labels, scores: np.ndarray) -> np.ndarray:
  """Returns the outputs behind served scores: probabilities, also of classes, and values."""
  inverse = {"binary": logit, "softmax": np.log, "squared_log": np.log1p}
  parts, start = [], 0
  for label in labels.values():
    own = scores.reshape(len(scores), -1)[:, start : start + label.num_outputs]
    parts.append(inverse[label.loss](np.asarray(own, np.float64)))
    start += label.num_outputs
  return np.concatenate(parts, axis=1)


def metric_names(labels: Labels, groups: Groups = _NO_GROUPS) -> list[str]:
  """Returns the names of what a run is measured by."""
  clicks = [*CLICK_NAMES, *groups.names]
  if is_one_click(labels):
    return clicks
  by_loss = {"binary": clicks, "softmax": ["accuracy", "logloss"], "squared_log": ["squared_loss"]}
  names = [(name, metric) for name, label in labels.items() for metric in by_loss[label.loss]]
  return [f"{name}_{metric}" for name, metric in names] + ["logloss"]


def named(labels: Labels, scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
  """Returns the metrics of labels under their names, and the weighted sum of all losses.

  One label of clicks keeps the metrics' own names.

  >>> scores = {"seen": {"auc": 0.5, "logloss": 0.75}, "liked": {"auc": 0.5, "logloss": 0.25}}
  >>> named({"seen": Label(), "liked": Label(weight=2.0)}, scores)["logloss"]
  1.25
  """
  if is_one_click(labels):
    return dict(*scores.values())
  named = {f"{n}_{metric}": value for n, own in scores.items() for metric, value in own.items()}
  losses = {f"{name}_{label.metric}": label.weight for name, label in labels.items()}
  if not losses.keys() <= named.keys():
    return named
  return named | {"logloss": sum(weight * named[loss] for loss, weight in losses.items())}
