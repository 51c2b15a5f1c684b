"""A float64 NumPy model of lookups, row optimizers and dense heads, for the fuzzers.

Lookups and heads are written from the formulas alone, so that each function can be checked by eye;
rows are stepped by `embed.tools.reference`, which recorded cases hold. All of it is in float64.
"""

import numpy as np

from embed.tools import reference

# --- lookups --------------------------------------------------------------------------------------


class Lookup:
  """The ids of one feature of one batch: occurrence `k` belongs to output position `position[k]`.

  Args:
    shape: of the activations, without dim.
    occurrences: `(position, id, weight)` in batch order; padding is left out.
    combines: False for positions that hold one id each, where the weight plays no part.
  """

  def __init__(self, shape, occurrences, combines=True):
    self.shape, self.combines = tuple(shape), combines
    self.position = np.array([o[0] for o in occurrences], np.int64)
    self.ids = np.array([o[1] for o in occurrences], np.int64)
    self.weights = np.array([o[2] for o in occurrences], np.float64)

  def gains(self, combiner):
    """sum: w; mean: w / sum(w); sqrtn: w / sqrt(sum(w * w)), and 0 where that divides by 0."""
    w = self.weights
    if combiner == "sum" or not self.combines:
      return w
    total = np.zeros(int(np.prod(self.shape)))
    np.add.at(total, self.position, w if combiner == "mean" else w * w)
    divisor = total if combiner == "mean" else np.sqrt(total)
    own = divisor[self.position]
    return np.divide(w, own, out=np.zeros_like(w), where=own != 0)

  def activations(self, rows, combiner):
    out = np.zeros((int(np.prod(self.shape)), rows.shape[1]))
    np.add.at(out, self.position, self.gains(combiner)[:, None] * rows[self.ids])
    return out.reshape(*self.shape, rows.shape[1])

  def row_gradients(self, grad, combiner):
    """The gradient of each occurrence's row, in batch order."""
    flat = grad.reshape(-1, grad.shape[-1])
    return self.gains(combiner)[:, None] * flat[self.position]


# --- row optimizers -------------------------------------------------------------------------------

# Hyperparameters that the reference asks for, or has another default of.
DEFAULTS = {
  "momentum": {"momentum": 0.9},
  "rmsprop": {"rho": 0.9, "momentum": 0.0, "epsilon": 1e-7},
  "lion": {"beta1": 0.9, "beta2": 0.99},
}


def at(value, step):
  return float(value(step)) if callable(value) else value


class Table:
  """Rows and slots of one table, and its optimizer `(name, arguments)`."""

  def __init__(self, rows, optimizer):
    self.name, arguments = optimizer
    self.arguments = DEFAULTS.get(self.name, {}) | arguments
    self.variables = {"parameters": np.array(rows, np.float64)}
    if self.name != "frozen":
      self.variables = reference.initial_variables(self.name, rows, **arguments)

  @property
  def rows(self):
    return self.variables["parameters"]

  def step(self, ids, grads, number, noise=0.0):
    """One step from the gradients `[N, D]` of the occurrences `ids`, in batch order.

    `noise` shifts each gradient that is not 0 by a multiple of the largest.
    """
    if self.name == "frozen":
      return
    config = {key: at(x, number) for key, x in self.arguments.items()}
    lr, multiplier = config.pop("learning_rate"), config.pop("gradient_multiplier", 1.0)
    grads = grads * multiplier
    if config.get("use_gradient_accumulation", True):
      touched, total = np.unique(ids), np.zeros_like(self.rows)
      np.add.at(total, ids, grads)
      parts = [(touched, shifted(total, noise)[touched])]
    else:
      parts = [(ids[n : n + 1], shifted(grads[n : n + 1], noise)) for n in range(len(ids))]
    for rows, g in parts:
      if self.name == "ftrl" and noise:
        self._blur(rows, g, lr, noise / 10)
      self.variables = reference.apply_rows(self.name, self.variables, rows, g, lr, **config)

  def _blur(self, rows, g, lr, noise):
    """Perturbs a power that FTRL subtracts a nearly equal one from, relatively."""
    h, v = self.arguments, self.variables
    by_rate = 1 if h.get("multiply_linear_by_learning_rate") else lr
    power = (v["accumulators"][rows] + g * g) ** -h.get("learning_rate_power", -0.5)
    v["linears"][rows] -= noise * power * v["parameters"][rows] / by_rate


def shifted(g, noise):
  """Gradients that differ as two programs' rounding may make them differ."""
  if not noise or not g.size:
    return g
  return g + noise * np.max(np.abs(g)) * (g != 0)


# --- dense heads: reverse-mode differentiation of arrays ------------------------------------------


class Node:
  """An array that remembers how it was made; `parents` pairs inputs with their vector-Jacobian."""

  def __init__(self, value, parents=()):
    self.value, self.parents = np.asarray(value, np.float64), parents


def gradients(loss, wanted):
  """The gradient of the scalar `loss` for each of the nodes `wanted`."""
  order, seen = [], set()

  def visit(node):
    if id(node) not in seen:
      seen.add(id(node))
      for parent, _ in node.parents:
        visit(parent)
      order.append(node)

  visit(loss)
  grads = {id(loss): np.ones(())}
  for node in reversed(order):
    for parent, vjp in node.parents:
      if id(node) in grads:
        grads[id(parent)] = grads.get(id(parent), 0.0) + vjp(grads[id(node)])
  return [np.broadcast_to(grads.get(id(n), 0.0), n.value.shape).copy() for n in wanted]


def _sum_to(g, shape):
  """Undoes broadcasting."""
  g = g.sum(axis=tuple(range(g.ndim - len(shape))))
  return g.sum(
    axis=tuple(i for i, d in enumerate(shape) if d == 1 and g.shape[i] != 1), keepdims=True
  )


def add(a, b):
  shapes = a.value.shape, b.value.shape
  return Node(
    a.value + b.value,
    [(a, lambda g: _sum_to(g, shapes[0])), (b, lambda g: _sum_to(g, shapes[1]))],
  )


def mul(a, b):
  return Node(
    a.value * b.value,
    [
      (a, lambda g: _sum_to(g * b.value, a.value.shape)),
      (b, lambda g: _sum_to(g * a.value, b.value.shape)),
    ],
  )


def scale(a, factor):
  return Node(a.value * factor, [(a, lambda g: g * factor)])


def einsum(spec, a, b):
  """`np.einsum` where every index of one input is in the other or in the output."""
  inputs, out = spec.split("->")
  left, right = inputs.split(",")
  return Node(
    np.einsum(spec, a.value, b.value),
    [
      (a, lambda g: np.einsum(f"{out},{right}->{left}", g, b.value)),
      (b, lambda g: np.einsum(f"{out},{left}->{right}", g, a.value)),
    ],
  )


def elementwise(a, value, slope):
  return Node(value, [(a, lambda g: g * slope)])


def tanh(a):
  y = np.tanh(a.value)
  return elementwise(a, y, 1 - y * y)


def exp(a):
  y = np.exp(a.value)
  return elementwise(a, y, y)


def power(a, p):
  return elementwise(a, a.value**p, p * a.value ** (p - 1))


def softplus(a):
  return elementwise(a, np.logaddexp(a.value, 0), 1 / (1 + np.exp(-a.value)))


def total(a, axis=None, keepdims=False):
  expand = lambda g: g if keepdims or axis is None else np.expand_dims(g, axis)
  return Node(
    a.value.sum(axis=axis, keepdims=keepdims),
    [(a, lambda g: np.broadcast_to(expand(g), a.value.shape))],
  )


def linear(x, kernel, bias):
  axes = "abc"[: x.value.ndim - 1]
  return add(einsum(f"{axes}d,dh->{axes}h", x, kernel), bias)


def layer_norm(x, weight, bias, epsilon):
  size = x.value.shape[-1]
  centred = add(x, scale(total(x, -1, True), -1 / size))
  variance = scale(total(mul(centred, centred), -1, True), 1 / size)
  normed = mul(centred, power(add(variance, Node(epsilon)), -0.5))
  return add(mul(normed, weight), bias)


def softmax(x):
  if not x.value.size:
    return x
  top = x.value.max(axis=-1, keepdims=True)
  e = exp(add(x, Node(-top)))
  return mul(e, power(total(e, -1, True), -1))
