"""The compiled step costs what the batch costs: no copy, temporary or gradient as large as a table.

Read off the compiled program, so that it holds on any machine and needs no clock.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import assert_in_place, compile_step, stored
from flax import nnx

import embed
from embed import layer as layer_lib

V, D, BATCH, VALENCY = 300_000, 16, 64, 4


def assert_cost_of_the_batch(optimizers, after=lambda model: None):
  """Of a step of tables of these optimizers, `{name: optimizer}`, in one layer and program."""
  features = {}
  for name, optimizer in optimizers.items():
    table = embed.TableConfig(
      V, D, optimizer=optimizer, name=name, initializer=jax.nn.initializers.zeros
    )
    features |= {f"{kind} {name}": embed.FeatureConfig(table) for kind in ("bag", "one")}
  model = nnx.eval_shape(lambda: embed.SparseEmbed(features, rngs=nnx.Rngs(0)))

  def step(model, optimizer, inputs):
    loss = lambda m: sum(jnp.sum(a**2) for a in m(inputs).values())
    value, grads = embed.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    after(model)
    return value

  ids = np.zeros((BATCH, VALENCY), np.int32)
  of_kind = {"bag": embed.Padded(ids), "one": ids[:, 0]}
  inputs = {name: of_kind[name.split()[0]] for name in features}
  modules = model, nnx.eval_shape(lambda model: embed.Optimizer(model, optax.sgd(0.1)), model)
  # Sixteen buffers of one row per id are plenty; a table has a thousand times as many rows.
  most = len(optimizers) * (16 * BATCH * (VALENCY + 1) * D * 4 + 2**16)
  assert_in_place(compile_step(step, modules, inputs), stored(model), most)


OPTIMIZERS = {
  "sgd": embed.sgd(clipvalue=0.5, weight_decay_factor=0.5),
  "adagrad": embed.adagrad(),
  "rowwise_adagrad": embed.rowwise_adagrad(),
  "adagrad_momentum": embed.adagrad_momentum(),
  "ftrl": embed.ftrl(),
  "adam": embed.adam(),
  "from_optax": embed.from_optax(optax.adam(1e-3)),
  "custom_optimizer": embed.custom_optimizer(
    lambda g, w, s, lr: (w - lr * g, {"n": s["n"] + 1}), {"n": embed.Slot(per_row=True)}
  ),
  "frozen": embed.frozen(),
}


@pytest.mark.ci
@pytest.mark.parametrize("way", ["packed", "rows"], indirect=True)
def test_no_cost_of_the_vocabulary(way):
  """Also in packed tables, where lines and rows are the same bytes, as on CPUs and GPUs."""
  assert_cost_of_the_batch(OPTIMIZERS)


def test_the_check_sees_a_dense_update():
  """A step that reads and writes every row fails the check."""
  reverse = lambda state: jax.tree.map(lambda x: x + x[::-1], state)
  mix = lambda model: nnx.update(model, reverse(nnx.state(model, embed.Table)))
  with pytest.raises(AssertionError, match=r"copy|copies| of |fusion"):
    assert_cost_of_the_batch({"t": embed.sgd()}, mix)


def test_row_gradients_are_no_larger_than_the_batch():
  """What leaves a compiled loss is the activations' gradients, not rows of the table."""
  feature = embed.FeatureConfig(embed.TableConfig(V, D, optimizer=embed.adagrad(), name="t"))
  model = nnx.eval_shape(lambda: embed.SparseEmbed(feature, rngs=nnx.Rngs(0)))
  ids = embed.Padded(np.zeros((BATCH, VALENCY), np.int32))
  _, grads = nnx.eval_shape(embed.value_and_grad(lambda m: jnp.sum(m(ids) ** 2)), model)
  sizes = [leaf.size for leaf in jax.tree.leaves(grads.rows)]
  assert sum(sizes) == BATCH * D + BATCH * (VALENCY + 1) + 1  # activations, ids, gains and a 1
  values = jax.eval_shape(lambda grads: grads.rows["t"].values, grads)
  assert values.shape == (BATCH * VALENCY, D)


@pytest.mark.parametrize("platform", [pytest.param("rocm", marks=pytest.mark.ci), "tpu"])
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


def train_eagerly(layer):
  activations, residual = layer.lookup(np.array([1, 2]))
  layer.apply_gradients(jnp.ones_like(activations), residual)


def test_equal_layers_share_their_programs():
  """Whatever holds the rows, and though their configs are others."""
  programs = (layer_lib.compiled_look_up, layer_lib.compiled_step)
  before = [f._cache_size() for f in programs]
  for seed in range(3):
    table = embed.TableConfig(9, 4, optimizer=embed.adagrad(0.1), name="t")
    train_eagerly(embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(seed)))
  assert [f._cache_size() for f in programs] == [n + 1 for n in before]
