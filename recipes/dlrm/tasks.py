"""Several labels of one model: structures of heads, losses and metrics.

A label is a task; `tables.spec.Label` has its options. B is the batch, H the backbone's features, T
the number of labels, O of outputs: one of a label, or as many as it has classes. A label that does
not count in a row, since its value is missing or its mask is not 1, is NaN there.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from scipy.special import logit

from ..errors import UserError
from ..evaluation.groups import Groups, group_metrics
from ..evaluation.metrics import CLICK_NAMES, click_metrics, reliability
from ..tables.spec import Label, is_one_click
from ..training import layers, losses

Labels = Mapping[str, Label]
ONE_CLICK: Labels = {"label": Label()}
_NO_GROUPS = Groups()
_TINY = 1e-30  # a batch in which a label never counts has no loss, and no gradient


def num_outputs(labels: Labels) -> int:
  """Returns O."""
  return sum(label.num_outputs for label in labels.values())


# --- heads ----------------------------------------------------------------------------------------


class Extraction(nnx.Module):
  """Experts, which are MLPs, and for each task a gate that mixes its own and the shared ones.

  `y[k] = softmax(W[k] x[k] + b[k]) · experts(x[k])` over the experts that the gate of task k sees.
  Without experts of a task's own it is MMoE's (Ma et al. 2018, "Modeling Task Relationships in
  Multi-task Learning with Multi-gate Mixture-of-Experts", equations 6 and 7), with them a level of
  PLE (Tang et al. 2020, "Progressive Layered Extraction", equations 1 to 6). A level that is not
  the last also mixes all experts, for the shared experts of the next one.

  Args:
    width: W of the inputs `[B, W]`.
    num_tasks: T.
    own: experts of each task.
    shared: experts that all gates see.
    sizes: widths of an expert.
    is_last: whether no level follows.
  """

  def __init__(
    self, width: int, num_tasks: int, own: int, shared: int, sizes: Sequence[int], is_last: bool,
    *, dropout: float, dtype: Any, rngs: nnx.Rngs,
  ):  # fmt: skip
    expert = lambda: layers.MLP(width, sizes, dropout=dropout, dtype=dtype, rngs=rngs)
    experts = lambda number: nnx.List(expert() for _ in range(number))
    self.own, self.shared = nnx.List(experts(own) for _ in range(num_tasks)), experts(shared)
    seen = [own + shared] * num_tasks + [num_tasks * own + shared] * (not is_last)
    self.gates = nnx.List(nnx.Linear(width, number, rngs=rngs) for number in seen)

  def __call__(self, inputs: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns `[B, W']` of each task, and of the shared experts where a level follows.

    Args:
      inputs: `[B, W]` of each task, and of the shared experts.
    """
    shared = [expert(inputs[-1]) for expert in self.shared]
    own = [[expert(x) for expert in each] for each, x in zip(self.own, inputs, strict=False)]
    seen = [[*each, *shared] for each in own] + [[*(y for each in own for y in each), *shared]]
    return [
      jnp.einsum("be,ebw->bw", weights, jnp.stack(experts))
      for weights, experts in zip(self.weights(inputs), seen, strict=False)
    ]

  def weights(self, inputs: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns what each gate gives its experts `[B, experts]`, which sums to 1."""
    return [jax.nn.softmax(gate(x)) for gate, x in zip(self.gates, inputs, strict=False)]


class Towers(nnx.Module):
  """Levels of experts, and a tower with the outputs of each label; `[B, H]` to `[B, O]`.

  Args:
    width: H.
    levels: by level, experts of each label and shared ones; none is a shared bottom.
    expert: widths of an expert.
    tower: widths of a tower before its outputs.
    dropout: rate, after the layers of experts and towers.
    dtype: of the computation; outputs are float32.
  """

  def __init__(
    self,
    width: int,
    labels: Labels,
    levels: Sequence[tuple[int, int]],
    *,
    expert: Sequence[int],
    tower: Sequence[int],
    dropout: float,
    dtype: Any,
    rngs: nnx.Rngs,
  ):
    options: Any = {"dropout": dropout, "dtype": dtype, "rngs": rngs}
    self.levels: nnx.List[Extraction] = nnx.List()
    for place, (own, shared) in enumerate(levels):
      is_last = place == len(levels) - 1
      level = Extraction(width, len(labels), own, shared, expert, is_last, **options)
      self.levels.append(level)
      width = expert[-1] if expert else width
    self.towers = nnx.List(layers.MLP(width, tower, **options) for _ in labels)
    self.out = nnx.List(
      nnx.Linear(mlp.out_features, label.num_outputs, rngs=rngs)
      for mlp, label in zip(self.towers, labels.values(), strict=True)
    )

  def __call__(self, hidden: jax.Array) -> jax.Array:
    inputs = [hidden] * (len(self.out) + 1)
    for level in self.levels:
      inputs = level(inputs)
    towers = zip(self.out, self.towers, inputs, strict=False)
    return jnp.concatenate([out(tower(x)) for out, tower, x in towers], axis=1)


def head(
  labels: Labels,
  structure: str,
  *,
  experts: int,
  own_experts: int,
  levels: int,
  expert: Sequence[int],
  tower: Sequence[int],
  dropout: float,
  dtype: Any,
) -> Any:
  """Returns what makes a head, `(H, rngs=rngs) -> module`, by `config.tasks`.

  Raises:
    UserError: the structure is unknown, or has no experts.
  """
  known: dict[str, list[tuple[int, int]]] = {
    "shared_bottom": [],
    "mmoe": [(0, experts)],
    "ple": [(own_experts, experts)] * levels,
  }
  if structure not in known:
    raise UserError(f"config.tasks.structure is {structure!r}: choose {', '.join(known)}")
  if structure != "shared_bottom" and not (known[structure] and experts > 0 and own_experts > 0):
    raise UserError("config.tasks: experts, own_experts and levels are 1 or more")
  if structure == "shared_bottom" and not tower:
    return functools.partial(nnx.Linear, out_features=num_outputs(labels))
  sizes: Any = {"expert": expert, "tower": tower, "dropout": dropout, "dtype": dtype}
  return functools.partial(Towers, labels=labels, levels=known[structure], **sizes)


# --- losses ---------------------------------------------------------------------------------------


def loss_of(label: Label, outputs: Any, targets: Any) -> jax.Array:
  """Returns the loss of each row `[B]`.

  Args:
    outputs: `[B, O of the label]`: a logit, a logit of each class, or log(1 + value).
    targets: `[B]`: 0 or 1, the number of the class, or log(1 + value).

  >>> out, target = jnp.array([[0.0], [2.0]]), jnp.array([1.0, 1.0])
  >>> loss_of(Label(loss="squared_log"), out, target).tolist()
  [1.0, 1.0]
  """
  if label.loss == "softmax":
    return losses.cross_entropy(outputs, targets.astype(jnp.int32))
  if label.loss == "squared_log":
    return jnp.square(outputs[:, 0] - targets)
  return optax.sigmoid_binary_cross_entropy(outputs[:, 0], targets)


def cut(labels: Labels, outputs: Any, targets: Any) -> Iterator[tuple[Any, ...]]:
  """Yields of each label its name, options, outputs, targets and whether it counts, bool `[B]`.

  Args:
    outputs: `[B]` or `[B, O]`.
    targets: `[B]` or `[B, T]`, NaN where a label does not count, which is 0 in what is yielded.
  """
  outputs, targets = (x.reshape(len(x), -1) for x in (outputs, targets))
  at = 0
  for place, (name, label) in enumerate(labels.items()):
    own, target = outputs[:, at : at + label.num_outputs], targets[:, place]
    counts = ~jnp.isnan(target)
    yield name, label, own, jnp.where(counts, target, 0), counts
    at += label.num_outputs


def loss_fn(model: Any, batch: Any, *, labels: Labels) -> Any:
  """Returns the sum of the labels' losses, each by its weight, and the losses by name.

  A label's loss is a mean over the rows in which it counts, by `weight` if there is one.

  Args:
    model: returns `[B]` or `[B, O]`.
    batch: has `label` `[B]` or `[B, T]`, NaN where a label does not count.
    labels: in the order of the columns of `label`.
  """
  rows = batch.get("weight", jnp.ones(len(batch["label"]), jnp.float32))
  metrics, total = {}, jnp.float32(0)
  for name, label, outputs, targets, counts in cut(labels, model(batch), batch["label"]):
    weights = jnp.where(counts, rows, 0)
    of_rows = loss_of(label, outputs, targets) * weights
    metrics[f"{name}_loss"] = jnp.sum(of_rows) / jnp.maximum(jnp.sum(weights), _TINY)
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
) -> dict[str, Any]:
  """Returns the metrics of all rows of a split by name, and `reliability`, an array.

  Of clicks those of `click_metrics` and `group_metrics`, of classes `logloss` and `accuracy`, of a
  regression `squared_loss`, the mean of the squared errors of log(1 + value), of which none below 0
  is served. One label of clicks has them by these names; several have them under their own names,
  and `logloss` is the weighted sum of their losses.

  Args:
    labels: in the order of the columns of `targets`.
    outputs: float `[N]` or `[N, O]`.
    targets: `[N]` or `[N, T]`, NaN where a label does not count.
    weights: float `[N]`, how often a row counts.
    groups, ids: see `group_metrics`.
  """
  scores: dict[str, dict[str, Any]] = {}
  for name, label, *rows in cut(labels, outputs, targets):
    own, target, counts = map(np.asarray, rows)
    counts = counts & (weights > 0)
    own, target, amount = own[counts], target[counts], weights[counts]
    if label.loss == "binary":
      examples = own[:, 0], target, amount
      scores[name] = click_metrics(*examples)
      if len(target):
        scores[name]["reliability"] = reliability(*examples)
        scores[name] |= group_metrics(groups, *examples, {k: x[counts] for k, x in ids.items()})
      continue
    own = np.maximum(own, 0) if label.loss == "squared_log" else own
    mean = lambda x, amount=amount: float(np.average(x, weights=amount))
    scores[name] = {label.metric: mean(np.asarray(loss_of(label, own, target)))}
    if label.loss == "softmax":
      scores[name]["accuracy"] = mean(own.argmax(axis=1) == target)
  return named(labels, scores)


def of_served(labels: Labels, scores: np.ndarray) -> np.ndarray:
  """Returns outputs that give what is served: probabilities, probabilities of classes, and values.

  Args:
    labels: of the model.
    scores: float `[N]` or `[N, O]`.
  """
  inverse = {"binary": logit, "softmax": np.log, "squared_log": np.log1p}
  parts, start = [], 0
  for label in labels.values():
    own = scores.reshape(len(scores), -1)[:, start : start + label.num_outputs]
    parts.append(inverse[label.loss](np.asarray(own, np.float64)))
    start += label.num_outputs
  return np.concatenate(parts, axis=1)


def metric_names(labels: Labels, groups: Groups = _NO_GROUPS) -> list[str]:
  """Returns the names of what a run is measured by."""
  if is_one_click(labels):
    return [*CLICK_NAMES, *groups.names]
  of = {"binary": [*CLICK_NAMES, *groups.names], "softmax": ["accuracy", "logloss"]}
  own = lambda label: of.get(label.loss, [label.metric])
  return [f"{name}_{each}" for name, label in labels.items() for each in own(label)] + ["logloss"]


def named(labels: Labels, scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
  """Returns the metrics of labels under their names, and the weighted sum of all losses.

  Those of one label of clicks alone have their own names.

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
