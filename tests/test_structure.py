"""The compiled step costs what the batch costs: no copy, temporary or gradient as large as a table.

Read off the compiled program, so that it holds on any machine and needs no clock.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from test_properties import OPTIMIZERS, optimizer_id

import embed

V, D, BATCH, VALENCY = 300_000, 16, 64, 4
LAZY = [i for i, (_, config) in enumerate(OPTIMIZERS) if config.get("lazy_adam", True)]
EXTRA = {
  "from_optax": lambda: embed.from_optax(optax.adam(1e-3)),
  "custom_optimizer": lambda: embed.custom_optimizer(
    lambda g, w, s, lr: (w - lr * g, {"n": s["n"] + 1}), {"n": embed.Slot(per_row=True)}
  ),
  "frozen": embed.frozen,
}


def compile_step(optimizer):
  table = embed.TableConfig(
    V, D, optimizer=optimizer, name="t", initializer=jax.nn.initializers.zeros
  )
  features = {"bag": embed.FeatureConfig(table), "one": embed.FeatureConfig(table)}
  model = embed.SparseEmbed(features, rngs=nnx.Rngs(0))
  updater = embed.Optimizer(model, optax.sgd(0.1))

  def step(model, optimizer, inputs):
    loss = lambda m: sum(jnp.sum(a**2) for a in m(inputs).values())
    value, grads = embed.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value

  graphdef, state = nnx.split((model, updater))

  def pure(state, inputs):
    model, updater = nnx.merge(graphdef, state)
    loss = step(model, updater, inputs)
    return nnx.state((model, updater)), loss

  ids = np.zeros((BATCH, VALENCY), np.int32)
  inputs = {"bag": embed.Padded(ids), "one": ids[:, 0]}
  compiled = jax.jit(pure, donate_argnums=0).lower(state, inputs).compile()
  arrays = [v for table in model.variables.values() for v in table.values()]
  return compiled, arrays


def assert_cost_of_the_batch(optimizer):
  compiled, arrays = compile_step(optimizer)
  memory = compiled.memory_analysis()
  # Sixteen buffers of one row per id are plenty; a table has a thousand times as many rows.
  rows = BATCH * (VALENCY + 1)
  assert memory.temp_size_in_bytes < 16 * rows * D * 4 + 2**16
  assert memory.alias_size_in_bytes >= sum(a.nbytes for a in arrays), "a table is not in place"
  copy = re.compile(rf"= \w+\[{V}(,{D})?\]\S* copy\(")
  assert not [line for line in compiled.as_text().splitlines() if copy.search(line)]


@pytest.mark.parametrize("index", LAZY, ids=optimizer_id)
def test_no_cost_of_the_vocabulary(index):
  name, config = OPTIMIZERS[index]
  assert_cost_of_the_batch(getattr(embed, name)(**config))


@pytest.mark.parametrize("name", EXTRA)
def test_no_cost_of_the_vocabulary_for_others(name):
  assert_cost_of_the_batch(EXTRA[name]())


def test_the_check_sees_a_dense_update():
  """The one optimizer that does move every row fails the check."""
  with pytest.raises(AssertionError):
    assert_cost_of_the_batch(embed.adam(lazy_adam=False))


def test_row_gradients_are_no_larger_than_the_batch():
  """What leaves a compiled loss is the activations' gradients, not rows of the table."""
  model = embed.SparseEmbed(
    embed.FeatureConfig(embed.TableConfig(V, D, optimizer=embed.adagrad(), name="t")),
    rngs=nnx.Rngs(0),
  )
  ids = embed.Padded(np.zeros((BATCH, VALENCY), np.int32))
  _, grads = nnx.jit(embed.value_and_grad(lambda m: jnp.sum(m(ids) ** 2)))(model)
  sizes = [leaf.size for leaf in jax.tree.leaves(grads.rows)]
  assert sum(sizes) <= BATCH * D + BATCH * (VALENCY + 1)
  assert grads.rows["t"].values.shape == (BATCH * VALENCY, D)


@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu"])
def test_a_training_step_lowers(platform):
  """For platforms that are not here: nothing in a step is written for the CPU alone."""
  tables = [embed.TableConfig(40, 8, name=name) for name in ("a", "b")]
  layer = embed.SparseEmbed(
    [embed.FeatureConfig(t) for t in tables], embed.adam(), rngs=nnx.Rngs(0)
  )
  optimizer = embed.Optimizer(layer, optax.identity())

  @nnx.jit
  def step(layer, optimizer, ids):
    _, grads = embed.value_and_grad(lambda layer, ids: sum(x.sum() for x in layer(ids)))(layer, ids)
    optimizer.update(layer, embed.clip_by_global_norm(grads, 1.0))

  inputs = [embed.to_padded([[1, 2], [3]]), np.array([4, 5])]
  lowered = step.trace(layer, optimizer, inputs).lower(lowering_platforms=(platform,))
  assert "gather" in lowered.as_text()
