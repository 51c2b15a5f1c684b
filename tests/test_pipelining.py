"""Pipelined steps: activations one update behind, every update applied once, nothing copied."""

import conformance
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from compiled import assert_in_place, compile_step, stored
from flax import nnx
from parts import taking
from suites import slow_unless

import embed
from recipes.training.train_step import Options, Step

CASES = {case["id"]: case for case in conformance.load("pipeline")["cases"]}
V, D = 12, 3


class Model(nnx.Module):
  """Rows beside a linear layer, and scores of candidates."""

  def __init__(self, optimizer, **where):
    rngs = nnx.Rngs(0)
    table = embed.TableConfig(V, D, combiner="sum", name="t")
    features = {"bag": embed.FeatureConfig(table), "one": embed.FeatureConfig(table)}
    self.embed = embed.SparseEmbed(features, optimizer, rngs=rngs, **where)
    self.out = nnx.Linear(D, D, rngs=rngs)

  def __call__(self, batch):
    bag = self.embed({"bag": embed.Padded(batch["bag"])})["bag"]
    query = self.out(bag) + self.embed({"one": batch["one"]})["one"]
    return self.embed.attend(query, "t", candidates=batch["one"][:4])


def one_table(size, dim, optimizer=None, **config):
  """A layer of one table "t", whose bags are summed."""
  table = embed.TableConfig(size, dim, None, optimizer, "sum", name="t", **config)
  return embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))


def of_case(case):
  """The layer of a recorded case."""
  make = getattr(embed, conformance.OPTIMIZERS[case["optimizer"]])
  model = one_table(*case["table"].shape, make(case["lr"], **case["config"]))
  model.load_tables({"t": case["table"]})
  return model


def loss_fn(model, batch):
  return jnp.mean((model(batch) - 1.0) ** 2)


def batches(number, seed=0):
  draw = np.random.default_rng(seed)
  ids = lambda *shape: draw.integers(-1, V, shape).astype(np.int32)
  return [{"bag": jnp.asarray(ids(8, 4)), "one": jnp.asarray(ids(8))} for _ in range(number)]


def train(model, optimizer, data, pipelined=True, loss_fn=loss_fn):
  """The losses of one pass."""
  state = {"model": model, "optimizer": optimizer}
  take = taking(Step(loss_fn, **state, options=Options(pipelined=pipelined)), iter(data))
  return [float(take(i == len(data) - 1)) for i in range(len(data))]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.int16])
def test_padding_may_be_any_number_below_0(dtype):
  """An eager lookup of a NumPy batch and a compiled step see the same rows."""
  model = one_table(V, D, embed.sgd(0.1))
  bags = embed.Padded(np.array([[3, -7], [np.iinfo(np.int16).min, -1]], dtype))
  loss_fn = lambda model, bags: jnp.sum(model(bags) ** 2)
  ahead = embed.look_ahead(loss_fn)(model, bags)
  step = nnx.jit(lambda model, ahead, bags: embed.value_and_grad(loss_fn, ahead=ahead)(model, bags))
  loss, _ = step(model, ahead, embed.Padded(jnp.asarray(bags.values, jnp.int32)))
  np.testing.assert_allclose(loss, jnp.sum(model.tables["t"][3] ** 2), rtol=1e-6)


# --- the recorded cases ---------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", slow_unless([False, True], bool), ids=["eager", "jit"])
@pytest.mark.parametrize(
  "name",
  slow_unless(
    CASES,
    ("sgd/pipelined=0", "sgd/pipelined=1", "adam/pipelined=1").__contains__,
    ("sgd/pipelined=0", "sgd/pipelined=1").__contains__,
  ),
)
def test_recorded_cases(name, compiled):
  case = CASES[name]
  model = of_case(case)
  optimizer = embed.Optimizer(model, optax.sgd(0.0))

  def loss(model, ids, target):
    act = model(embed.Padded(ids))
    return 0.5 * jnp.sum((act - target) ** 2), act

  def step(model, optimizer, ahead, now, then):
    (_, act), grads = embed.value_and_grad(loss, has_aux=True, ahead=ahead)(model, *now)
    ahead = then and embed.look_ahead(loss, has_aux=True)(model, *then)
    optimizer.update(model, grads)
    return act, ahead

  step = nnx.jit(step) if compiled else step
  data = [(jnp.array(i), jnp.array(t)) for i, t in zip(case["ids"], case["targets"], strict=True)]
  ahead = None
  for i, now in enumerate(data):
    then = data[i + 1] if case["pipelined"] and i + 1 < len(data) else None
    act, ahead = step(model, optimizer, ahead, now, then)
    np.testing.assert_allclose(act, case["activations"][i], **case["tol"])
  for key, value in case["final"].items():
    np.testing.assert_allclose(model.variables["t"][key], value, **case["tol"], err_msg=key)


def test_recorded_cases_by_hand():
  """The mid level: a look-up before the update of the step before it."""
  case = CASES["adam/pipelined=1"]
  model = of_case(case)
  bags = [embed.Padded(np.array(ids)) for ids in case["ids"]]
  act, residual = model.lookup(bags[0])
  for i, target in enumerate(case["targets"]):
    np.testing.assert_allclose(act, case["activations"][i], **case["tol"])
    ahead = model.lookup(bags[i + 1]) if i + 1 < len(bags) else (None, None)
    model.apply_gradients(act - target, residual)
    act, residual = ahead
  np.testing.assert_allclose(
    model.variables["t"]["parameters"], case["final"]["parameters"], **case["tol"]
  )


# --- what it means --------------------------------------------------------------------------------


def test_activations_are_one_update_behind():
  """A row of ones under w -= 1: looked up as 1, 1, 0, -1 where 1, 0, -1, -2 would be in order."""
  table = embed.TableConfig(
    3, 1, combiner="sum", optimizer=embed.sgd(1.0), initializer=jax.nn.initializers.ones
  )
  model = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  optimizer = embed.Optimizer(model, optax.sgd(0.0))
  state, data = {"model": model, "optimizer": optimizer}, iter([jnp.array([1])] * 4)
  take = taking(
    Step(lambda m, ids: jnp.sum(m(ids)), **state, options=Options(pipelined=True)), data
  )
  assert [float(take(i == 3)) for i in range(4)] == [1.0, 1.0, 0.0, -1.0]
  assert model.tables["table_0"][:, 0].tolist() == [1.0, -3.0, 1.0]


@pytest.mark.ci
def test_a_pause_before_every_step_is_no_pipeline():
  """Drained each time, a pipelined run is the ordinary one, bit for bit."""
  found = []
  for pipelined in (False, True):
    model = Model(embed.adam(0.1))
    optimizer = embed.Optimizer(model, optax.adam(0.1))
    state = {"model": model, "optimizer": optimizer}
    take = taking(Step(loss_fn, **state, options=Options(pipelined=pipelined)), iter(batches(4)))
    losses = [float(take(True)) for _ in range(4)]
    found.append((losses, jax.tree.map(np.asarray, model.embed.variables)))
  meshes.assert_equal(*found)


def stale(model, optimizer, data):
  """The same by keeping old tables: step t differentiates at the tables of two updates ago."""
  losses, before = [], model.embed.tables["t"]
  for batch in data:
    table = model.embed.tables["t"]
    old = nnx.clone(model)
    old.embed.load_tables({"t": before})
    loss, grads = embed.value_and_grad(loss_fn)(old, batch)
    optimizer.update(model, grads)
    before = table
    losses.append(float(loss))
  return losses


@pytest.mark.ci
@pytest.mark.parametrize(
  "name", slow_unless(["sgd", "rowwise_adagrad", "adam", "ftrl"], "adam".__eq__)
)
def test_equals_training_on_kept_old_tables(name):
  model, other = Model(getattr(embed, name)(0.1)), Model(getattr(embed, name)(0.1))
  losses = train(model, embed.Optimizer(model, optax.adam(0.1)), batches(5))
  wanted = stale(other, embed.Optimizer(other, optax.adam(0.1)), batches(5))
  np.testing.assert_allclose(losses, wanted, rtol=1e-5)
  meshes.assert_close(model.embed.variables, other.embed.variables)


@pytest.mark.weekly
@pytest.mark.parametrize("kind", meshes.KINDS)
def test_sharded_equals_unsharded(kind):
  where = {"mesh": meshes.make_mesh(kind), "axis": "data"}
  model, other = Model(embed.adagrad(0.1), **where), Model(embed.adagrad(0.1))
  optimizer = embed.Optimizer(model, optax.adam(0.1))
  with jax.set_mesh(where["mesh"]):
    losses = train(model, optimizer, batches(4))
  wanted = train(other, embed.Optimizer(other, optax.adam(0.1)), batches(4))
  np.testing.assert_allclose(losses, wanted, rtol=1e-5)
  meshes.assert_close(model.embed.variables, other.embed.variables)


@pytest.mark.ci
def test_dropped_ids_are_counted_once():
  data = [{"bag": b["bag"].at[0, 0].set(V), "one": b["one"]} for b in batches(3)]
  model = Model(embed.sgd(0.1))

  def loss(model, batch):
    bag = model.embed({"bag": embed.Padded(batch["bag"])})["bag"]
    return jnp.sum(bag * model.embed({"one": batch["one"]})["one"])

  train(model, embed.Optimizer(model, optax.sgd(0.1)), data, loss_fn=loss)
  assert int(model.embed.report["dropped_ids"]) == 3


@pytest.mark.ci
def test_candidates_drawn_in_the_loss_are_those_looked_up():
  """Random counters at the look ahead are those of the step that it is for."""

  class Drawing(nnx.Module):
    def __init__(self):
      self.embed = Model(embed.sgd(0.1)).embed
      self.draw = nnx.Rngs(5)

  def loss(model, query):
    candidates = jax.random.randint(model.draw(), (6,), 0, V)
    return jnp.sum(model.embed.attend(query, "t", candidates=candidates) ** 2)

  model = Drawing()
  optimizer = embed.Optimizer(model, optax.sgd(0.1))
  state = {"model": model, "optimizer": optimizer}
  take = taking(Step(loss, **state, options=Options(pipelined=True)), iter([jnp.ones((2, D))] * 3))
  assert np.isfinite([float(take(i == 2)) for i in range(3)]).all()


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.ci
def test_the_lookups_of_another_batch_give_nan_and_no_gradient():
  model = Model(embed.sgd(0.1))
  one, other = batches(2)
  ahead = embed.look_ahead(loss_fn)(model, one)
  loss, grads = embed.value_and_grad(loss_fn, ahead=ahead)(model, other)
  assert np.isnan(loss)
  assert float(embed.global_norm(grads)) == 0.0


def test_other_bags_of_the_same_ids_are_another_batch():
  model = one_table(V, D)
  loss = lambda m, splits: jnp.sum(m(embed.Ragged(jnp.array([1, 2, 3]), splits)) ** 2)
  ahead = embed.look_ahead(loss)(model, jnp.array([0, 1, 3]))
  same, _ = embed.value_and_grad(loss, ahead=ahead)(model, jnp.array([0, 1, 3]))
  other, _ = embed.value_and_grad(loss, ahead=ahead)(model, jnp.array([0, 2, 3]))
  assert np.isfinite(same)
  assert np.isnan(other)


def test_lookups_of_another_layer_are_refused():
  class Two(nnx.Module):
    def __init__(self):
      self.a, self.b = Model(embed.sgd(0.1)).embed, Model(embed.sgd(0.1)).embed

  of = lambda name: lambda m, ids: jnp.sum(getattr(m, name)({"one": ids})["one"])
  model, ids = Two(), jnp.array([1, 2])
  ahead = embed.look_ahead(of("a"))(model, ids)
  with pytest.raises(ValueError, match="`ahead` is of another loss or model"):
    embed.value_and_grad(of("b"), ahead=ahead)(model, ids)


def test_an_eager_look_ahead_shares_nothing_with_the_model():
  """The scores of all rows are made of the table itself, which the step then takes away."""
  model = Model(embed.sgd(0.1))
  loss = lambda m, q: jnp.sum(m.embed.attend(q, "t") ** 2)
  query = jnp.ones((2, D))
  ahead = embed.look_ahead(loss)(model, query)

  @nnx.jit(donate_argnames=("model", "optimizer"))
  def step(model, optimizer, ahead, query):
    value, grads = embed.value_and_grad(loss, ahead=ahead)(model, query)
    optimizer.update(model, grads)
    return value

  assert np.isfinite(step(model, embed.Optimizer(model, optax.sgd(0.1)), ahead, query))


def test_another_shape_or_loss_is_refused():
  model = Model(embed.sgd(0.1))
  ahead = embed.look_ahead(loss_fn)(model, batches(1)[0])
  short = jax.tree.map(lambda x: x[:4], batches(1)[0])
  with pytest.raises(
    ValueError, match="a last batch of another size needs a look ahead of its own"
  ):
    embed.value_and_grad(loss_fn, ahead=ahead)(model, short)
  once = lambda model, batch: jnp.sum(model.embed({"one": batch["one"]})["one"])
  with pytest.raises(ValueError, match="`ahead` is of another loss or model"):
    embed.value_and_grad(once, ahead=ahead)(model, batches(1)[0])


def test_a_look_ahead_of_another_model_is_refused():
  """Also where only the number of rows differs, which no activation shows."""
  layer = lambda size: one_table(size, 2, embed.sgd(0.1))
  loss, ids = (lambda m, ids: m(ids).sum()), np.array([1, 2])
  ahead = embed.look_ahead(loss)(layer(9), ids)
  with pytest.raises(ValueError, match="another loss or model"):
    embed.value_and_grad(loss, ahead=ahead)(layer(5), ids)


def test_a_lookup_in_a_branch_is_refused():
  def loss(model, ids):
    yes = lambda m: jnp.sum(m.embed({"one": ids})["one"])
    return nnx.cond(ids[0] > 3, yes, lambda m: jnp.float32(0), model)

  with pytest.raises(ValueError, match="in one branch of a conditional"):
    embed.look_ahead(loss)(Model(embed.sgd(0.1)), jnp.array([1, 2]))


# --- what it costs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "loss",
  [
    pytest.param(jnp.sum, id="constant"),
    pytest.param(lambda a: jnp.sum(a**2), id="square", marks=pytest.mark.weekly),
  ],
)
@pytest.mark.parametrize("name", slow_unless(["sgd", "rowwise_adagrad", "adam"], "adam".__eq__))
def test_no_table_is_copied(name, loss):
  """The look-ahead reads the table that the same step updates in place."""
  size, dim = 300_000, 16
  table = embed.TableConfig(size, dim, name="t", initializer=jax.nn.initializers.zeros)
  model = embed.SparseEmbed(embed.FeatureConfig(table), getattr(embed, name)(0.1), rngs=nnx.Rngs(0))
  optimizer = embed.Optimizer(model, optax.sgd(0.1))
  of_batch = lambda model, ids: loss(model(embed.Padded(ids)))
  ids = jnp.zeros((64, 4), jnp.int32)
  ahead = embed.look_ahead(of_batch)(model, ids)

  def step(model, optimizer, ahead, ids, next_ids):
    value, grads = embed.value_and_grad(of_batch, ahead=ahead)(model, ids)
    ahead = embed.look_ahead(of_batch)(model, next_ids)
    optimizer.update(model, grads)
    return value, ahead

  program = compile_step(step, (model, optimizer), ahead, ids, ids)
  assert_in_place(program, stored(model), 16 * ids.size * dim * 4 + 2**16)


def test_the_lookup_waits_for_nothing_of_its_own_step():
  """Neither the loss nor any gradient is among what the look-ahead of the next batch needs."""
  model = Model(embed.adam(0.1))
  now, then = batches(2)
  ahead = embed.look_ahead(loss_fn)(model, now)
  graphdef, state = nnx.split(model)

  def step(state, ahead, now, then):
    model = nnx.merge(graphdef, state)
    loss, _ = embed.value_and_grad(loss_fn, ahead=ahead)(model, now)
    return embed.look_ahead(loss_fn)(model, then), loss

  poison = jax.tree.map(lambda x: x * jnp.nan if x.dtype == jnp.float32 else x, ahead)
  clean, loss = step(state, ahead, now, then)
  poisoned, nan = step(state, poison, now, then)
  assert np.isfinite(loss)
  assert np.isnan(nan)
  meshes.assert_equal(poisoned, clean)
