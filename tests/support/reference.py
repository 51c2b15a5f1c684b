"""Reference for the tests: the library's computations in slow float64 NumPy.

Three parts, each to be read from top to bottom:

  inputs      -> the row, gain and output position of each id (`occurrences`)
  occurrences -> activations (`lookup`) and one gradient per touched row (`row_gradients`)
  gradients   -> optimizers, one function each, and the arguments they share (`apply_rows`)

Of the library it uses the kinds of inputs alone. To add an optimizer, write its update and its line
in `RULES`.
"""

import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

import embed

# ------------------------------------------------------------------------------ inputs


class Occurrences(NamedTuple):
  """activations[position[n]] += gain[n] * table[id[n]], in batch order, without padding."""

  shape: tuple[int, ...]  # of the activations, without dim
  positions: np.ndarray
  ids: np.ndarray
  gains: np.ndarray


def entries(inputs, weights=None):
  """(leading shape, [(bag, column, id, weight), ...]); negative ids are padding."""
  values = np.asarray(inputs.values)
  of_ids = np.ones(values.shape) if weights is None else np.asarray(weights.values)
  if isinstance(inputs, embed.Padded):
    lead, indices = values.shape[:-1], list(np.ndindex(values.shape))
  elif isinstance(inputs, embed.Ragged):  # values after the last split are padding
    splits = [int(s) for s in inputs.row_splits]
    lead = (len(splits) - 1,)
    indices = [(b, k - splits[b]) for b in range(*lead) for k in range(splits[b], splits[b + 1])]
  else:
    lead, indices = tuple(inputs.dense_shape[:-1]), np.asarray(inputs.indices)
  cells = zip(indices, values.reshape(-1), of_ids.reshape(-1), strict=False)
  return lead, [
    (int(np.ravel_multi_index(tuple(index[:-1]), lead)), int(index[-1]), int(i), float(w))
    for index, i, w in cells
    if i >= 0
  ]


def as_kind(kind, values, weights):
  """[B, L] ids with -1 as padding, and weights or None, as "padded", "sparse" or "ragged" ones."""
  if kind == "padded":
    wrap = embed.Padded
  elif kind == "sparse":
    # Some cells of padding stay, as ids of -1: three shapes, each of which is compiled.
    used, padding = np.argwhere(values >= 0), np.argwhere(values < 0)
    number = next(n for n in (0, values.size // 2, values.size) if n >= len(used))
    indices = np.concatenate([used, padding[: number - len(used)]]).astype(np.int32)
    indices = indices[np.lexsort(indices.T[::-1])]
    wrap = lambda x: embed.Sparse(indices, x[tuple(indices.T)], values.shape)
  else:  # trailing padding goes, holes stay; what lies behind the last split must not matter
    lengths = [int(np.max(np.flatnonzero(bag >= 0), initial=-1)) + 1 for bag in values]
    splits = np.cumsum([0, *lengths]).astype(np.int32)
    pack = lambda rows: [row[:n] for row, n in zip(rows, lengths, strict=True)]
    wrap = lambda x: embed.Ragged(np.concatenate([*pack(x), x.reshape(-1)])[: x.size], splits)
  return wrap(values), None if weights is None else wrap(weights)


def occurrences(inputs, weights=None, combiner="sum", length=0, output_shape=None):
  """The ids that are looked up: also with weight 0, but neither truncated ones nor padding.

  `inputs` and `weights` are a layer's; `length` is the feature's `max_sequence_length`.
  """
  if isinstance(inputs, np.ndarray):  # one id per position; a trailing axis of 1 is dropped
    shape = inputs.shape[:-1] if inputs.ndim > 1 and inputs.shape[-1] == 1 else inputs.shape
    ids = inputs.reshape(-1)
    (positions,) = np.nonzero(ids >= 0)
    return Occurrences(shape, positions, ids[positions], np.ones(len(positions)))
  shape, cells = entries(inputs, weights)
  if output_shape is None and length and len(shape) == 1:  # a position is a column
    cells = [cell for cell in cells if cell[1] < length]
    positions, gains = [b * length + column for b, column, _, _ in cells], [1.0] * len(cells)
    shape = (*shape, length)
  else:
    positions = [b for b, _, _, _ in cells]
    gains = _gains(combiner, positions, [w for _, _, _, w in cells])
    shape = shape if output_shape is None else tuple(output_shape)
  ids = [i for _, _, i, _ in cells]
  return Occurrences(shape, np.array(positions, int), np.array(ids, int), np.array(gains, float))


def _gains(combiner, bags, weights):
  """sum: w; mean: w / sum(w); sqrtn: w / sqrt(sum(w * w)); 0 if the denominator is 0."""
  bags, weights = np.array(bags, int), np.array(weights, float)
  if combiner == "sum" or not len(bags):
    return weights
  total = np.zeros(bags.max() + 1)
  np.add.at(total, bags, weights if combiner == "mean" else weights**2)
  denominator = total[bags] if combiner == "mean" else np.sqrt(total[bags])
  return np.divide(weights, denominator, out=np.zeros_like(weights), where=denominator != 0)


# ------------------------------------------------------------- activations and row gradients


def lookup(table, occ):
  """[*shape, dim]; a position without an id is 0."""
  table = np.asarray(table, np.float64)
  activations = np.zeros((int(np.prod(occ.shape)), table.shape[1]))
  for position, i, gain in zip(occ.positions, occ.ids, occ.gains, strict=True):
    activations[position] += gain * table[i]
  return activations.reshape(*occ.shape, table.shape[1])


def occurrence_gradients(occ, cotangent):
  """(ids [N], gradients [N, dim]) of all occurrences in batch order, not summed."""
  flat = np.asarray(cotangent, np.float64).reshape(int(np.prod(occ.shape)), -1)
  return occ.ids, occ.gains[:, None] * flat[occ.positions]


def row_gradients(ids, gradients):
  """{row: gradient}, summed over duplicates. The keys are all touched rows, even if a sum is 0."""
  rows: dict[int, Any] = {}
  for i, gradient in zip(ids, gradients, strict=True):
    rows[int(i)] = rows.get(int(i), 0.0) + gradient
  return rows


# -------------------------------------------------------------------------- optimizers
# update(w, g, lr, *slots, h) -> (new w, *new slots), of one row; h has the hyperparameters


def sgd(w, g, lr, h):
  return (w - lr * g,)


def adagrad(w, g, lr, a, h):
  a = a + g**2
  return w - lr * g / (np.sqrt(a) + h.epsilon), a


def rowwise_adagrad(w, g, lr, a, h):
  a = a + np.mean(g**2)
  return w - lr * g / (np.sqrt(a) + h.epsilon), a


def adagrad_momentum(w, g, lr, a, m, h):
  a = a + g**2 if h.beta2 == 1 else h.beta2 * a + (1 - h.beta2) * g**2
  scaled = (a + h.epsilon) ** (-1 / h.exponent) * g
  m = h.momentum * m + scaled
  return w - lr * (h.momentum * m + scaled if h.use_nesterov else m), a, m


def ftrl(w, g, lr, a, z, h):
  p, l1, l2 = -h.learning_rate_power, h.l1_regularization_strength, h.l2_regularization_strength
  a_new = a + g**2
  delta = a_new**p - a**p
  if h.multiply_linear_by_learning_rate:
    z = z + lr * g - delta * w
    w = (np.clip(z, -lr * l1, lr * l1) - z) / (a_new**p + 2 * lr * l2 + h.beta)
  else:
    z = z + g - delta * w / lr
    w = (np.clip(z, -l1, l1) - z) / ((a_new**p + h.beta) / lr + 2 * l2)
  return w, a_new, z


def adam(w, g, lr, m, v, h):
  m = h.beta_1 * m + (1 - h.beta_1) * g
  v = h.beta_2 * v + (1 - h.beta_2) * g**2
  root = np.sqrt(v + h.epsilon**2) if h.sum_inside_sqrt else np.sqrt(v) + h.epsilon
  return w - lr * m / root, m, v


class Equation(NamedTuple):
  """An optimizer: its update of a row, slots and hyperparameters."""

  update: Callable
  slots: dict[str, float]  # initial values, in checkpoint order
  hyperparameters: Mapping[str, Any] = types.MappingProxyType({})  # defaults
  per_row: bool = False  # slots of shape [V] instead of [V, dim]


_ADAGRAD_MOMENTUM = {
  "momentum": 0.0, "use_nesterov": False, "exponent": 2.0, "beta2": 1.0, "epsilon": 1e-10,
}  # fmt: skip
_FTRL = {
  "learning_rate_power": -0.5, "l1_regularization_strength": 0.0,
  "l2_regularization_strength": 0.0, "beta": 0.0, "multiply_linear_by_learning_rate": False,
}  # fmt: skip
_ADAM = {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "sum_inside_sqrt": True}
RULES = {
  "sgd": Equation(sgd, {}),
  "adagrad": Equation(adagrad, {"accumulators": 0.1}, {"epsilon": 0.0}),
  "rowwise_adagrad": Equation(
    rowwise_adagrad, {"accumulators": 0.1}, {"epsilon": 0.0}, per_row=True
  ),
  "adagrad_momentum": Equation(
    adagrad_momentum, {"accumulators": 0.0, "momenta": 0.0}, _ADAGRAD_MOMENTUM
  ),
  "ftrl": Equation(ftrl, {"accumulators": 0.1, "linears": 0.0}, _FTRL),
  "adam": Equation(adam, {"momenta": 0.0, "velocities": 0.0}, _ADAM),
}


def initial_variables(name, table, **config):
  """{"parameters": [V, dim], slot: ...} before the first step."""
  table = np.asarray(table, np.float64)
  variables = {"parameters": table.copy()}
  for slot, value in RULES[name].slots.items():
    if slot == "accumulators":
      value = config.get("initial_accumulator_value", value)
    variables[slot] = np.full(table.shape[:1] if RULES[name].per_row else table.shape, value)
  return variables


def apply_rows(
  name, variables, ids, gradients, lr, *, clipvalue=None, weight_decay_factor=None,
  multiply_weight_decay_factor_by_learning_rate=None, clip_weight_min=None, clip_weight_max=None,
  initial_accumulator_value=None, **hyperparameters,
):  # fmt: skip
  """Steps once: sum per row -> clip gradient -> decay -> slots -> weights -> clip weights.

  `ids` [N] and `gradients` [N, dim] are occurrences in batch order; a negative id is padding.
  """
  rule = RULES[name]
  if not hyperparameters.keys() <= rule.hyperparameters.keys():
    raise TypeError(f"{hyperparameters}, and the hyperparameters are {rule.hyperparameters}")
  h = types.SimpleNamespace(**(dict(rule.hyperparameters) | hyperparameters))
  is_row = np.asarray(ids) >= 0
  rows = row_gradients(np.asarray(ids)[is_row], np.asarray(gradients, np.float64)[is_row])
  decay = weight_decay_factor or 0.0
  if multiply_weight_decay_factor_by_learning_rate:
    decay = decay * lr
  if not isinstance(clipvalue, tuple | list):
    clipvalue = (None, None) if clipvalue is None else (-clipvalue, clipvalue)

  variables = {key: value.copy() for key, value in variables.items()}
  for row, g in rows.items():
    w = variables["parameters"][row] * (1 - decay)
    slots = [variables[slot][row] for slot in rule.slots]
    w, *slots = rule.update(w, _clip(g, *clipvalue), lr, *slots, h)
    variables["parameters"][row] = _clip(w, clip_weight_min, clip_weight_max)
    for slot, value in zip(rule.slots, slots, strict=True):
      variables[slot][row] = value
  return variables


def _clip(x, low, high):
  """None is unbounded."""
  return np.clip(x, -np.inf if low is None else low, np.inf if high is None else high)
