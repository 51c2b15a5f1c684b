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


def batch_of():
  ids = embed.Padded(jnp.asarray(IDS))
  return {"bag": ids, "seen": ids, "one": jnp.asarray(np.abs(IDS[:, 0]))}


def train_step(model, optimizer, batch, weights):
  loss_fn = lambda m, batch, weights: jnp.mean(jnp.square(m(batch, weights)))
  loss, grads = embed.value_and_grad(loss_fn)(model, batch, weights)
  optimizer.update(model, embed.clip_by_global_norm(grads, 0.5))
  return loss


WHILE_TRACING = {
  "dtype_promotion=strict": lambda: jax.numpy_dtype_promotion("strict"),
  "rank_promotion=raise": lambda: jax.numpy_rank_promotion("raise"),
  "check_tracer_leaks": jax.checking_leaks,
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


WHILE_RUNNING = {
  "transfer_guard=disallow": lambda: jax.transfer_guard("disallow"),
  "enable_x64": lambda: jax.enable_x64(True),
  "debug_nans": lambda: jax.debug_nans(True),
}


def two_steps(setting, from_the_first, **where):
  """What two compiled steps leave; the second one, or both, under a setting."""
  with setting() if from_the_first else contextlib.nullcontext():
    model = Model(**where)
    batch = batch_of(), embed.Padded(jnp.asarray(np.abs(IDS) + 1, jnp.float32))
    if "mesh" in where:
      batch = jax.device_put(batch, jax.NamedSharding(where["mesh"], jax.P("data")))
    step = embed.jit_step(train_step, model, embed.Optimizer(model, optax.adam(0.1)))
    step(*batch)
  with setting():
    loss = step(*batch)
  left = loss, dict(model.embed.variables["t"]), model.head.kernel[...]
  return [np.asarray(x, np.float32) for x in jax.tree.leaves(left)]


@pytest.mark.ci
@pytest.mark.parametrize("place", ["one device", "bfloat16 on a mesh"])
def test_a_setting_changes_no_step(place):
  where = {"mesh": jax.make_mesh((2,), ("data",)), "dtype": jnp.bfloat16} if "mesh" in place else {}
  expected = two_steps(contextlib.nullcontext, False, **where)
  for flag, setting in WHILE_RUNNING.items():
    actual = two_steps(setting, flag != "transfer_guard=disallow", **where)
    for x, y in zip(actual, expected, strict=True):
      np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6, err_msg=flag)


@pytest.mark.ci
def test_one_device_works_without_jit():
  model = Model()
  expected = model.embed(batch_of())
  with jax.disable_jit():
    actual = model.embed(batch_of())
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), actual, expected)
