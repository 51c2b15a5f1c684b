"""The row optimizers: one function each, which states the equation of a row's step.

An equation takes `g` (the row's summed gradient), `w` (the row) and its slots, all `[..., D]` in
float32; slots with one value per row are `[...]`. The first line of a function checks its arguments
by `CHECKS`, and its last line makes the `RowOptimizer`. `OPTIMIZERS` lists the functions for
pickles, `embed.EmbeddingConfigSpec`, `embed.from_tpu_embedding` and error messages.

Formulas, names and defaults are TensorFlow's (SparseCore sources, training kernels) if not noted.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from embed.config import check, setting

Schedule = Callable[[Any], Any]
Rate = float | Schedule
ClipRange = float | tuple[float | None, float | None]
Slots = dict[str, jax.Array]
Equation = Callable[..., tuple[jax.Array, Slots]]


class Common(TypedDict, total=False):
  """The keyword arguments of every optimizer, each None by default; `embed.sgd` documents them."""

  clipvalue: ClipRange | None
  weight_decay_factor: float | None
  multiply_weight_decay_factor_by_learning_rate: bool | None
  clip_weight_min: float | None
  clip_weight_max: float | None


_COMMON: dict[str, Any] = dict.fromkeys(Common.__annotations__)
_OF_FROZEN = _COMMON | {"learning_rate": 0.0}


@dataclasses.dataclass(frozen=True)
class Slot:
  """An optimizer's state per row, for `embed.custom_optimizer`.

  Args:
    initial: the value that every entry starts with.
    per_row: True keeps one value per row, `[V]`, instead of one per element, `[V, D]`.
    dtype: float32, or an integer type for counts.
  """

  initial: float = 0.0
  per_row: bool = False
  dtype: Any = "float32"

  def __post_init__(self):
    object.__setattr__(self, "initial", setting("initial", self.initial))
    check("initial", self.initial, _is_number(self.initial), "a number")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class RowOptimizer:
  """A table's optimizer, made by `embed.sgd`, `embed.custom_optimizer` or another such function.

  Optimizers compare by value, can be pickled and hold no state, so one may serve many tables. Each
  row that was looked up is stepped once: its gradients are summed over all occurrences and clipped
  to `clipvalue`, weight decay and then `equation` are applied, and the row is clipped to
  `clip_weight_min` and `clip_weight_max`. All of this is in float32, for tables of any dtype.

  Attributes:
    name: the name of the function that made it, such as "adagrad".
    arguments: every argument of that function, by name. Each is an attribute too.
    equation: `f(gradients, rows, slots, learning_rate) -> (rows, slots)` on float32 `[..., D]`;
      slots are a dict, with arrays `[...]` if `per_row`; the rate is a scalar. None if frozen.
    slots: `f(dim) -> {name: embed.Slot}`, the state kept per row.
    linear: True if the step of a sum of gradients is the sum of the steps.
    takes_dim: True if `equation` also takes `dim=D`, for rows that a kernel has padded with zeros.
  """

  name: str
  arguments: Mapping[str, Any]
  equation: Equation | None
  slots: Any  # may be given as `{name: Slot or initial value}`
  linear: bool = False
  takes_dim: bool = False

  def __post_init__(self):
    if isinstance(self.slots, Mapping):
      slots = _slots(self.slots)
      object.__setattr__(self, "slots", lambda dim: slots)

  def __getattr__(self, name: str) -> Any:
    for arguments in (self.__dict__.get("arguments", {}), _OF_FROZEN):
      if name in arguments:
        return arguments[name]
    raise AttributeError(f"{self.__dict__.get('name', 'a row optimizer')} has no argument {name!r}")

  def __reduce__(self):
    return _make, (self.name, self.arguments)  # closures do not pickle, their arguments do

  @functools.cached_property
  def _key(self) -> tuple[Any, ...]:
    by_value = lambda x: tuple(sorted(x.items())) if isinstance(x, Mapping) else x
    return (self.name, *((key, by_value(x)) for key, x in sorted(self.arguments.items())))

  def __eq__(self, other: object) -> bool:
    return self._key == other._key if isinstance(other, RowOptimizer) else NotImplemented

  def __hash__(self) -> int:
    return hash(self._key)

  def __repr__(self) -> str:
    given = ", ".join(f"{k}={x!r}" for k, x in self.arguments.items() if x is not None)
    return f"embed.{self.name}({given})"

  def learning_rate_at(self, step: Any) -> Any:
    """The learning rate at the 0-based `step`, a number or a traced scalar."""
    return self.learning_rate(step) if self.has_schedule else self.learning_rate

  @property
  def has_schedule(self) -> bool:
    """True if a step depends on its number, which `apply_gradients` then requires."""
    return callable(self.learning_rate)

  def replace(self, **arguments: Any) -> "RowOptimizer":
    """Makes the same optimizer with other arguments; raises as its function does."""
    return _make(self.name, {**self.arguments, **arguments})


def _make(name: str, arguments: Mapping[str, Any]) -> RowOptimizer:
  return OPTIMIZERS[name](**arguments)


def _slots(slots: Mapping[str, Slot | float]) -> dict[str, Slot]:
  """Slots by name; an initial value becomes a `Slot`."""
  for name, slot in slots.items():
    is_slot = isinstance(slot, Slot) or _is_number(slot)
    check(f"slots[{name!r}]", slot, is_slot, "a number or an embed.Slot")
  return {name: s if isinstance(s, Slot) else Slot(float(s)) for name, s in slots.items()}


# --- arguments -----------------------------------------------------------------------------------


def _is_number(x: Any) -> bool:
  return isinstance(x, int | float) and not isinstance(x, bool)


def _is_rate(x: Any) -> bool:
  return callable(x) or (_is_number(x) and x >= 0)


def _is_clip_range(x: Any) -> bool:
  if _is_number(x):
    return x >= 0
  if not isinstance(x, tuple | list) or len(x) != 2:
    return False
  low, high = (end if v is None else v for v, end in zip(x, (-math.inf, math.inf), strict=True))
  return _is_number(low) and _is_number(high) and low <= high


Check = tuple[Callable[[Any], bool], str]
_NUMBER: Check = (_is_number, "a number")
_BOOL: Check = (lambda x: isinstance(x, bool), "True or False")
_POSITIVE: Check = (lambda x: _is_number(x) and x > 0, "a positive number")
_NOT_NEGATIVE: Check = (lambda x: _is_number(x) and x >= 0, "a number >= 0")
_DECAY: Check = (lambda x: _is_number(x) and 0 <= x < 1, "a number >= 0 and < 1")


def _optional(predicate: Callable[[Any], bool], expected: str) -> Check:
  return lambda x: x is None or predicate(x), f"{expected}, or None"


CHECKS: dict[str, Check] = {  # by argument, or by optimizer and argument
  "learning_rate": (_is_rate, "a number >= 0, or a schedule such as `lambda step: ...`"),
  "clipvalue": _optional(_is_clip_range, "a number >= 0 or (min, max) with min <= max"),
  "weight_decay_factor": _optional(*_NOT_NEGATIVE),
  "multiply_weight_decay_factor_by_learning_rate": _optional(*_BOOL),
  "clip_weight_min": _optional(*_NUMBER),
  "clip_weight_max": _optional(*_NUMBER),
  "initial_accumulator_value": _NOT_NEGATIVE,
  "ftrl initial_accumulator_value": _POSITIVE,
  "epsilon": _POSITIVE,
  "adagrad epsilon": _NOT_NEGATIVE,
  "rowwise_adagrad epsilon": _NOT_NEGATIVE,
  "momentum": _NUMBER,
  "exponent": _POSITIVE,
  "beta": _NUMBER,
  "beta_1": _DECAY,
  "beta_2": _DECAY,
  "beta2": (lambda x: _is_number(x) and 0 < x <= 1, "a number > 0 and <= 1"),
  "learning_rate_power": (lambda x: _is_number(x) and x <= 0, "a number <= 0"),
  "l1_regularization_strength": _NOT_NEGATIVE,
  "l2_regularization_strength": _NOT_NEGATIVE,
  "use_nesterov": _BOOL,
  "multiply_linear_by_learning_rate": _BOOL,
  "allow_zero_accumulator": _BOOL,
  "sum_inside_sqrt": _BOOL,
  "bias_correction": _BOOL,
  "per_row": _BOOL,
  "update": (callable, "a function"),
  "slots": _optional(lambda x: isinstance(x, Mapping), "{name: initial value or embed.Slot}"),
  "tx": (lambda x: hasattr(x, "init"), "an optax transformation such as optax.adam(1e-3)"),
}


def _checked(name: str, key: str, value: Any) -> Any:
  """Checks an argument by its entry in `CHECKS`; returns it, a scalar array as a number."""
  if isinstance(value, nnx.Variable):
    raise ValueError(
      f"Argument `{key}` of {name} is an nnx.Variable, which may change, and no step would see it. "
      "Write a number, or a schedule of the step."
    )
  value = setting(f"{name}: {key}", value)
  is_valid, expected = CHECKS.get(f"{name} {key}") or CHECKS[key]
  check(key, value, is_valid(value), expected)
  return value


def _arguments(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
  """Checks an optimizer's arguments, given as `locals()` in the first line of its function.

  Returns:
    All arguments by name: `clipvalue` as a pair, scalar arrays as numbers. Equations take numbers
    from here, since `1 - beta` would be rounded if `beta` were a bfloat16 scalar.
  """
  arguments = {key: x for key, x in given.items() if key != "common"} | _COMMON
  for key in given["common"]:
    if key not in arguments:
      raise TypeError(f"{name}() has no argument {key!r}. It takes {', '.join(arguments)}.")
  arguments |= given["common"]
  arguments = {key: _checked(name, key, x) for key, x in arguments.items()}
  low, high = arguments["clip_weight_min"], arguments["clip_weight_max"]
  is_range = low is None or high is None or low <= high
  check("clip_weight_min", low, is_range, f"at most clip_weight_max={high}")
  clip = arguments["clipvalue"]
  if clip is not None:
    arguments["clipvalue"] = (-clip, clip) if _is_number(clip) else tuple(clip)
  return arguments


# --- equations -----------------------------------------------------------------------------------


def sgd(learning_rate: Rate = 0.01, **common: Unpack[Common]) -> RowOptimizer:
  """Stochastic gradient descent. No slots.

  The step of a row::

    w -= lr * g

  Every optimizer takes `learning_rate` and, by keyword, `**common`, each None by default:

  Args:
    learning_rate: a number, or a schedule of the 0-based step, such as an optax schedule.
    clipvalue: clips the summed gradient elementwise, before slots are updated: `c` clips it to
      `[-c, c]`, `(min, max)` to that range, where None is no bound.
    weight_decay_factor: decays touched rows by `w -= factor * w`, before the update.
    multiply_weight_decay_factor_by_learning_rate: True decays by `factor * lr * w` instead.
    clip_weight_min, clip_weight_max: bounds that touched rows are clipped to after the update.

  Raises:
    ValueError: naming the invalid argument, and what it must be.
    TypeError: for an argument that the optimizer does not have.
  """
  arguments = _arguments("sgd", locals())
  equation = lambda g, w, s, lr: (w - lr * g, s)
  return RowOptimizer("sgd", arguments, equation, {}, linear=True)


def adagrad(
  learning_rate: Rate = 0.001,
  initial_accumulator_value: float = 0.1,
  epsilon: float = 0.0,
  **common: Unpack[Common],
) -> RowOptimizer:
  """Adagrad (Duchi et al. 2011). Slot `accumulators` (`a`), float32 `[V, D]`.

  The step of a row; as in TensorFlow, `a` is updated first, and epsilon is 0 by default::

    a += g²
    w -= lr * g / (sqrt(a) + epsilon)

  `a` starts at `initial_accumulator_value`; it or epsilon must be positive.
  """
  arguments = _arguments("adagrad", locals())
  initial, epsilon = _divisor(arguments)

  def equation(g, w, s, lr):
    a = s["accumulators"] + g * g
    if epsilon:
      return w - lr * g / (jnp.sqrt(a) + epsilon), {"accumulators": a}
    return w - lr * g * jax.lax.rsqrt(a), {"accumulators": a}

  return RowOptimizer("adagrad", arguments, equation, {"accumulators": initial})


def _divisor(arguments: Mapping[str, Any]) -> tuple[float, float]:
  """Returns Adagrad's initial accumulator value and epsilon; at least one must be positive."""
  initial, epsilon = arguments["initial_accumulator_value"], arguments["epsilon"]
  expected = "positive, or 0 with a positive `epsilon`: a gradient of 0 would divide 0 by 0"
  check("initial_accumulator_value", initial, initial + epsilon > 0, expected)
  return initial, epsilon


def rowwise_adagrad(
  learning_rate: Rate = 0.001,
  initial_accumulator_value: float = 0.1,
  epsilon: float = 0.0,
  **common: Unpack[Common],
) -> RowOptimizer:
  """Row-wise Adagrad: one accumulator per row, `1 / D` of Adagrad's state.

  The step of a row, FBGEMM's EXACT_ROWWISE_ADAGRAD::

    a += mean(g²)  # over the row
    w -= lr * g / (sqrt(a) + epsilon)

  Slot `accumulators`, float32 `[V]`.
  """
  arguments = _arguments("rowwise_adagrad", locals())
  initial, epsilon = _divisor(arguments)

  def equation(g, w, s, lr, dim=None):
    a = s["accumulators"] + jnp.sum(g * g, axis=-1) / (dim or g.shape[-1])
    return w - lr * g / (jnp.sqrt(a) + epsilon)[..., None], {"accumulators": a}

  slots = {"accumulators": Slot(initial, per_row=True)}
  return RowOptimizer("rowwise_adagrad", arguments, equation, slots, takes_dim=True)


def adagrad_momentum(
  learning_rate: Rate = 0.001,
  momentum: float = 0.0,
  use_nesterov: bool = False,
  exponent: float = 2.0,
  beta2: float = 1.0,
  epsilon: float = 1e-10,
  **common: Unpack[Common],
) -> RowOptimizer:
  """Adagrad with momentum over the scaled gradient, as in TensorFlow on SparseCore.

  The step of a row::

    a = a + g²  # beta2 * a + (1 - beta2) * g² for beta2 < 1
    s = (a + epsilon)^(-1 / exponent) * g
    m = momentum * m + s
    w -= lr * m  # lr * (momentum * m + s) with use_nesterov

  Slots `accumulators` (`a`) and `momenta` (`m`), float32 `[V, D]`, both starting at 0.
  """
  arguments = _arguments("adagrad_momentum", locals())
  momentum, exponent = arguments["momentum"], arguments["exponent"]
  beta2, epsilon = arguments["beta2"], arguments["epsilon"]

  def equation(g, w, s, lr):
    a = s["accumulators"]
    a = a + g * g if beta2 == 1 else beta2 * a + (1 - beta2) * g * g
    # A general power is five times as slow as a root.
    root = jax.lax.rsqrt(a + epsilon) if exponent == 2 else (a + epsilon) ** (-1.0 / exponent)
    scaled = root * g
    m = momentum * s["momenta"] + scaled
    w = w - lr * (momentum * m + scaled if use_nesterov else m)
    return w, {"accumulators": a, "momenta": m}

  slots = {"accumulators": 0.0, "momenta": 0.0}
  return RowOptimizer("adagrad_momentum", arguments, equation, slots)


def ftrl(
  learning_rate: Rate = 0.001,
  learning_rate_power: float = -0.5,
  l1_regularization_strength: float = 0.0,
  l2_regularization_strength: float = 0.0,
  beta: float = 0.0,
  initial_accumulator_value: float = 0.1,
  multiply_linear_by_learning_rate: bool = False,
  allow_zero_accumulator: bool = False,
  **common: Unpack[Common],
) -> RowOptimizer:
  """FTRL-proximal (McMahan et al. 2013). `w` is recomputed from the slots at every touch.

  The step of a row, with `p = -learning_rate_power` and regularization strengths `l1`, `l2`::

    a' = a + g²;  d = a'^p - a^p
    z += g - d * w / lr
    w = (clip(z, -l1, l1) - z) / ((a'^p + beta) / lr + 2 * l2)

  Slots `accumulators` (`a`) and `linears` (`z`, from 0), float32 `[V, D]`. With `l1`, small weights
  become exactly 0. A row's initial value is lost at its first touch; weight decay acts on the `w`
  in the update of `z`.

  Args:
    learning_rate: as in `embed.sgd`. A rate of 0, as at the start of a warm-up, divides by 0 unless
      `multiply_linear_by_learning_rate` is True.
    multiply_linear_by_learning_rate: True gives `z` the factor `lr`, which may then be 0.
    allow_zero_accumulator: has no effect; TensorFlow refuses a zero accumulator with it as well.
  """
  arguments = _arguments("ftrl", locals())
  p, beta = -arguments["learning_rate_power"], arguments["beta"]
  l1, l2 = arguments["l1_regularization_strength"], arguments["l2_regularization_strength"]

  def equation(g, w, s, lr):
    a, z = s["accumulators"], s["linears"]
    a_new = a + g * g
    power = jnp.sqrt(a_new) if p == 0.5 else a_new**p
    d = power - (jnp.sqrt(a) if p == 0.5 else a**p)
    if multiply_linear_by_learning_rate:
      z = z + lr * g - d * w
      w = (jnp.clip(z, -lr * l1, lr * l1) - z) / (power + 2 * lr * l2 + beta)
    else:
      z = z + g - d * w / lr
      w = (jnp.clip(z, -l1, l1) - z) / ((power + beta) / lr + 2 * l2)
    return w, {"accumulators": a_new, "linears": z}

  slots = {"accumulators": arguments["initial_accumulator_value"], "linears": 0.0}
  return RowOptimizer("ftrl", arguments, equation, slots)


def adam(
  learning_rate: Rate = 0.001,
  beta_1: float = 0.9,
  beta_2: float = 0.999,
  epsilon: float = 1e-7,
  sum_inside_sqrt: bool = True,
  bias_correction: bool = False,
  **common: Unpack[Common],
) -> RowOptimizer:
  """Adam (Kingma and Ba 2015), by default as in TensorFlow for embeddings: no bias correction.

  The step of a row::

    m = beta_1 * m + (1 - beta_1) * g
    v = beta_2 * v + (1 - beta_2) * g²
    w -= lr * m / sqrt(v + epsilon²)  # lr * m / (sqrt(v) + epsilon) without sum_inside_sqrt

  Slots `momenta` (`m`) and `velocities` (`v`), float32 `[V, D]`, start at 0. That makes a row's
  first step `(1 - beta_1) / sqrt(1 - beta_2)` times `lr`, 3.2 times with the defaults. To correct
  it by the global step, as TensorFlow's Adam and torch's SparseAdam do, write
  `learning_rate=embed.bias_corrected(...)`; by a row's own steps, `bias_correction=True`.

  Args:
    bias_correction: True divides `m` by `1 - beta_1^t` and `v` by `1 - beta_2^t`, where `t` counts
      the row's steps, this one included; without sum_inside_sqrt, this is Adam as in torch and
      optax. Adds slot `steps`, int32 `[V]`.
  """
  arguments = _arguments("adam", locals())
  beta_1, beta_2 = arguments["beta_1"], arguments["beta_2"]
  epsilon = arguments["epsilon"]

  def equation(g, w, s, lr):
    m = beta_1 * s["momenta"] + (1 - beta_1) * g
    v = beta_2 * s["velocities"] + (1 - beta_2) * (g * g)
    slots = {"momenta": m, "velocities": v}
    if bias_correction:
      slots["steps"] = s["steps"] + 1
      t = slots["steps"].astype(jnp.float32)[..., None]
      m, v = m / _correction(beta_1, t), v / _correction(beta_2, t)
    root = jnp.sqrt(v + epsilon**2) if sum_inside_sqrt else jnp.sqrt(v) + epsilon
    return w - lr * m / root, slots

  slots = {"momenta": Slot(), "velocities": Slot()}
  if bias_correction:
    slots["steps"] = Slot(0, per_row=True, dtype="int32")
  return RowOptimizer("adam", arguments, equation, slots)


def _correction(beta: float, t: jax.Array) -> jax.Array | float:
  """`1 - beta^t` by expm1, which keeps the digits that the difference would lose in float32."""
  return -jnp.expm1(t * math.log(beta)) if beta > 0 else 1.0


def bias_corrected(
  learning_rate: Rate = 0.001, beta_1: float = 0.9, beta_2: float = 0.999
) -> Schedule:
  """The schedule that gives Adam its bias correction: `lr * sqrt(1 - beta_2^t) / (1 - beta_1^t)`.

  `t` is the global step plus 1, no matter when a row was last looked up. The betas are Adam's, and
  `learning_rate` is as in `embed.sgd`.

  >>> optimizer = embed.adam(embed.bias_corrected(0.1))
  >>> [round(float(optimizer.learning_rate_at(step)), 4) for step in (0, 100_000)]
  [0.0316, 0.1]
  """
  given = {"learning_rate": learning_rate, "beta_1": beta_1, "beta_2": beta_2}
  return BiasCorrected(**{key: _checked("bias_corrected", key, x) for key, x in given.items()})


@dataclasses.dataclass(frozen=True)
class BiasCorrected:
  """The schedule of `bias_corrected`."""

  learning_rate: Rate
  beta_1: float
  beta_2: float

  def __call__(self, step: Any) -> jax.Array:
    t = jnp.asarray(step, jnp.float32) + 1
    rate = self.learning_rate(step) if callable(self.learning_rate) else self.learning_rate
    return rate * jnp.sqrt(_correction(self.beta_2, t)) / _correction(self.beta_1, t)


def frozen() -> RowOptimizer:
  """Leaves a table as it is: no slots, no updates. Its row gradients can still be read."""
  return RowOptimizer("frozen", {}, None, {})


# --- your own equations, and optax's -------------------------------------------------------------


def _meets_others(
  step: Callable[..., tuple[jax.Array, Any]], state_of: Callable[[jax.Array], Any], dim: int
) -> bool:
  """True if another row, possibly with non-finite gradients, changes the step of a row."""

  def run(rows, gradients):
    state = state_of(rows)
    for g in gradients:
      rows, state = step(g, rows, state)
    return rows[0]

  w = np.linspace(0.5, 1.0, 2 * dim, dtype=np.float32).reshape(2, dim)
  gradients = np.stack([100 * w, [w[0], np.full(dim, np.nan, np.float32)], w])
  both = jax.jit(lambda w, g: (run(w, g), run(w[:1], g[:, :1])))
  with jax.ensure_compile_time_eval():  # also inside a traced step
    pair, alone = both(w, gradients)
  return not np.allclose(pair, alone, rtol=1e-4, equal_nan=True)


def custom_optimizer(
  update: Equation,
  slots: Mapping[str, Slot | float] | None = None,
  learning_rate: Rate = 0.01,
  **common: Unpack[Common],
) -> RowOptimizer:
  """Makes an optimizer from your own equation.

  Args:
    update: `f(gradients, rows, slots, learning_rate) -> (rows, slots)`, in JAX operations on
      float32 `[..., D]` arrays whose leading axes are rows. Slots are a dict of `[..., D]`, or
      `[...]` if `per_row`. It may reduce over a row, along the last axis.
    slots: `{name: initial value}`, or `{name: embed.Slot(initial, per_row=True)}`.

  Raises:
    ValueError: when a layer is made, if the step of a row depends on other rows.

  Two such optimizers are equal only if their functions are the same objects: define each once.
  """
  arguments = _arguments("custom_optimizer", locals())
  by_name = _slots(arguments["slots"] or {})

  @functools.cache
  def checked_slots(dim: int) -> dict[str, Slot]:
    full = lambda s, n: jnp.full((n,) if s.per_row else (n, dim), s.initial, s.dtype)
    state_of = lambda rows: {name: full(s, len(rows)) for name, s in by_name.items()}
    step = lambda g, w, state: update(g, w, state, jnp.float32(0.125))
    if _meets_others(step, state_of, dim):
      raise ValueError(
        "custom_optimizer: the update of a row depends on other rows, which are not always beside "
        "it. Reduce over the last axis only, as jnp.mean(g, axis=-1)."
      )
    return by_name

  return RowOptimizer("custom_optimizer", arguments, update, checked_slots)


def from_optax(
  tx: Any, learning_rate: Rate = 1.0, per_row: bool = False, **common: Unpack[Common]
) -> RowOptimizer:
  """Runs an elementwise optax transformation on rows, lazily.

  Each row is a parameter of its own that steps only when it is touched: the state is kept per
  row, step counts included, so bias correction counts a row's own steps. Slots are the leaves of
  the optax state, `[V, D]`, or `[V]` for its scalars, named by their paths in it.

  Args:
    tx: such as `optax.adam(1e-3)`. Its `init` must not depend on the parameters' values.
    learning_rate: a factor on the updates; a schedule of the global step belongs here.
    per_row: True accepts a `tx` in which an element's update depends on other elements (norms in
      LAMB and LARS, means in NovoGrad and Adafactor), and computes those over each row alone.
      `embed.clip_by_global_norm` clips by the norm of all gradients.

  Two optimizers are equal only if they have the same `tx` object: give one object to all tables
  that may share a stack, since optax transformations do not compare by their arguments.

  Raises:
    ValueError: if `tx` is not an optax transformation, if the update of a row depends on other rows
      without `per_row`, or if its state does not fit a row.

  >>> optimizer = embed.from_optax(optax.adam(1e-3))
  >>> {name: slot.per_row for name, slot in optimizer.slots(64).items()}
  {'0.count': True, '0.mu': False, '0.nu': False}
  """
  arguments = _arguments("from_optax", locals())

  def table_step(g, w, state):
    updates, state = tx.update(g, state, w)
    return w + updates, state

  try:
    meets_others = not per_row and _meets_others(table_step, tx.init, dim=4)
  except Exception as error:
    raise ValueError(
      "from_optax: tx needs arguments or a state that the rows of a table do not have "
      f"({type(error).__name__}: {error}). Write embed.custom_optimizer for its equation."
    ) from error
  if meets_others:
    raise ValueError(
      "from_optax: the update of a row depends on other rows of the table, so it cannot step "
      "alone. To clip by a norm, leave the clip out of tx and write optimizer.update(model, "
      "embed.clip_by_global_norm(grads, max_norm)). To take norms and means over each row alone, "
      "write from_optax(tx, per_row=True)."
    )

  @functools.cache
  def slots(dim: int) -> dict[str, Slot]:
    with jax.ensure_compile_time_eval():  # also inside a traced step
      zero, one = (tx.init(jnp.full((dim,), v, jnp.float32)) for v in (0, 1))
    leaves = zip(jax.tree_util.tree_leaves_with_path(zero), jax.tree.leaves(one), strict=True)
    name_of = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    return {name_of(path): _slot_of(path, a, b, dim) for (path, a), b in leaves}

  def equation(g, w, s, lr):
    names = list(slots(w.shape[-1]))  # in the order of the state; `s` may come sorted

    def one_row(g, w, leaves):
      treedef = jax.tree.structure(tx.init(w))
      updates, state = tx.update(g, jax.tree.unflatten(treedef, [leaves[n] for n in names]), w)
      new = dict(zip(names, jax.tree.leaves(state), strict=True))
      return w + lr * updates, {k: v.astype(leaves[k].dtype) for k, v in new.items()}

    return (jax.vmap(one_row) if g.ndim > 1 else one_row)(g, w, s)

  return RowOptimizer("from_optax", arguments, equation, slots)


def _slot_of(path: Any, of_zeros: Any, of_ones: Any, dim: int) -> Slot:
  """The slot for a leaf of an optax state, given the leaf for parameters of zeros and of ones."""
  a, b = np.asarray(of_zeros), np.asarray(of_ones)
  if a.shape not in ((), (dim,)) or not np.array_equal(a, b) or (a != a.flat[0]).any():
    raise ValueError(
      f"from_optax: state {jax.tree_util.keystr(path)} of shape {a.shape} does not fit a row: it "
      "must be constant and of the row's shape or a scalar."
    )
  return Slot(a.flat[0].item(), per_row=a.shape == (), dtype=a.dtype)


# --- all of them ---------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., RowOptimizer]] = {
  "sgd": sgd,
  "adagrad": adagrad,
  "rowwise_adagrad": rowwise_adagrad,
  "adagrad_momentum": adagrad_momentum,
  "ftrl": ftrl,
  "adam": adam,
  "frozen": frozen,
  "custom_optimizer": custom_optimizer,
  "from_optax": from_optax,
}


def named() -> dict[str, Callable[..., RowOptimizer]]:
  """The optimizers that a configuration can describe with numbers and strings alone."""
  takes_functions = ("custom_optimizer", "from_optax")
  return {name: make for name, make in OPTIMIZERS.items() if name not in takes_functions}
