"""Each way to write a step updates tables in place: no copy and no temporary of their size.

Read off the compiled program, so that it holds on any machine and needs no clock.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import assert_in_place, compile_step, stored
from flax import nnx
from step_ways import WAYS, Model, batch_of

import embed

DIM = 16
IDS = np.arange(96, dtype=np.int32).reshape(32, 3)


def check(step, model):
  modules = model, nnx.eval_shape(lambda model: embed.Optimizer(model, optax.sgd(0.1)), model)
  arrays = stored(model)
  smallest = min(x.size * x.dtype.itemsize for x in arrays if x.ndim == 2)
  assert_in_place(compile_step(step, modules, batch_of(IDS)), arrays, smallest / 2)


@pytest.fixture(scope="module")
def model():
  return nnx.eval_shape(lambda: Model(100_000, DIM))


@pytest.fixture(scope="module")
def model_on_eight_devices():
  return Model(400_000, DIM, jax.make_mesh((8,), ("data",)))


def cases(*quick):
  return [name if name in quick else pytest.param(name, marks=pytest.mark.ci) for name in WAYS]


@pytest.mark.parametrize("name", cases("a_sum", "accumulate", "scan_of_steps"))
def test_on_one_device(name, model):
  check(WAYS[name], model)


@pytest.mark.parametrize("name", cases("a_sum"))
def test_on_eight_devices(name, model_on_eight_devices):
  check(WAYS[name], model_on_eight_devices)


@pytest.mark.ci
def test_rows_change_hands_in_place():
  """Nothing of the size of the table, of its slots, or of its raw ids is copied."""

  def admit_and_train(model, optimizer, batch):
    batch = model.admit(batch)
    loss, grads = embed.value_and_grad(lambda m, b: jnp.sum(m(b)["bag"] ** 2))(model, batch)
    optimizer.update(model, grads)
    return loss

  table = embed.TableConfig(embed.DynamicVocabulary(800_000), DIM, name="user")
  mesh = jax.make_mesh((8,), ("data",))
  model = embed.SparseEmbed(
    {"bag": embed.FeatureConfig(table)}, embed.adagrad(0.1), rngs=nnx.Rngs(0), mesh=mesh
  )
  optimizer = embed.Optimizer(model, optax.sgd(0.1))
  batch = {"bag": embed.raw_ids(embed.Padded(IDS))}
  compiled = compile_step(admit_and_train, (model, optimizer), batch)
  variables = nnx.state(model, (embed.Table, embed.SlotVariable, embed.Vocabulary))
  arrays = [x.addressable_shards[0].data for x in jax.tree.leaves(variables) if x.ndim]
  assert_in_place(compiled, arrays, min(x.nbytes for x in arrays if x.ndim == 2) / 2)
