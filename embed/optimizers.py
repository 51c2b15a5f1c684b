"""The row optimizers: a function each, with the equation of one row's step.

An equation is written on `g` (the row's summed gradient), `w` (the row) and its slots, all
`[..., D]` in float32, slots of one value per row `[...]`. One that looks across a row takes the
row's `Columns` as well, which may be on several devices. `register` adds what all optimizers share:
it checks the common arguments and records all of them. `OPTIMIZERS` is the registry: pickles,
`embed.EmbeddingConfigSpec`, `embed.from_tpu_embedding`, error texts and `python -m embed check`
read it, so none of them changes when an optimizer is added.

Formulas, names and defaults are TensorFlow's (its SparseCore sources and training kernels).
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Never, TypedDict, TypeVar, Unpack, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from embed.config import setting
from embed.engine.mesh import WHOLE_ROWS, Columns

Schedule = Callable[[Any], Any]
Rate = float | Schedule | nnx.Variable
ClipRange = float | tuple[float | None, float | None]
SlotInit = Mapping[str, Callable[..., Any]]
Slots = dict[str, jax.Array]
Equation = Callable[..., tuple[jax.Array, Slots]]
UserEquation = Callable[[jax.Array, jax.Array, Slots, Any], tuple[jax.Array, Slots]]


class Common(TypedDict, total=False):
  """The keyword arguments of every optimizer, which `embed.sgd` explains."""

  clipvalue: ClipRange | None
  weight_decay_factor: float | None
  multiply_weight_decay_factor_by_learning_rate: bool | None
  clip_weight_min: float | None
  clip_weight_max: float | None
  slot_init: SlotInit | None


_DEFAULTS: dict[str, Any] = dict.fromkeys(Common.__annotations__)
_FROZEN = _DEFAULTS | {"learning_rate": 0.0, "slot_init": {}}


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

  def __post_init__(self):
    object.__setattr__(self, "initial", setting("initial", self.initial))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class RowOptimizer:
  """A table's optimizer. Compared by value: equal hyperparameters are equal optimizers.

  Made by `embed.sgd`, `embed.adagrad` and the others; by `embed.custom_optimizer` from your own
  equation. It holds no state, so one object may serve many tables, and it pickles. Every row that
  was looked up in a step is stepped once, in this order: gradients summed over the row's
  occurrences, clipped to `clipvalue`; weight decay; `equation`; the row clipped to
  `clip_weight_min` and `clip_weight_max`. All in float32, for tables of any dtype.

  Attributes:
    equation: `f(gradients, rows, slots, learning_rate) -> (rows, slots)`, float32 `[..., D]` each;
      None for `embed.frozen`. With `across_row` it takes the `Columns` that each device has of a
      row as its fifth argument, by default all.
    slots: `f(dim) -> {name: embed.Slot}`, the state that it keeps per row.
    linear: whether the step of a sum of gradients is the sum of the steps.
    across_row: whether an element's step depends on other elements of its row.
    uses_step: whether the equation takes the number of the step, int32, as `step=`.
    name: of the function that made it, such as "adagrad".
    arguments: every argument of that function, by name. Each is an attribute too.

  >>> embed.adagrad(0.1) == embed.adagrad(learning_rate=0.1)
  True
  >>> embed.adagrad(0.1, clipvalue=1.0).clipvalue
  (-1.0, 1.0)
  >>> g, w, slots = jnp.array([3.0]), jnp.array([1.0]), {"accumulators": jnp.array([7.0])}
  >>> w, slots = embed.adagrad(0.5).equation(g, w, slots, 0.5)
  >>> w.tolist(), slots["accumulators"].tolist()  # 7 + 3 * 3; 1 - 0.5 * 3 / sqrt(16)
  ([0.625], [16.0])
  """

  equation: Equation | None
  slots: Any
  linear: bool = False
  across_row: bool = False
  uses_step: bool = False
  name: str = ""
  arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __getattr__(self, name: str) -> Any:
    for arguments in (self.__dict__.get("arguments", {}), _FROZEN):
      if name in arguments:
        return arguments[name]
    raise AttributeError(f"{self.name or 'a row optimizer'} has no argument {name!r}")

  def __reduce__(self):
    return _rebuild, (self.name, self.arguments)  # closures do not pickle, their arguments do

  @functools.cached_property
  def _key(self) -> tuple[Any, ...]:
    def frozen(x: Any) -> Any:
      if isinstance(x, nnx.Variable):  # which compares by value
        return id(x)
      return tuple(sorted(x.items())) if isinstance(x, Mapping) else x

    return (self.name, *((key, frozen(x)) for key, x in sorted(self.arguments.items())))

  def __eq__(self, other: object) -> bool:
    return self._key == other._key if isinstance(other, RowOptimizer) else NotImplemented

  def __hash__(self) -> int:
    return hash(self._key)

  def __repr__(self) -> str:
    given = ", ".join(f"{k}={x!r}" for k, x in self.arguments.items() if x is not None)
    return f"embed.{self.name}({given})"

  @property
  def rate_variable(self) -> nnx.Variable | None:
    """The `nnx.Variable` that is the learning rate, or that `bias_corrected` corrects; else None.

    >>> rate = nnx.Variable(0.1)
    >>> embed.adam(rate).rate_variable is rate, embed.adam(0.1).rate_variable
    (True, None)
    """
    rate = self.learning_rate
    rate = rate.learning_rate if isinstance(rate, _BiasCorrected) else rate
    return rate if isinstance(rate, nnx.Variable) else None

  def learning_rate_at(self, step: Any, rate: Any = None) -> Any:
    """The rate of the 0-based `step`, a float or a traced scalar.

    Args:
      step: the step.
      rate: what `rate_variable` held when the step began; None is what it holds now.

    >>> embed.sgd(lambda step: 0.1 / (step + 1)).learning_rate_at(1)
    0.05
    """
    if rate is None and self.rate_variable is not None:
      rate = self.rate_variable.get_value()
    if isinstance(self.learning_rate, nnx.Variable):
      return rate
    if isinstance(self.learning_rate, _BiasCorrected):
      return self.learning_rate(step, rate)
    return _at(self.learning_rate, step)

  @property
  def has_schedule(self) -> bool:
    """Whether a step depends on its number, which `apply_gradients` then requires.

    >>> embed.sgd(0.1).has_schedule, embed.sgd(optax.linear_schedule(0.1, 0, 100)).has_schedule
    (False, True)
    """
    rate = self.learning_rate
    is_schedule = callable(rate) and not isinstance(rate, nnx.Variable)
    return is_schedule or self.uses_step

  def replace(self, **arguments: Any) -> "RowOptimizer":
    """The same optimizer with other arguments.

    Raises:
      TypeError: for an argument that it does not have.
      ValueError: naming an argument that is wrong.

    >>> embed.sgd(0.1).replace(clipvalue=1.0) == embed.sgd(0.1, clipvalue=1.0)
    True
    """
    return _rebuild(self.name, {**self.arguments, **arguments})


def _at(value: Any, step: Any) -> Any:
  return value(step) if callable(value) else value


def _rebuild(name: str, arguments: Mapping[str, Any]) -> RowOptimizer:
  return OPTIMIZERS[name](**arguments)


# --- registry and common arguments ---------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., RowOptimizer]] = {}
"""Every function that makes a `RowOptimizer`, by its name."""

Maker = TypeVar("Maker", bound=Callable[..., RowOptimizer])


def register(function: Maker) -> Maker:
  """Adds an optimizer's function to `OPTIMIZERS`.

  The function takes `learning_rate`, its own arguments and `**common: Unpack[Common]`, and returns
  a `RowOptimizer(equation, slots)`: slots are `Slot`s or initial values by name, or a function of
  the dimension. The registered one checks the common arguments, and adds all arguments to its
  result: scalar arrays as numbers, numbers of common arguments as floats, `clipvalue` as a pair.
  Docstrings leave the common arguments to `sgd`.
  """
  name, own = function.__name__, inspect.signature(function)
  of_common = [
    inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS[key], annotation=kind)
    for key, kind in Common.__annotations__.items()
  ]
  signature = own.replace(parameters=[*list(own.parameters.values())[:-1], *of_common])

  @functools.wraps(function)
  def maker(*args: Any, **kwargs: Any) -> RowOptimizer:
    try:
      bound = signature.bind(*args, **kwargs)
    except TypeError as error:
      raise TypeError(f"{name}() {error}") from None
    bound.apply_defaults()
    given = {key: _setting(name, key, x) for key, x in bound.arguments.items()}
    arguments = given | _checked(name, given)
    made = function(**arguments)
    slots = made.slots if callable(made.slots) else _fixed_slots(name, made.slots, arguments)
    return dataclasses.replace(made, name=name, arguments=arguments, slots=slots)

  maker.__signature__ = signature  # type: ignore[attr-defined]  # for `help`, and error texts
  if name != "sgd":
    maker.__doc__ = f"{function.__doc__}\n  `embed.sgd` explains the common arguments and errors.\n"
  OPTIMIZERS[name] = maker
  return cast(Maker, maker)


def _setting(name: str, key: str, value: Any) -> Any:
  """An argument as a number, unless it may change from step to step."""
  if isinstance(value, nnx.Variable):
    require(
      key == "learning_rate",
      f"{name}: {key} is an nnx.Variable, whose later values no step would see. Give a number: "
      "only learning_rate may be one.",
    )
    return value
  can_change = isinstance(value, np.ndarray) and not value.ndim and value.flags.writeable
  instead = ", or nnx.Variable(x) for a rate that changes" if key == "learning_rate" else ""
  require(
    not can_change,
    f"{name}: {key} is a NumPy array, whose later values no step would see. Write "
    f"float(x){instead}.",
  )
  return setting(f"{name}: {key}", value)


def named() -> dict[str, Callable[..., RowOptimizer]]:
  """The registered functions that a configuration can name: each argument has a default."""
  required = lambda p: p.default is p.empty and p.kind is not p.VAR_KEYWORD
  return {
    name: function
    for name, function in OPTIMIZERS.items()
    if not any(map(required, inspect.signature(function).parameters.values()))
  }


def _fixed_slots(
  name: str, slots: Mapping[str, Slot | float], arguments: Mapping[str, Any]
) -> Callable[[int], dict[str, Slot]]:
  unknown = sorted(set(arguments["slot_init"]) - set(slots))
  require(not unknown, f"{name}: slot_init names {unknown}; its slots are {set(slots)}.")
  by_name = {key: s if isinstance(s, Slot) else Slot(float(s)) for key, s in slots.items()}
  return lambda dim: by_name


def require(condition: bool, message: str) -> None:
  """Raises a `ValueError` unless the condition holds."""
  if not condition:
    raise ValueError(message)


def _checked(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
  """The arguments that all optimizers take, in one form each."""
  rate = _rate(name, "learning_rate", arguments["learning_rate"])
  clip = arguments["clipvalue"]
  low, high = arguments["clip_weight_min"], arguments["clip_weight_max"]
  require(
    low is None or high is None or low <= high,
    f"{name}: clip_weight_min={low} is greater than clip_weight_max={high}.",
  )
  by_rate = "multiply_weight_decay_factor_by_learning_rate"
  return {
    "learning_rate": rate,
    "clipvalue": _clip_pair(name, clip),
    by_rate: bool(arguments[by_rate]),
    "slot_init": arguments["slot_init"] or {},
  }


def _rate(name: str, argument: str, value: Any) -> Rate:
  """A number as a float, which compares by value; a schedule and a Variable as they are."""
  if isinstance(value, nnx.Variable):
    require(
      np.shape(value.get_value()) == (),
      f"{name}: {argument} is an nnx.Variable of shape {np.shape(value.get_value())}. Write "
      "nnx.Variable(0.1), a scalar.",
    )
    return value
  if not callable(value):
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    require(is_number, f"{name}: {argument} must be a number or f(step). Got {value!r}.")
    return float(value)
  try:
    inspect.signature(value).bind(0)
  except TypeError:
    raise ValueError(
      f"{name}: {argument} must be a number or a schedule f(step). A function without arguments "
      "would be read once, when the step is compiled. Write `lambda step: ...`."
    ) from None
  return value


def _clip_pair(name: str, value: Any) -> tuple[float | None, float | None] | None:
  if value is None:
    return None
  if not isinstance(value, (tuple, list)):
    value = (-float(value), float(value))
  require(len(value) == 2, f"{name}: clipvalue must be a number or (min, max). Got {value!r}.")
  low, high = (None if v is None else float(v) for v in value)
  require(
    low == low and high == high and (low is None or high is None or low <= high),  # NaN: unequal
    f"{name}: clipvalue clips gradients to ({low}, {high}), which is no range. Write a number that "
    "is not negative, or (min, max).",
  )
  return low, high


# --- equations -----------------------------------------------------------------------------------


def _check_divisor(name: str, initial_accumulator_value: float, epsilon: float) -> None:
  require(epsilon >= 0, f"Argument `epsilon` must be >= 0. Got {epsilon!r}.")
  require(
    initial_accumulator_value >= 0 and initial_accumulator_value + epsilon > 0,
    "Argument `initial_accumulator_value` must be a positive float, or 0 with a positive "
    f"`epsilon`: {name} would divide 0 by 0. Got {initial_accumulator_value!r}.",
  )


def _check_beta(name: str, value: float) -> None:
  require(0 <= value < 1, f"Argument `{name}` must be >= 0 and < 1. Got {value!r}.")


@register
def sgd(learning_rate: Rate = 0.01, **common: Unpack[Common]) -> RowOptimizer:
  """Stochastic gradient descent. No slots.

  The step of a row::

    w -= lr * g

  Every optimizer takes these arguments, besides its own:

  Args:
    learning_rate: a float, or a schedule of the 0-based step (optax schedules are such); or an
      `nnx.Variable` of a scalar, whose value is read at every step by `embed.Optimizer`, which
      holds it in `rates`.
    clipvalue: clips the summed gradient elementwise, before the slots: `c` to `[-c, c]`, or
      `(min, max)` with None for open.
    weight_decay_factor: `w -= factor * w` of touched rows, before the update.
    multiply_weight_decay_factor_by_learning_rate: decay by `factor * lr` instead.
    clip_weight_min: touched rows are clipped to it after the update.
    clip_weight_max: touched rows are clipped to it after the update.
    slot_init: `{slot name: f(key, shape, dtype)}`, to start slots at other values; `shape` is the
      whole slot's, `[V, D]` or `[V]`.

  Raises:
    ValueError: naming the argument that is wrong.

  >>> embed.sgd(0.5).equation(jnp.array([1.0]), jnp.array([2.0]), {}, 0.5)[0].tolist()
  [1.5]
  >>> careful = embed.sgd(optax.cosine_decay_schedule(0.1, 1000), clipvalue=(-1.0, None))
  >>> careful.clipvalue
  (-1.0, None)
  """
  return RowOptimizer(lambda g, w, s, lr: (w - lr * g, s), {}, linear=True)


@register
def adagrad(
  learning_rate: Rate = 0.001,
  initial_accumulator_value: float = 0.1,
  epsilon: float = 0.0,
  **common: Unpack[Common],
) -> RowOptimizer:
  """Adagrad (Duchi et al. 2011): the squared gradients of an element lower its rate.

  The step of a row, with the new `a` and by default no epsilon, as TensorFlow's::

    a += g²
    w -= lr * g / (sqrt(a) + epsilon)

  Slot `accumulators`, float32 `[V, D]`.

  Args:
    initial_accumulator_value: of `a`, at least 0.
    epsilon: at least 0; one of the two must be positive.

  >>> g, w, slots = jnp.array([3.0]), jnp.array([1.0]), {"accumulators": jnp.array([7.0])}
  >>> w, slots = embed.adagrad(0.5).equation(g, w, slots, 0.5)
  >>> w.tolist(), slots["accumulators"].tolist()  # 7 + 3 * 3; 1 - 0.5 * 3 / sqrt(16)
  ([0.625], [16.0])
  """
  _check_divisor("adagrad", initial_accumulator_value, epsilon)

  def equation(g, w, s, lr):
    a = s["accumulators"] + g * g
    if epsilon:
      return w - lr * g / (jnp.sqrt(a) + epsilon), {"accumulators": a}
    return w - lr * g * jax.lax.rsqrt(a), {"accumulators": a}

  return RowOptimizer(equation, {"accumulators": initial_accumulator_value})


@register
def rowwise_adagrad(
  learning_rate: Rate = 0.001,
  initial_accumulator_value: float = 0.1,
  epsilon: float = 0.0,
  half_life: float | None = None,
  **common: Unpack[Common],
) -> RowOptimizer:
  """Row-wise Adagrad: one accumulator a row, `D` times less state than Adagrad.

  The step of a row, FBGEMM's EXACT_ROWWISE_ADAGRAD::

    a += mean(g²)  # over the row
    w -= lr * g / (sqrt(a) + epsilon)

  Slot `accumulators`, float32 `[V]`; with a half-life `steps` besides, int32 `[V]`, the number of
  steps that `accumulators` are up to date with.

  Args:
    initial_accumulator_value: of `a`, at least 0.
    epsilon: at least 0; one of the two must be positive.
    half_life: the number of steps in which `a` halves, of all rows, touched or not:
      `a = a * 2 ** (-1 / half_life) + mean(g²)`, so that a model that is trained for months keeps
      learning. It is computed when a row is stepped, for all steps since the last time. None never
      forgets.

  >>> g, w, slots = jnp.array([[1.0, 7.0]]), jnp.zeros((1, 2)), {"accumulators": jnp.zeros(1)}
  >>> w, slots = embed.rowwise_adagrad(5.0).equation(g, w, slots, 5.0)
  >>> w.tolist(), slots["accumulators"].tolist()  # (1 * 1 + 7 * 7) / 2; -5 * g / sqrt(25)
  ([[-1.0, -7.0]], [25.0])
  """
  _check_divisor("rowwise_adagrad", initial_accumulator_value, epsilon)
  require(
    half_life is None or half_life > 0,
    f"rowwise_adagrad: half_life must be a positive number of steps, or None. Got {half_life!r}.",
  )

  def moved(g, w, lr, a, columns):
    a = a + row_mean(g * g, columns)
    return w - lr * g / (jnp.sqrt(a) + epsilon)[..., None], a

  def equation(g, w, s, lr, columns=WHOLE_ROWS):
    w, a = moved(g, w, lr, s["accumulators"], columns)
    return w, {"accumulators": a}

  def fading(g, w, s, lr, columns=WHOLE_ROWS, *, step):
    missed = (step + 1 - s["steps"]).astype(jnp.float32)
    w, a = moved(g, w, lr, s["accumulators"] * jnp.exp2(-missed / half_life), columns)
    return w, {"accumulators": a, "steps": jnp.full_like(s["steps"], step + 1)}

  slots = {"accumulators": Slot(initial_accumulator_value, per_row=True)}
  if half_life is None:
    return RowOptimizer(equation, slots, across_row=True)
  slots["steps"] = Slot(0, per_row=True, dtype="int32")
  return RowOptimizer(fading, slots, across_row=True, uses_step=True)


@register
def adagrad_momentum(
  learning_rate: Rate = 0.001,
  momentum: float = 0.0,
  use_nesterov: bool = False,
  exponent: float = 2.0,
  beta2: float = 1.0,
  epsilon: float = 1e-10,
  **common: Unpack[Common],
) -> RowOptimizer:
  """Adagrad with momentum over the scaled gradient, as TensorFlow's on SparseCore.

  The step of a row::

    a = a + g²  # beta2 * a + (1 - beta2) * g² for beta2 < 1
    s = (a + epsilon)^(-1 / exponent) * g
    m = momentum * m + s
    w -= lr * m  # lr * (momentum * m + s) with use_nesterov

  Slots `accumulators` and `momenta`, float32 `[V, D]`, both from 0.

  Args:
    momentum: the decay of `m`.
    use_nesterov: whether to look ahead.
    exponent: positive; 2 is Adagrad's square root.
    beta2: the decay of `a`; 1 adds up.
    epsilon: positive.

  >>> zero = {"accumulators": jnp.array([0.0]), "momenta": jnp.array([2.0])}
  >>> optimizer = embed.adagrad_momentum(0.5, momentum=0.5)
  >>> w, slots = optimizer.equation(jnp.array([4.0]), jnp.array([1.0]), zero, 0.5)
  >>> w.tolist(), slots["momenta"].tolist()  # 0.5 * 2 + 4 / sqrt(16); 1 - 0.5 * 2
  ([0.0], [2.0])
  """
  require(epsilon > 0, "Adagrad momentum: epsilon must be positive")
  require(exponent > 0, "Adagrad momentum: the exponent must be > 0")

  def equation(g, w, s, lr):
    a = s["accumulators"]
    a = a + g * g if beta2 == 1 else beta2 * a + (1 - beta2) * g * g
    # A general power is five times as slow as a root.
    root = jax.lax.rsqrt(a + epsilon) if exponent == 2 else (a + epsilon) ** (-1.0 / exponent)
    scaled = root * g
    m = momentum * s["momenta"] + scaled
    w = w - lr * (momentum * m + scaled if use_nesterov else m)
    return w, {"accumulators": a, "momenta": m}

  return RowOptimizer(equation, {"accumulators": 0.0, "momenta": 0.0})


@register
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

  >>> slots = {"accumulators": jnp.array([7.0]), "linears": jnp.array([0.0])}
  >>> optimizer = embed.ftrl(1.0, l1_regularization_strength=5.0)
  >>> w, slots = optimizer.equation(jnp.array([3.0]), jnp.array([0.0]), slots, 1.0)
  >>> w.tolist(), slots["linears"].tolist()  # |z| is below l1
  ([0.0], [3.0])
  """
  del allow_zero_accumulator  # TensorFlow refuses a zero accumulator with it as well
  require(
    initial_accumulator_value > 0,
    "Argument `initial_accumulator_value` must be a positive float. Got "
    f"{initial_accumulator_value!r}.",
  )
  require(
    learning_rate_power <= 0, f"`learning_rate_power` must be <= 0. Got {learning_rate_power}"
  )
  require(l1_regularization_strength >= 0, "Argument `l1_regularization_strength` must be >= 0.")
  require(l2_regularization_strength >= 0, "Argument `l2_regularization_strength` must be >= 0.")
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

  slots = {"accumulators": initial_accumulator_value, "linears": 0.0}
  return RowOptimizer(equation, slots)


@register
def adam(
  learning_rate: Rate = 0.001,
  beta_1: float = 0.9,
  beta_2: float = 0.999,
  epsilon: float = 1e-7,
  sum_inside_sqrt: bool = True,
  bias_correction: bool = False,
  rowwise: bool = False,
  **common: Unpack[Common],
) -> RowOptimizer:
  """Adam (Kingma and Ba 2015) as TensorFlow has it for embeddings: without bias correction.

  The step of a row::

    m = beta_1 * m + (1 - beta_1) * g
    v = beta_2 * v + (1 - beta_2) * g²
    w -= lr * m / sqrt(v + epsilon²)  # lr * m / (sqrt(v) + epsilon) without sum_inside_sqrt

  Slots `momenta` and `velocities`, float32 `[V, D]`, from 0. That makes the first step of a row
  `(1 - beta_1) / sqrt(1 - beta_2)` times `lr`, 3.2 times with the defaults. Two arguments correct
  for it: `learning_rate=embed.bias_corrected(...)` by the global step, before epsilon is added, as
  TensorFlow's Adam and torch's SparseAdam; and `bias_correction`.

  Args:
    beta_1: the decay of `m`, in [0, 1).
    beta_2: the decay of `v`, in [0, 1).
    epsilon: positive.
    sum_inside_sqrt: whether epsilon is added inside the root, squared, or outside.
    bias_correction: divides `m` by `1 - beta_1^t` and `v` by `1 - beta_2^t` before epsilon is
      added, `t` being the row's own steps, this one included. Without sum_inside_sqrt that is
      torch's Adam and optax's. Slot `steps`, int32 `[V]`.
    rowwise: `v` is of the mean of g² over the row, one value a row, `[V]`: FBGEMM's
      PARTIAL_ROWWISE_ADAM.

  >>> zero = {"momenta": jnp.zeros(1), "velocities": jnp.zeros(1)}
  >>> optimizer = embed.adam(1.0, beta_1=0.5, beta_2=0.75)
  >>> w, slots = optimizer.equation(jnp.array([8.0]), jnp.array([0.0]), zero, 1.0)
  >>> w.tolist(), slots["momenta"].tolist(), slots["velocities"].tolist()  # -4 / sqrt(16)
  ([-1.0], [4.0], [16.0])
  """
  _check_beta("beta_1", beta_1)
  _check_beta("beta_2", beta_2)
  require(epsilon > 0, f"epsilon must be positive; got {epsilon}.")

  def equation(g, w, s, lr, columns=WHOLE_ROWS):
    m = beta_1 * s["momenta"] + (1 - beta_1) * g
    if rowwise:
      v = beta_2 * s["velocities"] + (1 - beta_2) * row_mean(g * g, columns)
    else:
      v = beta_2 * s["velocities"] + (1 - beta_2) * g * g
    new = {"momenta": m, "velocities": v}
    if rowwise:
      v = v[..., None]
    if bias_correction:
      new["steps"] = s["steps"] + 1
      t = new["steps"].astype(jnp.float32)[..., None]
      m, v = m / _correction(beta_1, t), v / _correction(beta_2, t)
    root = jnp.sqrt(v + epsilon**2) if sum_inside_sqrt else jnp.sqrt(v) + epsilon
    return w - lr * m / root, new

  slots = {"momenta": Slot(), "velocities": Slot(per_row=rowwise)}
  if bias_correction:
    slots["steps"] = Slot(0, per_row=True, dtype="int32")
  return RowOptimizer(equation, slots, across_row=rowwise)


def frozen(**arguments: Never) -> RowOptimizer:
  """Leaves a table as it is: no slots, no update. Its row gradients can still be seen.

  Raises:
    ValueError: for any argument.

  >>> movie = embed.TableConfig(100, 4, optimizer=embed.frozen(), name="movie")
  >>> layer = embed.SparseEmbed(embed.FeatureConfig(movie), embed.adam(1e-3), rngs=nnx.Rngs(0))
  >>> list(layer.variables["movie"])
  ['parameters']
  """
  if arguments:
    raise ValueError(
      f"frozen: a table that does not train takes no arguments. Got {', '.join(arguments)}."
    )
  return RowOptimizer(None, lambda dim: {}, name="frozen")


OPTIMIZERS["frozen"] = frozen


def bias_corrected(
  learning_rate: Rate = 0.001, beta_1: float = 0.9, beta_2: float = 0.999
) -> Schedule:
  """The schedule that gives Adam its bias correction: `lr * sqrt(1 - beta_2^t) / (1 - beta_1^t)`.

  `t` is the step plus 1: it corrects by the global step, whenever a row was last looked up.

  Args:
    learning_rate: a float, a schedule of the 0-based step, or an `nnx.Variable`.
    beta_1: of the Adam that the schedule is for.
    beta_2: of the Adam that the schedule is for.

  Returns:
    The schedule, a function of the 0-based step.

  >>> optimizer = embed.adam(embed.bias_corrected(0.1))
  >>> [round(float(optimizer.learning_rate_at(step)), 4) for step in (0, 100_000)]
  [0.0316, 0.1]
  """
  what = "bias_corrected", "learning_rate"
  return _BiasCorrected(_rate(*what, _setting(*what, learning_rate)), beta_1, beta_2)


@dataclasses.dataclass(frozen=True, eq=False)
class _BiasCorrected:
  """The schedule of `bias_corrected`."""

  learning_rate: Rate
  beta_1: float
  beta_2: float

  def __call__(self, step: Any, rate: Any = None) -> jax.Array:
    t = jnp.asarray(step, jnp.float32) + 1
    if not isinstance(self.learning_rate, nnx.Variable):
      rate = _at(self.learning_rate, step)
    return rate * jnp.sqrt(_correction(self.beta_2, t)) / _correction(self.beta_1, t)


def _correction(beta: float, t: jax.Array) -> jax.Array | float:
  """`1 - beta^t`, by expm1, which keeps the digits that the difference loses in float32."""
  return -jnp.expm1(t * math.log(beta)) if beta > 0 else 1.0


# --- equations that look across a row ------------------------------------------------------------


def row_sum(x: jax.Array, columns: Columns) -> jax.Array:
  """The sum of each row, `[..., D]` to `[...]`, its columns on one device or several."""
  total = jnp.sum(x, axis=-1)
  return jax.lax.psum(total, columns.axes) if columns.axes else total


def row_mean(x: jax.Array, columns: Columns) -> jax.Array:
  """The mean of each row, `[..., D]` to `[...]`, its columns on one device or several."""
  if not columns.axes:
    return jnp.mean(x, axis=-1)
  return row_sum(x, columns) / columns.dim  # padding columns are 0


def on_whole_rows(update: UserEquation) -> Equation:
  """Gives an equation whole rows, wherever their columns are.

  Every device gathers and steps whole rows, and keeps its own columns. A slot of one value per
  element is known by its rank.
  """

  def equation(g, w, slots, learning_rate, columns: Columns = WHOLE_ROWS):
    if not columns.axes:
      return update(g, w, slots, learning_rate)
    whole, own = columns.whole, columns.own
    split = {name: slot.ndim == w.ndim for name, slot in slots.items()}
    whole_slots = {name: whole(s) if split[name] else s for name, s in slots.items()}
    new_w, new = update(whole(g), whole(w), whole_slots, learning_rate)
    return own(new_w), {name: own(s) if split[name] else s for name, s in new.items()}

  return equation


@register
def custom_optimizer(
  update: UserEquation,
  slots: Mapping[str, Slot | float] | None = None,
  learning_rate: Rate = 0.01,
  **common: Unpack[Common],
) -> RowOptimizer:
  """Makes an optimizer from your own equation.

  Args:
    update: `f(gradients, rows, slots, learning_rate) -> (rows, slots)` on float32 `[..., D]`
      arrays, the leading axes being rows, in JAX operations. Slots are a dict of `[..., D]`, or
      `[...]` if `per_row`. It gets whole rows, on a mesh too, and may look across a row.
    slots: `{name: initial value}`, or `{name: embed.Slot(initial, per_row=True)}`.
    learning_rate: a float, or a schedule of the 0-based step.

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
  require(callable(update), f"custom_optimizer: update must be callable. Got {update!r}.")
  for name, slot in (slots or {}).items():
    require(
      isinstance(slot, (Slot, int, float)),
      f"custom_optimizer: slot {name!r} must be a number or an embed.Slot. Got {slot!r}.",
    )

  @functools.cache
  def checked_slots(dim: int) -> dict[str, Slot]:
    by_name = {name: s if isinstance(s, Slot) else Slot(s) for name, s in (slots or {}).items()}
    full = lambda s, n: jnp.full((n,) if s.per_row else (n, dim), s.initial, s.dtype)
    state_of = lambda rows: {name: full(s, len(rows)) for name, s in by_name.items()}
    step = lambda g, w, state: update(g, w, state, jnp.float32(0.125))
    require(
      not _meets_others(step, state_of, dim),
      "custom_optimizer: a row's update depends on other rows, which are not always beside it. "
      "Reduce over the last axis only, as jnp.mean(g, axis=-1).",
    )
    return by_name

  return RowOptimizer(on_whole_rows(update), checked_slots, across_row=True)


@register
def from_optax(
  tx: Any, learning_rate: Rate = 1.0, per_row: bool = False, **common: Unpack[Common]
) -> RowOptimizer:
  """Runs an elementwise optax transformation on rows, lazily.

  Each row is a parameter of its own that steps only when it is touched: the state is kept per
  row, step counts included, so bias correction counts a row's own steps.

  Args:
    tx: such as `optax.adam(1e-3)`. Its `init` must not depend on the parameters.
    learning_rate: a factor on the updates; a schedule of the global step belongs here.
    per_row: True takes a `tx` in which an element's update depends on other elements (the norms of
      LAMB and LARS, the means of novograd and adafactor), and takes those over each row alone.
      `embed.clip_by_global_norm` clips by the norm of all gradients.

  Slots are the leaves of the optax state, `[V, D]`, or `[V]` for its scalars, named by their paths
  in it. Two optimizers are equal if they have the same `tx` object: give one to all tables that may
  share a stack, since optax's transformations do not compare by their arguments.

  Raises:
    ValueError: if `tx` is not an optax transformation, if it is not elementwise without `per_row`,
      or if its state does not fit a row.

  >>> optimizer = embed.from_optax(optax.adam(1e-3))
  >>> {name: slot.per_row for name, slot in optimizer.slots(64).items()}
  {'0.count': True, '0.mu': False, '0.nu': False}
  """
  require(
    hasattr(tx, "init") and hasattr(tx, "update"),
    f"from_optax takes an optax transformation such as optax.adam(1e-3). Got {tx!r}.",
  )

  def step(g, w, state):
    updates, state = tx.update(g, state, w)
    return w + updates, state

  try:
    meets_others = not per_row and _meets_others(step, tx.init, dim=4)
  except Exception as error:
    raise ValueError(
      "from_optax: tx needs arguments or a state that the rows of a table do not have "
      f"({type(error).__name__}: {error}). Write embed.custom_optimizer for its equation."
    ) from error
  require(
    not meets_others,
    "from_optax: a row's update depends on other rows of the table, so it cannot step alone. To "
    "clip by a norm, leave the clip out of tx and write optimizer.update(model, "
    "embed.clip_by_global_norm(grads, max_norm)). To take norms and means over each row alone, "
    "write from_optax(tx, per_row=True).",
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
      require(
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

  return RowOptimizer(on_whole_rows(equation), slots, across_row=True)


def _meets_others(
  step: Callable[..., tuple[jax.Array, Any]], state_of: Callable[[jax.Array], Any], dim: int
) -> bool:
  """Whether a row steps otherwise beside another row, also one without finite gradients."""

  def run(rows, gradients):
    state = state_of(rows)
    for g in gradients:
      rows, state = step(g, rows, state)
    return rows[0]

  w = np.linspace(0.5, 1.0, 2 * dim, dtype=np.float32).reshape(2, dim)
  gradients = np.stack([100 * w, [w[0], np.full(dim, np.nan)], w])
  both = jax.jit(lambda w, g: (run(w, g), run(w[:1], g[:, :1])))
  with jax.ensure_compile_time_eval():  # asked for inside a traced step too
    pair, alone = both(w, gradients)
  return not np.allclose(pair, alone, rtol=1e-4, equal_nan=True)
