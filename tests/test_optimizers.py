"""The equations of optimizers by hand, and what they have beside them."""

import functools
import inspect
import pickle

import cases
import jax
import jax.numpy as jnp
import layers
import numpy as np
import optax
import pytest
import reference
from flax import nnx

import embed
from embed import optimizers
from embed.engine import update

V, D = layers.V, layers.D
one_table, step = layers.one_table, layers.step

# By hand, what no recorded case has: gradient, row, slots, rate -> new row and slots.
ADAM = {"momenta": 6.0, "velocities": 20.0}
EQUATIONS = {
  "adagrad, epsilon": (
    embed.adagrad(initial_accumulator_value=0.0, epsilon=1.0), [3.0], [1.0],
    {"accumulators": 0.0}, 1.0, [0.25], {"accumulators": 9.0},
  ),
  "rowwise adagrad, epsilon": (
    embed.rowwise_adagrad(epsilon=5.0), [1.0, 7], [0.0, 0], {"accumulators": 0.0}, 5.0,
    [-0.5, -3.5], {"accumulators": 25.0},
  ),
  "ftrl by the rate": (  # 2 * lr * l2
    embed.ftrl(
      l1_regularization_strength=1.0, l2_regularization_strength=0.25, beta=1.0,
      multiply_linear_by_learning_rate=True,
    ),
    [3.0], [0.5], {"accumulators": 16.0, "linears": 1.0}, 0.5,
    [-0.24], {"accumulators": 25.0, "linears": 2.0},
  ),
  "adam, epsilon outside": (
    embed.adam(beta_1=0.5, beta_2=0.75, epsilon=4.0, sum_inside_sqrt=False), [2.0], [1.0], ADAM,
    1.0, [0.5], {"momenta": 4.0, "velocities": 16.0},
  ),
  "adam of a small number": (  # 1 - beta_1 would be 1 in float16
    embed.adam(beta_1=np.float16(2**-12), beta_2=0.0), [4096.0], [0.0],
    {"momenta": 0.0, "velocities": 0.0}, 4096.0,
    [-4095.0], {"momenta": 4095.0, "velocities": 2.0**24},
  ),
  "clip from below": (embed.sgd(clipvalue=(-1, None)), [-4.0, 6], [1.0, 1], {}, 0.5, [1.5, -2], {}),
  "custom": (
    embed.custom_optimizer(
      lambda g, w, s, lr: (w - 2 * lr * g, s), clipvalue=0.5, clip_weight_max=1.25
    ),
    [2.0, -2, 0.25], [1.0, 1, 1], {}, 0.5, [0.5, 1.25, 0.75], {},
  ),
}  # fmt: skip


def check_row(actual, w, slots):
  actual_w, actual_slots = actual
  np.testing.assert_allclose(actual_w, w, rtol=1e-6, atol=1e-7)
  assert set(actual_slots) == set(slots)
  for name, wanted in slots.items():
    np.testing.assert_allclose(actual_slots[name], wanted, rtol=1e-6, err_msg=name)


def test_equations_by_hand():
  """And the order of what all optimizers do beside their equations."""
  is_leaf = lambda x: isinstance(x, list)
  given = {
    name: jax.tree.map(np.float32, case[1:5], is_leaf=is_leaf) for name, case in EQUATIONS.items()
  }

  @jax.jit
  def step_each(given):
    return {name: update.step_rows(EQUATIONS[name][0], *row) for name, row in given.items()}

  actual = step_each(given)
  cases.each({name: (actual[name], *case[-2:]) for name, case in EQUATIONS.items()}, check_row)


def gradient(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_equal_hyperparameters_are_equal_optimizers():
  assert embed.adam(1e-3) == embed.adam(learning_rate=1e-3, beta_1=0.9)
  assert embed.adam(1e-3) != embed.adam(1e-3, beta_1=0.8)
  assert embed.adam(1e-3) != embed.adam(1e-3, clipvalue=1.0)
  assert embed.sgd(0.1) != embed.adagrad(0.1)
  assert len({embed.sgd(0.1), embed.sgd(0.1), embed.frozen()}) == 2
  f = lambda g, w, s, lr: (w, s)
  assert hash(embed.custom_optimizer(f, {"a": 0.0})) == hash(embed.custom_optimizer(f, {"a": 0.0}))
  assert embed.adam(0.1).replace(clipvalue=1.0) == embed.adam(0.1, clipvalue=1.0)
  assert (
    repr(embed.sgd(0.1, clipvalue=1.0)) == "embed.sgd(learning_rate=0.1, clipvalue=(-1.0, 1.0))"
  )


def optax_step(tx, g, state, w):
  updates, state = tx.update(g, state, w)
  return w + updates, state


@pytest.mark.programs(40, "a state of optax, its probe and a layer, each three times")
def test_from_optax_is_lazy_row_by_row():
  """A row touched at steps 0 and 2 is where optax is after those two gradients alone.

  The state of rprop is not in alphabetical order, and LAMB needs the norms of a row.
  """
  for tx, per_row in ((optax.rprop(0.1), False), (optax.adam(0.1), False), (optax.lamb(0.1), True)):
    optimizer = embed.from_optax(tx, per_row=per_row)
    assert optimizer == optimizer.replace()
    layer = one_table(optimizer)
    row, one_step = layers.ROWS[1], jax.jit(functools.partial(optax_step, tx))
    state = jax.jit(tx.init)(row)
    for i, ids in enumerate([[1, 3], [3, 4], [1, 1]]):
      g = gradient(i, 2, D)
      step(layer, np.array(ids), g, np.int32(i))
      if 1 in ids:
        row, state = one_step(g[np.array(ids) == 1].sum(0), state, row)
    after = np.asarray(layer.tables["t"])
    np.testing.assert_allclose(after[1], row, rtol=1e-5)
    np.testing.assert_array_equal(after[[0, 2, 5]], layers.ROWS[[0, 2, 5]])
    if "0.count" in layer.variables["t"]:
      counts = layer.variables["t"]["0.count"]
      assert counts.tolist() == [0, 2, 0, 2, 1, *[0] * (V - 5)]
      assert counts.dtype == jnp.int32


def test_from_optax_refuses_what_is_not_per_row():
  needs = "from_optax: tx needs arguments"
  given = [("adam", "optax transformation"), (optax.polyak_sgd(), needs)]
  cases.refused(given, embed.from_optax)
  keeps_params = optax.GradientTransformation(lambda p: p, lambda g, s, p=None: (g, s))
  with pytest.raises(ValueError, match="constant"):
    one_table(embed.from_optax(keeps_params))


@pytest.mark.ci
def test_from_optax_takes_what_steps_each_row_alone():
  taken = (
    *(getattr(optax, name)(0.1) for name in ("adagrad", "adamax", "lion", "rprop", "yogi")),
    optax.adam(optax.cosine_decay_schedule(0.1, 100)),
    optax.chain(optax.clip(1.0), optax.add_decayed_weights(0.1), optax.adam(0.1)),
    optax.chain(optax.zero_nans(), optax.sgd(1.0)),  # a flag of the whole table
  )
  cases.each([(tx,) for tx in taken], embed.from_optax)
  together = (
    *(getattr(optax, name)(0.1) for name in ("adafactor", "lamb", "lars", "novograd", "sm3")),
    optax.chain(optax.clip_by_global_norm(1e9), optax.adam(0.1)),
    optax.flatten(optax.clip_by_global_norm(1.0)),
    optax.MultiSteps(optax.clip_by_global_norm(1.0), 2),
    optax.apply_if_finite(optax.sgd(0.1), 3),
  )
  says = r"clip_by_global_norm\(grads, .*per_row=True"
  cases.refused([(tx, says) for tx in together], embed.from_optax)


def test_custom_rows_that_meet_are_refused():
  total = lambda g, w, s, lr: (w - lr * g / jnp.linalg.norm(g), s)
  with pytest.raises(ValueError, match=r"depends on other rows.*axis=-1"):
    one_table(embed.custom_optimizer(total))


def test_a_schedule_sees_the_step_from_zero():
  layer = one_table(embed.sgd(lambda step: 1.0 + step))
  optimizer = embed.Optimizer(layer, optax.sgd(0.0))
  grads_of = embed.value_and_grad(lambda m: jnp.sum(m(np.array([0]))))
  train = nnx.jit(lambda m, o: o.update(m, grads_of(m)[1]))
  for total in (1.0, 3.0, 6.0):
    train(layer, optimizer)
    assert layer.tables["t"][0].tolist() == (layers.ROWS[0] - total).tolist()
  assert int(optimizer.step[...]) == 3


NAN = float("nan")
REFUSED = {  # by optimizer: arguments and values that it does not take
  "sgd": {
    "learning_rate": ("2", True, -1.0, np.ones(3), NAN),
    "clipvalue": (True, -1, NAN, "1", (1, -1), (NAN, 1), [0, None, 1]),
    "weight_decay_factor": ("0.1", -0.1, True),
    "multiply_weight_decay_factor_by_learning_rate": (1,),
    "clip_weight_min": ("1", True),
  },
  "adagrad": {"epsilon": (-1.0, "0"), "initial_accumulator_value": (0.0, -0.1)},
  "rowwise_adagrad": {"initial_accumulator_value": (0.0,)},
  "adagrad_momentum": {"epsilon": (0.0,), "exponent": (-2.0,), "beta2": (2,), "use_nesterov": (1,)},
  "ftrl": {
    "initial_accumulator_value": (0.0,), "learning_rate_power": (0.5,),
    "l2_regularization_strength": (-1.0,),
  },
  "adam": {"beta_1": (1.0, -0.1, "0.9"), "beta_2": (1,), "epsilon": (0.0,)},
  "bias_corrected": {"beta_1": (1.0,), "learning_rate": (-1.0,)},
}  # fmt: skip


def check_refused(name, arguments):
  for argument, values in arguments.items():
    for value in values:
      with pytest.raises(ValueError, match=rf"(Argument `|: ){argument}.* must be .*Got "):
        getattr(embed, name)(**{argument: value})


def test_a_wrong_argument_says_what_it_must_be():
  cases.each(list(REFUSED.items()), check_refused)
  with pytest.raises(ValueError, match="clip_weight_min` must be at most clip_weight_max=-1"):
    embed.sgd(clip_weight_min=1.0, clip_weight_max=-1.0)


def test_a_rate_is_a_number_or_a_schedule():
  assert embed.sgd(2) == embed.sgd(2.0) != embed.sgd()
  layer = one_table(embed.sgd(lambda step: 1.0))
  with pytest.raises(ValueError, match="step="):
    nnx.eval_shape(step, layer, np.array([0]), np.ones((1, D), np.float32), None)
  for argument in ("learning_rate", "beta_1"):
    with pytest.raises(ValueError, match=f"`{argument}` of adam is an nnx.Variable"):
      embed.adam(**{argument: nnx.Variable(0.1)})


def test_adam_with_bias_correction_is_the_papers():
  """Kingma and Ba's algorithm 1 in float64; optax loses four digits of 1 - 0.999^t.

  The epsilon counts where gradients are tiny, in the second half of the rows.
  """
  rule = embed.adam(0.1, epsilon=1e-8, sum_inside_sqrt=False, bias_correction=True)
  layer = one_table(rule)
  w, m, v = (layers.ROWS.astype(np.float64), 0.0, 0.0)
  for i in range(4):
    g = np.zeros((V, D), np.float32)
    g[:4] = gradient(i, 4, D) * np.array([1, 1, 1e-6, 1e-6], np.float32)[:, None]
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g.astype(np.float64) ** 2
    w = w - 0.1 * m / (1 - 0.9 ** (i + 1)) / (np.sqrt(v / (1 - 0.999 ** (i + 1))) + 1e-8)
    step(layer, np.arange(4), g[:4], np.int32(i))
  np.testing.assert_allclose(layer.tables["t"], w, rtol=1e-5, atol=1e-6)
  assert layer.variables["t"]["steps"].tolist() == [4] * 4 + [0] * (V - 4)


def test_a_bias_corrected_rate_is_that_of_the_step():
  """rate * sqrt(1 - beta_2^t) / (1 - beta_1^t), t from 1; equal by value."""
  rates = jax.jit(embed.bias_corrected(0.5, beta_1=0.75, beta_2=0.75))
  for number, wanted in ((0, 0.5 * 0.25**0.5 / 0.25), (1, 0.5 * 0.4375**0.5 / 0.4375)):
    np.testing.assert_allclose(rates(np.int32(number)), wanted, rtol=1e-6)
  of = lambda rate: embed.adam(embed.bias_corrected(rate))
  for given in (0.1, np.float32(0.1), optax.constant_schedule(0.1)):
    assert (of(given) == of(given), hash(of(given)) == hash(of(given))) == (True, True)
  assert of(0.1) != of(0.2)


def test_every_optimizer_is_registered_and_in_the_reference():
  returns = lambda f: inspect.isfunction(f) and inspect.signature(f).return_annotation
  exported = {name for name in embed.__all__ if returns(getattr(embed, name)) is embed.RowOptimizer}
  assert exported == set(optimizers.OPTIMIZERS)
  named = optimizers.named()
  assert exported - set(named) == {"custom_optimizer", "from_optax"}
  assert {name for name in named if named[name]().equation is not None} == set(reference.RULES)


def check_arguments(name):
  """All of its signature, under its own name, so that it pickles and can be changed."""
  function = getattr(embed, name)
  required = {"custom_optimizer": (same,), "from_optax": (optax.sgd(0.1),)}.get(name, ())
  optimizer = function(*required)
  own = [key for key in inspect.signature(function).parameters if key != "common"]
  assert optimizer.name == name
  assert list(optimizer.arguments) == own + list(optimizers.Common.__annotations__) * bool(own)
  assert (optimizer.replace(), hash(optimizer.replace())) == (optimizer, hash(optimizer))
  if name != "from_optax":  # optax's closures do not pickle
    assert pickle.loads(pickle.dumps(optimizer)) == optimizer
  with pytest.raises(TypeError, match="speed"):
    optimizer.replace(speed=1)


def test_an_optimizer_keeps_its_arguments():
  cases.each({name: (name,) for name in optimizers.OPTIMIZERS}, check_arguments)


def same(g, w, slots, lr):
  return w - lr * g, slots


SETTINGS = (
  lambda x: embed.sgd(x),
  lambda x: embed.sgd(weight_decay_factor=x, clipvalue=(-x, x), clip_weight_max=x),
  lambda x: embed.adam(beta_1=x, epsilon=x),
  lambda x: embed.custom_optimizer(same, {"a": x, "b": embed.Slot(x)}, 0.1),
)


def check_setting(make):
  """A scalar array is equal to its float, and hashed like it; nothing else is a setting."""
  wanted = make(0.25)
  for scalar in (jnp.float32, jnp.bfloat16, np.float32, np.float64):
    optimizer = make(scalar(0.25))
    assert (optimizer, hash(optimizer)) == (wanted, hash(wanted))
    assert pickle.loads(pickle.dumps(optimizer)) == wanted
  for wrong in (lambda: make(np.ones(2)), lambda: jax.eval_shape(lambda x: make(x) and x, 0.25)):
    with pytest.raises(ValueError, match=r"one number that is known .* Write float\(x\) outside"):
      wrong()


def test_a_setting_is_one_number_that_is_known():
  cases.each([(make,) for make in SETTINGS], check_setting)
