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
from suites import slow_unless

import embed

DIM = 16
QUICK = [
  WAYS[name] for name in ("a_sum", "another_lookup_as_aux", "accumulate", "fori_loop_of_steps")
]
is_sum = lambda step: step is WAYS["a_sum"]
# One of each kind of thing that may come between a table and its update.
FULL = [
  WAYS[name]
  for name in (
    "a_sum", "half_precision", "a_lookup_in_a_branch", "remat", "nested_jit",
    "candidates_of_attend", "a_prediction_before_the_step", "two_models_that_share_the_layer",
    "apply_gradients_of_activations", "row_gradients_by_hand", "accumulate", "look_ahead",
    "cond_around_the_update", "scan_of_steps",
  )
]  # fmt: skip
IDS = np.arange(96, dtype=np.int32).reshape(32, 3)


def check(step, rows, *where, **table):
  model = Model(rows, DIM, *where, **table)
  modules = model, embed.Optimizer(model, optax.sgd(0.1))
  arrays = stored(model)
  smallest = min(x.nbytes for x in arrays if x.ndim == 2)
  assert_in_place(compile_step(step, modules, batch_of(IDS)), arrays, smallest / 2)


def on_eight_devices(step, sharding="mod"):
  check(step, 400_000, jax.make_mesh((8,), ("data",)), sharding)


each_way = pytest.mark.parametrize("step", slow_unless(WAYS.values(), QUICK.__contains__), ids=WAYS)


@each_way
def test_on_one_device(step):
  check(step, 100_000)


@each_way
def test_by_kernels(step, kernels):
  check(step, 100_000)


@pytest.mark.parametrize("step", slow_unless(WAYS.values(), FULL.__contains__, is_sum), ids=WAYS)
def test_on_eight_devices(step):
  on_eight_devices(step)


# The exchange is that of the test above, the kernels those of the other.
@pytest.mark.parametrize("step", slow_unless(WAYS.values(), is_sum), ids=WAYS)
def test_by_kernels_on_eight_devices(step, kernels):
  on_eight_devices(step)


@pytest.mark.weekly
@pytest.mark.parametrize("step", QUICK)
@pytest.mark.parametrize("sharding", ["div", "column", "replicated"])
def test_by_other_strategies(sharding, step):
  on_eight_devices(step, sharding)


@pytest.mark.parametrize("step", QUICK, ids=lambda step: step.__name__)
def test_bfloat16_by_kernels(step, kernels):
  """XLA:CPU has no way: it scatters bfloat16 through a float32 copy."""
  check(step, 100_000, dtype=jnp.bfloat16)


def admit_and_train(model, optimizer, batch):
  batch = model.admit(batch)
  loss, grads = embed.value_and_grad(lambda m, b: jnp.sum(m(b)["bag"] ** 2))(model, batch)
  optimizer.update(model, grads)
  return loss


LFU = {"eviction": "lfu", "half_life": 10, "sightings": 2}


@pytest.mark.parametrize(
  "policy", [{}, pytest.param(LFU, marks=pytest.mark.ci)], ids=["lru", "lfu_sightings"]
)
def test_rows_change_hands_in_place(policy):
  """Nothing of the size of the table, of its slots, or of its raw ids is copied."""
  table = embed.TableConfig(embed.DynamicVocabulary(800_000, **policy), DIM, name="user")
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
