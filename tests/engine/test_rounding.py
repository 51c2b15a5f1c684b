"""Stochastic rounding: unbiased, reproducible, the same on any mesh; rows learn as in float32."""

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from suites import slow_unless

import embed
from embed.engine import update

ULP = 2.0**-7  # of bfloat16 from 1 to 2


def bits(n, seed=0):
  return noise_of(n, 1, seed)[:, 0]


def noise_of(n, d, *numbers):
  """The noise of ids and columns in a row, for a table and a step."""
  keys = jnp.arange(n, dtype=jnp.uint32) ^ update.rounding_key(*numbers)
  return update.rounding_noise(keys, jnp.arange(d))


def make(optimizer, v=64, d=8, value=1.0, **settings):
  settings = {"dtype": jnp.bfloat16, "combiner": "sum", "name": "t"} | settings
  table = embed.TableConfig(v, d, jax.nn.initializers.constant(value), optimizer, **settings)
  return embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))


def stepper(model):
  """`(ids, gradient)` to one optimizer step, compiled."""
  optimizer = embed.Optimizer(model, optax.sgd(0.0))

  @nnx.jit
  def step(model, optimizer, ids, g):
    loss = lambda m: jnp.sum(m(ids).astype(jnp.float32) * g)
    _, grads = embed.value_and_grad(loss)(model)
    optimizer.update(model, grads)

  return lambda ids, g: step(model, optimizer, ids, g)


def rows(model):
  return np.asarray(model.tables["t"].astype(jnp.float32))


# --- numbers --------------------------------------------------------------------------------------


def test_a_quarter_of_the_way_goes_up_a_quarter_of_the_time():
  for sign in (1.0, -1.0):
    x = jnp.full(4, sign * (1 + ULP / 4))
    found = update.to_bfloat16(x, jnp.array([0, 0xBFFF, 0xC000, 0xFFFF], jnp.uint32))
    assert found.tolist() == [sign, sign, sign * (1 + ULP), sign * (1 + ULP)]


@pytest.mark.ci
@given(
  st.lists(st.floats(width=32, allow_subnormal=False), min_size=1, max_size=20),
  st.integers(0, 2**32 - 1),
)
def test_one_of_the_two_neighbours_and_what_fits_stays(values, noise):
  x = np.array(values, np.float32)
  found = np.asarray(update.to_bfloat16(jnp.asarray(x), jnp.full(x.shape, noise, jnp.uint32)))
  exact = np.asarray(jnp.asarray(x).astype(jnp.bfloat16))
  down = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)  # towards zero
  up = ((x.view(np.uint32) >> 16) + 1 << 16).astype(np.uint32).view(np.float32)
  for value, got, nearest, low, high in zip(x, found, exact, down, up, strict=True):
    if not np.isfinite(value) or value == low:
      np.testing.assert_array_equal(np.float32(got), np.float32(nearest))
    else:
      assert float(got) in (low, high)


def test_the_mean_is_the_number():
  """Of 2^16 roundings, within four standard deviations."""
  n = 2**16
  for part in (1 / 64, 0.3, 0.5, 0.9):
    x = jnp.full(n, 1 + part * ULP)
    mean = float(jnp.mean(update.to_bfloat16(x, bits(n)).astype(jnp.float32)))
    assert abs(mean - float(x[0])) < 4 * ULP * np.sqrt(part * (1 - part) / n), part


def test_noise_differs_by_row_column_step_and_table():
  """The share of equal bits of any two is a half, within five standard deviations."""
  base = noise_of(512, 32, 7, 3)
  others = {
    "row": jnp.roll(base, 1, axis=0),
    "column": jnp.roll(base, 1, axis=1),
    "step": noise_of(512, 32, 7, 4),
    "table": noise_of(512, 32, 8, 3),
  }
  for name, other in others.items():
    share = float(jnp.mean(jnp.bitwise_count(base ^ other))) / 32
    assert abs(share - 0.5) < 5 * 0.5 / np.sqrt(base.size * 32), name


# --- tables ---------------------------------------------------------------------------------------


@pytest.mark.ci
def test_steps_below_the_resolution_count():
  """100 steps of 1/64 ulp: to the nearest nothing ever moves, at random it does on average."""
  ids = embed.Padded(np.arange(64)[:, None])
  g = jnp.float32(ULP / 64)
  exact = make(embed.sgd(1.0), stochastic_rounding=False)
  random = make(embed.sgd(1.0))
  move, wander = stepper(exact), stepper(random)
  for _ in range(100):
    move(ids, g)
    wander(ids, g)
  np.testing.assert_array_equal(rows(exact), 1.0)
  # Below 1 the spacing is half as wide; a walk of variance under 100 * (1/64) * (63/64) ulp^2.
  deviation = ULP * np.sqrt(100 / 64 / rows(random).size)
  assert abs(rows(random).mean() - (1 - 100 * g)) < 4 * deviation


@pytest.mark.parametrize("optimizer", [embed.adagrad(0.1), embed.rowwise_adagrad(0.1)])
def test_other_rows_keep_their_bits_and_slots_stay_float32(optimizer):
  model = make(optimizer, value=0.3)
  before = rows(model)
  stepper(model)(embed.Padded(np.array([[3, 5], [5, -1]])), 0.7)
  after = rows(model)
  touched = [3, 5]
  np.testing.assert_array_equal(np.delete(after, touched, 0), np.delete(before, touched, 0))
  assert (after[touched] != before[touched]).all()
  assert model.variables["t"]["accumulators"].dtype == jnp.float32


def test_occurrences_of_a_row_are_rounded_apart():
  """Each of eight steps of half an ulp goes its own way: 2^8 sums for 512 weights, not two."""
  model = make(embed.sgd(1.0, use_gradient_accumulation=False), value=1.5)
  stepper(model)(embed.Padded(np.repeat(np.arange(64), 8).reshape(64, 8)), ULP / 2)
  assert len(np.unique(rows(model))) > 4


@pytest.mark.ci
def test_a_run_repeats_itself_and_tables_differ():
  def run(name):
    model = make(embed.sgd(0.1), name="t") if name == "t" else make(embed.sgd(0.1), name=name)
    step = stepper(model)
    for _ in range(3):
      step(embed.Padded(np.arange(64)[:, None]), 0.011)
    return np.asarray(model.tables[name].astype(jnp.float32))

  np.testing.assert_array_equal(run("t"), run("t"))
  assert (run("t") != run("u")).any()


@pytest.mark.ci
@pytest.mark.parametrize(
  "strategy",
  slow_unless(meshes.STRATEGIES, "column".__eq__),
)
def test_a_row_is_rounded_alike_on_any_mesh(strategy):
  """Integer gradients, so that sums are exact: bit for bit."""
  draw = np.random.default_rng(0)
  ids = embed.Padded(draw.integers(-1, 20, (16, 3)))
  g = draw.integers(-8, 9, (16, 12)).astype(np.float32)
  tables = []
  for where in ({}, {"mesh": meshes.make_mesh(), "sharding": strategy}):
    one = embed.TableConfig(
      20, 12, jax.nn.initializers.ones, embed.adagrad(0.01), "sum", "a", dtype=jnp.bfloat16
    )
    two = embed.TableConfig(
      9, 12, jax.nn.initializers.ones, embed.adagrad(0.01), "sum", "b", dtype=jnp.bfloat16
    )
    features = {"a": embed.FeatureConfig(one), "b": embed.FeatureConfig(two)}
    model = embed.SparseEmbed(features, rngs=nnx.Rngs(0), **where)
    optimizer = embed.Optimizer(model, optax.sgd(0.0))
    loss = lambda m: sum(
      jnp.sum(act.astype(jnp.float32) * g)
      for act in m({"a": ids, "b": embed.Padded(ids.values % 9)}).values()
    )

    @nnx.jit
    def step(model, optimizer, loss=loss):
      _, grads = embed.value_and_grad(loss)(model)
      optimizer.update(model, grads)

    for _ in range(2):
      step(model, optimizer)
    tables.append(jax.tree.map(lambda x: np.asarray(x.astype(jnp.float32)), model.tables))
  meshes.assert_equal(*tables)


def test_the_step_is_asked_for():
  model = make(embed.sgd(0.1))
  act, residual = model.lookup(np.array([1, 2]))
  with pytest.raises(ValueError, match=r"pass step=\.\.\., or set stochastic_rounding=False"):
    model.apply_gradients(jnp.ones(act.shape), residual)
  model.apply_gradients(jnp.ones(act.shape), residual, step=0)


def test_a_frozen_table_rounds_nothing():
  model = make(embed.frozen())
  act, residual = model.lookup(np.array([1, 2]))
  model.apply_gradients(jnp.ones(act.shape), residual)


@pytest.mark.weekly
def test_a_short_training_run_matches_float32():
  """Factorizing a matrix: float32, and bfloat16 at random, over two seeds; nearest is worse."""

  def final_loss(seed, **settings):
    draw = np.random.default_rng(seed)
    left, right = draw.normal(size=(2, 40, 4)) / 2
    target = jnp.asarray(left @ right.T, jnp.float32)
    init = jax.nn.initializers.normal(0.3)
    tables = [
      embed.TableConfig(40, 8, init, embed.sgd(0.004), "sum", name=n, **settings) for n in "ab"
    ]
    features = {n: embed.FeatureConfig(t) for n, t in zip("ab", tables, strict=True)}
    model = embed.SparseEmbed(features, rngs=nnx.Rngs(seed))
    optimizer = embed.Optimizer(model, optax.sgd(0.0))

    def loss_fn(model, a, b, target):
      act = model({"a": a, "b": b})
      score = jnp.sum(act["a"].astype(jnp.float32) * act["b"].astype(jnp.float32), -1)
      return jnp.mean((score - target[a, b]) ** 2)

    graphdef, state = nnx.split((model, optimizer))

    @jax.jit
    def train(state, pairs, target):
      def step(state, pair):
        model, optimizer = nnx.merge(graphdef, state)
        _, grads = embed.value_and_grad(loss_fn)(model, *pair, target)
        optimizer.update(model, grads.map(lambda g: g * 16))
        return nnx.state((model, optimizer)), None

      return jax.lax.scan(step, state, pairs)[0]

    pairs = draw.integers(0, 40, (1000, 2, 256)).astype(np.int32)
    model, _ = nnx.merge(graphdef, train(state, pairs, target))
    a, b = np.divmod(np.arange(1600), 40)
    return float(loss_fn(model, a, b, target))

  of = lambda **settings: np.mean([final_loss(seed, **settings) for seed in range(2)])
  exact = of()
  assert of(dtype=jnp.bfloat16) == pytest.approx(exact, rel=0.1)  # seen: 3.5 % less
  assert of(dtype=jnp.bfloat16, stochastic_rounding=False) > 1.15 * exact  # seen: 22 % more
