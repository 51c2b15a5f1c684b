"""The library under settings of JAX and Flax that strict users switch on."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import embed

ROWS, DIM, BAGS = 24, 4, 8
IDS = np.arange(BAGS * 3, dtype=np.int32).reshape(BAGS, 3) % 11 - 1


class Model(nnx.Module):
  def __init__(self, mesh=None, dtype=jnp.float32):
    table = embed.TableConfig(ROWS, DIM, optimizer=embed.adagrad(0.1), name="t", dtype=dtype)
    features = {
      "bag": embed.FeatureConfig(table),
      "seen": embed.FeatureConfig(table, max_sequence_length=2),
      "one": embed.FeatureConfig(table),
    }
    self.embed = embed.SparseEmbed(features, rngs=nnx.Rngs(0), mesh=mesh)
    self.head = nnx.Linear(DIM, 1, rngs=nnx.Rngs(0))

  def __call__(self, batch, weights=None):
    weights = None if weights is None else {"bag": weights}
    act = self.embed({name: batch[name] for name in batch}, weights)
    parts = [jnp.sum(x.astype(jnp.float32), axis=tuple(range(1, x.ndim - 1))) for x in act.values()]
    return self.head(sum(parts))


def batch_of(put=jnp.asarray):
  return {
    "bag": embed.Padded(put(IDS)), "seen": embed.Padded(put(IDS)), "one": put(np.abs(IDS[:, 0]))
  }  # fmt: skip


def train_step(model, optimizer, batch, weights):
  loss_fn = lambda m, batch, weights: jnp.mean(jnp.square(m(batch, weights)))
  loss, grads = embed.value_and_grad(loss_fn)(model, batch, weights)
  optimizer.update(model, embed.clip_by_global_norm(grads, 0.5))
  return loss


def steps(**where):
  """A compiled step of training, and what it leaves."""
  model = Model(**where)
  updater = embed.Optimizer(model, optax.adam(0.1))
  weights = embed.Padded(jnp.asarray(np.abs(IDS) + 1, jnp.float32))
  batch = batch_of()
  if "mesh" in where:
    sharding = jax.NamedSharding(where["mesh"], jax.P("data"))
    batch, weights = jax.device_put((batch, weights), sharding)
  step = embed.jit_step(train_step, model, updater)
  state = lambda: [
    jax.tree.map(np.asarray, dict(model.embed.variables["t"])),
    model.head.kernel[...],
  ]
  return lambda: step(batch, weights), state


def eager_lookups():
  model = Model()
  ragged = embed.Ragged(
    jnp.asarray(np.abs(IDS.reshape(-1))), jnp.arange(0, BAGS * 3 + 1, 3), max_valency=3
  )
  inputs = [batch_of(), {"bag": ragged}, {"one": jnp.asarray(np.abs(IDS))}]
  look_up = lambda: [model.embed(batch) for batch in inputs]
  return look_up, list


SCENARIOS = {
  "a step": steps,
  "a step in bfloat16 on a mesh": lambda: steps(
    mesh=jax.make_mesh((2,), ("data",)), dtype=jnp.bfloat16
  ),
  "eager lookups": eager_lookups,
}
WHILE_TRACING = {
  "dtype_promotion=strict": lambda: jax.numpy_dtype_promotion("strict"),
  "rank_promotion=raise": lambda: jax.numpy_rank_promotion("raise"),
  "check_tracer_leaks": jax.checking_leaks,
}
WHILE_RUNNING = {
  "transfer_guard=disallow": lambda: jax.transfer_guard("disallow"),
  "enable_x64": lambda: jax.enable_x64(True),
  "debug_nans": lambda: jax.debug_nans(True),
}


@pytest.mark.parametrize("flag", WHILE_TRACING)
def test_a_setting_of_tracing_is_kept(flag):
  def train(**where):
    model = Model(**where)
    updater = embed.Optimizer(model, optax.adam(0.1))
    return train_step(model, updater, batch_of(), embed.Padded(np.ones(IDS.shape, np.float32)))

  with WHILE_TRACING[flag]():
    nnx.eval_shape(train)
    nnx.eval_shape(lambda: train(mesh=jax.make_mesh((2,), ("data",)), dtype=jnp.bfloat16))


def numbers(scenario, setting, at_once=True):
  """What a scenario computes the second time; the setting holds from the first if `at_once`."""
  with setting() if at_once else contextlib.nullcontext():
    go, state = SCENARIOS[scenario]()
    go()
  with setting():
    out = go()
  return [np.asarray(x, np.float32) for x in jax.tree.leaves((out, state()))]


@functools.cache
def expected(scenario):
  return numbers(scenario, contextlib.nullcontext)


@pytest.mark.ci
@pytest.mark.parametrize("flag", WHILE_RUNNING)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_setting_changes_nothing(scenario, flag):
  """Each scenario gives the numbers that it gives without the setting."""
  guards = flag == "transfer_guard=disallow"
  if guards and scenario == "eager lookups":
    # Outside of jit JAX moves constants at every operation; the error says what to write.
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
      numbers(scenario, WHILE_RUNNING[flag], at_once=False)
    assert any("embed.jit_step" in note for note in caught.value.__notes__)
    return
  actual = numbers(scenario, WHILE_RUNNING[flag], at_once=not guards)
  for x, y in zip(actual, expected(scenario), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


# --- settings that are refused --------------------------------------------------------------------


def test_hijax_variables_are_refused():
  with nnx.var_defaults(hijax=True), pytest.raises(ValueError, match="FLAX_HIJAX_VARIABLE"):
    Model()


@pytest.mark.ci
def test_without_jit_a_mesh_is_refused_and_one_device_works():
  model, mesh = Model(), jax.make_mesh((2,), ("data",))
  whole, split = model.embed(batch_of()), Model(mesh=mesh)
  with jax.disable_jit():
    actual = model.embed(batch_of())
    with pytest.raises(ValueError, match="one device after another"):
      split.embed(batch_of())
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), actual, whole)


# --- settings of the compiler ---------------------------------------------------------------------
