"""The row optimizers: a function each, which states the equation of one row's step.

An equation is written on `g` (the row's summed gradient), `w` (the row) and its slots, all
`[..., D]` in float32, slots of one value per row `[...]`. `register` adds what all optimizers
share: it checks all arguments by `CHECKS` and records them. `OPTIMIZERS` is the registry: pickles,
`embed.EmbeddingConfigSpec`, `embed.from_tpu_embedding` and error texts read it, so none of them
changes when an optimizer is added.

Formulas, names and defaults are TensorFlow's (its SparseCore sources and training kernels).
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, TypeVar, Unpack, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from embed.config import check, setting

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


@dataclasses.dataclass(frozen=True)
class Slot:
  """An optimizer's state per row, for `embed.custom_optimizer`.

  Args:
    initial: the value every entry starts with.
    per_row: one value a row, `[V]`, instead of one per element, `[V, D]`.
    dtype: float32, or an integer type for counts.

  >>> embed.adam(1e-3).slots(64)["momenta"]  # of each row of 64 elements
  Slot(initial=0.0, per_row=False, dtype='float32')
  """

  initial: float = 0.0
  per_row: bool = False
  dtype: Any = "float32"

  def __post_init__(self):
    object.__setattr__(self, "initial", setting("initial", self.initial))
    check("initial", self.initial, _is_number(self.initial), "a number")


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
      None for `embed.frozen`.
    slots: `f(dim) -> {name: embed.Slot}`, the state that it keeps per row.
    linear: True if the step of a sum of gradients is the sum of the steps.
    uses_step: True if the equation takes the number of the step, int32, as `step=`.
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
  uses_step: bool = False
  name: str = ""
  arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __getattr__(self, name: str) -> Any:
    for arguments in (self.__dict__.get("arguments", {}), _FROZEN):
      if name in arguments:
        return arguments[name]
    raise AttributeError(f"{self.name or 'a row optimizer'} has no argument {name!r}")

  def __reduce__(self):
    return _make, (self.name, self.arguments)  # closures do not pickle, their arguments do

  @functools.cached_property
  def _key(self) -> tuple[Any, ...]:
    return (self.name, *((key, _by_value(x)) for key, x in sorted(self.arguments.items())))

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
    rate = rate.learning_rate if isinstance(rate, BiasCorrected) else rate
    return rate if isinstance(rate, nnx.Variable) else None

  def learning_rate_at(self, step: Any, rate: Any = None) -> Any:
    """The rate of the 0-based `step`, a number or a traced scalar.

    Args:
      step: the step.
      rate: what `rate_variable` held when the step began; None is what it holds now.

    >>> embed.sgd(lambda step: 0.1 / (step + 1)).learning_rate_at(1)
    0.05
    """
    return _rate_at(self.learning_rate, step, rate)

  @property
  def has_schedule(self) -> bool:
    """True if a step depends on its number, which `apply_gradients` then requires.

    >>> embed.sgd(0.1).has_schedule, embed.sgd(optax.linear_schedule(0.1, 0, 100)).has_schedule
    (False, True)
    """
    rate = self.learning_rate
    return self.uses_step or (callable(rate) and not isinstance(rate, nnx.Variable))

  def replace(self, **arguments: Any) -> "RowOptimizer":
    """Makes the same optimizer with other arguments.

    Raises:
      TypeError: for an argument that it does not have.
      ValueError: naming an argument that is wrong.

    >>> embed.sgd(0.1).replace(clipvalue=1.0) == embed.sgd(0.1, clipvalue=1.0)
    True
    """
    return _make(self.name, {**self.arguments, **arguments})


def _by_value(x: Any) -> Any:
  if isinstance(x, nnx.Variable):  # equal Variables may differ later
    return id(x)
  return tuple(sorted(x.items())) if isinstance(x, Mapping) else x


def _rate_at(rate: Rate, step: Any, value: Any = None) -> Any:
  """The number that a rate is at a step; `value` is what its Variable holds, if it has one."""
  if isinstance(rate, nnx.Variable):
    return rate.get_value() if value is None else value
  if isinstance(rate, BiasCorrected):
    return rate(step, value)
  return rate(step) if callable(rate) else rate


def _make(name: str, arguments: Mapping[str, Any]) -> RowOptimizer:
  return OPTIMIZERS[name](**arguments)


# --- arguments -----------------------------------------------------------------------------------


def _is_number(x: Any) -> bool:
  return isinstance(x, int | float) and not isinstance(x, bool)


def _is_rate(x: Any) -> bool:
  if isinstance(x, nnx.Variable):
    return np.shape(x.get_value()) == ()
  if not callable(x):
    return _is_number(x) and x >= 0
  try:
    inspect.signature(x).bind(0)
  except TypeError:
    return False  # a function without arguments would be read once, when the step is compiled
  return True


def _is_clip_range(x: Any) -> bool:
  if _is_number(x):
    return x >= 0
  if not isinstance(x, tuple | list) or len(x) != 2:
    return False
  low, high = (end if v is None else v for v, end in zip(x, (-math.inf, math.inf), strict=True))
  return _is_number(low) and _is_number(high) and low <= high


def _optional(predicate: Callable[[Any], bool], expected: str) -> tuple[Callable[[Any], bool], str]:
  return lambda x: x is None or predicate(x), f"{expected}, or None"


Check = tuple[Callable[[Any], bool], str]
_NUMBER: Check = (_is_number, "a number")
_BOOL: Check = (lambda x: isinstance(x, bool), "True or False")
_POSITIVE: Check = (lambda x: _is_number(x) and x > 0, "a positive number")
_NOT_NEGATIVE: Check = (lambda x: _is_number(x) and x >= 0, "a number >= 0")
_DECAY: Check = (lambda x: _is_number(x) and 0 <= x < 1, "a number >= 0 and < 1")
_CALLABLE: Check = (callable, "a function")

CHECKS: dict[str, Check] = {  # by argument, or by optimizer and argument
  "learning_rate": (
    _is_rate,
    "a number >= 0, a schedule such as `lambda step: ...`, or an nnx.Variable of a scalar",
  ),
  "clipvalue": _optional(_is_clip_range, "a number >= 0 or (min, max) with min <= max"),
  "weight_decay_factor": _optional(*_NOT_NEGATIVE),
  "multiply_weight_decay_factor_by_learning_rate": _optional(*_BOOL),
  "clip_weight_min": _optional(*_NUMBER),
  "clip_weight_max": _optional(*_NUMBER),
  "slot_init": _optional(
    lambda x: isinstance(x, Mapping) and all(map(callable, x.values())),
    "{slot name: f(key, shape, dtype)}",
  ),
  "initial_accumulator_value": _NOT_NEGATIVE,
  "ftrl initial_accumulator_value": _POSITIVE,
  "epsilon": _POSITIVE,
  "adagrad epsilon": _NOT_NEGATIVE,
  "rowwise_adagrad epsilon": _NOT_NEGATIVE,
  "half_life": _optional(_POSITIVE[0], "a positive number of steps"),
  "momentum": _NUMBER,
  "use_nesterov": _BOOL,
  "exponent": _POSITIVE,
  "beta": _NUMBER,
  "beta_1": _DECAY,
  "beta_2": _DECAY,
  "beta2": (lambda x: _is_number(x) and 0 < x <= 1, "a number > 0 and <= 1"),
  "learning_rate_power": (lambda x: _is_number(x) and x <= 0, "a number <= 0"),
  "l1_regularization_strength": _NOT_NEGATIVE,
  "l2_regularization_strength": _NOT_NEGATIVE,
  "multiply_linear_by_learning_rate": _BOOL,
  "allow_zero_accumulator": _BOOL,
  "sum_inside_sqrt": _BOOL,
  "bias_correction": _BOOL,
  "rowwise": _BOOL,
  "per_row": _BOOL,
  "update": _CALLABLE,
  "tx": (
    lambda x: hasattr(x, "init") and hasattr(x, "update"),
    "an optax transformation such as optax.adam(1e-3)",
  ),
}


def _checked(name: str, key: str, value: Any) -> Any:
  """An argument that fits its line in `CHECKS`, a scalar array as a number."""
  is_variable = isinstance(value, nnx.Variable)
  can_change = isinstance(value, np.ndarray) and not value.ndim and value.flags.writeable
  if can_change or (is_variable and key != "learning_rate"):
    raise ValueError(
      f"Argument `{key}` of {name} may change, and no step would see it. Write float(x); "
      "only learning_rate may be an nnx.Variable(x)."
    )
  value = value if is_variable else setting(f"{name}: {key}", value)
  is_valid, expected = CHECKS.get(f"{name} {key}", CHECKS.get(key, (lambda x: True, "")))
  check(key, value, is_valid(value), expected)
  return value


# --- registry ------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., RowOptimizer]] = {}
"""Every function that makes a `RowOptimizer`, by its name."""

Maker = TypeVar("Maker", bound=Callable[..., RowOptimizer])
_COMMON = [
  inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
  for key, kind in Common.__annotations__.items()
]
_FROZEN = {parameter.name: None for parameter in _COMMON} | {"learning_rate": 0.0, "slot_init": {}}


def register(function: Maker) -> Maker:
  """Adds an optimizer's function to `OPTIMIZERS`.

  The function takes `learning_rate`, its own arguments and `**common: Unpack[Common]`, and returns
  a `RowOptimizer(equation, slots)`: slots are `Slot`s or initial values by name, or a function of
  the dimension. The registered one checks all arguments, and adds them to its result: scalar arrays
  as numbers, `clipvalue` as a pair. Docstrings leave the common arguments to `sgd`.
  """
  name, own = function.__name__, inspect.signature(function)
  signature = own.replace(parameters=[*list(own.parameters.values())[:-1], *_COMMON])

  @functools.wraps(function)
  def maker(*args: Any, **kwargs: Any) -> RowOptimizer:
    try:
      bound = signature.bind(*args, **kwargs)
    except TypeError as error:
      raise TypeError(f"{name}() {error}") from None
    bound.apply_defaults()
    arguments = {key: _checked(name, key, x) for key, x in bound.arguments.items()}
    low, high = arguments["clip_weight_min"], arguments["clip_weight_max"]
    is_range = low is None or high is None or low <= high
    check("clip_weight_min", low, is_range, f"at most clip_weight_max={high}")
    clip = arguments["clipvalue"]
    if clip is not None:
      arguments["clipvalue"] = (-clip, clip) if _is_number(clip) else tuple(clip)
    arguments["slot_init"] = arguments["slot_init"] or {}
    made = function(**arguments)
    if not callable(made.slots):
      by_name = _as_slots(made.slots, arguments["slot_init"])
      made = dataclasses.replace(made, slots=lambda dim: by_name)
    return dataclasses.replace(made, name=name, arguments=arguments)

  maker.__signature__ = signature  # type: ignore[attr-defined]  # for `help`, and error texts
  if name != "sgd":
    maker.__doc__ = f"{function.__doc__}\n  `embed.sgd` explains the common arguments and errors.\n"
  OPTIMIZERS[name] = maker
  return cast(Maker, maker)


def _as_slots(slots: Mapping[str, Slot | float], slot_init: SlotInit) -> dict[str, Slot]:
  is_known = set(slot_init) <= set(slots)
  check("slot_init", sorted(slot_init), is_known, f"by slot; the slots are {sorted(slots)}")
  for name, slot in slots.items():
    is_slot = isinstance(slot, Slot) or _is_number(slot)
    check(f"slots[{name!r}]", slot, is_slot, "a number or an embed.Slot")
  return {name: s if isinstance(s, Slot) else Slot(float(s)) for name, s in slots.items()}


def named() -> dict[str, Callable[..., RowOptimizer]]:
  """The registered functions that a configuration can name: each argument has a default."""
  required = lambda p: p.default is p.empty and p.kind is not p.VAR_KEYWORD
  return {
    name: function
    for name, function in OPTIMIZERS.items()
    if not any(map(required, inspect.signature(function).parameters.values()))
  }


# --- equations -----------------------------------------------------------------------------------


@register
def sgd(learning_rate: Rate = 0.01, **common: Unpack[Common]) -> RowOptimizer:
  """Stochastic gradient descent. No slots.

  The step of a row::

    w -= lr * g

  Every optimizer takes these arguments, besides its own:

  Args:
    learning_rate: a number, or a schedule of the 0-based step (optax schedules are such); or an
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
    ValueError: naming the argument that is wrong, and what it must be.

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
  """
  _check_divisor(initial_accumulator_value, epsilon)

  def equation(g, w, s, lr):
    a = s["accumulators"] + g * g
    if epsilon:
      return w - lr * g / (jnp.sqrt(a) + epsilon), {"accumulators": a}
    return w - lr * g * jax.lax.rsqrt(a), {"accumulators": a}

  return RowOptimizer(equation, {"accumulators": initial_accumulator_value})


def _check_divisor(initial_accumulator_value: float, epsilon: float) -> None:
  check(
    "initial_accumulator_value",
    initial_accumulator_value,
    initial_accumulator_value + epsilon > 0,
    "positive, or 0 with a positive `epsilon`: a gradient of 0 would divide 0 by 0",
  )


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
  _check_divisor(initial_accumulator_value, epsilon)

  def equation(g, w, s, lr):
    a = s["accumulators"] + jnp.mean(g * g, axis=-1)
    return w - lr * g / (jnp.sqrt(a) + epsilon)[..., None], {"accumulators": a}

  def forgetting(g, w, s, lr, *, step):
    missed = (step + 1 - s["steps"]).astype(jnp.float32)
    kept = {"accumulators": s["accumulators"] * jnp.exp2(-missed / half_life)}
    w, slots = equation(g, w, kept, lr)
    return w, slots | {"steps": jnp.full_like(s["steps"], step + 1)}

  slots = {"accumulators": Slot(initial_accumulator_value, per_row=True)}
  if half_life is None:
    return RowOptimizer(equation, slots)
  slots["steps"] = Slot(0, per_row=True, dtype="int32")
  return RowOptimizer(forgetting, slots, uses_step=True)


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
    use_nesterov: True looks ahead.
    exponent: positive; 2 is Adagrad's square root.
    beta2: the decay of `a`, in (0, 1]; 1 adds up.
    epsilon: positive.
  """

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
    learning_rate: a number, or a schedule of the 0-based step. A rate of 0, as a warm-up may start
      with, divides by 0 unless `multiply_linear_by_learning_rate`.
    learning_rate_power: at most 0; -0.5 is Adagrad's square root.
    l1_regularization_strength: `l1`, at least 0.
    l2_regularization_strength: `l2`, at least 0.
    beta: added to the root of the accumulator.
    initial_accumulator_value: of `a`, positive.
    multiply_linear_by_learning_rate: `z` carries the factor `lr`, which may then be 0.
    allow_zero_accumulator: has no effect; TensorFlow refuses a zero accumulator with it as well.
  """
  del allow_zero_accumulator
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

  return RowOptimizer(equation, {"accumulators": initial_accumulator_value, "linears": 0.0})


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
    sum_inside_sqrt: True adds epsilon inside the root, squared; False outside.
    bias_correction: divides `m` by `1 - beta_1^t` and `v` by `1 - beta_2^t` before epsilon is
      added, `t` being the row's own steps, this one included. Without sum_inside_sqrt that is
      torch's Adam and optax's. Slot `steps`, int32 `[V]`.
    rowwise: `v` is of the mean of g² over the row, one value a row, `[V]`: FBGEMM's
      PARTIAL_ROWWISE_ADAM.
  """

  def equation(g, w, s, lr):
    squares = jnp.mean(g * g, axis=-1) if rowwise else g * g
    m = beta_1 * s["momenta"] + (1 - beta_1) * g
    v = beta_2 * s["velocities"] + (1 - beta_2) * squares
    slots = {"momenta": m, "velocities": v}
    v = v[..., None] if rowwise else v
    if bias_correction:
      slots["steps"] = s["steps"] + 1
      t = slots["steps"].astype(jnp.float32)[..., None]
      m, v = m / _correction(beta_1, t), v / _correction(beta_2, t)
    root = jnp.sqrt(v + epsilon**2) if sum_inside_sqrt else jnp.sqrt(v) + epsilon
    return w - lr * m / root, slots

  slots = {"momenta": Slot(), "velocities": Slot(per_row=rowwise)}
  if bias_correction:
    slots["steps"] = Slot(0, per_row=True, dtype="int32")
  return RowOptimizer(equation, slots)


def _correction(beta: float, t: jax.Array) -> jax.Array | float:
  """`1 - beta^t`, by expm1, which keeps the digits that the difference loses in float32."""
  return -jnp.expm1(t * math.log(beta)) if beta > 0 else 1.0


def frozen() -> RowOptimizer:
  """Leaves a table as it is: no slots, no update. Its row gradients can still be seen.

  >>> movie = embed.TableConfig(100, 4, optimizer=embed.frozen(), name="movie")
  >>> layer = embed.SparseEmbed(embed.FeatureConfig(movie), embed.adam(1e-3), rngs=nnx.Rngs(0))
  >>> list(layer.variables["movie"])
  ['parameters']
  """
  return RowOptimizer(None, lambda dim: {}, name="frozen")


OPTIMIZERS["frozen"] = frozen


def bias_corrected(
  learning_rate: Rate = 0.001, beta_1: float = 0.9, beta_2: float = 0.999
) -> Schedule:
  """The schedule that gives Adam its bias correction: `lr * sqrt(1 - beta_2^t) / (1 - beta_1^t)`.

  `t` is the step plus 1: it corrects by the global step, whenever a row was last looked up.

  Args:
    learning_rate: a number, a schedule of the 0-based step, or an `nnx.Variable`.
    beta_1: of the Adam that the schedule is for.
    beta_2: of the Adam that the schedule is for.

  Returns:
    The schedule, a function of the 0-based step. Schedules of equal arguments are equal.

  >>> optimizer = embed.adam(embed.bias_corrected(0.1))
  >>> [round(float(optimizer.learning_rate_at(step)), 4) for step in (0, 100_000)]
  [0.0316, 0.1]
  """
  given = {"learning_rate": learning_rate, "beta_1": beta_1, "beta_2": beta_2}
  return BiasCorrected(**{key: _checked("bias_corrected", key, x) for key, x in given.items()})


@dataclasses.dataclass(frozen=True, eq=False)
class BiasCorrected:
  """The schedule of `bias_corrected`."""

  learning_rate: Rate
  beta_1: float
  beta_2: float

  def __call__(self, step: Any, value: Any = None) -> jax.Array:
    t = jnp.asarray(step, jnp.float32) + 1
    rate = _rate_at(self.learning_rate, step, value)
    return rate * jnp.sqrt(_correction(self.beta_2, t)) / _correction(self.beta_1, t)

  def _key(self) -> tuple[Any, ...]:
    return _by_value(self.learning_rate), self.beta_1, self.beta_2

  def __eq__(self, other: object) -> bool:
    return self._key() == other._key() if isinstance(other, BiasCorrected) else NotImplemented

  def __hash__(self) -> int:
    return hash(self._key())


# --- your own equations, and optax's -------------------------------------------------------------


def _meets_others(
  step: Callable[..., tuple[jax.Array, Any]], state_of: Callable[[jax.Array], Any], dim: int
) -> bool:
  """True if a row steps otherwise beside another row, also one without finite gradients."""

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
      `[...]` if `per_row`. It may look across a row, by the last axis.
    slots: `{name: initial value}`, or `{name: embed.Slot(initial, per_row=True)}`.
    learning_rate: a number, or a schedule of the 0-based step.

  Raises:
    ValueError: if `update` is not callable, or a slot is neither a number nor an `embed.Slot`; when
      a layer is made, if the step of a row depends on other rows.

  Two such optimizers are equal if their functions are the same object: define them once.

  >>> def signed(g, w, slots, lr):
  ...   return w - lr * jnp.sign(g), {"steps": slots["steps"] + 1}
  >>> optimizer = embed.custom_optimizer(signed, {"steps": embed.Slot(0, per_row=True)}, 0.5)
  >>> g, w = jnp.array([[4.0, -1.0]]), jnp.zeros((1, 2))
  >>> optimizer.equation(g, w, {"steps": jnp.zeros(1)}, 0.5)[0].tolist()
  [[-0.5, 0.5]]
  """
  by_name = _as_slots(slots or {}, common.get("slot_init") or {})

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

  return RowOptimizer(update, checked_slots)


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
    ValueError: if `tx` is not an optax transformation, if the update of a row depends on other rows
      without `per_row`, or if its state does not fit a row.

  >>> optimizer = embed.from_optax(optax.adam(1e-3))
  >>> {name: slot.per_row for name, slot in optimizer.slots(64).items()}
  {'0.count': True, '0.mu': False, '0.nu': False}
  """

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
    return {
      jax.tree_util.keystr(path, simple=True, separator="."): _slot_of(path, a, b, dim)
      for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(zero), jax.tree.leaves(one), strict=True
      )
    }

  def equation(g, w, s, lr):
    names = list(slots(w.shape[-1]))  # in the order of the state; `s` may come sorted

    def one_row(g, w, leaves):
      treedef = jax.tree.structure(tx.init(w))
      updates, state = tx.update(g, jax.tree.unflatten(treedef, [leaves[n] for n in names]), w)
      new = dict(zip(names, jax.tree.leaves(state), strict=True))
      return w + lr * updates, {k: v.astype(leaves[k].dtype) for k, v in new.items()}

    return (jax.vmap(one_row) if g.ndim > 1 else one_row)(g, w, s)

  return RowOptimizer(equation, slots)


def _slot_of(path: Any, of_zeros: Any, of_ones: Any, dim: int) -> Slot:
  """The slot of a leaf of an optax state, from the states of parameters of zeros and of ones."""
  a, b = np.asarray(of_zeros), np.asarray(of_ones)
  if a.shape not in ((), (dim,)) or not np.array_equal(a, b) or (a != a.flat[0]).any():
    raise ValueError(
      f"from_optax: state {jax.tree_util.keystr(path)} of shape {a.shape} does not fit a row: it "
      "must be constant and of the row's shape or a scalar."
    )
  return Slot(a.flat[0].item(), per_row=a.shape == (), dtype=a.dtype)
