"""The parts that all row optimizers share: the optimizer as a value, and the order of a step.

`embed/optimizers.py` has one function per optimizer. Each hands its equation, slots and arguments
to `make`, which checks the arguments that all of them take. `OPTIMIZERS` is the registry: pickles,
`embed.EmbeddingConfigSpec`, `embed.from_tpu_embedding`, error texts and `python -m embed check`
read it, so none of them changes when an optimizer is added.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from embed.config import setting
from embed.engine.mesh import WHOLE_ROWS, Columns

Schedule = Callable[[Any], Any]
Rate = float | Schedule
ClipRange = float | tuple[float | None, float | None]
SlotInit = Mapping[str, Callable[..., Any]]
Slots = dict[str, jax.Array]
Equation = Callable[..., tuple[jax.Array, Slots]]
UserEquation = Callable[[jax.Array, jax.Array, Slots, Any], tuple[jax.Array, Slots]]

_COMMON = (
  "gradient_multiplier", "clipvalue", "weight_decay_factor",
  "multiply_weight_decay_factor_by_learning_rate", "clip_weight_min", "clip_weight_max",
  "use_gradient_accumulation", "slot_init",
)  # fmt: skip


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


@dataclasses.dataclass(frozen=True)
class RowOptimizer:
  """A table's optimizer. Compared by value: equal hyperparameters are equal optimizers.

  Made by `embed.sgd`, `embed.adagrad` and the others; by `embed.custom_optimizer` from your own
  equation. It holds no state, so one object may serve many tables, and it pickles. Every row that
  was looked up in a step is stepped once, in this order: gradients times `gradient_multiplier`,
  summed over the row's occurrences, clipped to `clipvalue`; weight decay; `equation`; the row
  clipped to `clip_weight_min` and `clip_weight_max`. All in float32, for tables of any dtype.

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
  hyperparameters: tuple[tuple[str, Any], ...] = ()
  learning_rate: Rate = 0.0
  gradient_multiplier: Rate | None = None
  clipvalue: tuple[float | None, float | None] | None = None
  weight_decay_factor: float | None = None
  multiply_weight_decay_factor_by_learning_rate: bool = False
  clip_weight_min: float | None = None
  clip_weight_max: float | None = None
  use_gradient_accumulation: bool = True
  slot_init: tuple[tuple[str, Any], ...] = ()
  equation: Equation | None = dataclasses.field(default=None, compare=False, repr=False)
  slots: Callable[[int], dict[str, Slot]] = dataclasses.field(
    default_factory=lambda: lambda dim: {}, compare=False, repr=False
  )
  arguments: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)
  lazy: bool = True  # False moves every row at every step
  linear: bool = False  # the step of a sum is the sum of steps: rows need not be summed first
  across_row: bool = False  # the equation takes a fifth argument, the `Columns` it is given

  def __reduce__(self):
    return _rebuild, (self.name, self.arguments)  # closures do not pickle, their arguments do

  def learning_rate_at(self, step: Any) -> Any:
    """The rate of the 0-based `step`, a float or a traced scalar.

    >>> embed.sgd(lambda step: 0.1 / (step + 1)).learning_rate_at(1)
    0.05
    """
    return _at(self.learning_rate, step)

  def gradient_multiplier_at(self, step: Any) -> Any:
    """The factor on the gradients of the 0-based `step`, a float or a traced scalar, or None.

    >>> embed.sgd(0.1, gradient_multiplier=0.5).gradient_multiplier_at(0)
    0.5
    """
    return _at(self.gradient_multiplier, step)

  @property
  def has_schedule(self) -> bool:
    """Whether a step depends on its number, which `apply_gradients` then requires.

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
  return OPTIMIZERS[name](**arguments)


# --- registry ------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., RowOptimizer]] = {}
"""Every function that makes a `RowOptimizer`, by its name."""

Maker = TypeVar("Maker", bound=Callable[..., RowOptimizer])


def register(function: Maker) -> Maker:
  """Adds an optimizer's function to `OPTIMIZERS`, with its arguments as `config.setting`s."""
  names = tuple(inspect.signature(function).parameters)
  of = lambda name, value: setting(f"{function.__name__}: {name}", value)

  @functools.wraps(function)
  def with_settings(*args: Any, **kwargs: Any) -> RowOptimizer:
    settings = [of(name, x) for name, x in zip(names, args, strict=False)]
    rest = args[len(settings) :]  # too many, which the function says
    return function(*settings, *rest, **{name: of(name, x) for name, x in kwargs.items()})

  OPTIMIZERS[function.__name__] = with_settings
  return cast(Maker, with_settings)


def named() -> dict[str, Callable[..., RowOptimizer]]:
  """The registered functions that a configuration can name: each argument has a default."""
  required = lambda p: p.default is p.empty and p.kind is not p.VAR_KEYWORD
  return {
    name: function
    for name, function in OPTIMIZERS.items()
    if not any(map(required, inspect.signature(function).parameters.values()))
  }


# --- arguments -----------------------------------------------------------------------------------


def make(
  name: str,
  arguments: dict[str, Any],
  equation: Equation,
  slots: Mapping[str, Slot | float] | Callable[[int], dict[str, Slot]],
  *,
  lazy: bool = True,
  linear: bool = False,
  across_row: bool = False,
) -> RowOptimizer:
  """Builds an optimizer, and checks the arguments that all optimizers take.

  Args:
    name: of the function in the registry.
    arguments: every argument of that function, by name.
    equation: as in `RowOptimizer`. It may take `Columns` as its fifth argument, see `across_row`.
    slots: by name, or a function of the dimension.
    lazy: whether it moves touched rows alone.
    linear: whether the step of a sum of gradients is the sum of the steps.
    across_row: whether an element's step depends on other elements of its row. The equation then
      takes as its fifth argument the `Columns` that each device has of a row; by default all.

  Raises:
    ValueError: naming the argument that is wrong.
  """
  common = {key: arguments[key] for key in _COMMON}
  own = {key: value for key, value in arguments.items() if key not in common}
  rate = own.pop("learning_rate")
  _check_common(name, common | {"learning_rate": rate})
  if not callable(slots):
    slots = _fixed_slots(name, slots, common["slot_init"] or {})
  require(
    lazy or common["use_gradient_accumulation"],
    f"{name}: moving every row at every step (lazy_adam=False) needs gradient accumulation. "
    "Leave `use_gradient_accumulation` as True.",
  )
  common |= {
    "gradient_multiplier": _as_float(common["gradient_multiplier"]),
    "clipvalue": _clip_pair(name, common["clipvalue"]),
    "multiply_weight_decay_factor_by_learning_rate": bool(
      common["multiply_weight_decay_factor_by_learning_rate"]
    ),
    "slot_init": _freeze(common["slot_init"] or {}),
  }
  return RowOptimizer(
    name=name,
    hyperparameters=tuple((key, _freeze(value)) for key, value in sorted(own.items())),
    learning_rate=_as_float(rate),
    equation=equation,
    slots=slots,
    arguments=arguments,
    lazy=lazy,
    linear=linear,
    across_row=across_row,
    **common,
  )


def _fixed_slots(
  name: str, slots: Mapping[str, Slot | float], slot_init: SlotInit
) -> Callable[[int], dict[str, Slot]]:
  unknown = sorted(set(slot_init) - set(slots))
  require(not unknown, f"{name}: slot_init names {unknown}; its slots are {set(slots)}.")
  by_name = {key: s if isinstance(s, Slot) else Slot(float(s)) for key, s in slots.items()}
  return lambda dim: by_name


def require(condition: bool, message: str) -> None:
  """Raises a `ValueError` unless the condition holds."""
  if not condition:
    raise ValueError(message)


def _check_common(name: str, common: dict[str, Any]) -> None:
  _check_schedule(name, "learning_rate", common["learning_rate"])
  if common["gradient_multiplier"] is not None:
    _check_schedule(name, "gradient_multiplier", common["gradient_multiplier"])
  clip = common["clipvalue"]
  require(
    common["use_gradient_accumulation"] or clip is None,
    f"{name}: when `use_gradient_accumulation` is False, gradient clipping cannot be used and "
    f"`clipvalue` should be left as None. Got {clip!r}.",
  )
  low, high = common["clip_weight_min"], common["clip_weight_max"]
  require(
    low is None or high is None or low <= high,
    f"{name}: clip_weight_min={low} is greater than clip_weight_max={high}.",
  )


def _check_schedule(name: str, argument: str, value: Any) -> None:
  if callable(value):
    try:
      inspect.signature(value).bind(0)
    except TypeError:
      raise ValueError(
        f"{name}: {argument} must be a number or a schedule f(step). A function without "
        "arguments would be read once, when the step is compiled. Write `lambda step: ...`."
      ) from None
  elif not isinstance(value, (int, float)) or isinstance(value, bool):
    raise ValueError(f"{name}: {argument} must be a number or f(step). Got {value!r}.")


def _as_float(value: Any) -> Any:
  """A number as a float, which compares by value; a schedule or None as it is."""
  return value if value is None or callable(value) else float(value)


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


def _freeze(value: Any) -> Any:
  return tuple(sorted(value.items())) if isinstance(value, Mapping) else value


# --- equations that look across a row ------------------------------------------------------------


def row_mean(x: jax.Array, columns: Columns) -> jax.Array:
  """The mean of each row, `[..., D]` to `[...]`, its columns on one device or several."""
  if not columns.axes:
    return jnp.mean(x, axis=-1)
  return jax.lax.psum(jnp.sum(x, axis=-1), columns.axes) / columns.dim  # padding columns are 0


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
  update: UserEquation, slots: Mapping[str, Slot | float] | None = None,
  learning_rate: Rate = 0.01, *,
  gradient_multiplier: Rate | None = None, clipvalue: ClipRange | None = None,
  weight_decay_factor: float | None = None,
  multiply_weight_decay_factor_by_learning_rate: bool | None = None,
  clip_weight_min: float | None = None, clip_weight_max: float | None = None,
  use_gradient_accumulation: bool = True, slot_init: SlotInit | None = None,
) -> RowOptimizer:  # fmt: skip
  """Makes an optimizer from your own equation.

  Args:
    update: `f(gradients, rows, slots, learning_rate) -> (rows, slots)` on float32 `[..., D]`
      arrays, the leading axes being rows, in JAX operations. Slots are a dict of `[..., D]`, or
      `[...]` if `per_row`. It gets whole rows, on a mesh too, and may look across a row.
    slots: `{name: initial value}`, or `{name: embed.Slot(initial, per_row=True)}`.
    learning_rate: a float, or a schedule of the 0-based step.

  `embed.sgd` explains the keyword-only arguments.

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
  arguments = dict(locals())
  require(callable(update), f"custom_optimizer: update must be callable. Got {update!r}.")
  for name, slot in (slots or {}).items():
    require(
      isinstance(slot, (Slot, int, float)),
      f"custom_optimizer: slot {name!r} must be a number or an embed.Slot. Got {slot!r}.",
    )
  return make("custom_optimizer", arguments, on_whole_rows(update), slots or {}, across_row=True)


@register
def from_optax(
  tx: Any, learning_rate: Rate = 1.0, *,
  gradient_multiplier: Rate | None = None, clipvalue: ClipRange | None = None,
  weight_decay_factor: float | None = None,
  multiply_weight_decay_factor_by_learning_rate: bool | None = None,
  clip_weight_min: float | None = None, clip_weight_max: float | None = None,
  use_gradient_accumulation: bool = True, slot_init: SlotInit | None = None,
) -> RowOptimizer:  # fmt: skip
  """Runs an elementwise optax transformation on rows, lazily.

  Each row is a parameter of its own that steps only when it is touched: the state is kept per
  row, step counts included, so bias correction counts a row's own steps. Transformations that
  look across rows, such as a global norm, do not fit; see `embed.clip_by_global_norm`.

  Args:
    tx: such as `optax.adam(1e-3)`. Its `init` must not depend on the parameters.
    learning_rate: a factor on the updates; a schedule of the global step belongs here.

  Slots are the leaves of the optax state, `[V, D]`, or `[V]` for its scalars, named by their paths
  in it. `embed.sgd` explains the keyword-only arguments.

  Raises:
    ValueError: if `tx` is not an optax transformation, or its state does not fit a row.

  >>> optimizer = embed.from_optax(optax.adam(1e-3))
  >>> {name: slot.per_row for name, slot in optimizer.slots(64).items()}
  {'0.count': True, '0.mu': False, '0.nu': False}
  """
  arguments = dict(locals())
  require(
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

  return make("from_optax", arguments, on_whole_rows(equation), slots, across_row=True)
