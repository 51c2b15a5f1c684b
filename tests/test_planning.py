"""What a plan decides and what it says that costs, by hand; and that stacks cannot be seen."""

import re

import cases
import jax
import numpy as np
import pytest
from flax import nnx
from meshes import make_mesh

import embed
from embed import inputs
from embed.engine import exchange, update
from embed.engine.grads import ActivationGrads

# --- costs, in bytes -----------------------------------------------------------------------------


def small(rows=64, dim=4, **settings):
  """Eight devices; each has 2 bags of 2 ids, so 4 ids and 2 activations."""
  table = embed.TableConfig(rows, dim, name="t", optimizer=embed.adagrad())
  ids = jax.ShapeDtypeStruct((16, 2), np.int32)
  plan = embed.plan(embed.FeatureConfig(table), make_mesh(), embed.Padded(ids))
  for name, value in settings.items():
    setattr(plan["t"], name, value)
  (cost,) = plan.costs()
  assert plan.bytes_per_device == cost.rows + cost.slots + cost.buffers
  return cost


@pytest.mark.parametrize(
  ("rows", "dim", "settings", "exchange", "capacity", "stored", "moved"),
  [
    # A device has 8 of 64 rows. Half an id for each owner; room for six deviations more, but for no
    # more than there are. From each of 7 others: 4 ids, 4 rows and 4 gradients of rows.
    (64, 4, {"strategy": "mod", "exchange": "all_to_all"}, "all_to_all", 4, 8 * 4, 7 * 4 * 9),
    # From each of 7 others: 4 ids on both ways, 2 activations and their 2 gradients.
    (64, 4, {"strategy": "mod", "exchange": "gather"}, "gather", None, 8 * 4, 7 * (8 + 16)),
    # The ids and gradients of 7 others, on the way back.
    (64, 4, {"strategy": "replicated"}, "gather", None, 64 * 4, 7 * (4 + 8)),
    # 16 rows are fewer than the 32 ids of the batch: all are added up, with a mark of touched ones.
    (16, 4, {"strategy": "replicated"}, "sum", None, 16 * 4, 2 * 16 * 5 * 7 // 8),
  ],
)
def test_costs_in_words_of_four_bytes(rows, dim, settings, exchange, capacity, stored, moved):
  cost = small(rows, dim, **settings)
  assert (cost.rows, cost.slots) == (4 * stored, 4 * stored)
  assert (cost.exchange, cost.capacity, cost.moved) == (exchange, capacity, 4 * moved)


def test_costs_of_dtypes_of_one_device_and_of_what_fits():
  table = embed.TableConfig(64, 4, name="t", optimizer=embed.rowwise_adagrad(), dtype="bfloat16")
  plan = embed.plan(embed.FeatureConfig(table), make_mesh(), np.zeros(16, np.int32))
  plan["t"].strategy = "mod"
  (cost,) = plan.costs()
  assert (cost.rows, cost.slots) == (8 * 4 * 2, 8 * 4)
  table = embed.TableConfig(10, 4, name="t", optimizer=embed.adam())
  for hbm, fits, text in ((479, False, "does not fit 479"), (480, True, "fits 480")):
    plan = embed.plan(embed.FeatureConfig(table), None, np.zeros(16, np.int32), hbm_bytes=hbm)
    (cost,) = plan.costs()
    assert (cost.rows, cost.slots, cost.buffers, cost.moved) == (160, 320, 0, 0)
    assert (plan.bytes_per_device, plan.fits) == (480, fits)
    assert text in repr(plan)


# --- choices -------------------------------------------------------------------------------------


def test_what_is_chosen():
  for rows, dim, batch, strategy, way in (
    (3, 4, (1024, 1), "replicated", "sum"),
    (1_000_000, 64, (1024, 1), "mod", "all_to_all"),
    (1_000_000, 16, (64, 50), "mod", "gather"),
    (10_000, 1024, (64, 50), "mod", "gather"),
  ):
    table = embed.TableConfig(rows, dim, name="t")
    ids = embed.Padded(jax.ShapeDtypeStruct(batch, np.int32))
    plan = embed.plan(embed.FeatureConfig(table), make_mesh(), ids)
    (cost,) = plan.costs()
    assert (plan["t"].strategy, cost.exchange) == (strategy, way)
    if batch == (1024, 1):  # the strategy that moves less
      plan["t"].strategy = "mod" if strategy == "replicated" else "replicated"
      plan["t"].exchange = None
      assert cost.moved < plan.costs()[0].moved


def test_tables_that_do_not_fit_are_not_replicated():
  features = embed.FeatureConfig(embed.TableConfig(3, 4, name="t"))
  plan = embed.plan(features, make_mesh(), np.zeros(1024, np.int32), hbm_bytes=100)
  assert (plan["t"].strategy, plan.fits) == ("mod", False)


def test_the_axis_is_that_of_the_mesh_or_the_one_given():
  table = embed.TableConfig(64, 4, name="t")
  mesh = make_mesh(shape=(4, 2), names=("data", "model"))
  ids = np.zeros(16, np.int32)
  assert embed.plan(embed.FeatureConfig(table), mesh, ids)["t"].axis == ("data", "model")
  assert embed.plan(embed.FeatureConfig(table), mesh, ids, axis="model")["t"].axis == ("model",)


# --- reading and changing ------------------------------------------------------------------------


def three_tables():
  sizes = {"a": (300, 8), "b": (21, 8), "c": (64, 4)}
  features = {
    name: embed.FeatureConfig(embed.TableConfig(*size, name=name)) for name, size in sizes.items()
  }
  return features, {name: np.zeros(24, np.int32) for name in features}


def test_printing():
  features, batch = three_tables()
  plan = embed.plan(features, make_mesh(), batch, embed.adagrad(), hbm_bytes=1 << 20)
  for name in plan:
    plan[name].strategy, plan[name].exchange = "mod", "all_to_all"
  text = repr(plan)
  _, a, b, c, total = (line.split() for line in text.splitlines())
  for line, words in ((a, "a 300 8 mod"), (b, "b 21 8 mod"), (c, "c 64 4 mod")):
    assert line[:4] == words.split()
  assert "all_to_all" not in a  # what tables of one array cost stands beside the last of them
  assert {"all_to_all", "1.3k"} <= set(b)  # (38 + 3) rows of 8 floats, and as many accumulators
  assert {"8", "fits", "1.0M"} <= set(total)
  for dim, warns in ((3, True), (8, False)):  # no view splits 5,000,001 rows of 3
    table = embed.TableConfig(5_000_001, dim, name="t")
    plan = embed.plan(embed.FeatureConfig(table), make_mesh(), np.zeros(8, np.int32))
    assert ("Whole on every device while saved or restored: t " in repr(plan)) == warns


def test_a_plan_is_a_mapping_that_can_be_changed():
  features, batch = three_tables()
  plan = embed.plan(features, make_mesh(), batch)
  assert (list(plan), len(plan)) == (["a", "b", "c"], 3)
  plan["a"].strategy = "div"
  plan["b"].axis = "data"
  plan["c"].strategy, plan["c"].capacity = "mod", 5
  layer = nnx.eval_shape(lambda: embed.SparseEmbed(plan=plan, rngs=nnx.Rngs(0)))
  assert layer.spec.stack_of["a"].layout.contiguous
  assert not layer.spec.stack_of["c"].layout.contiguous


def test_mistakes_are_named():
  features, batch = three_tables()
  plan, mesh = embed.plan(features, make_mesh(), batch), make_mesh()
  refused = [
    (("strategy", "rows"), r"`strategy` must be one of .*'mod'.*Got 'rows'"),
    (("exchange", "ring"), r"`exchange` must be one of .*'gather'.*Got 'ring'"),
    (("storage", "disk"), r"`storage` must be one of .*'packed'.*Got 'disk'"),
    (("capacity", 0), "`capacity` must be an int and must be >= 1. Got 0"),
    (("capacity", True), "`capacity` must be an int and must be >= 1. Got True"),
  ]
  cases.refused(refused, lambda given: setattr(plan["a"], *given))
  for owner, name in ((plan["a"], "stategy"), (plan, "mesh"), (plan, "hbm_byte")):
    with pytest.raises(AttributeError, match=name):
      setattr(owner, name, None)
  with pytest.raises(KeyError, match="There is no table 'z'; the tables are"):
    plan["z"]
  with pytest.raises(ValueError, match="takes a feature config, or a plan"):
    embed.SparseEmbed(rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match="unknown features"):
    embed.plan(features, mesh, batch | {"d": batch["a"]})
  plan["a"].axis = "model"
  with pytest.raises(ValueError, match=r"no axis 'model'; its axes are \('data',\)"):
    embed.SparseEmbed(plan=plan, rngs=nnx.Rngs(0))


def test_an_abstract_mesh_is_enough():
  features = embed.FeatureConfig(embed.TableConfig(1000, 8, name="t"))
  ids = embed.Padded(np.zeros((64, 4), np.int32))
  mesh = jax.sharding.AbstractMesh((8,), ("data",))
  there = embed.plan(features, mesh, ids, embed.adagrad())
  here = embed.plan(features, make_mesh(), ids, embed.adagrad())
  assert there.hbm_bytes is None
  assert there.bytes_per_device == here.bytes_per_device
  assert there["t"].strategy == here["t"].strategy


# --- plan and run time ---------------------------------------------------------------------------

WHERE = {
  "mod": {"strategy": "mod", "axis": ("a", "b")},
  "div beside replicas": {"strategy": "div", "axis": "a"},
  "replicated": {"strategy": "replicated"},
}


@pytest.mark.parametrize("rows", [24, 4000])
@pytest.mark.parametrize("where", WHERE)
def test_a_plan_says_what_a_step_does(where, rows):
  """The capacity of the lookup's route, and the collectives of the update."""
  table = embed.TableConfig(rows, 16, name="t", optimizer=embed.adagrad())
  batch = embed.Padded(np.arange(13 * 3, dtype=np.int32).reshape(13, 3) % rows)
  plan = embed.plan(embed.FeatureConfig(table), make_mesh("auto", (2, 4), ("a", "b")), batch)
  plan["t"].strategy, plan["t"].axis = "mod", ()
  for field, value in WHERE[where].items():
    setattr(plan["t"], field, value)
  (cost,) = plan.costs()
  layer = nnx.eval_shape(lambda: embed.SparseEmbed(plan=plan, rngs=nnx.Rngs(0)))
  (stack,) = layer.spec.stacks.values()
  (x,) = inputs.read(layer.spec.features, batch)
  (bags,) = jax.eval_shape(lambda: inputs.to_bags([x], None, [x.parts])[0])
  arrays = {key: value.get_value() for key, value in layer.arrays["t"].items()}
  look_up = lambda rows, bags: exchange.look_up(stack, rows, [bags], ["t"])
  activations, record = jax.eval_shape(look_up, arrays["parameters"], bags)
  route = record.route
  assert cost.capacity == (None if route is None else route.capacity)
  assert (cost.exchange == "all_to_all") == (route is not None)
  grads = ActivationGrads(tuple(activations), record)
  step = lambda arrays, grads: update.step(stack, arrays, [grads], update.StepScalars.at(stack, 0))
  program = str(jax.make_jaxpr(step)(arrays, grads))
  gathered = re.findall(r"all_gather\[[^\]]*?axis_name=(\([^)]*\))", program)
  assert ("psum" in program) == (cost.exchange == "sum")
  if cost.exchange == "sum":  # over replicas no id or gradient is gathered
    assert str(stack.placement.replica_axes) not in gathered
  if cost.exchange == "gather":
    assert gathered
