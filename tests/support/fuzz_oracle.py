"""A float64 NumPy model of lookups, row optimizers and dense heads, for the fuzzers.

Written from the formulas alone and independent of `embed.tools.reference`. Every quantity is
float64 and every row is stepped by the equation in its docstring, so that each function can be
checked by eye.
"""

import numpy as np

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

SLOTS = {
  "sgd": {},
  "adagrad": {"accumulators": 0.1},
  "rowwise_adagrad": {"accumulators": 0.1},
  "adagrad_momentum": {"accumulators": 0.0, "momenta": 0.0},
  "ftrl": {"accumulators": 0.1, "linears": 0.0},
  "adam": {"momenta": 0.0, "velocities": 0.0},
  "momentum": {"momenta": 0.0},
  "rmsprop": {"ms": 0.0, "mom": 0.0},
  "proximal_adagrad": {"accumulators": 0.1},
  "lion": {"momenta": 0.0},
  "frozen": {},
}


def equation(name, h, g, w, s, lr, noise=0.0):
  """One step of rows `[N, D]`; `h` holds hyperparameters, defaults where one is missing.

  `noise` perturbs, relatively, what a difference of two nearly equal numbers is taken of.
  """
  if name == "sgd":  # w -= lr g
    return w - lr * g, {}
  if name == "adagrad":  # a += g²; w -= lr g / sqrt(a)
    a = s["accumulators"] + g * g
    return w - lr * g / np.sqrt(a), {"accumulators": a}
  if name == "rowwise_adagrad":  # a += mean(g²); w -= lr g / (sqrt(a) + epsilon)
    a = s["accumulators"] + np.mean(g * g, axis=1)
    return w - lr * g / (np.sqrt(a) + h.get("epsilon", 0.0))[:, None], {"accumulators": a}
  if name == "adagrad_momentum":
    # a = a + g² or a mean of it; s = (a + epsilon)^(-1 / exponent) g; m = momentum m + s; w -= lr m
    a, beta2, mu = s["accumulators"], h.get("beta2", 1.0), h.get("momentum", 0.0)
    a = a + g * g if beta2 == 1 else beta2 * a + (1 - beta2) * g * g
    scaled = (a + h.get("epsilon", 1e-10)) ** (-1 / h.get("exponent", 2.0)) * g
    m = mu * s["momenta"] + scaled
    move = mu * m + scaled if h.get("use_nesterov", False) else m
    return w - lr * move, {"accumulators": a, "momenta": m}
  if name == "ftrl":
    # d = a'^p - a^p; z += g - d w / lr; w = (clip(z, -l1, l1) - z) / ((a'^p + beta) / lr + 2 l2)
    p = -h.get("learning_rate_power", -0.5)
    l1, l2 = h.get("l1_regularization_strength", 0.0), h.get("l2_regularization_strength", 0.0)
    a, z, beta = s["accumulators"], s["linears"], h.get("beta", 0.0)
    new = a + g * g
    d = new**p * (1 + noise) - a**p
    if h.get("multiply_linear_by_learning_rate", False):
      z = z + lr * g - d * w
      w = (np.clip(z, -lr * l1, lr * l1) - z) / (new**p + 2 * lr * l2 + beta)
    else:
      z = z + g - d * w / lr
      w = (np.clip(z, -l1, l1) - z) / ((new**p + beta) / lr + 2 * l2)
    return w, {"accumulators": new, "linears": z}
  if name == "adam":  # no bias correction; epsilon inside the root or outside
    b1, b2, eps = h.get("beta_1", 0.9), h.get("beta_2", 0.999), h.get("epsilon", 1e-7)
    m = b1 * s["momenta"] + (1 - b1) * g
    v = b2 * s["velocities"] + (1 - b2) * g * g
    inside = h.get("sum_inside_sqrt", True)
    divisor = np.sqrt(v + eps**2) if inside else np.sqrt(v) + eps
    return w - lr * m / divisor, {"momenta": m, "velocities": v}
  if name == "momentum":  # m = mu m + g; w -= lr m, or lr (g + mu m)
    mu = h.get("momentum", 0.9)
    m = mu * s["momenta"] + g
    return w - lr * (g + mu * m if h.get("use_nesterov", False) else m), {"momenta": m}
  if name == "rmsprop":  # ms += (1 - rho)(g² - ms); mom = mu mom + lr g / sqrt(ms + eps); w -= mom
    ms = s["ms"] + (1 - h.get("rho", 0.9)) * (g * g - s["ms"])
    mom = h.get("momentum", 0.0) * s["mom"] + lr * g / np.sqrt(ms + h.get("epsilon", 1e-7))
    return w - mom, {"ms": ms, "mom": mom}
  if name == "proximal_adagrad":  # u = w - eta g; w = sign(u) max(|u| - eta l1, 0) / (1 + eta l2)
    a = s["accumulators"] + g * g
    eta = lr / np.sqrt(a)
    u = w - eta * g
    l1, l2 = h.get("l1_regularization_strength", 0.0), h.get("l2_regularization_strength", 0.0)
    return np.sign(u) * np.maximum(np.abs(u) - eta * l1, 0) / (1 + eta * l2), {"accumulators": a}
  if name == "lion":  # w -= lr sign(b1 m + (1 - b1) g); m = b2 m + (1 - b2) g
    b1, b2, m = h.get("beta1", 0.9), h.get("beta2", 0.99), s["momenta"]
    move = np.sign(b1 * m + (1 - b1) * g)
    return w - lr * move, {"momenta": b2 * m + (1 - b2) * g}
  raise ValueError(f"no equation for {name}")


def at(value, step):
  return float(value(step)) if callable(value) else value


class Table:
  """Rows and slots of one table, and its optimizer `(name, arguments)`."""

  def __init__(self, rows, optimizer):
    self.name, self.arguments = optimizer
    self.rows = np.array(rows, np.float64)
    self.slots = {}
    for slot, default in SLOTS[self.name].items():
      initial = self.arguments.get("initial_accumulator_value", default)
      shape = self.rows.shape[:1] if self.name == "rowwise_adagrad" else self.rows.shape
      self.slots[slot] = np.full(shape, initial if slot == "accumulators" else default)

  def arrays(self):
    return {"parameters": self.rows, **self.slots}

  def step(self, ids, grads, number, noise=0.0):
    """One step from the gradients `[N, D]` of the occurrences `ids`, in batch order.

    `noise` shifts each gradient that is not 0 by a multiple of the largest.
    """
    if self.name == "frozen":
      return
    multiplier = self.arguments.get("gradient_multiplier")
    if multiplier is not None:
      grads = grads * at(multiplier, number)
    if not self.arguments.get("use_gradient_accumulation", True):
      for id_, g in zip(ids, grads, strict=True):
        self._move(np.array([id_]), shifted(g[None], noise), number, noise)
      return
    every = self.name == "adam" and not self.arguments.get("lazy_adam", True)
    touched = np.arange(len(self.rows)) if every else np.unique(ids)
    total = np.zeros_like(self.rows)
    np.add.at(total, ids, grads)
    self._move(touched, shifted(total, noise)[touched], number, noise)

  def _move(self, touched, g, number, noise):
    h = self.arguments
    lr = at(h["learning_rate"], number)
    clip = h.get("clipvalue")
    if clip is not None:
      low, high = clip if isinstance(clip, tuple) else (-clip, clip)
      g = np.clip(g, -np.inf if low is None else low, np.inf if high is None else high)
    w = self.rows[touched]
    decay = h.get("weight_decay_factor")
    if decay:
      by_rate = h.get("multiply_weight_decay_factor_by_learning_rate", False)
      w = w - (decay * lr if by_rate else decay) * w
    slots = {name: slot[touched] for name, slot in self.slots.items()}
    w, slots = equation(self.name, h, g, w, slots, lr, noise / 10)
    low, high = h.get("clip_weight_min"), h.get("clip_weight_max")
    w = np.clip(w, -np.inf if low is None else low, np.inf if high is None else high)
    self.rows[touched] = w
    for name, value in slots.items():
      self.slots[name][touched] = value


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
