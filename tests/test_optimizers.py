"""What the optimizers have beside their equations, which test_properties holds to the reference."""

import inspect
import pickle
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import embed
from embed import optimizers
from embed.tools import check, reference

V, D = 6, 3


def make(optimizer, **table):
  config = embed.TableConfig(V, D, combiner="sum", name="t", optimizer=optimizer, **table)
  return embed.SparseEmbed(embed.FeatureConfig(config), rngs=nnx.Rngs(0))


def step(layer, ids, grads, number=0):
  """One step at the mid level: `grads` `[N, D]` are the gradients of the rows `ids` `[N]`."""
  _, residual = layer.lookup(np.asarray(ids))
  layer.apply_gradients(jnp.asarray(grads, jnp.float32), residual, step=number)


def gradient(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_sgd_by_hand():
  layer = make(embed.sgd(0.5), initializer=jax.nn.initializers.ones)
  step(layer, [2, 2, 4], [[1, 0, 0], [1, 2, 0], [0, 0, 4]])
  wanted = np.ones((V, D))
  wanted[2], wanted[4] = [0, 0, 1], [1, 1, -1]
  np.testing.assert_array_equal(layer.tables["t"], wanted)


def test_equal_hyperparameters_are_equal_optimizers():
  assert embed.adam(1e-3) == embed.adam(learning_rate=1e-3, beta_1=0.9)
  assert embed.adam(1e-3) != embed.adam(1e-3, beta_1=0.8)
  assert embed.adam(1e-3) != embed.adam(1e-3, clipvalue=1.0)
  assert embed.sgd(0.1) != embed.momentum(0.1)
  assert len({embed.sgd(0.1), embed.sgd(0.1), embed.frozen()}) == 2
  f = lambda g, w, s, lr: (w, s)
  assert hash(embed.custom_optimizer(f, {"a": 0.0})) == hash(embed.custom_optimizer(f, {"a": 0.0}))


@pytest.mark.ci
@pytest.mark.parametrize(
  "tx",
  [optax.adam(0.1), optax.rprop(0.1)],  # the state of rprop is not in alphabetical order
  ids=["adam", "rprop"],
)
def test_from_optax_is_optax_where_every_row_is_touched(tx):
  layer = make(embed.from_optax(tx))
  table = layer.tables["t"]
  state = tx.init(table)
  for i in range(3):
    g = gradient(i, V, D)
    updates, state = tx.update(jnp.asarray(g), state, table)
    table = optax.apply_updates(table, updates)
    step(layer, range(V), g, i)
    np.testing.assert_allclose(layer.tables["t"], table, rtol=1e-5, atol=1e-6)


@pytest.mark.ci
def test_from_optax_is_lazy_row_by_row():
  """A row touched at steps 0 and 2 is where optax is after those two gradients alone."""
  tx = optax.adam(0.1)
  layer = make(embed.from_optax(tx))
  before = np.asarray(layer.tables["t"])
  row, state = jnp.asarray(before[1]), tx.init(jnp.asarray(before[1]))
  for i, ids in enumerate([[1, 3], [3, 4], [1, 1]]):
    g = gradient(i, 2, D)
    step(layer, ids, g, i)
    if 1 in ids:
      updates, state = tx.update(jnp.asarray(g[np.array(ids) == 1].sum(0)), state, row)
      row = row + updates
  np.testing.assert_allclose(layer.tables["t"][1], row, rtol=1e-5)
  np.testing.assert_array_equal(layer.tables["t"][jnp.array([0, 2, 5])], before[[0, 2, 5]])
  counts = layer.variables["t"]["0.count"]
  assert counts.tolist() == [0, 2, 0, 2, 1, 0]
  assert counts.dtype == jnp.int32


def test_from_optax_refuses_what_is_not_per_row():
  with pytest.raises(ValueError, match="optax transformation"):
    embed.from_optax("adam")
  keeps_params = optax.GradientTransformation(lambda p: p, lambda g, s, p=None: (g, s))
  with pytest.raises(ValueError, match="constant"):
    make(embed.from_optax(keeps_params))


ELEMENTWISE = {
  **{
    str(i): f(0.1)
    for i, f in enumerate(
      (
        *(optax.adabelief, optax.adadelta, optax.adan, optax.adagrad, optax.adam, optax.adamax),
        *(optax.adamaxw, optax.adamw, optax.amsgrad, optax.lion, optax.nadam, optax.nadamw),
        *(optax.optimistic_adam_v2, optax.radam, optax.rmsprop, optax.rprop, optax.sgd),
        *(optax.sign_sgd, optax.signum, optax.yogi),
      )
    )
  },
  "noise": optax.noisy_sgd(0.1, key=jax.random.key(0)),
  "schedule": optax.adam(optax.cosine_decay_schedule(0.1, 100)),
  "clip": optax.chain(optax.clip(1.0), optax.add_decayed_weights(0.1), optax.adam(0.1)),
  "a branch": optax.MultiSteps(optax.adam(0.1), 2),
  "a flag of the whole table that no update reads": optax.chain(optax.zero_nans(), optax.sgd(1.0)),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_from_optax_takes_what_is_elementwise(name):
  embed.from_optax(ELEMENTWISE[name])


TOGETHER = {
  "a global norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
  "inside a branch": optax.MultiSteps(optax.clip_by_global_norm(1.0), 2),
  "in a flat copy": optax.flatten(optax.clip_by_global_norm(1.0)),
  "finite": optax.apply_if_finite(optax.sgd(0.1), 3),
  **{n: getattr(optax, n)(0.1) for n in ("lamb", "lars", "novograd", "fromage", "sm3")},
  "adafactor": optax.adafactor(0.1),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_from_optax_raises_for_what_joins_elements(name):
  with pytest.raises(ValueError, match=r"clip_by_global_norm\(grads, .*per_row=True"):
    embed.from_optax(TOGETHER[name])


@pytest.mark.parametrize("name", ["lamb", "novograd", "a global norm"])
def test_per_row_is_optax_on_each_row(name):
  tx = TOGETHER[name]
  optimizer = embed.from_optax(tx, per_row=True)
  assert optimizer == optimizer.replace()
  layer, rows = make(optimizer), [1, 4]
  wanted = {r: layer.tables["t"][r] for r in rows}
  states = {r: tx.init(w) for r, w in wanted.items()}
  for i in range(2):
    g = gradient(i, 2, D)
    step(layer, rows, g, i)
    for r, of_row in zip(rows, g, strict=True):
      updates, states[r] = tx.update(jnp.asarray(of_row), states[r], wanted[r])
      wanted[r] = wanted[r] + updates
  for r in rows:
    np.testing.assert_allclose(layer.tables["t"][r], wanted[r], rtol=1e-5, atol=1e-6)


@pytest.mark.ci
def test_custom_optimizer_can_be_row_wise_adagrad():
  def update(g, w, slots, lr):
    a = slots["a"] + jnp.mean(g * g, axis=-1)
    return w - lr * g / jnp.sqrt(a)[..., None], {"a": a}

  mine = make(embed.custom_optimizer(update, {"a": embed.Slot(0.1, per_row=True)}, 0.1))
  theirs = make(embed.rowwise_adagrad(0.1))
  for i in range(2):
    for layer in (mine, theirs):
      step(layer, [0, 5, 0], gradient(i, 3, D), i)
  np.testing.assert_allclose(mine.tables["t"], theirs.tables["t"], rtol=1e-6)
  np.testing.assert_allclose(mine.variables["t"]["a"], theirs.variables["t"]["accumulators"])


def test_custom_optimizer_takes_the_common_arguments():
  plain = embed.custom_optimizer(
    lambda g, w, s, lr: (w - lr * g, s), learning_rate=1.0, clipvalue=0.5, clip_weight_max=1.25
  )
  layer = make(plain, initializer=jax.nn.initializers.ones)
  step(layer, [0], [[2.0, -2.0, 0.25]])
  np.testing.assert_allclose(layer.tables["t"][0], [0.5, 1.25, 0.75])


def test_frozen_tables_do_not_move_but_show_their_gradients():
  layer = make(embed.frozen())
  before = layer.tables["t"]
  _, grads = embed.value_and_grad(lambda m: jnp.sum(m(np.array([1, 1]))))(layer)
  assert grads.rows["t"].values[0].tolist() == [2.0] * D
  embed.Optimizer(layer, optax.sgd(1.0)).update(layer, grads)
  np.testing.assert_array_equal(layer.tables["t"], before)
  assert list(layer.variables["t"]) == ["parameters"]


def test_slots_start_where_slot_init_says():
  layer = make(embed.adagrad(slot_init={"accumulators": jax.nn.initializers.constant(3.0)}))
  assert (layer.variables["t"]["accumulators"] == 3).all()
  with pytest.raises(ValueError, match="its slots are"):
    embed.adagrad(slot_init={"momenta": jax.nn.initializers.zeros})


def test_a_schedule_sees_the_step_from_zero():
  layer = make(embed.sgd(lambda step: 1.0 + step), initializer=jax.nn.initializers.zeros)
  optimizer = embed.Optimizer(layer, optax.sgd(0.0))
  train = nnx.jit(
    lambda m, o: o.update(m, embed.value_and_grad(lambda m: jnp.sum(m(np.array([0]))))(m)[1])
  )
  for total in (1.0, 3.0, 6.0):
    train(layer, optimizer)
    assert layer.tables["t"][0].tolist() == [-total] * D
  assert int(optimizer.step[...]) == 3


@pytest.mark.ci
def test_gradients_are_multiplied_first():
  """Before they are clipped, by the multiplier of this step; rows stay touched where it is 0."""
  optimizer = embed.momentum(
    1.0, momentum=0.5, clipvalue=2.0, gradient_multiplier=lambda step: 0.5 * step
  )
  layer = make(optimizer, initializer=jax.nn.initializers.zeros)
  wanted = 0.0
  for number, momenta in enumerate([0.0, 1.0, 0.5 + 2.0, 1.25 + 2.0]):  # of 0, 1, 2 and 3 clipped
    step(layer, [3, 3], np.ones((2, D)), number)
    wanted -= momenta
    assert layer.tables["t"][3].tolist() == [wanted] * D
    assert layer.variables["t"]["momenta"][3].tolist() == [momenta] * D
  assert not layer.tables["t"][:3].any()
  zero = make(embed.sgd(1.0, gradient_multiplier=0, weight_decay_factor=0.5))
  before = layer.tables["t"]
  zero.load_tables({"t": before})
  step(zero, [3], np.ones((1, D)))
  np.testing.assert_array_equal(
    zero.tables["t"], before * np.where(np.arange(V) == 3, 0.5, 1)[:, None]
  )


@pytest.mark.parametrize("argument", ["learning_rate", "gradient_multiplier"])
def test_a_rate_is_a_number_or_a_schedule(argument):
  make_with = lambda x: embed.sgd(**{argument: x})
  assert make_with(2) == make_with(2.0) != embed.sgd()
  with pytest.raises(ValueError, match=rf"{argument} must be .*lambda step"):
    make_with(lambda: 0.1)
  for wrong in ("2", True, np.ones(3)):
    with pytest.raises(ValueError, match=f"{argument} must be"):
      make_with(wrong)
  layer = make(make_with(lambda step: 1.0))
  with pytest.raises(ValueError, match=r"has a schedule.*step="):
    step(layer, [0], np.ones((1, D)), None)


def test_an_optimizer_with_other_arguments():
  assert embed.adam(0.1).replace(clipvalue=1.0) == embed.adam(0.1, clipvalue=1.0)
  with pytest.raises(TypeError, match="speed"):
    embed.adam(0.1).replace(speed=1)


def test_bias_correction_makes_it_optax_adam():
  rate = embed.bias_corrected(0.1)
  layer = make(embed.adam(rate, epsilon=1e-12, lazy_adam=False, sum_inside_sqrt=False))
  tx, table = optax.adam(0.1, eps=1e-12), layer.tables["t"]
  state = tx.init(table)
  for i in range(4):
    g = np.zeros((V, D), np.float32)
    g[:4] = gradient(i, 4, D)
    updates, state = tx.update(jnp.asarray(g), state, table)
    table = optax.apply_updates(table, updates)
    step(layer, range(4), g[:4], i)
  np.testing.assert_allclose(layer.tables["t"], table, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 1e-6])  # the epsilon counts where gradients are tiny
def test_adam_with_bias_correction_is_the_papers(scale):
  """Kingma and Ba's algorithm 1 in float64; optax loses four digits of 1 - 0.999^t."""
  rule = embed.adam(0.1, epsilon=1e-8, lazy_adam=False, sum_inside_sqrt=False, bias_correction=True)
  layer = make(rule)
  w, m, v = (np.asarray(layer.tables["t"], np.float64), 0.0, 0.0)
  for i in range(4):
    g = np.zeros((V, D))
    g[:4] = scale * gradient(i, 4, D)
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
    w = w - 0.1 * m / (1 - 0.9 ** (i + 1)) / (np.sqrt(v / (1 - 0.999 ** (i + 1))) + 1e-8)
    step(layer, range(4), g[:4], i)
  np.testing.assert_allclose(layer.tables["t"], w, rtol=1e-5, atol=1e-6)
  assert layer.variables["t"]["steps"].tolist() == [4] * V


def test_bias_correction_counts_the_steps_of_a_row():
  layer = make(embed.adam(0.5, epsilon=1e-9, bias_correction=True))
  before = np.asarray(layer.tables["t"])
  for i, ids in enumerate([[1], [1, 2]]):  # with one gradient all along, each step is the rate
    step(layer, ids, np.full((len(ids), D), 3.0), i)
  np.testing.assert_allclose(before[1] - layer.tables["t"][1], 1.0, rtol=1e-5)
  np.testing.assert_allclose(before[2] - layer.tables["t"][2], 0.5, rtol=1e-5)
  assert layer.variables["t"]["steps"].tolist() == [0, 2, 1, 0, 0, 0]


def test_rowwise_adam_by_hand():
  layer = make(
    embed.adam(1.0, beta_1=0.5, beta_2=0.5, epsilon=1e-9, rowwise=True),
    initializer=jax.nn.initializers.zeros,
  )
  step(layer, [2], [[1, 1, 4]])  # the mean of squares is 6, v 3
  assert layer.variables["t"]["velocities"].shape == (V,)
  np.testing.assert_allclose(layer.tables["t"][2], -np.array([0.5, 0.5, 2]) / np.sqrt(3), rtol=1e-6)


def test_adagrad_with_epsilon_is_torchs():
  layer = make(
    embed.adagrad(1.0, 0.0, epsilon=1.0, l2_factor=0.5), initializer=jax.nn.initializers.ones
  )
  step(layer, [1], [[2.5, -0.5, 0.5]])  # g becomes 3, 0, 1
  np.testing.assert_allclose(layer.variables["t"]["accumulators"][1], [9, 0, 1])
  np.testing.assert_allclose(layer.tables["t"][1], [1 - 3 / 4, 1, 1 - 1 / 2])
  for wrong in ({"epsilon": -1.0}, {"initial_accumulator_value": 0.0}):
    with pytest.raises(ValueError, match="epsilon"):
      embed.adagrad(**wrong)


def test_l2_is_a_gradient_and_decay_is_not():
  """Three occurrences decay a row once, and a clip does not see it."""
  layer = make(embed.sgd(1.0, clipvalue=0.25, l2_factor=0.5), initializer=jax.nn.initializers.ones)
  step(layer, [3, 3, 3], np.ones((3, D)))
  assert layer.tables["t"][3].tolist() == [0.25] * D
  plain = make(embed.sgd(1.0, l2_factor=0.5), initializer=jax.nn.initializers.ones)
  step(plain, [3, 3, 3], np.zeros((3, D)))
  assert plain.tables["t"][3].tolist() == [0.5] * D
  through_slots = make(
    embed.momentum(1.0, momentum=0.5, l2_factor=0.5), initializer=jax.nn.initializers.ones
  )
  for i in range(2):  # m = 0.5, w = 0.5; m = 0.25 + 0.25, w = 0
    step(through_slots, [3], np.zeros((1, D)), i)
  assert through_slots.tables["t"][3].tolist() == [0.0] * D


def test_a_row_is_no_longer_than_max_norm():
  layer = make(embed.sgd(1.0, max_norm=5.0), initializer=jax.nn.initializers.zeros)
  step(layer, [1, 2], [[-6, -8, 0], [-3, 0, 0]])
  np.testing.assert_allclose(layer.tables["t"][1], [3, 4, 0], rtol=1e-6)
  assert layer.tables["t"][2].tolist() == [3, 0, 0]


@optimizers.register
def halving(learning_rate: float = 0.5, **common):
  """A made-up optimizer: half the rate at every step of a row."""

  def equation(g, w, s, lr):
    return w - lr * g / s["scale"], {"scale": 2 * s["scale"]}

  return embed.RowOptimizer(equation, {"scale": 1.0})


del optimizers.OPTIMIZERS["halving"]  # known to the tests that take `made_up` alone


def halving_reference(w, g, lr, scale, h):
  return w - lr * g / scale, 2 * scale


@pytest.fixture
def made_up(monkeypatch):
  """An optimizer in the registry and in the reference, and nowhere else."""
  monkeypatch.setitem(optimizers.OPTIMIZERS, "halving", halving)
  rule = reference.Equation(halving_reference, {"scale": 1.0})
  monkeypatch.setitem(reference.RULES, "halving", rule)


def in_spec(entry):
  tables = {"t": {"vocabulary_size": V, "dim": D, "optimizer": entry}}
  return embed.EmbeddingConfigSpec({"f": {"table_id": "t"}}, tables).tables["t"].optimizer


def test_a_new_optimizer_is_known_by_name(made_up):
  """To the config spec, the importer, pickles and error texts."""
  assert in_spec({"name": "halving", "learning_rate": 0.25}) == halving(0.25)
  of_tensorflow = type("Halving", (types.SimpleNamespace,), {})(
    learning_rate=0.25, use_gradient_accumulation=True
  )
  assert embed.from_tpu_embedding({}, of_tensorflow).optimizer == halving(0.25)
  assert pickle.loads(pickle.dumps(halving(0.25, clipvalue=1.0))) == halving(0.25, clipvalue=1.0)
  assert halving().replace(learning_rate=0.25) == halving(0.25)
  with pytest.raises(ValueError, match=r"unknown name 'halve'. There are .*, ftrl, halving, lion"):
    in_spec({"name": "halve"})
  with pytest.raises(
    ValueError, match=r"halving\(\) .*'rate'.* It takes learning_rate, .*, slot_init"
  ):
    in_spec({"name": "halving", "rate": 0.1})
  with pytest.raises(ValueError, match=r"unsupported optimizer class.* ftrl, halving, lion"):
    make("halving")


@pytest.mark.ci
def test_a_new_optimizer_is_checked(made_up, monkeypatch):
  """By `python -m embed check`, against its line in the reference; without one it fails."""
  assert check.optimizers()["halving"] == ("halving", {})
  monkeypatch.setattr(check, "optimizers", lambda: {"halving": ("halving", {})})
  (result,) = check._check_optimizers({})
  assert (result.what, result.ok) == ("halving", True)
  wrong = lambda w, g, lr, scale, h: (w - lr * g / scale, 4 * scale)
  monkeypatch.setitem(reference.RULES, "halving", reference.RULES["halving"]._replace(update=wrong))
  (result,) = check._check_optimizers({})
  assert not result.ok
  monkeypatch.undo()
  monkeypatch.setitem(optimizers.OPTIMIZERS, "halving", halving)
  with pytest.raises(LookupError, match="halving: no line in RULES"):
    check.optimizers()


def test_every_optimizer_is_registered_and_in_the_reference():
  returns = lambda f: inspect.isfunction(f) and inspect.signature(f).return_annotation
  exported = {name for name in embed.__all__ if returns(getattr(embed, name)) is embed.RowOptimizer}
  assert exported == set(optimizers.OPTIMIZERS)
  for name in exported:
    assert getattr(embed, name) is optimizers.OPTIMIZERS[name]
  named = optimizers.named()
  assert exported - set(named) == {"custom_optimizer", "from_optax"}
  assert {name for name in named if named[name]().equation is not None} == set(reference.RULES)


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_an_optimizer_keeps_its_arguments(name):
  """All of its signature, under its own name, so that it pickles and can be changed."""
  function = optimizers.OPTIMIZERS[name]
  required = {"custom_optimizer": (same,), "from_optax": (optax.sgd(0.1),)}.get(name, ())
  optimizer = function(*required)
  parameters = inspect.signature(function).parameters.values()
  assert optimizer.name == name
  assert list(optimizer.arguments) == [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
  assert optimizer.replace() == optimizer
  assert hash(optimizer.replace()) == hash(optimizer)
  if name != "from_optax":  # optax's closures do not pickle
    assert pickle.loads(pickle.dumps(optimizer)) == optimizer


def test_frozen_ignores_nothing():
  with pytest.raises(ValueError, match="takes no arguments"):
    embed.frozen(weight_decay_factor=0.1)


def test_the_config_is_never_written_to():
  table = embed.TableConfig(V, D)
  embed.SparseEmbed(embed.FeatureConfig(table), embed.sgd(), rngs=nnx.Rngs(0))
  assert table.optimizer is None


@pytest.mark.parametrize(
  ("argument", "values"),
  [
    ("clipvalue", [-1, float("nan"), (1, -1), (float("nan"), 1), [0, None, 1]]),
    ("max_norm", [0, 0.0, -1.0, float("inf"), float("nan"), "1"]),
    ("l2_factor", [-1]),
  ],
)
def test_a_value_out_of_range_is_refused(argument, values):
  for value in values:
    with pytest.raises(ValueError, match=f"{argument} (must|clips)"):
      embed.sgd(0.1, **{argument: value})


SCALARS = [x(0.25) for x in (jnp.float32, jnp.bfloat16, np.float32, np.float64)]
SETTINGS = {
  "learning rate": lambda x: embed.sgd(x),
  "multiplier": lambda x: embed.sgd(gradient_multiplier=x),
  "decay": lambda x: embed.sgd(weight_decay_factor=x),
  "clip": lambda x: embed.sgd(clipvalue=(-x, x), clip_weight_max=x),
  "beta": lambda x: embed.adam(beta_1=x, epsilon=x),
  "accumulator": lambda x: embed.adagrad(initial_accumulator_value=x),
  "slot": lambda x: embed.custom_optimizer(same, {"s": x}, 0.1),
  "a Slot": lambda x: embed.custom_optimizer(same, {"s": embed.Slot(x)}, 0.1),
}


def same(g, w, slots, lr):
  return w - lr * g, slots


@pytest.mark.parametrize("name", SETTINGS)
def test_a_scalar_array_is_the_number_that_it_is(name):
  """Equal to the float, hashed like it, and of use in a layer."""
  wanted = SETTINGS[name](0.25)
  for scalar in SCALARS:
    optimizer = SETTINGS[name](scalar)
    assert (optimizer, hash(optimizer)) == (wanted, hash(wanted))
    assert pickle.loads(pickle.dumps(optimizer)) == wanted
  table = embed.TableConfig(4, 2, optimizer=SETTINGS[name](SCALARS[0]), name="t")
  layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  layer.apply_row_gradients({"t": embed.RowGrads([1], jnp.ones((1, 2)))})
  assert layer(np.array([1])).shape == (1, 2)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_one_number_that_is_known(name):
  with pytest.raises(ValueError, match=r"one number that is known .* Write float\(x\) outside"):
    SETTINGS[name](jnp.ones(2))
  with pytest.raises(ValueError, match=r"one number that is known .* Write float\(x\) outside"):
    jax.jit(lambda x: SETTINGS[name](x) and x)(0.25)


@pytest.mark.parametrize("make", [optax.polyak_sgd, optax.contrib.reduce_on_plateau])
def test_a_transformation_that_needs_more_than_rows_is_refused(make):
  with pytest.raises(ValueError, match="from_optax: tx needs arguments"):
    embed.from_optax(make())


@pytest.mark.parametrize("devices", [1, 8])
def test_a_half_life_decays_rows_lazily(devices):
  """As in float64 where every row decays at every step."""
  config = embed.TableConfig(16, 4, optimizer=embed.rowwise_adagrad(0.1, half_life=2.5), name="t")
  mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
  layer = embed.SparseEmbed(
    embed.FeatureConfig(config), rngs=nnx.Rngs(0), mesh=mesh if devices > 1 else None
  )
  draw = np.random.default_rng(0)
  w, a = np.asarray(layer.tables["t"], np.float64), np.full(16, 0.1)
  for step in range(30):
    ids = draw.choice(16, 3, replace=False) if step % 7 else np.array([0, 1, 2])
    g = draw.normal(size=(3, 4)).astype(np.float32)
    rows = embed.RowGrads(jnp.asarray(ids, jnp.int32), jnp.asarray(g))
    layer.apply_row_gradients({"t": rows}, step=step)
    a *= 2 ** (-1 / 2.5)
    a[ids] += (g.astype(np.float64) ** 2).mean(axis=1)
    w[ids] -= 0.1 * g / np.sqrt(a[ids])[:, None]
    np.testing.assert_allclose(layer.tables["t"], w, rtol=2e-5, atol=2e-6)
  np.testing.assert_allclose(layer.variables["t"]["accumulators"][ids], a[ids], rtol=1e-5)
  with pytest.raises(ValueError, match="step"):
    layer.apply_row_gradients({"t": rows})
