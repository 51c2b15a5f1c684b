"""Row optimizers: each one is the equation of one row's step.

An optimizer here is a function of its hyperparameters that returns the equation, written on
`g` (the row's summed gradient), `w` (the row) and its slots, all `[..., D]` in float32, slots of
one value per row `[...]`. The decorator `row_optimizer` adds the arguments common to all, and
`step_rows` runs the order common to all: clip the gradient, decay, slots and row, clip the row.
Formulas, names and defaults are TensorFlow's (its SparseCore sources and training kernels).
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from embed.engine.layout import Columns

Schedule = Callable[[Any], Any]
_NUMBER = (int, float, np.number, np.ndarray, jax.Array)
Slots = dict[str, jax.Array]
Equation = Callable[[jax.Array, jax.Array, Slots, Any], tuple[jax.Array, Slots]]


@dataclasses.dataclass(frozen=True)
class Slot:
  """An optimizer's state per row, for `embed.custom_optimizer`.

  Args:
    initial: the value every entry starts with.
    per_row: one value a row, `[V]`, instead of one per element, `[V, D]`.
    dtype: float32, or an integer type for counts.

  >>> embed.adam(1e-3).slots(64)["momenta"]  # what an optimizer keeps of rows of 64 columns
  Slot(initial=0.0, per_row=False, dtype='float32')
  >>> embed.rowwise_adagrad(1e-3).slots(64)["accumulators"].per_row
  True
  """

  initial: float = 0.0
  per_row: bool = False
  dtype: Any = "float32"


@dataclasses.dataclass(frozen=True)
class RowOptimizer:
  """A table's optimizer. Compared by value: equal hyperparameters are equal optimizers.

  Made by `embed.sgd`, `embed.adagrad` and the others; `embed.custom_optimizer` for one's own. It
  holds no state, so one object may serve many tables, and it pickles. Every row that was looked up
  in a step is stepped once, in this order: gradients times `gradient_multiplier`, summed over the
  row's occurrences, clipped to `clipvalue`; weight decay; `equation`; the row clipped to
  `clip_weight_min` and `clip_weight_max`. All in float32, whatever the dtype of the table.

  Attributes:
    name: of the function that made it, such as "adagrad".
    learning_rate: a float, or a schedule of the 0-based step.
    equation: `f(gradients, rows, slots, learning_rate) -> (rows, slots)`, float32 `[..., D]` each;
      None for `embed.frozen`.
    slots: `f(dim) -> {name: embed.Slot}`, the state that it keeps per row.
    lazy: whether it moves touched rows alone; False for `embed.adam(lazy_adam=False)`.

  The other arguments of `embed.sgd` are attributes by their names.

  >>> embed.adagrad(0.1) == embed.adagrad(learning_rate=0.1)
  True
  >>> g, w, slots = jnp.array([3.0]), jnp.array([1.0]), {"accumulators": jnp.array([7.0])}
  >>> w, slots = embed.adagrad(0.5).equation(g, w, slots, 0.5)
  >>> w.tolist(), slots["accumulators"].tolist()  # 7 + 3 * 3; 1 - 0.5 * 3 / sqrt(16)
  ([0.625], [16.0])
  """

  name: str
  hyperparameters: tuple[tuple[str, Any], ...]
  learning_rate: float | Schedule
  gradient_multiplier: float | Schedule | None
  clipvalue: tuple[float | None, float | None] | None
  weight_decay_factor: float | None
  multiply_weight_decay_factor_by_learning_rate: bool
  clip_weight_min: float | None
  clip_weight_max: float | None
  use_gradient_accumulation: bool
  slot_init: tuple[tuple[str, Any], ...]
  equation: Equation | None = dataclasses.field(compare=False, repr=False)
  slots: Callable[[int], dict[str, Slot]] = dataclasses.field(compare=False, repr=False)
  arguments: dict[str, Any] = dataclasses.field(compare=False, repr=False)
  lazy: bool = True  # False moves every row at every step
  linear: bool = False  # the step of a sum is the sum of steps: rows need not be summed first
  elementwise: bool = True  # the equation looks across a row by `row_mean` alone

  def __reduce__(self):
    return _rebuild, (self.name, self.arguments)  # closures do not pickle, their arguments do

  def learning_rate_at(self, step: Any) -> Any:
    """The rate of the 0-based `step`, a float or a traced scalar.

    >>> embed.sgd(lambda step: 0.1 / (step + 1)).learning_rate_at(1)
    0.05
    """
    return _at(self.learning_rate, step)

  def gradient_multiplier_at(self, step: Any) -> Any:
    """The factor on the gradients of the 0-based `step`, as `learning_rate_at`; None for none.

    >>> embed.sgd(0.1, gradient_multiplier=0.5).gradient_multiplier_at(0)
    0.5
    """
    return _at(self.gradient_multiplier, step)

  @property
  def has_schedule(self) -> bool:
    """Whether a step depends on its number, which `apply_gradients` then wants.

    >>> embed.sgd(0.1).has_schedule, embed.sgd(optax.linear_schedule(0.1, 0, 100)).has_schedule
    (False, True)
    """
    return callable(self.learning_rate) or callable(self.gradient_multiplier)

  def replace(self, **arguments: Any) -> "RowOptimizer":
    """The same optimizer with other arguments.

    Raises:
      TypeError: for an argument that it does not have.
      ValueError: naming an argument that is wrong.

    >>> embed.sgd(0.1).replace(clipvalue=1.0) == embed.sgd(0.1, clipvalue=1.0)
    True
    """
    return _rebuild(self.name, self.arguments | arguments)


def _at(value: Any, step: Any) -> Any:
  return value(step) if callable(value) else value


def _rebuild(name: str, arguments: dict[str, Any]) -> RowOptimizer:
  return globals()[name](**arguments)


def _check_common(name: str, common: dict[str, Any], slot_names: set[str] | None) -> None:
  _check_schedule(name, "learning_rate", common["learning_rate"])
  if common["gradient_multiplier"] is not None:
    _check_schedule(name, "gradient_multiplier", common["gradient_multiplier"])
  clip = common["clipvalue"]
  if not common["use_gradient_accumulation"] and clip is not None:
    raise ValueError(
      f"{name}: when `use_gradient_accumulation` is False, gradient clipping cannot be used and "
      f"`clipvalue` should be left as None. Got {clip!r}."
    )
  low, high = common["clip_weight_min"], common["clip_weight_max"]
  if low is not None and high is not None and low > high:
    raise ValueError(f"{name}: clip_weight_min={low} is greater than clip_weight_max={high}.")
  if slot_names is not None:
    unknown = set(common["slot_init"] or {}) - slot_names
    if unknown:
      raise ValueError(f"{name}: slot_init names {sorted(unknown)}; its slots are {slot_names}.")


def _check_schedule(name: str, argument: str, value: Any) -> None:
  if callable(value):
    try:
      inspect.signature(value).bind(0)
    except TypeError:
      raise ValueError(
        f"{name}: {argument} must be a number or a schedule f(step). A function without "
        "arguments would be read once, when the step is compiled. Write `lambda step: ...`."
      ) from None
  elif not isinstance(value, _NUMBER) or isinstance(value, bool) or np.shape(value):
    raise ValueError(f"{name}: {argument} must be a number or f(step). Got {value!r}.")


def _number(value: Any) -> Any:
  """A number as a float, which compares by value; a schedule or None as it is."""
  return value if value is None or callable(value) else float(value)


def _clip_pair(name: str, value: Any) -> tuple[float | None, float | None] | None:
  if value is None:
    return None
  if isinstance(value, (tuple, list)):
    if len(value) != 2:
      raise ValueError(f"{name}: clipvalue must be a number or (min, max). Got {value!r}.")
    low, high = (None if v is None else float(v) for v in value)
    if low is not None and high is not None and low > high:
      raise ValueError(f"{name}: clipvalue has min {low} greater than max {high}.")
    return low, high
  return (-float(value), float(value))


def _freeze(value: Any) -> Any:
  return tuple(sorted(value.items())) if isinstance(value, Mapping) else value


def _common(
  *,
  gradient_multiplier: float | Schedule | None = None,
  clipvalue: float | tuple[float | None, float | None] | None = None,
  weight_decay_factor: float | None = None,
  multiply_weight_decay_factor_by_learning_rate: bool | None = None,
  clip_weight_min: float | None = None,
  clip_weight_max: float | None = None,
  use_gradient_accumulation: bool = True,
  slot_init: Mapping[str, Callable[..., Any]] | None = None,
) -> None:
  """The arguments every optimizer takes; see `embed.sgd` for what they mean."""


class Rule(NamedTuple):
  """What an optimizer function returns to `row_optimizer`."""

  equation: Equation | None
  slots: Mapping[str, Slot | float] | Callable[[int], dict[str, Slot]]
  lazy: bool = True
  linear: bool = False
  elementwise: bool = True


def _slots_by_dim(slots: Any) -> tuple[Callable[[int], dict[str, Slot]], set[str] | None]:
  """Slots as a function of dim, and their names where those do not depend on it."""
  if callable(slots):
    return slots, None
  fixed = {k: s if isinstance(s, Slot) else Slot(float(s)) for k, s in slots.items()}
  return (lambda dim: fixed), set(fixed)


def row_optimizer(make: Callable[..., Rule]) -> Callable[..., RowOptimizer]:
  """Adds the common arguments to a function of hyperparameters, and builds the `RowOptimizer`."""
  own, shared = inspect.signature(make), inspect.signature(_common)
  signature = own.replace(
    parameters=[*own.parameters.values(), *shared.parameters.values()],
    return_annotation=RowOptimizer,
  )
  name = make.__name__

  @functools.wraps(make)
  def build(*args: Any, **kwargs: Any) -> RowOptimizer:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    common = {key: bound.arguments[key] for key in shared.parameters}
    mine = {key: bound.arguments[key] for key in own.parameters}
    rule = make(**mine)
    slots, names = _slots_by_dim(rule.slots)
    common["learning_rate"] = rate = mine.pop("learning_rate", 0.0)
    _check_common(name, common, names)
    if rule.equation is None and any(common[k] != p.default for k, p in shared.parameters.items()):
      raise ValueError(f"{name}: a table that does not train takes no arguments.")
    if not rule.lazy and not common["use_gradient_accumulation"]:
      raise ValueError(
        f"{name}: moving every row at every step (lazy_adam=False) needs gradient accumulation. "
        "Leave `use_gradient_accumulation` as True."
      )
    return RowOptimizer(
      name=name,
      hyperparameters=tuple((k, _freeze(v)) for k, v in sorted(mine.items())),
      learning_rate=_number(rate),
      gradient_multiplier=_number(common["gradient_multiplier"]),
      clipvalue=_clip_pair(name, common["clipvalue"]),
      weight_decay_factor=common["weight_decay_factor"],
      multiply_weight_decay_factor_by_learning_rate=bool(
        common["multiply_weight_decay_factor_by_learning_rate"]
      ),
      clip_weight_min=common["clip_weight_min"],
      clip_weight_max=common["clip_weight_max"],
      use_gradient_accumulation=common["use_gradient_accumulation"],
      slot_init=tuple(sorted((common["slot_init"] or {}).items())),
      equation=rule.equation,
      arguments=dict(bound.arguments),
      slots=slots,
      lazy=rule.lazy,
      linear=rule.linear,
      elementwise=rule.elementwise,
    )

  build.__signature__ = signature  # type: ignore[attr-defined]
  return build


def step_rows(
  optimizer: RowOptimizer, g: jax.Array, w: jax.Array, slots: Slots, learning_rate: Any
) -> tuple[jax.Array, Slots]:
  """One step of rows: the only place where a row update is defined.

  Args:
    optimizer: what to apply.
    g: float32 `[..., D]`, the rows' gradients, summed.
    w: float32 `[..., D]`, the rows.
    slots: float32 `[..., D]` or `[...]` each.
    learning_rate: this step's.

  Returns:
    The new rows and slots.
  """
  assert optimizer.equation is not None
  if optimizer.clipvalue is not None:
    g = jnp.clip(g, *optimizer.clipvalue)
  if optimizer.weight_decay_factor:
    decay = optimizer.weight_decay_factor
    if optimizer.multiply_weight_decay_factor_by_learning_rate:
      decay = decay * learning_rate
    w = w - decay * w
  columns = _COLUMNS.get()
  if columns is None or optimizer.elementwise:
    w, slots = optimizer.equation(g, w, slots, learning_rate)
  else:
    w, slots = _with_whole_rows(optimizer.equation, columns, g, w, slots, learning_rate)
  if optimizer.clip_weight_min is not None or optimizer.clip_weight_max is not None:
    w = jnp.clip(w, optimizer.clip_weight_min, optimizer.clip_weight_max)
  return w, slots


# --- rows whose columns are on several devices ---------------------------------------------------

_COLUMNS: contextvars.ContextVar[Columns | None] = contextvars.ContextVar("columns", default=None)


@contextlib.contextmanager
def split_columns(columns: Columns | None) -> Iterator[None]:
  """While a step is traced whose rows are some of their columns only."""
  token = _COLUMNS.set(columns)
  try:
    yield
  finally:
    _COLUMNS.reset(token)


def row_mean(x: jax.Array) -> jax.Array:
  """The mean of each row, `[..., D]` to `[...]`, its columns on one device or several."""
  columns = _COLUMNS.get()
  if columns is None:
    return jnp.mean(x, axis=-1)
  return jax.lax.psum(jnp.sum(x, axis=-1), columns.axes) / columns.dim  # the filling is 0


def _with_whole_rows(equation: Equation, columns: Columns, g, w, slots: Slots, learning_rate):
  """For an equation that may look across a row: every device steps whole rows, and keeps its own.

  A slot of one value per element is known by its shape.
  """
  split = {name: slot.ndim == w.ndim for name, slot in slots.items()}
  whole, own = columns.whole, columns.own
  everything = {name: whole(s) if split[name] else s for name, s in slots.items()}
  with split_columns(None):  # these are whole
    new_w, new = equation(whole(g), whole(w), everything, learning_rate)
  return own(new_w), {name: own(s) if split[name] else s for name, s in new.items()}


def _check(condition: bool, message: str) -> None:
  if not condition:
    raise ValueError(message)


def _check_accumulator(value: float) -> None:
  _check(
    value > 0, f"Argument `initial_accumulator_value` must be a positive float. Got {value!r}."
  )


def _check_beta(name: str, value: float) -> None:
  _check(0 <= value < 1, f"Argument `{name}` must be >= 0 and < 1. Got {value!r}.")


# --- the optimizers ------------------------------------------------------------------------------


@row_optimizer
def sgd(learning_rate: float | Schedule = 0.01) -> Rule:
  """Stochastic gradient descent. No slots.

  The step of a row::

    w -= lr * g

  Every optimizer takes, besides its own, these arguments:

  Args:
    learning_rate: a float, or a schedule of the 0-based step (optax schedules are such).
    gradient_multiplier: a float or a schedule too; gradients are scaled by it before all else.
    clipvalue: clips the summed gradient elementwise, before the slots: `c` to `[-c, c]`, or
      `(min, max)` with None for open.
    weight_decay_factor: `w -= factor * w` of touched rows, before the update.
    multiply_weight_decay_factor_by_learning_rate: decay by `factor * lr` instead.
    clip_weight_min: touched rows are clipped to it after the update.
    clip_weight_max: likewise.
    use_gradient_accumulation: True sums a row's gradients over the batch and steps once; False
      steps once per occurrence of an id, in batch order (slow, and for comparisons only).
    slot_init: `{slot name: f(key, shape, dtype)}`, to start slots at other values; `shape` is that
      of the whole slot, `[V, D]` or `[V]`.

  Raises:
    ValueError: naming the argument that is wrong.

  >>> embed.sgd(0.5).equation(jnp.array([1.0]), jnp.array([2.0]), {}, 0.5)[0].tolist()
  [1.5]
  >>> careful = embed.sgd(optax.cosine_decay_schedule(0.1, 1000), clipvalue=(-1.0, None))
  >>> careful.clipvalue
  (-1.0, None)
  """
  return Rule(lambda g, w, s, lr: (w - lr * g, s), {}, linear=True)


@row_optimizer
def adagrad(
  learning_rate: float | Schedule = 0.001, initial_accumulator_value: float = 0.1
) -> Rule:
  """Adagrad (Duchi et al. 2011): what an element has seen lowers its rate.

  The step of a row, with the new `a` and no epsilon, as TensorFlow's::

    a += g²
    w -= lr * g / sqrt(a)

  Slot `accumulators`, float32 `[V, D]`.

  Args:
    learning_rate: a float, or a schedule of the 0-based step.
    initial_accumulator_value: of `a`, positive.
    **common: the arguments of every optimizer, see `embed.sgd`.

  Raises:
    ValueError: naming the argument that is wrong.

  >>> g, w, slots = jnp.array([3.0]), jnp.array([1.0]), {"accumulators": jnp.array([7.0])}
  >>> w, slots = embed.adagrad(0.5).equation(g, w, slots, 0.5)
  >>> w.tolist(), slots["accumulators"].tolist()  # 7 + 3 * 3; 1 - 0.5 * 3 / sqrt(16)
  ([0.625], [16.0])
  """
  _check_accumulator(initial_accumulator_value)

  def equation(g, w, s, lr):
    a = s["accumulators"] + g * g
    return w - lr * g * jax.lax.rsqrt(a), {"accumulators": a}

  return Rule(equation, {"accumulators": initial_accumulator_value})


@row_optimizer
def rowwise_adagrad(
  learning_rate: float | Schedule = 0.001,
  initial_accumulator_value: float = 0.1,
  epsilon: float = 0.0,
) -> Rule:
  """Row-wise Adagrad: one accumulator a row, `D` times less state than Adagrad.

  The step of a row, FBGEMM's EXACT_ROWWISE_ADAGRAD::

    a += mean(g²)  # over the row
    w -= lr * g / (sqrt(a) + epsilon)

  Slot `accumulators`, float32 `[V]`.

  Args:
    learning_rate: a float, or a schedule of the 0-based step.
    initial_accumulator_value: of `a`, at least 0.
    epsilon: at least 0; one of the two must be positive.
    **common: the arguments of every optimizer, see `embed.sgd`.

  Raises:
    ValueError: naming the argument that is wrong.

  >>> g, w, slots = jnp.array([[1.0, 7.0]]), jnp.zeros((1, 2)), {"accumulators": jnp.zeros(1)}
  >>> w, slots = embed.rowwise_adagrad(5.0).equation(g, w, slots, 5.0)
  >>> w.tolist(), slots["accumulators"].tolist()  # (1 * 1 + 7 * 7) / 2; -5 * g / sqrt(25)
  ([[-1.0, -7.0]], [25.0])
  """
  _check(initial_accumulator_value >= 0, "`initial_accumulator_value` must be >= 0.")
  _check(epsilon >= 0, f"Argument `epsilon` must be >= 0. Got {epsilon!r}.")
  _check(
    initial_accumulator_value > 0 or epsilon > 0,
    "rowwise_adagrad: a zero gradient would give 0 / 0. Make `initial_accumulator_value` or "
    "`epsilon` positive.",
  )

  def equation(g, w, s, lr):
    a = s["accumulators"] + row_mean(g * g)
    return w - lr * g / (jnp.sqrt(a) + epsilon)[..., None], {"accumulators": a}

  return Rule(equation, {"accumulators": Slot(initial_accumulator_value, per_row=True)})


@row_optimizer
def adagrad_momentum(
  learning_rate: float | Schedule = 0.001,
  momentum: float = 0.0,
  use_nesterov: bool = False,
  exponent: float = 2.0,
  beta2: float = 1.0,
  epsilon: float = 1e-10,
) -> Rule:
  """Adagrad with momentum over the scaled gradient, as TensorFlow's on SparseCore.

  The step of a row::

    a = a + g²  # beta2 * a + (1 - beta2) * g² for beta2 < 1
    s = (a + epsilon)^(-1 / exponent) * g
    m = momentum * m + s
    w -= lr * m  # lr * (momentum * m + s) with use_nesterov

  Slots `accumulators` and `momenta`, float32 `[V, D]`, both from 0.

  Args:
    learning_rate: a float, or a schedule of the 0-based step.
    momentum: the decay of `m`.
    use_nesterov: whether to look ahead.
    exponent: positive; 2 is Adagrad's square root.
    beta2: the decay of `a`; 1 adds up.
    epsilon: positive.
    **common: the arguments of every optimizer, see `embed.sgd`.

  Raises:
    ValueError: naming the argument that is wrong.

  >>> zero = {"accumulators": jnp.array([0.0]), "momenta": jnp.array([2.0])}
  >>> optimizer = embed.adagrad_momentum(0.5, momentum=0.5)
  >>> w, slots = optimizer.equation(jnp.array([4.0]), jnp.array([1.0]), zero, 0.5)
  >>> w.tolist(), slots["momenta"].tolist()  # 0.5 * 2 + 4 / sqrt(16); 1 - 0.5 * 2
  ([0.0], [2.0])
  """
  _check(epsilon > 0, "Adagrad momentum: epsilon must be positive")
  _check(exponent > 0, "Adagrad momentum: the exponent must be > 0")

  def equation(g, w, s, lr):
    a = s["accumulators"]
    a = a + g * g if beta2 == 1 else beta2 * a + (1 - beta2) * g * g
    # A general power is five times as slow as a root.
    root = jax.lax.rsqrt(a + epsilon) if exponent == 2 else (a + epsilon) ** (-1.0 / exponent)
    scaled = root * g
    m = momentum * s["momenta"] + scaled
    return w - lr * (momentum * m + scaled if use_nesterov else m), {
      "accumulators": a,
      "momenta": m,
    }

  return Rule(equation, {"accumulators": 0.0, "momenta": 0.0})


@row_optimizer
def ftrl(
  learning_rate: float | Schedule = 0.001,
  learning_rate_power: float = -0.5,
  l1_regularization_strength: float = 0.0,
  l2_regularization_strength: float = 0.0,
  beta: float = 0.0,
  initial_accumulator_value: float = 0.1,
  multiply_linear_by_learning_rate: bool = False,
  allow_zero_accumulator: bool = False,
) -> Rule:
  """FTRL-proximal (McMahan et al. 2013). `w` is recomputed from the slots at every touch.

  The step of a row, with `p = -learning_rate_power`::

    a' = a + g²;  d = a'^p - a^p
    z += g - d * w / lr
    w = (clip(z, -l1, l1) - z) / ((a'^p + beta) / lr + 2 * l2)

  Slots `accumulators` and `linears` (`z`, from 0), float32 `[V, D]`. With `l1` small weights become
  exactly 0. A row's initial value is lost at its first touch; weight decay acts on the `w` that `z`
  is updated with.

  Args:
    learning_rate: a float, or a schedule of the 0-based step. A rate of 0, as a warm-up may start
      with, divides by 0 unless `multiply_linear_by_learning_rate`.
    learning_rate_power: at most 0; -0.5 is Adagrad's square root.
    l1_regularization_strength: `l1`, at least 0.
    l2_regularization_strength: `l2`, at least 0.
    beta: added to the root of the accumulator.
    initial_accumulator_value: of `a`, positive.
    multiply_linear_by_learning_rate: `z` carries the factor `lr`, which may then be 0.
    allow_zero_accumulator: has no effect; TensorFlow refuses a zero accumulator with it as well.
    **common: the arguments of every optimizer, see `embed.sgd`.

  Raises:
    ValueError: naming the argument that is wrong.

  >>> slots = {"accumulators": jnp.array([7.0]), "linears": jnp.array([0.0])}
  >>> optimizer = embed.ftrl(1.0, l1_regularization_strength=5.0)
  >>> w, slots = optimizer.equation(jnp.array([3.0]), jnp.array([0.0]), slots, 1.0)
  >>> w.tolist(), slots["linears"].tolist()  # |z| is below l1
  ([0.0], [3.0])
  """
  del allow_zero_accumulator  # TensorFlow refuses a zero accumulator with it as well
  _check_accumulator(initial_accumulator_value)
  _check(learning_rate_power <= 0, f"`learning_rate_power` must be <= 0. Got {learning_rate_power}")
  _check(l1_regularization_strength >= 0, "Argument `l1_regularization_strength` must be >= 0.")
  _check(l2_regularization_strength >= 0, "Argument `l2_regularization_strength` must be >= 0.")
  p, l1, l2 = -learning_rate_power, l1_regularization_strength, l2_regularization_strength

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

  return Rule(equation, {"accumulators": initial_accumulator_value, "linears": 0.0})


@row_optimizer
def adam(
  learning_rate: float | Schedule = 0.001,
  beta_1: float = 0.9,
  beta_2: float = 0.999,
  epsilon: float = 1e-7,
  lazy_adam: bool = True,
  sum_inside_sqrt: bool = True,
) -> Rule:
  """Adam (Kingma and Ba 2015) as TensorFlow has it for embeddings: without bias correction.

  The step of a row::

    m = beta_1 * m + (1 - beta_1) * g
    v = beta_2 * v + (1 - beta_2) * g²
    w -= lr * m / sqrt(v + epsilon²)  # lr * m / (sqrt(v) + epsilon) without sum_inside_sqrt

  Slots `momenta` and `velocities`, float32 `[V, D]`, from 0. That makes the first step of a row
  `(1 - beta_1) / sqrt(1 - beta_2)` times `lr`, 3.2 times with the defaults;
  `learning_rate=embed.bias_corrected(...)` corrects for it.

  Args:
    learning_rate: a float, or a schedule of the 0-based step.
    beta_1: the decay of `m`, in [0, 1).
    beta_2: the decay of `v`, in [0, 1).
    epsilon: positive.
    lazy_adam: True moves touched rows alone, and decays the slots of those alone. False moves every
      row of the table at every step, with zero gradient where it was not touched, and costs
      O(V * D).
    sum_inside_sqrt: where epsilon stands.
    **common: the arguments of every optimizer, see `embed.sgd`.

  Raises:
    ValueError: naming the argument that is wrong.

  >>> zero = {"momenta": jnp.zeros(1), "velocities": jnp.zeros(1)}
  >>> optimizer = embed.adam(1.0, beta_1=0.5, beta_2=0.75)
  >>> w, slots = optimizer.equation(jnp.array([8.0]), jnp.array([0.0]), zero, 1.0)
  >>> w.tolist(), slots["momenta"].tolist(), slots["velocities"].tolist()  # -4 / sqrt(16)
  ([-1.0], [4.0], [16.0])
  """
  _check_beta("beta_1", beta_1)
  _check_beta("beta_2", beta_2)
  _check(epsilon > 0, f"epsilon must be positive; got {epsilon}.")

  def equation(g, w, s, lr):
    m = beta_1 * s["momenta"] + (1 - beta_1) * g
    v = beta_2 * s["velocities"] + (1 - beta_2) * g * g
    if sum_inside_sqrt:
      w = w - lr * m / jnp.sqrt(v + epsilon**2)
    else:
      w = w - lr * m / (jnp.sqrt(v) + epsilon)
    return w, {"momenta": m, "velocities": v}

  return Rule(equation, {"momenta": 0.0, "velocities": 0.0}, lazy=lazy_adam)


@row_optimizer
def momentum(
  learning_rate: float | Schedule = 0.001, momentum: float = 0.9, use_nesterov: bool = False
) -> Rule:
  """Momentum, TensorFlow's.

  The step of a row::

    m = momentum * m + g
    w -= lr * m  # lr * (g + momentum * m) with use_nesterov

  Slot `momenta`, float32 `[V, D]`, from 0. It decays only when its row is touched.

  Args:
    learning_rate: a float, or a schedule of the 0-based step.
    momentum: the decay of `m`.
    use_nesterov: whether to look ahead.
    **common: the arguments of every optimizer, see `embed.sgd`.

  Raises:
    ValueError: naming the argument that is wrong.

  >>> optimizer = embed.momentum(0.5, momentum=0.5)
  >>> w, slots = optimizer.equation(jnp.ones(1), jnp.ones(1), {"momenta": jnp.array([2.0])}, 0.5)
  >>> w.tolist(), slots["momenta"].tolist()
  ([0.0], [2.0])
  """

  def equation(g, w, s, lr):
    m = momentum * s["momenta"] + g
    return w - lr * (g + momentum * m if use_nesterov else m), {"momenta": m}

  return Rule(equation, {"momenta": 0.0})


@row_optimizer
def rmsprop(
  learning_rate: float | Schedule = 0.001,
  rho: float = 0.9,
  momentum: float = 0.0,
  epsilon: float = 1e-7,
) -> Rule:
  """RMSProp (Tieleman and Hinton 2012), TensorFlow's.

  The step of a row::

    ms += (1 - rho) * (g² - ms)
    mom = momentum * mom + lr * g / sqrt(ms + epsilon)
    w -= mom

  Slots `ms` and `mom`, float32 `[V, D]`, both from 0.

  Args:
    learning_rate: a float, or a schedule of the 0-based step.
    rho: the decay of `ms`, in [0, 1).
    momentum: the decay of `mom`.
    epsilon: positive.
    **common: the arguments of every optimizer, see `embed.sgd`.

  Raises:
    ValueError: naming the argument that is wrong.

  >>> zero = {"ms": jnp.zeros(1), "mom": jnp.zeros(1)}
  >>> optimizer = embed.rmsprop(1.0, rho=0.75)
  >>> w, slots = optimizer.equation(jnp.array([8.0]), jnp.array([2.0]), zero, 1.0)
  >>> w.tolist(), slots["ms"].tolist()  # 0.25 * 64; 2 - 8 / sqrt(16)
  ([0.0], [16.0])
  """
  _check_beta("rho", rho)
  _check(epsilon > 0, f"epsilon must be positive; got {epsilon}.")

  def equation(g, w, s, lr):
    ms = s["ms"] + (1 - rho) * (g * g - s["ms"])
    mom = momentum * s["mom"] + lr * g * jax.lax.rsqrt(ms + epsilon)
    return w - mom, {"ms": ms, "mom": mom}

  return Rule(equation, {"ms": 0.0, "mom": 0.0})


@row_optimizer
def proximal_adagrad(
  learning_rate: float | Schedule = 0.001,
  initial_accumulator_value: float = 0.1,
  l1_regularization_strength: float = 0.0,
  l2_regularization_strength: float = 0.0,
) -> Rule:
  """Adagrad with a proximal step (Duchi and Singer 2009), which drives small weights to 0.

  The step of a row::

    a += g²
    eta = lr / sqrt(a)
    u = w - eta * g
    w = sign(u) * max(|u| - eta * l1, 0) / (1 + eta * l2)

  Slot `accumulators`, float32 `[V, D]`.

  Args:
    learning_rate: a float, or a schedule of the 0-based step.
    initial_accumulator_value: of `a`, positive.
    l1_regularization_strength: `l1`, at least 0.
    l2_regularization_strength: `l2`, at least 0.
    **common: the arguments of every optimizer, see `embed.sgd`.

  Raises:
    ValueError: naming the argument that is wrong.

  >>> slots = {"accumulators": jnp.array([7.0])}
  >>> optimizer = embed.proximal_adagrad(1.0, l1_regularization_strength=2.0)
  >>> optimizer.equation(jnp.array([3.0]), jnp.array([1.0]), slots, 1.0)[0].tolist()  # |u| is 0.25
  [0.0]
  """
  _check_accumulator(initial_accumulator_value)
  l1, l2 = l1_regularization_strength, l2_regularization_strength
  _check(l1 >= 0 and l2 >= 0, "The l1 and l2 regularization strengths must be >= 0.")

  def equation(g, w, s, lr):
    a = s["accumulators"] + g * g
    eta = lr * jax.lax.rsqrt(a)
    u = w - eta * g
    w = jnp.sign(u) * jnp.maximum(jnp.abs(u) - eta * l1, 0) / (1 + eta * l2)
    return w, {"accumulators": a}

  return Rule(equation, {"accumulators": initial_accumulator_value})


@row_optimizer
def lion(learning_rate: float | Schedule = 0.001, beta1: float = 0.9, beta2: float = 0.99) -> Rule:
  """Lion (Chen et al. 2023): steps of one size, by the sign of the smoothed gradient.

  The step of a row::

    w -= lr * sign(beta1 * m + (1 - beta1) * g)
    m = beta2 * m + (1 - beta2) * g

  Slot `momenta`, float32 `[V, D]`, from 0.

  Args:
    learning_rate: a float, or a schedule of the 0-based step.
    beta1: the share of `m` in the step, in [0, 1).
    beta2: the decay of `m`, in [0, 1).
    **common: the arguments of every optimizer, see `embed.sgd`.

  Raises:
    ValueError: naming the argument that is wrong.

  >>> optimizer = embed.lion(0.5, beta2=0.5)
  >>> w, slots = optimizer.equation(jnp.array([3.0]), jnp.ones(1), {"momenta": jnp.zeros(1)}, 0.5)
  >>> w.tolist(), slots["momenta"].tolist()
  ([0.5], [1.5])
  """
  _check_beta("beta1", beta1)
  _check_beta("beta2", beta2)

  def equation(g, w, s, lr):
    m = s["momenta"]
    w = w - lr * jnp.sign(beta1 * m + (1 - beta1) * g)
    return w, {"momenta": beta2 * m + (1 - beta2) * g}

  return Rule(equation, {"momenta": 0.0})


@row_optimizer
def custom_optimizer(
  update: Equation,
  slots: Mapping[str, Slot | float] | None = None,
  learning_rate: float | Schedule = 0.01,
) -> Rule:
  """An optimizer of one's own, with every common argument.

  Args:
    update: `f(gradients, rows, slots, learning_rate) -> (rows, slots)` on float32 `[..., D]`
      arrays, the leading axes being rows; slots is a dict, `[..., D]`, or `[...]` if `per_row`. In
      JAX operations. It gets whole rows, wherever their columns are, and may look across a row.
    slots: `{name: initial value}`, or `{name: embed.Slot(initial, per_row=True)}`.
    learning_rate: a float or a schedule.
    **common: the arguments of every optimizer, see `embed.sgd`.

  Raises:
    ValueError: if `update` is not callable, or a slot is neither a number nor an `embed.Slot`.

  Two such optimizers are equal if their functions are the same object: define them once.

  >>> def signed(g, w, slots, lr):
  ...   return w - lr * jnp.sign(g), {"steps": slots["steps"] + 1}
  >>> optimizer = embed.custom_optimizer(signed, {"steps": embed.Slot(0, per_row=True)}, 0.5)
  >>> g, w = jnp.array([[4.0, -1.0]]), jnp.zeros((1, 2))
  >>> optimizer.equation(g, w, {"steps": jnp.zeros(1)}, 0.5)[0].tolist()
  [[-0.5, 0.5]]
  """
  _check(callable(update), f"custom_optimizer: update must be callable. Got {update!r}.")
  for name, slot in (slots or {}).items():
    _check(
      isinstance(slot, (Slot, int, float)),
      f"custom_optimizer: slot {name!r} must be a number or an embed.Slot. Got {slot!r}.",
    )
  return Rule(update, slots or {}, elementwise=False)


@row_optimizer
def frozen() -> Rule:
  """A table that does not train: no slots, no update. Its row gradients are still there to see.

  It takes no arguments.

  Raises:
    ValueError: for any argument.

  >>> movie = embed.TableConfig(100, 4, optimizer=embed.frozen(), name="movie")
  >>> layer = embed.SparseEmbed(embed.FeatureConfig(movie), embed.adam(1e-3), rngs=nnx.Rngs(0))
  >>> list(layer.variables["movie"])
  ['parameters']
  """
  return Rule(None, {})


@row_optimizer
def from_optax(tx: Any, learning_rate: float | Schedule = 1.0) -> Rule:
  """Runs an elementwise optax transformation on rows, lazily.

  Each row is a parameter of its own that steps only when it is touched: the state is kept per
  row, step counts included, so bias correction counts a row's own steps. Transformations that
  look across rows (a global norm, say) do not belong here; see `embed.clip_by_global_norm`.

  Args:
    tx: such as `optax.adam(1e-3)`. Its `init` must not depend on the parameters.
    learning_rate: a factor on the updates; a schedule of the global step belongs here.
    **common: the arguments of every optimizer, see `embed.sgd`.

  Slots are the leaves of the optax state, `[V, D]`, or `[V]` for its scalars, named by their place
  in it.

  Raises:
    ValueError: if `tx` is no optax transformation, or its state does not fit a row.

  >>> optimizer = embed.from_optax(optax.adam(1e-3))
  >>> {name: slot.per_row for name, slot in optimizer.slots(64).items()}
  {'0.count': True, '0.mu': False, '0.nu': False}
  """
  _check(
    hasattr(tx, "init") and hasattr(tx, "update"),
    f"from_optax takes an optax transformation such as optax.adam(1e-3). Got {tx!r}.",
  )
  name_of = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")

  def slots(dim: int) -> dict[str, Slot]:
    with jax.ensure_compile_time_eval():  # asked for inside a traced step too
      zero, one = (tx.init(jnp.full((dim,), v, jnp.float32)) for v in (0, 1))
    result = {}
    for (path, a), b in zip(
      jax.tree_util.tree_leaves_with_path(zero), jax.tree.leaves(one), strict=True
    ):
      a, b, name = np.asarray(a), np.asarray(b), name_of(path)
      _check(
        a.shape in ((), (dim,)) and np.array_equal(a, b) and bool((a == a.flat[0]).all()),
        f"from_optax: state {name!r} of shape {a.shape} does not fit a row: it must be constant "
        "and of the row's shape or a scalar.",
      )
      result[name] = Slot(a.flat[0].item(), per_row=a.shape == (), dtype=a.dtype)
    return result

  def equation(g, w, s, lr):
    names = list(slots(w.shape[-1]))  # in the order of the state; `s` may come sorted

    def one_row(g, w, leaves):
      treedef = jax.tree.structure(tx.init(w))
      updates, state = tx.update(g, jax.tree.unflatten(treedef, [leaves[n] for n in names]), w)
      new = dict(zip(names, jax.tree.leaves(state), strict=True))
      return w + lr * updates, {k: v.astype(leaves[k].dtype) for k, v in new.items()}

    return (jax.vmap(one_row) if g.ndim > 1 else one_row)(g, w, s)

  return Rule(equation, slots, elementwise=False)


def bias_corrected(
  learning_rate: float | Schedule = 0.001, beta_1: float = 0.9, beta_2: float = 0.999
) -> Schedule:
  """The schedule that gives Adam its bias correction: `lr * sqrt(1 - beta_2^t) / (1 - beta_1^t)`.

  `t` is the step plus 1. With `adam(..., lazy_adam=False, sum_inside_sqrt=False)` this is
  `tf.raw_ops.ResourceApplyAdam` exactly; for a lazy one it corrects by the global step.

  Args:
    learning_rate: a float, or a schedule of the 0-based step.
    beta_1: that of the Adam it is for.
    beta_2: likewise.

  Returns:
    The schedule, a function of the 0-based step.

  >>> optimizer = embed.adam(embed.bias_corrected(0.1))
  >>> [round(float(optimizer.learning_rate_at(step)), 4) for step in (0, 100_000)]
  [0.0316, 0.1]
  """

  def schedule(step):
    t = jnp.asarray(step, jnp.float32) + 1
    rate = learning_rate(step) if callable(learning_rate) else learning_rate
    # expm1 keeps the digits that 1 - 0.999^t loses in float32.
    correction = lambda beta: -jnp.expm1(t * math.log(beta)) if beta > 0 else 1.0
    return rate * jnp.sqrt(correction(beta_2)) / correction(beta_1)

  return schedule
