"""The row optimizers: a function each, with the equation of one row's step.

An equation is written on `g` (the row's summed gradient), `w` (the row) and its slots, all
`[..., D]` in float32, slots of one value per row `[...]`. One that looks across a row takes the
row's `Columns` as well, which may be on several devices. `row_optimizer.make` adds what all
optimizers share. Every function lists all arguments, so that editors, mypy and `help` show them,
and begins with `arguments = dict(locals())`: the arguments as they were passed, by name.

Formulas, names and defaults are TensorFlow's (its SparseCore sources and training kernels).
"""

import math
from typing import Never

import jax
import jax.numpy as jnp

from embed.row_optimizer import (
  WHOLE_ROWS,
  ClipRange,
  Rate,
  RowOptimizer,
  Schedule,
  Slot,
  SlotInit,
  make,
  register,
  require,
  row_mean,
)


def _check_accumulator(value: float) -> None:
  require(
    value > 0, f"Argument `initial_accumulator_value` must be a positive float. Got {value!r}."
  )


def _check_beta(name: str, value: float) -> None:
  require(0 <= value < 1, f"Argument `{name}` must be >= 0 and < 1. Got {value!r}.")


@register
def sgd(
  learning_rate: Rate = 0.01, *,
  gradient_multiplier: Rate | None = None, clipvalue: ClipRange | None = None,
  weight_decay_factor: float | None = None,
  multiply_weight_decay_factor_by_learning_rate: bool | None = None,
  clip_weight_min: float | None = None, clip_weight_max: float | None = None,
  use_gradient_accumulation: bool = True, slot_init: SlotInit | None = None,
) -> RowOptimizer:  # fmt: skip
  """Stochastic gradient descent. No slots.

  The step of a row::

    w -= lr * g

  Every optimizer takes these arguments, besides its own:

  Args:
    learning_rate: a float, or a schedule of the 0-based step (optax schedules are such).
    gradient_multiplier: a float or a schedule; scales gradients before all else.
    clipvalue: clips the summed gradient elementwise, before the slots: `c` to `[-c, c]`, or
      `(min, max)` with None for open.
    weight_decay_factor: `w -= factor * w` of touched rows, before the update.
    multiply_weight_decay_factor_by_learning_rate: decay by `factor * lr` instead.
    clip_weight_min: touched rows are clipped to it after the update.
    clip_weight_max: touched rows are clipped to it after the update.
    use_gradient_accumulation: True sums a row's gradients over the batch and steps once; False
      steps once per occurrence of an id, in batch order (slow, and for comparisons only).
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
  arguments = dict(locals())
  return make("sgd", arguments, lambda g, w, s, lr: (w - lr * g, s), {}, linear=True)


@register
def adagrad(
  learning_rate: Rate = 0.001, initial_accumulator_value: float = 0.1, *,
  gradient_multiplier: Rate | None = None, clipvalue: ClipRange | None = None,
  weight_decay_factor: float | None = None,
  multiply_weight_decay_factor_by_learning_rate: bool | None = None,
  clip_weight_min: float | None = None, clip_weight_max: float | None = None,
  use_gradient_accumulation: bool = True, slot_init: SlotInit | None = None,
) -> RowOptimizer:  # fmt: skip
  """Adagrad (Duchi et al. 2011): the squared gradients of an element lower its rate.

  The step of a row, with the new `a` and no epsilon, as TensorFlow's::

    a += g²
    w -= lr * g / sqrt(a)

  Slot `accumulators`, float32 `[V, D]`.

  Args:
    initial_accumulator_value: of `a`, positive.

  `embed.sgd` explains `learning_rate`, the keyword-only arguments and the errors.

  >>> g, w, slots = jnp.array([3.0]), jnp.array([1.0]), {"accumulators": jnp.array([7.0])}
  >>> w, slots = embed.adagrad(0.5).equation(g, w, slots, 0.5)
  >>> w.tolist(), slots["accumulators"].tolist()  # 7 + 3 * 3; 1 - 0.5 * 3 / sqrt(16)
  ([0.625], [16.0])
  """
  arguments = dict(locals())
  _check_accumulator(initial_accumulator_value)

  def equation(g, w, s, lr):
    a = s["accumulators"] + g * g
    return w - lr * g * jax.lax.rsqrt(a), {"accumulators": a}

  return make("adagrad", arguments, equation, {"accumulators": initial_accumulator_value})


@register
def rowwise_adagrad(
  learning_rate: Rate = 0.001, initial_accumulator_value: float = 0.1, epsilon: float = 0.0, *,
  gradient_multiplier: Rate | None = None, clipvalue: ClipRange | None = None,
  weight_decay_factor: float | None = None,
  multiply_weight_decay_factor_by_learning_rate: bool | None = None,
  clip_weight_min: float | None = None, clip_weight_max: float | None = None,
  use_gradient_accumulation: bool = True, slot_init: SlotInit | None = None,
) -> RowOptimizer:  # fmt: skip
  """Row-wise Adagrad: one accumulator a row, `D` times less state than Adagrad.

  The step of a row, FBGEMM's EXACT_ROWWISE_ADAGRAD::

    a += mean(g²)  # over the row
    w -= lr * g / (sqrt(a) + epsilon)

  Slot `accumulators`, float32 `[V]`.

  Args:
    initial_accumulator_value: of `a`, at least 0.
    epsilon: at least 0; one of the two must be positive.

  `embed.sgd` explains `learning_rate`, the keyword-only arguments and the errors.

  >>> g, w, slots = jnp.array([[1.0, 7.0]]), jnp.zeros((1, 2)), {"accumulators": jnp.zeros(1)}
  >>> w, slots = embed.rowwise_adagrad(5.0).equation(g, w, slots, 5.0)
  >>> w.tolist(), slots["accumulators"].tolist()  # (1 * 1 + 7 * 7) / 2; -5 * g / sqrt(25)
  ([[-1.0, -7.0]], [25.0])
  """
  arguments = dict(locals())
  require(initial_accumulator_value >= 0, "`initial_accumulator_value` must be >= 0.")
  require(epsilon >= 0, f"Argument `epsilon` must be >= 0. Got {epsilon!r}.")
  require(
    initial_accumulator_value > 0 or epsilon > 0,
    "rowwise_adagrad: a zero gradient would give 0 / 0. Make `initial_accumulator_value` or "
    "`epsilon` positive.",
  )

  def equation(g, w, s, lr, columns=WHOLE_ROWS):
    a = s["accumulators"] + row_mean(g * g, columns)
    return w - lr * g / (jnp.sqrt(a) + epsilon)[..., None], {"accumulators": a}

  slots = {"accumulators": Slot(initial_accumulator_value, per_row=True)}
  return make("rowwise_adagrad", arguments, equation, slots, across_row=True)


@register
def adagrad_momentum(
  learning_rate: Rate = 0.001, momentum: float = 0.0, use_nesterov: bool = False,
  exponent: float = 2.0, beta2: float = 1.0, epsilon: float = 1e-10, *,
  gradient_multiplier: Rate | None = None, clipvalue: ClipRange | None = None,
  weight_decay_factor: float | None = None,
  multiply_weight_decay_factor_by_learning_rate: bool | None = None,
  clip_weight_min: float | None = None, clip_weight_max: float | None = None,
  use_gradient_accumulation: bool = True, slot_init: SlotInit | None = None,
) -> RowOptimizer:  # fmt: skip
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

  `embed.sgd` explains `learning_rate`, the keyword-only arguments and the errors.

  >>> zero = {"accumulators": jnp.array([0.0]), "momenta": jnp.array([2.0])}
  >>> optimizer = embed.adagrad_momentum(0.5, momentum=0.5)
  >>> w, slots = optimizer.equation(jnp.array([4.0]), jnp.array([1.0]), zero, 0.5)
  >>> w.tolist(), slots["momenta"].tolist()  # 0.5 * 2 + 4 / sqrt(16); 1 - 0.5 * 2
  ([0.0], [2.0])
  """
  arguments = dict(locals())
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

  return make("adagrad_momentum", arguments, equation, {"accumulators": 0.0, "momenta": 0.0})


@register
def ftrl(
  learning_rate: Rate = 0.001, learning_rate_power: float = -0.5,
  l1_regularization_strength: float = 0.0, l2_regularization_strength: float = 0.0,
  beta: float = 0.0, initial_accumulator_value: float = 0.1,
  multiply_linear_by_learning_rate: bool = False, allow_zero_accumulator: bool = False, *,
  gradient_multiplier: Rate | None = None, clipvalue: ClipRange | None = None,
  weight_decay_factor: float | None = None,
  multiply_weight_decay_factor_by_learning_rate: bool | None = None,
  clip_weight_min: float | None = None, clip_weight_max: float | None = None,
  use_gradient_accumulation: bool = True, slot_init: SlotInit | None = None,
) -> RowOptimizer:  # fmt: skip
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

  `embed.sgd` explains `learning_rate`, the keyword-only arguments and the errors.

  >>> slots = {"accumulators": jnp.array([7.0]), "linears": jnp.array([0.0])}
  >>> optimizer = embed.ftrl(1.0, l1_regularization_strength=5.0)
  >>> w, slots = optimizer.equation(jnp.array([3.0]), jnp.array([0.0]), slots, 1.0)
  >>> w.tolist(), slots["linears"].tolist()  # |z| is below l1
  ([0.0], [3.0])
  """
  arguments = dict(locals())
  del allow_zero_accumulator  # TensorFlow refuses a zero accumulator with it as well
  _check_accumulator(initial_accumulator_value)
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
  return make("ftrl", arguments, equation, slots)


@register
def adam(
  learning_rate: Rate = 0.001, beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-7,
  lazy_adam: bool = True, sum_inside_sqrt: bool = True, *,
  gradient_multiplier: Rate | None = None, clipvalue: ClipRange | None = None,
  weight_decay_factor: float | None = None,
  multiply_weight_decay_factor_by_learning_rate: bool | None = None,
  clip_weight_min: float | None = None, clip_weight_max: float | None = None,
  use_gradient_accumulation: bool = True, slot_init: SlotInit | None = None,
) -> RowOptimizer:  # fmt: skip
  """Adam (Kingma and Ba 2015) as TensorFlow has it for embeddings: without bias correction.

  The step of a row::

    m = beta_1 * m + (1 - beta_1) * g
    v = beta_2 * v + (1 - beta_2) * g²
    w -= lr * m / sqrt(v + epsilon²)  # lr * m / (sqrt(v) + epsilon) without sum_inside_sqrt

  Slots `momenta` and `velocities`, float32 `[V, D]`, from 0. That makes the first step of a row
  `(1 - beta_1) / sqrt(1 - beta_2)` times `lr`, 3.2 times with the defaults;
  `learning_rate=embed.bias_corrected(...)` corrects for it.

  Args:
    beta_1: the decay of `m`, in [0, 1).
    beta_2: the decay of `v`, in [0, 1).
    epsilon: positive.
    lazy_adam: True moves touched rows alone, and decays only their slots. False moves every
      row of the table at every step, with zero gradient where it was not touched, and costs
      O(V * D).
    sum_inside_sqrt: whether epsilon is added inside the root, squared, or outside.

  `embed.sgd` explains `learning_rate`, the keyword-only arguments and the errors.

  >>> zero = {"momenta": jnp.zeros(1), "velocities": jnp.zeros(1)}
  >>> optimizer = embed.adam(1.0, beta_1=0.5, beta_2=0.75)
  >>> w, slots = optimizer.equation(jnp.array([8.0]), jnp.array([0.0]), zero, 1.0)
  >>> w.tolist(), slots["momenta"].tolist(), slots["velocities"].tolist()  # -4 / sqrt(16)
  ([-1.0], [4.0], [16.0])
  """
  arguments = dict(locals())
  _check_beta("beta_1", beta_1)
  _check_beta("beta_2", beta_2)
  require(epsilon > 0, f"epsilon must be positive; got {epsilon}.")

  def equation(g, w, s, lr):
    m = beta_1 * s["momenta"] + (1 - beta_1) * g
    v = beta_2 * s["velocities"] + (1 - beta_2) * g * g
    if sum_inside_sqrt:
      w = w - lr * m / jnp.sqrt(v + epsilon**2)
    else:
      w = w - lr * m / (jnp.sqrt(v) + epsilon)
    return w, {"momenta": m, "velocities": v}

  return make("adam", arguments, equation, {"momenta": 0.0, "velocities": 0.0}, lazy=lazy_adam)


@register
def momentum(
  learning_rate: Rate = 0.001, momentum: float = 0.9, use_nesterov: bool = False, *,
  gradient_multiplier: Rate | None = None, clipvalue: ClipRange | None = None,
  weight_decay_factor: float | None = None,
  multiply_weight_decay_factor_by_learning_rate: bool | None = None,
  clip_weight_min: float | None = None, clip_weight_max: float | None = None,
  use_gradient_accumulation: bool = True, slot_init: SlotInit | None = None,
) -> RowOptimizer:  # fmt: skip
  """Momentum, TensorFlow's.

  The step of a row::

    m = momentum * m + g
    w -= lr * m  # lr * (g + momentum * m) with use_nesterov

  Slot `momenta`, float32 `[V, D]`, from 0. It decays only when its row is touched.

  Args:
    momentum: the decay of `m`.
    use_nesterov: whether to look ahead.

  `embed.sgd` explains `learning_rate`, the keyword-only arguments and the errors.

  >>> optimizer = embed.momentum(0.5, momentum=0.5)
  >>> w, slots = optimizer.equation(jnp.ones(1), jnp.ones(1), {"momenta": jnp.array([2.0])}, 0.5)
  >>> w.tolist(), slots["momenta"].tolist()
  ([0.0], [2.0])
  """
  arguments = dict(locals())

  def equation(g, w, s, lr):
    m = momentum * s["momenta"] + g
    return w - lr * (g + momentum * m if use_nesterov else m), {"momenta": m}

  return make("momentum", arguments, equation, {"momenta": 0.0})


@register
def rmsprop(
  learning_rate: Rate = 0.001, rho: float = 0.9, momentum: float = 0.0, epsilon: float = 1e-7, *,
  gradient_multiplier: Rate | None = None, clipvalue: ClipRange | None = None,
  weight_decay_factor: float | None = None,
  multiply_weight_decay_factor_by_learning_rate: bool | None = None,
  clip_weight_min: float | None = None, clip_weight_max: float | None = None,
  use_gradient_accumulation: bool = True, slot_init: SlotInit | None = None,
) -> RowOptimizer:  # fmt: skip
  """RMSProp (Tieleman and Hinton 2012), TensorFlow's.

  The step of a row::

    ms += (1 - rho) * (g² - ms)
    mom = momentum * mom + lr * g / sqrt(ms + epsilon)
    w -= mom

  Slots `ms` and `mom`, float32 `[V, D]`, both from 0.

  Args:
    rho: the decay of `ms`, in [0, 1).
    momentum: the decay of `mom`.
    epsilon: positive.

  `embed.sgd` explains `learning_rate`, the keyword-only arguments and the errors.

  >>> zero = {"ms": jnp.zeros(1), "mom": jnp.zeros(1)}
  >>> optimizer = embed.rmsprop(1.0, rho=0.75)
  >>> w, slots = optimizer.equation(jnp.array([8.0]), jnp.array([2.0]), zero, 1.0)
  >>> w.tolist(), slots["ms"].tolist()  # 0.25 * 64; 2 - 8 / sqrt(16)
  ([0.0], [16.0])
  """
  arguments = dict(locals())
  _check_beta("rho", rho)
  require(epsilon > 0, f"epsilon must be positive; got {epsilon}.")

  def equation(g, w, s, lr):
    ms = s["ms"] + (1 - rho) * (g * g - s["ms"])
    mom = momentum * s["mom"] + lr * g * jax.lax.rsqrt(ms + epsilon)
    return w - mom, {"ms": ms, "mom": mom}

  return make("rmsprop", arguments, equation, {"ms": 0.0, "mom": 0.0})


@register
def proximal_adagrad(
  learning_rate: Rate = 0.001, initial_accumulator_value: float = 0.1,
  l1_regularization_strength: float = 0.0, l2_regularization_strength: float = 0.0, *,
  gradient_multiplier: Rate | None = None, clipvalue: ClipRange | None = None,
  weight_decay_factor: float | None = None,
  multiply_weight_decay_factor_by_learning_rate: bool | None = None,
  clip_weight_min: float | None = None, clip_weight_max: float | None = None,
  use_gradient_accumulation: bool = True, slot_init: SlotInit | None = None,
) -> RowOptimizer:  # fmt: skip
  """Adagrad with a proximal step (Duchi and Singer 2009), which drives small weights to 0.

  The step of a row::

    a += g²
    eta = lr / sqrt(a)
    u = w - eta * g
    w = sign(u) * max(|u| - eta * l1, 0) / (1 + eta * l2)

  Slot `accumulators`, float32 `[V, D]`.

  Args:
    initial_accumulator_value: of `a`, positive.
    l1_regularization_strength: `l1`, at least 0.
    l2_regularization_strength: `l2`, at least 0.

  `embed.sgd` explains `learning_rate`, the keyword-only arguments and the errors.

  >>> slots = {"accumulators": jnp.array([7.0])}
  >>> optimizer = embed.proximal_adagrad(1.0, l1_regularization_strength=2.0)
  >>> optimizer.equation(jnp.array([3.0]), jnp.array([1.0]), slots, 1.0)[0].tolist()  # |u| is 0.25
  [0.0]
  """
  arguments = dict(locals())
  _check_accumulator(initial_accumulator_value)
  l1, l2 = l1_regularization_strength, l2_regularization_strength
  require(l1 >= 0 and l2 >= 0, "The l1 and l2 regularization strengths must be >= 0.")

  def equation(g, w, s, lr):
    a = s["accumulators"] + g * g
    eta = lr * jax.lax.rsqrt(a)
    u = w - eta * g
    w = jnp.sign(u) * jnp.maximum(jnp.abs(u) - eta * l1, 0) / (1 + eta * l2)
    return w, {"accumulators": a}

  return make("proximal_adagrad", arguments, equation, {"accumulators": initial_accumulator_value})


@register
def lion(
  learning_rate: Rate = 0.001, beta1: float = 0.9, beta2: float = 0.99, *,
  gradient_multiplier: Rate | None = None, clipvalue: ClipRange | None = None,
  weight_decay_factor: float | None = None,
  multiply_weight_decay_factor_by_learning_rate: bool | None = None,
  clip_weight_min: float | None = None, clip_weight_max: float | None = None,
  use_gradient_accumulation: bool = True, slot_init: SlotInit | None = None,
) -> RowOptimizer:  # fmt: skip
  """Lion (Chen et al. 2023): steps of one size, by the sign of the smoothed gradient.

  The step of a row::

    w -= lr * sign(beta1 * m + (1 - beta1) * g)
    m = beta2 * m + (1 - beta2) * g

  Slot `momenta`, float32 `[V, D]`, from 0.

  Args:
    beta1: the share of `m` in the step, in [0, 1).
    beta2: the decay of `m`, in [0, 1).

  `embed.sgd` explains `learning_rate`, the keyword-only arguments and the errors.

  >>> optimizer = embed.lion(0.5, beta2=0.5)
  >>> w, slots = optimizer.equation(jnp.array([3.0]), jnp.ones(1), {"momenta": jnp.zeros(1)}, 0.5)
  >>> w.tolist(), slots["momenta"].tolist()
  ([0.5], [1.5])
  """
  arguments = dict(locals())
  _check_beta("beta1", beta1)
  _check_beta("beta2", beta2)

  def equation(g, w, s, lr):
    m = s["momenta"]
    w = w - lr * jnp.sign(beta1 * m + (1 - beta1) * g)
    return w, {"momenta": beta2 * m + (1 - beta2) * g}

  return make("lion", arguments, equation, {"momenta": 0.0})


@register
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
  return RowOptimizer("frozen")


def bias_corrected(
  learning_rate: Rate = 0.001, beta_1: float = 0.9, beta_2: float = 0.999
) -> Schedule:
  """The schedule that gives Adam its bias correction: `lr * sqrt(1 - beta_2^t) / (1 - beta_1^t)`.

  `t` is the step plus 1. With `adam(..., lazy_adam=False, sum_inside_sqrt=False)` this is
  `tf.raw_ops.ResourceApplyAdam` exactly; with `lazy_adam=True` it corrects by the global step.

  Args:
    learning_rate: a float, or a schedule of the 0-based step.
    beta_1: of the Adam that the schedule is for.
    beta_2: of the Adam that the schedule is for.

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
