"""What the compiled step of eight devices sends, and what it costs: the batch, not the vocabulary.

Read off the compiled program. A collective counts once for each array that it exchanges.
"""

import collections
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import assert_in_place, compile_step, stored
from flax import nnx
from meshes import make_mesh, on_mesh

import embed

N, V, D, BATCH, VALENCY = 8, 300_000, 16, 64, 4
IDS = BATCH // N * VALENCY  # of a device
# Of the test's own head and loss: the loss, two gradients, the count of dropped ids.
DENSE = {"all-reduce f32[]": 1, "all-reduce f32[1]": 1, "all-reduce f32[16,1]": 1}
COUNTS = {"all-reduce s32[]": 1}


class Model(nnx.Module):
  def __init__(self, plan):
    self.embed = embed.SparseEmbed(plan=plan, rngs=nnx.Rngs(0))
    self.head = nnx.Linear(D, 1, rngs=nnx.Rngs(0))


def train_one_table(strategy, *, rows=V, kind="auto", **settings):
  """The program of a training step with one table, and a device's tables and slots."""
  mesh = make_mesh(kind)
  table = embed.TableConfig(rows, D, optimizer=embed.adagrad(), name="t")
  features = embed.FeatureConfig(table)
  put = lambda x: jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
  ids = embed.Padded(put(np.zeros((BATCH, VALENCY), np.int32)))
  plan = embed.plan(features, mesh, ids)
  plan["t"].strategy, plan["t"].exchange = strategy, None
  for name, value in settings.items():
    setattr(plan["t"], name, value)
  model = Model(plan)
  modules = model, embed.Optimizer(model, optax.sgd(0.1))

  def step(model, updater, ids):
    loss = lambda model: jnp.sum(model.head(model.embed(ids)) ** 2)
    value, grads = embed.value_and_grad(loss)(model)
    updater.update(model, grads)
    return value

  place = functools.partial(on_mesh, mesh)
  return compile_step(step, modules, ids, place=place), stored(model)


COLLECTIVE = re.compile(
  r" = (.*?) (all-to-all|all-gather|all-reduce|reduce-scatter|collective-\w+)(?:-start)?\("
)


def sent(program):
  """({collective and shape: number} of what always runs, the same of loops and branches)."""
  found = {True: collections.Counter(), False: collections.Counter()}
  entry = False
  for line in program.as_text().splitlines():
    if line and not line.startswith(" "):
      entry = line.startswith("ENTRY")
    match = COLLECTIVE.search(line)
    if match:
      arrays = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
      if match[2] != "all-reduce":
        assert len(set(arrays)) == 1, line
        arrays = arrays[:1]
      for kind, dims in arrays:  # sorted: a gradient's reduction may be transposed
        dims = sorted(filter(None, dims.split(",")), key=int, reverse=True)
        found[entry][f"{match[2]} {kind}[{','.join(dims)}]"] += 1
  return dict(found[True]), dict(found[False])


def assert_cost_of_the_batch(program, arrays):
  # Sixteen buffers of one row per id of the batch; a device's tables have a hundred times that.
  assert_in_place(program, arrays, 16 * BATCH * VALENCY * D * 4 + 2**16)
  for counted in sent(program):
    for name in counted:
      sizes = [int(d) for d in re.findall(r"\d+", name.split("[")[1])]
      assert math.prod(sizes) <= BATCH * VALENCY * D, name


ROUTED = {
  f"all-to-all s32[{IDS},1]": 1,  # which rows
  f"all-to-all f32[{IDS},{D},1]": 2,  # the rows; their gradients
  "all-reduce s32[]": 2,  # how many at most, and the ids that were dropped
}


def test_rows_by_all_to_all():
  """Where a round has room for all ids, there is one."""
  program, arrays = train_one_table("mod", kind="explicit", capacity=IDS)
  assert sent(program) == (DENSE | ROUTED, {})
  assert_cost_of_the_batch(program, arrays)


@pytest.mark.ci
def test_more_rounds_are_in_loops():
  """What always runs is the first round; what may follow is in loops, and looks the same."""
  program, arrays = train_one_table("div", capacity=8)
  always, more = sent(program)
  ids, rows = "all-to-all s32[8,1]", f"all-to-all f32[{D},8,1]"
  assert always == DENSE | {ids: 1, rows: 2, "all-reduce s32[]": 2}
  assert more == {ids: 2, rows: 2, "all-reduce u32[8]": 2}  # lookup, update; where the rounds end
  assert_cost_of_the_batch(program, arrays)


@pytest.mark.ci
def test_rows_by_gathering_ids():
  program, arrays = train_one_table("mod", exchange="gather")
  always, more = sent(program)
  assert always == DENSE | COUNTS | {
    f"all-gather s32[{BATCH},{VALENCY}]": 1,  # ids
    f"all-gather f32[{BATCH},1]": 1,  # gains
    f"reduce-scatter f32[{D},{BATCH // N}]": 1,  # activations
    f"all-gather f32[{BATCH},{D}]": 1,  # their gradients
  }
  assert not more
  assert_cost_of_the_batch(program, arrays)


@pytest.mark.ci
def test_replicas():
  """Looked up without asking anybody."""
  program, arrays = train_one_table("replicated")
  always, more = sent(program)
  assert always == DENSE | COUNTS | {
    f"all-gather s32[{BATCH},{VALENCY}]": 1,
    f"all-gather f32[{BATCH},1]": 1,
    f"all-gather f32[{BATCH},{D}]": 1,
  }
  assert not more
  assert_cost_of_the_batch(program, arrays)


@pytest.mark.ci
def test_small_replicas_are_added_up():
  """Where a table has fewer rows than the batch has ids."""
  program, _ = train_one_table("replicated", rows=40)
  always, more = sent(program)
  touched = {"all-reduce s32[40]": 1, f"all-reduce f32[40,{D}]": 1}
  assert always == DENSE | COUNTS | touched
  assert not more
