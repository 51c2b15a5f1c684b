"""Serving's lookup: numbers by hand, the recorded cases, and where it equals training's."""

import functools

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import ways
from cases import each, refused
from conformance import LOOKUPS, has_sequence_by_shape, lookup_config, lookup_inputs
from flax import nnx

import embed

pytestmark = [
  pytest.mark.usefixtures("strict"),
  pytest.mark.filterwarnings("ignore:.*max_sequence_length"),
]

ROWS = np.array([[1.0], [10.0], [100.0], [1000.0]], np.float32)


def serve(inputs, weights=None, combiner="sum", **feature):
  """One feature of a table whose row i is 10 ** i."""
  table = embed.TableConfig(4, 1, combiner=combiner, name="t")
  config = embed.FeatureConfig(table, name="clicks", **feature)
  lookup = jax.jit(lambda: embed.serving_lookup(inputs, weights, {"t": ROWS}, config))
  return np.asarray(lookup())


def sparse(rows, shape=None, dtype=np.int32):
  """Lists of one bag each, None being a gap."""
  cells = [(b, c, v) for b, row in enumerate(rows) for c, v in enumerate(row) if v is not None]
  shape = shape or (len(rows), max(map(len, rows)))
  indices = np.array([cell[:2] for cell in cells], np.int32).reshape(-1, 2)
  return embed.Sparse(indices, np.array([cell[2] for cell in cells], dtype), shape)


def ragged(rows, dtype=np.int32):
  values = np.array([v for row in rows for v in row], dtype)
  return embed.Ragged(values, np.cumsum([0] + [len(row) for row in rows]).astype(np.int32))


floats = functools.partial(sparse, dtype=np.float32)
ragged_floats = functools.partial(ragged, dtype=np.float32)


# ------------------------------------------------------------------------------ by hand


def test_validation_leaves_out_weights_that_are_not_positive():
  bags, weights = sparse([[0, 1], [2, 3]]), floats([[4.0, -4.0], [0.0, -1.0]])
  for combiner in ("mean", "sqrtn"):
    assert serve(bags, weights, combiner).tolist() == [[1], [0]]


def test_other_inputs_keep_all_weights():
  """(-1 * 1 + 3 * 10) / (-1 + 3), and the sum as it is."""
  bags, weights = [[0, 1]], [[-1.0, 3.0]]
  assert serve(sparse(bags), floats(weights)).tolist() == [[29]]
  keep = {"combiner": "mean", "validate_weights_and_indices": False}
  assert serve(sparse(bags), floats(weights), **keep).tolist() == [[14.5]]
  assert serve(ragged(bags), ragged_floats(weights), "mean").tolist() == [[14.5]]
  padded = embed.Padded(bags), embed.Padded(weights)
  assert serve(*padded, "mean").tolist() == [[14.5]]


def test_higher_ranks_are_always_pruned():
  indices = [[0, 0, 0], [0, 0, 1], [0, 1, 0]]
  bags = embed.Sparse(indices, [0, 1, 2], (1, 3, 2))
  weights = embed.Sparse(indices, [2.0, -1.0, -1.0], (1, 3, 2))
  for validate in (True, False):
    act = serve(bags, weights, "mean", validate_weights_and_indices=validate)
    assert act.tolist() == [[[1], [0], [0]]]


def test_output_shape_of_a_ragged_input():
  bags, weights = ragged([[0, 1], [], [2], [3]]), ragged_floats([[2.0, 1.0], [], [1.0], [1.0]])
  at = lambda shape, *w: serve(bags, *w, combiner="mean", output_shape=shape)[..., 0].tolist()
  assert at([4], weights) == [4, 0, 100, 1000]
  assert at([2, 2], weights) == [[4, 0], [100, 1000]]
  assert at([4, 1], weights) == [[4], [0], [100], [1000]]
  assert at([None], weights) == [4, 0, 100, 1000]
  for shape in ([3], [6], [4, 2]):
    with pytest.raises(ValueError, match=r"'clicks'.*inconsistent shape"):
      at(shape)


def test_output_shape_matters_to_ragged_inputs_alone():
  """So that a model trained with a fixed batch is served with any."""
  fixed = functools.partial(serve, output_shape=[8])
  assert fixed(sparse([[0, 1]])).tolist() == [[11]]
  assert fixed(np.array([[2]])).tolist() == [[[100]]]
  with pytest.raises(ValueError, match="inconsistent shape"):
    fixed(embed.Padded([[0, 1]]))  # as in training


@pytest.mark.ci
def test_tables_on_a_mesh():
  """They are brought to one device."""
  table = embed.TableConfig(16, 2, name="t")
  config = {"f": embed.FeatureConfig(table)}
  batch = {"f": np.array([[1], [3]])}
  mesh = jax.make_mesh((8,), ("data",))
  layer = embed.SparseEmbed(config, rngs=nnx.Rngs(0), mesh=mesh)
  found = embed.serving_lookup(batch, None, layer.tables, config)["f"]
  np.testing.assert_array_equal(found[:, 0], np.asarray(layer.tables["t"])[[1, 3]])
  look_up = jax.jit(lambda t: embed.serving_lookup(batch, None, t, config)["f"])
  np.testing.assert_array_equal(look_up(layer.tables), found)  # as on Auto axes


def test_tables_by_name_or_by_config():
  """Two tables of equal fields are two tables; unnamed ones are table_0, table_1."""
  a, b = embed.TableConfig(4, 1, combiner="sum"), embed.TableConfig(4, 1, combiner="sum")
  config = {"x": embed.FeatureConfig(a), "y": [embed.FeatureConfig(b), embed.FeatureConfig(a)]}
  inputs = {"x": [1], "y": [[1], [0]]}
  wanted = {"x": [[10]], "y": [[[20]], [[1]]]}
  both = ({"table_0": ROWS, "table_1": 2 * ROWS}, {a: ROWS, b: jnp.asarray(2 * ROWS)})
  for tables in both:
    act = embed.serving_lookup(inputs, None, tables, config)
    assert jax.tree.map(lambda x: x.tolist(), act, is_leaf=lambda x: hasattr(x, "ndim")) == wanted
  assert list(embed.serving_lookup({"y": [[2], [2]]}, None, both[0], config)) == ["y"]


def test_a_bfloat16_table():
  table = embed.TableConfig(4, 1, name="t", dtype=jnp.bfloat16)
  rows = ROWS.astype(jnp.bfloat16)
  bags, weights = embed.Padded([[0, 0, 0]]), embed.Padded([[256.0, 1.0, 1.0]])
  feature = embed.FeatureConfig(table)
  act = jax.jit(lambda: embed.serving_lookup(bags, weights, {"t": rows}, feature))()
  assert act.dtype == jnp.float32
  assert act.tolist() == [[1]]  # 258 / 258: in bfloat16 256 + 1 would be 256


# ------------------------------------------------------------------------------- errors


def test_ids_out_of_range_raise_eagerly_and_are_dropped_under_jit():
  bags = [np.array([2**33]), embed.Padded([[2**33]]), ragged([[2**33]], np.int64), [4]]
  feature = embed.FeatureConfig(embed.TableConfig(4, 1, name="t"), name="clicks")
  lookup = lambda x: embed.serving_lookup(x, None, {"t": ROWS}, feature)
  refused([(x, r"'clicks': id (8589934592|4) at") for x in bags], lookup)
  with pytest.raises(ValueError, match="'clicks': id"):
    serve([4])  # ids are constants of a program: still to be seen
  assert jax.jit(lookup)(np.array([4, 1])).tolist() == [[0], [10]]


def test_tables_that_do_not_fit_are_named():
  feature = embed.FeatureConfig(embed.TableConfig(4, 1, name="t"))
  tables = [
    ({"u": ROWS}, r"no table 't' in `tables`, which has \['u'\]"),
    ({"t": ROWS[:3]}, r"'t' must be floats \(4, 1\).*Got float32 \(3, 1\)"),
    ({"t": ROWS.astype(np.int32)}, r"'t' must be floats.*Got int32"),
  ]
  refused(tables, lambda tables: embed.serving_lookup([1], None, tables, feature))


# ---------------------------------------------------------------------- the recorded cases


def expected(case, name):
  """What TensorFlow serves, but for two choices of ours.

  A negative id is padding everywhere (TensorFlow's gather refuses it where it was not pruned), and
  trailing empty bags are zeros (TensorFlow's unsafe lookup leaves them out).
  """
  wanted, train = case["expected"][name]["serve"], conformance.expected(case, name)
  if isinstance(wanted, dict):
    return train if wanted["error"] == "InvalidArgumentError" else wanted
  if case["id"].startswith("novalidate") and len(wanted) < len(train):
    return np.pad(wanted, ((0, len(train) - len(wanted)), (0, 0)))
  return wanted


def is_error(name):
  case = LOOKUPS[name]
  is_raised = lambda f: isinstance(expected(case, f), dict) or has_sequence_by_shape(case, f)
  return any(map(is_raised, case["features"]))


def served(names, transform=lambda lookup: lookup):
  """Cases as features of one lookup, each under its own prefix."""
  features, tables, inputs, weights = {}, {}, {}, {}
  for name in names:
    config, rows = lookup_config(LOOKUPS[name], f"{name}:")
    x, w = lookup_inputs(LOOKUPS[name], f"{name}:")
    features, tables, inputs, weights = features | config, tables | rows, inputs | x, weights | w
  lookup = functools.partial(embed.serving_lookup, feature_config=features)
  return transform(lookup)(inputs, weights, tables)


@pytest.mark.parametrize("group", ["rules", pytest.param("grid", marks=pytest.mark.ci)])
def test_recorded(group):
  """Combiners of every kind of input are the grid; the rest are rules of serving's own."""
  is_grid = group == "grid"
  names = [name for name in LOOKUPS if name.startswith("grid/") == is_grid and not is_error(name)]
  assert len(names) > 50
  activations = jax.tree.map(np.asarray, served(names, jax.jit))

  def check(name):
    for feature in LOOKUPS[name]["features"]:
      wanted, found = expected(LOOKUPS[name], feature), activations[f"{name}:{feature}"]
      assert found.shape == wanted.shape
      np.testing.assert_allclose(found, wanted, **LOOKUPS[name]["tol"])

  each({name: (name,) for name in names}, check)


def test_recorded_errors():
  wrong = filter(is_error, LOOKUPS)
  says = "weights of a sequence feature|inconsistent shape"
  cases = [(name, f"'{name}:f': ({says})") for name in wrong]
  refused(cases, lambda name: served([name]))


# ------------------------------------------------------------------------- beside training


@pytest.mark.programs(20, "a whole layer, beside the lookups of this file")
@pytest.mark.parametrize("way", ["rows", *ways.ci("lines")], indirect=True)
def test_equals_training_bit_for_bit(way):
  """Where no rule of serving's own applies; where rows are stored otherwise, but for rounding."""
  draw = np.random.default_rng(0)
  rows = draw.normal(size=(6, 2)).astype(np.float32)
  initializer = lambda key, shape, dtype: rows.astype(dtype)
  tables, features = {}, {}
  for kind, combiner in (("padded", "sum"), ("ragged", "mean"), ("sparse", "sqrtn")):
    tables[kind] = table = embed.TableConfig(6, 2, initializer, embed.sgd(), combiner, kind)
    features[kind] = embed.FeatureConfig(table)
    features[f"sequence of {kind}"] = embed.FeatureConfig(table, max_sequence_length=2)
  layer = embed.SparseEmbed(features, rngs=nnx.Rngs(0))
  look_up = nnx.jit(lambda layer, x, w: layer(x, w))
  serve = jax.jit(lambda x, w, t: embed.serving_lookup(x, w, t, features))
  for _ in range(2):
    inputs, weights = {}, {}
    for name in features:
      values = draw.integers(-1, 6, (3, 3)).astype(np.int32)
      w = None if name.startswith("sequence") else draw.integers(1, 9, (3, 3)) / np.float32(4)
      inputs[name], weights[name] = reference.as_kind(name.split()[-1], values, w)
    served = serve(inputs, weights, dict.fromkeys(tables, rows))
    trained = look_up(layer, inputs, weights)
    for name, act in trained.items():
      tolerance = 0 if way == "rows" else 1e-6
      np.testing.assert_allclose(served[name], act, tolerance, tolerance, err_msg=name)
