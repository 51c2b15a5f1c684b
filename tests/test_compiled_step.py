"""The compiled step costs what the batch costs: no copy, temporary or gradient as large as a table.

Read off the compiled program, so that it holds on any machine and needs no clock.
"""

import functools
import pathlib
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import assert_in_place, compile_step, stored
from flax import nnx
from optimizer_cases import EXTRA, FIRST, LAZY, OPTIMIZERS, is_plain, optimizer_id
from suites import slow_unless

import embed
from embed import layer as layer_lib
from embed.engine import rows as rows_lib
from embed.engine import stack as stack_lib
from embed.engine.stack import Layout, StackSpec

V, D, BATCH, VALENCY = 300_000, 16, 64, 4


def assert_cost_of_the_batch(optimizer):
  table = embed.TableConfig(
    V, D, optimizer=optimizer, name="t", initializer=jax.nn.initializers.zeros
  )
  features = {"bag": embed.FeatureConfig(table), "one": embed.FeatureConfig(table)}
  model = embed.SparseEmbed(features, rngs=nnx.Rngs(0))

  def step(model, optimizer, inputs):
    loss = lambda m: sum(jnp.sum(a**2) for a in m(inputs).values())
    value, grads = embed.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value

  ids = np.zeros((BATCH, VALENCY), np.int32)
  inputs = {"bag": embed.Padded(ids), "one": ids[:, 0]}
  modules = model, embed.Optimizer(model, optax.sgd(0.1))
  # Sixteen buffers of one row per id are plenty; a table has a thousand times as many rows.
  most = 16 * BATCH * (VALENCY + 1) * D * 4 + 2**16
  assert_in_place(compile_step(step, modules, inputs), stored(model), most)


@pytest.mark.parametrize("index", slow_unless(LAZY, FIRST.__contains__, is_plain), ids=optimizer_id)
def test_no_cost_of_the_vocabulary(index):
  name, config = OPTIMIZERS[index]
  assert_cost_of_the_batch(getattr(embed, name)(**config))


@pytest.mark.parametrize("name", EXTRA)
def test_no_cost_of_the_vocabulary_for_others(name):
  assert_cost_of_the_batch(EXTRA[name]())


@pytest.mark.ci
@pytest.mark.parametrize(
  "index",
  slow_unless(LAZY, lambda index: OPTIMIZERS[index] == ("rowwise_adagrad", {})),
  ids=optimizer_id,
)
def test_no_cost_of_the_vocabulary_in_packed_tables(index, monkeypatch):
  """Where lines and rows are the same bytes, as on CPUs and GPUs."""
  monkeypatch.setenv(stack_lib.PACKING_SWITCH, "1")
  monkeypatch.setattr(rows_lib, "has_lines", lambda kind: False)
  name, config = OPTIMIZERS[index]
  assert_cost_of_the_batch(getattr(embed, name)(**config))


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
  take = embed.value_and_grad(lambda m: jnp.sum(m(ids) ** 2))
  _, grads = nnx.jit(lambda m: take(m), graph=False)(model)
  sizes = [leaf.size for leaf in jax.tree.leaves(grads.rows)]
  assert sum(sizes) <= BATCH * D + BATCH * (VALENCY + 1)
  assert grads.rows["t"].values.shape == (BATCH * VALENCY, D)


@pytest.mark.parametrize("platform", [pytest.param("cuda", marks=pytest.mark.ci), "tpu"])
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


def layer_with(seed=0, size=8, optimizer=None, name="t", features=None):
  if features is None:
    optimizer = optimizer or embed.adagrad(0.1)
    features = embed.FeatureConfig(embed.TableConfig(size, 4, optimizer=optimizer, name=name))
  return embed.SparseEmbed(features, rngs=nnx.Rngs(seed))


def train_eagerly(layer):
  activations, residual = layer.lookup(np.array([1, 2]))
  layer.apply_gradients(jnp.ones_like(activations), residual)


def test_a_stack_from_another_process_is_the_same():
  """Strings have other hashes there, and a stack keeps its own."""
  stack = StackSpec("t", ("t",), Layout((9,)), 4, np.dtype(np.float32), embed.sgd())
  assert hash(stack)
  sent = pickle.loads(pickle.dumps(stack))
  assert "_hash" not in vars(sent)
  assert (sent, hash(sent)) == (stack, hash(stack))


def test_equal_layers_share_their_programs():
  """Whatever holds the rows, and though their configs are others."""
  programs = (layer_lib.compiled_look_up, layer_lib.compiled_step)
  before = [f._cache_size() for f in programs]
  layers = [layer_with(seed, size=9) for seed in range(3)]
  for layer in layers:
    train_eagerly(layer)
  assert [f._cache_size() for f in programs] == [n + 1 for n in before]
  assert not np.array_equal(layers[0].tables["t"], layers[1].tables["t"])


@pytest.mark.parametrize(
  "other", [{"size": 9}, {"optimizer": embed.adagrad(0.2)}, {"name": "s"}], ids=str
)
def test_other_layers_do_not(other):
  (stack,), (same,), (different,) = (
    layer_with(**settings).spec.stacks.values() for settings in ({}, {"seed": 1}, other)
  )
  assert stack == same
  assert hash(stack) == hash(same)
  assert stack != different


def test_a_copy_of_a_table_is_told():
  """nnx.jit returns the modules it is given; the forms that the pages show return no table."""
  table = embed.TableConfig(1 << 17, 32, name="t", optimizer=embed.sgd())
  layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  look_up, ids = lambda layer, ids: layer(ids), np.array([1])
  with pytest.warns(UserWarning, match=r"16 MiB was copied.*@nnx\.jit\(graph=False\)"):
    nnx.jit(look_up)(layer, ids)
  with pytest.warns(UserWarning, match=r"16 MiB was copied by a step outside.*embed\.jit_step"):
    train_eagerly(layer)
  with pytest.warns(UserWarning, match="constant of a jitted function.*later steps do not change"):
    jax.jit(lambda ids: layer(ids))(ids)
  nnx.jit(look_up, graph=False)(layer, ids)  # a warning would be an error here
  nnx.jit(look_up, graph_updates=False)(layer, ids)
  nnx.jit(look_up, donate_argnums=0)(layer, ids)
  nnx.update(layer, jax.tree.map(jnp.copy, nnx.state(layer)))


def test_layers_of_one_config_share_a_compiled_step():
  """Gradients from the program of another layer step as many rows, and as fast, as their own."""
  features = layer_with().spec.features
  traced = []

  @functools.partial(jax.jit, static_argnums=0)
  def gradients(graphdef, state):
    layer = nnx.merge(graphdef, state)
    traced.append(layer)
    return embed.value_and_grad(lambda layer: jnp.sum(layer(np.array([1, 1, 2]))))(layer)[1]

  for seed in range(2):
    layer = layer_with(seed, features=features)
    before = np.asarray(layer.tables["t"])
    grads = gradients(*nnx.split(layer))
    updater = embed.Optimizer(layer, optax.sgd(0.1))
    assert grads.rows["t"].stack == layer.spec.stacks["t"]
    updater.update(layer, grads)
    moved = np.flatnonzero((np.asarray(layer.tables["t"]) != before).any(axis=1))
    assert moved.tolist() == [1, 2]
  assert len(traced) == 1


@pytest.mark.skipif(not pathlib.Path("/proc/self/maps").exists(), reason="Linux has it")
def test_new_layers_take_no_memory_maps():
  """Each compiled program holds some, and Linux allows a process 65,530."""
  maps = lambda: len(pathlib.Path("/proc/self/maps").read_text().splitlines())
  counts = []
  for seed in range(50):
    train_eagerly(layer_with(seed))
    counts.append(maps())
  assert counts[-1] < counts[2] + 40
