"""Compiled kernels against XLA's own operations: lookups and updates of every kind of input."""

import functools
import itertools
import zlib

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import assert_in_place, compile_step, stored
from flax import nnx
from hypothesis import HealthCheck, given, settings
from optimizer_cases import EXTRA, LAZY, OPTIMIZERS, TOLERANCE, optimizer_id
from suites import full_unless

import embed
from embed.engine import exchange, lookup, update
from embed.engine.bags import Bags
from embed.engine.grads import GradRows
from embed.engine.stack import Layout, StackSpec
from embed.kernels import cpu as cpu_kernels

pytestmark = pytest.mark.usefixtures("kernels")
SAME_KERNELS = settings(suppress_health_check=[*HealthCheck], max_examples=8)


def text_of(function, *args):
  return jax.jit(function).lower(*args).as_text()


# --- lookups --------------------------------------------------------------------------------------


def random_bags(rng, size, bags, length, gains, ragged):
  """Ids with duplicates and padding, also far outside of the table."""
  shape = (bags * length,) if ragged else (bags, length)
  ids = rng.choice([-(2**31), -1, size, 2**31 - 1, *range(size)], shape).astype(np.int32)
  if ragged:
    segments = jnp.asarray(rng.integers(0, bags + 1, shape), jnp.int32)
    gains = jnp.asarray(rng.normal(size=shape), jnp.float32) if gains else None
    return Bags(jnp.asarray(ids), gains, segments, (bags,))
  of = {"none": None, "bag": (bags, 1), "id": shape}[gains]
  return Bags(
    jnp.asarray(ids), None if of is None else jnp.asarray(rng.normal(size=of), jnp.float32)
  )


def check_lookup(rng, size, dim, bags, atol=1e-5):
  table = jnp.asarray(rng.normal(size=(size, dim)), jnp.float32)
  expected = lookup.gather_and_combine(table, bags)
  act = jax.jit(cpu_kernels.gather_and_combine)(table, bags)
  np.testing.assert_allclose(act, expected, rtol=1e-5, atol=atol)


@pytest.mark.weekly
@SAME_KERNELS
@given(
  st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 70), st.integers(1, 30),
  st.integers(1, 20), st.sampled_from(["none", "bag", "id"]),
)  # fmt: skip
def test_bags_of_any_shape(kernels, seed, size, dim, bags, length, gains):
  rng = np.random.default_rng(seed)
  check_lookup(rng, size, dim, random_bags(rng, size, bags, length, gains, ragged=False))


@pytest.mark.weekly
@SAME_KERNELS
@given(
  st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 70), st.integers(1, 30),
  st.integers(1, 20), st.booleans(),
)  # fmt: skip
def test_ragged_bags_in_any_order(kernels, seed, size, dim, bags, length, gains):
  rng = np.random.default_rng(seed)
  check_lookup(rng, size, dim, random_bags(rng, size, bags, length, gains, ragged=True))


@pytest.mark.parametrize("gains", ["none", "bag", "id"])
def test_bags_by_kernel(gains):
  rng = np.random.default_rng(0)
  check_lookup(rng, 40, 19, random_bags(rng, 40, 23, 6, gains, ragged=False))


@pytest.mark.parametrize("ragged", [False, True])
def test_lookups_on_several_threads(ragged):
  rng = np.random.default_rng(0)
  bags = random_bags(rng, 500, 3000, 7, "id", ragged)
  check_lookup(rng, 500, 64, bags)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("dim", [1, 21, 64])
def test_rows_of_bfloat16(dim, ragged):
  """Summed in float32, and rounded once."""
  rng = np.random.default_rng(0)
  table = jnp.asarray(rng.normal(size=(500, dim)), jnp.bfloat16)
  bags = random_bags(rng, 500, 3000, 7, "id", ragged)
  look_up = lambda f, dtype: jax.jit(functools.partial(f, dtype=dtype))(table, bags)
  act = look_up(cpu_kernels.gather_and_combine, jnp.float32)
  expected = look_up(lookup.gather_and_combine, jnp.float32)
  np.testing.assert_allclose(act, expected, rtol=1e-5, atol=2e-5)
  for dtype in (None, jnp.bfloat16):
    rounded = look_up(cpu_kernels.gather_and_combine, dtype)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded, act.astype(jnp.bfloat16))


@pytest.mark.parametrize("gains", [False, True])
def test_ragged_bags_of_every_length_in_order(gains):
  """As ragged inputs come: runs of a bag, short ones and longer than what a kernel reads ahead."""
  rng = np.random.default_rng(0)
  lengths = [0, 1, 2, 31, 32, 33, 5000, 0, 64, 65, 4096, 7] + [3] * 600 + [0, 9000, 0]
  segments = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
  ids = rng.integers(-1, 501, segments.shape).astype(np.int32)
  gains = jnp.asarray(rng.normal(size=ids.shape), jnp.float32) if gains else None
  bags = Bags(jnp.asarray(ids), gains, jnp.asarray(segments), (len(lengths),))
  check_lookup(rng, 500, 72, bags, atol=1e-3)  # 9,000 terms, added up in another order


def test_activations_of_several_large_pages():
  rng = np.random.default_rng(0)
  check_lookup(rng, 500, 64, random_bags(rng, 500, 40_000, 2, "none", ragged=False))


@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (2, 5, 4)])
def test_ids_beyond_a_table_are_counted(shape):
  ids = np.random.default_rng(0).choice([-(2**31), -1, 0, 9, 10, 2**31 - 1], shape).astype(np.int32)
  count = jax.jit(cpu_kernels.count_beyond, static_argnums=1)
  assert "count_beyond" in count.lower(ids, 10).as_text()
  assert int(count(ids, 10)) == np.sum(ids >= 10)


def test_a_lookup_takes_the_kernel_only_where_it_is_covered():
  table, bags = jnp.ones((4, 2)), Bags(jnp.zeros((3, 2), jnp.int32))
  act = lambda table, **settings: text_of(
    functools.partial(cpu_kernels.gather_and_combine, **settings), table, bags
  )
  assert "sparse_embed_bag_sum" in act(table)
  assert "sparse_embed_bag_sum" in act(table.astype(jnp.bfloat16))
  assert "sparse_embed_bag_sum" in act(table, dtype=jnp.bfloat16)
  assert "sparse_embed" not in act(table, quantization=embed.QuantizationConfig(3, 0.0, 1.0))


# --- updates --------------------------------------------------------------------------------------


def make_arrays(rng, optimizer, size, dim):
  value = lambda *shape: jnp.asarray(rng.uniform(0.1, 1, shape), jnp.float32)
  slots = {
    name: value(*((size,) if slot.per_row else (size, dim))).astype(slot.dtype)
    for name, slot in optimizer.slots(dim).items()
  }
  return {"parameters": value(size, dim), **slots}


def make_parts(rng, size, dim, shapes):
  parts = []
  for bags, length, has_gains in shapes:
    ids = rng.choice([-(2**31), -1, size, 2**31 - 1, *range(size)], (bags, length))
    gains = jnp.asarray(rng.normal(size=(bags, length)), jnp.float32) if has_gains else None
    grads = jnp.asarray(rng.normal(size=(bags, dim)) / 30, jnp.float32)
    parts.append(GradRows(grads, jnp.asarray(ids, jnp.int32), gains))
  return parts


def check_step(monkeypatch, optimizer, size, dim, shapes, seed=0, **tolerance):
  """One step of a stack by kernel and by XLA; returns the kernel's program."""
  rng = np.random.default_rng(seed)
  arrays, parts = make_arrays(rng, optimizer, size, dim), make_parts(rng, size, dim, shapes)
  stack = StackSpec("t", ("t",), Layout((size,)), dim, np.dtype(np.float32), optimizer)
  scalars = update.StepScalars(jnp.float32(0.1), None, None)

  def run(switch):
    monkeypatch.setenv(cpu_kernels.SWITCH, switch)
    step = lambda arrays, parts: update.step_table(stack, scalars, arrays, parts)
    lowered = jax.jit(step).lower(arrays, parts)
    return lowered.compile()(arrays, parts), lowered.as_text()

  new, text = run("1")
  expected, without = run("0")
  assert "sparse_embed" not in without
  tolerance = {"rtol": 1e-4, "atol": 1e-5} | tolerance
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), new, expected)
  touched = {i for part in parts for i in np.asarray(part.ids).flat if 0 <= i < size}
  untouched = sorted(set(range(size)) - touched)
  for old, current in zip(jax.tree.leaves(arrays), jax.tree.leaves(new), strict=True):
    np.testing.assert_array_equal(np.asarray(old)[untouched], np.asarray(current)[untouched])
  return text


ACCUMULATING = [i for i in LAZY if OPTIMIZERS[i][1].get("use_gradient_accumulation", True)]
DIMS = (1, 5, 16)
SHAPES = [(20, 5, True), (7, 1, False), (40, 9, False)]


@pytest.mark.weekly
@pytest.mark.parametrize(
  ("index", "dim"),
  list(itertools.product(ACCUMULATING, DIMS)),
  ids=[f"{optimizer_id(i)}-{dim}" for i, dim in itertools.product(ACCUMULATING, DIMS)],
)
def test_every_optimizer_has_a_kernel(monkeypatch, index, dim):
  name, config = OPTIMIZERS[index]
  optimizer = getattr(embed, name)(**config)
  text = check_step(monkeypatch, optimizer, 70, dim, SHAPES, **TOLERANCE.get(name, {}))
  assert "sparse_embed_row_equation" in text


@pytest.mark.parametrize("name", ["from_optax", "custom_optimizer"])
def test_equations_of_users_have_a_kernel(monkeypatch, name):
  assert "sparse_embed_row_equation" in check_step(monkeypatch, EXTRA[name](), 30, 12, SHAPES)


@pytest.mark.weekly
@SAME_KERNELS
@given(
  st.integers(0, 2**32 - 1), st.integers(1, 300), st.integers(1, 70),
  st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12), st.booleans()), min_size=1),
)  # fmt: skip
def test_gradients_of_any_shape(kernels, seed, size, dim, shapes):
  with pytest.MonkeyPatch.context() as patch:
    check_step(patch, embed.rowwise_adagrad(), size, dim, shapes, seed, atol=2e-5)


@pytest.mark.parametrize("size", [3, 100_000])
def test_updates_on_several_threads(monkeypatch, size):
  """Few rows, each of which all threads have gradients for, and many."""
  check_step(monkeypatch, embed.adagrad(), size, 24, [(4000, 6, True), (900, 1, False)], atol=1e-3)


@pytest.mark.parametrize("is_random", [False, True], ids=["nearest", "random"])
@pytest.mark.parametrize("sizes", [(70,), (20, 7, 43)], ids=["a table", "tables"])
@pytest.mark.parametrize("dim", full_unless([1, 5, 24], lambda dim: dim == 5))
def test_rows_of_bfloat16_are_rounded_alike(monkeypatch, dim, sizes, is_random):
  """To the bit, for numbers that any order of additions has the same sum of."""
  rng, size = np.random.default_rng(0), sum(sizes)
  count = {"count": embed.Slot(0, per_row=True, dtype=np.int32)}
  equation = lambda g, w, s, lr: (w - lr * g, {"count": s["count"] + 1})
  optimizer = embed.custom_optimizer(equation, count)
  names = tuple(f"t{i}" for i in range(len(sizes)))
  stack = StackSpec(
    "t", names, Layout(sizes), dim, np.dtype(jnp.bfloat16), optimizer,
    stochastic_rounding=is_random,
  )  # fmt: skip
  w = rng.normal(size=(size, dim)).astype(np.float32)
  w.flat[:6] = [np.inf, -np.inf, np.nan, 3.38e38, 0.0, -1e-30]
  arrays = {"parameters": jnp.asarray(w, jnp.bfloat16), "count": jnp.zeros(size, jnp.int32)}
  exact = lambda x: jnp.round(x * 4096) / 4096
  parts = [
    part._replace(grads=exact(part.grads), gains=None if part.gains is None else exact(part.gains))
    for part in make_parts(rng, size, dim, [(200, 5, False), (7, 1, False)])
  ]
  scalars = update.StepScalars(jnp.float32(0.125), None, jnp.int32(3) if is_random else None)

  def run(switch):
    monkeypatch.setenv(cpu_kernels.SWITCH, switch)
    step = jax.jit(lambda arrays: update.step_table(stack, scalars, arrays, parts))
    return step(arrays), step.lower(arrays).as_text()

  (new, text), (expected, without) = run("1"), run("0")
  assert ("sparse_embed_row_equation" in text, "sparse_embed" in without) == (True, False)
  same = lambda x, y: np.testing.assert_array_equal(x.astype(jnp.float32), y.astype(jnp.float32))
  jax.tree.map(same, new, expected)
  assert not np.array_equal(new["parameters"], arrays["parameters"])


@pytest.mark.parametrize("contiguous", [False, True], ids=["mod", "div"])
def test_rules_of_rounding_are_those_of_its_definition(monkeypatch, contiguous):
  """For all rows and columns of all shards."""
  layout, step = Layout((20, 7, 43, 2), shards=3, contiguous=contiguous), jnp.int32(5)
  stack = StackSpec(
    "t", tuple("abcd"), layout, 6, np.dtype(jnp.bfloat16), embed.sgd(), stochastic_rounding=True
  )
  local = jnp.arange(layout.shard_rows, dtype=jnp.int32)
  scalars, noise = update.StepScalars(jnp.float32(1), None, step), []
  monkeypatch.setattr(update, "to_bfloat16", lambda new, bits: noise.append(bits))
  for shard in range(3):
    monkeypatch.setattr(update.mesh, "device_index", lambda axes, s=shard: jnp.int32(s))
    update._round_rows(update.rounding_rules(stack, scalars), jnp.zeros((len(local), 6)), local)
    for i, (name, size) in enumerate(zip(stack.tables, layout.sizes, strict=True)):
      ids = layout.ids(i, shard, local)
      keys = ids.astype(jnp.uint32) ^ update.rounding_key(zlib.crc32(name.encode()), step, 0)
      bits = update.rounding_noise(keys, jnp.arange(6))
      np.testing.assert_array_equal(bits[ids < size], noise[-1][ids < size])


def test_a_sum_does_not_depend_on_the_threads():
  """Gradients of a row are added in the order of the batch: to the bit."""
  rng = np.random.default_rng(0)
  optimizer = embed.adagrad()
  stack = StackSpec("t", ("t",), Layout((50,)), 8, np.dtype(np.float32), optimizer)
  scalars = update.StepScalars(jnp.float32(0.1), None, None)
  step = jax.jit(lambda arrays, parts: update.step_table(stack, scalars, arrays, parts))
  arrays, parts = make_arrays(rng, optimizer, 50, 8), make_parts(rng, 50, 8, [(3000, 5, True)])
  first = step(arrays, parts)
  for _ in range(20):
    jax.tree.map(np.testing.assert_array_equal, step(arrays, parts), first)


BOOLS = {"seen": embed.Slot(0, per_row=True, dtype=bool)}


@pytest.mark.parametrize(
  ("optimizer", "dtype"),
  [
    (embed.adagrad(use_gradient_accumulation=False), jnp.float32),
    (embed.adam(lazy_adam=False), jnp.float32),
    (embed.adagrad(), jnp.float16),
    (embed.custom_optimizer(lambda g, w, s, lr: (w - lr * jnp.tanh(g), s)), jnp.float32),
    (embed.custom_optimizer(lambda g, w, s, lr: (w - lr * jnp.sort(g), s)), jnp.float32),
    (embed.custom_optimizer(lambda g, w, s, lr: (w, s), BOOLS), jnp.float32),
    (embed.from_optax(optax.optimistic_gradient_descent(0.01)), jnp.float32),
    (embed.from_optax(optax.optimistic_adam_v2(0.01)), jnp.float32),
  ],
  ids=[
    "one by one",
    "not lazy",
    "float16",
    "tanh",
    "sort",
    "bool",
    "optimistic",
    "optimistic adam",
  ],
)
def test_what_has_no_kernel_runs_by_xla(optimizer, dtype):
  rng = np.random.default_rng(0)
  arrays, parts = make_arrays(rng, optimizer, 9, 4), make_parts(rng, 9, 4, SHAPES)
  arrays["parameters"] = arrays["parameters"].astype(dtype)
  stack = StackSpec("t", ("t",), Layout((9,)), 4, np.dtype(dtype), optimizer)
  scalars = update.StepScalars(jnp.float32(0.1), None, None)
  step = lambda arrays: update.step_table(stack, scalars, arrays, parts)
  assert "sparse_embed" not in text_of(step, arrays)


# --- whole steps ----------------------------------------------------------------------------------


def train(switch, monkeypatch, mesh=None):
  """Three steps of a model of all kinds of inputs: losses and variables."""
  monkeypatch.setenv(cpu_kernels.SWITCH, switch)
  jax.clear_caches()
  first = embed.TableConfig(1000, 16, optimizer=embed.adagrad(0.1), name="first")
  second = embed.TableConfig(300, 16, optimizer=embed.adagrad(0.1), name="second", combiner="sqrtn")
  features = {
    "bag": embed.FeatureConfig(first),
    "ragged": embed.FeatureConfig(second),
    "sequence": embed.FeatureConfig(first, max_sequence_length=4),
  }
  model = embed.SparseEmbed(features, rngs=nnx.Rngs(0), mesh=mesh)
  optimizer = embed.Optimizer(model, optax.sgd(0.1))

  @nnx.jit(donate_argnames=("model", "optimizer"), graph=False)
  def step(model, optimizer, batch, weights):
    loss_fn = lambda model: sum(jnp.sum(jnp.sin(x)) for x in model(batch, weights).values())
    loss, grads = embed.value_and_grad(loss_fn)(model)
    optimizer.update(model, embed.clip_by_global_norm(grads, 5.0))
    return loss

  rng, losses = np.random.default_rng(1), []
  for _ in range(3):
    splits = np.sort(np.r_[0, rng.integers(0, 100, 63), 100])
    batch = {
      "bag": embed.Padded(rng.integers(-1, 1000, (64, 8))),
      "ragged": embed.Ragged(rng.integers(0, 300, 100), splits),
      "sequence": embed.Padded(rng.integers(-1, 1000, (64, 6))),
    }
    weights = {"bag": embed.Padded(rng.uniform(1, 2, (64, 8)).astype(np.float32))}
    losses.append(
      float(step(model, optimizer, batch, weights | {"ragged": None, "sequence": None}))
    )
  return losses, jax.tree.map(np.asarray, dict(model.variables))


@pytest.mark.weekly
@pytest.mark.parametrize("devices", [1, 4])
def test_a_model_trains_alike(monkeypatch, devices):
  mesh = None if devices == 1 else jax.make_mesh((devices,), ("data",))
  by_kernels, by_xla = (train(switch, monkeypatch, mesh) for switch in "10")
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
  jax.tree.map(close, by_kernels, by_xla)


@pytest.mark.weekly
@pytest.mark.parametrize("rows", ["float32", "bfloat16", "bfloat16 at random"])
@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_no_cost_of_the_vocabulary(name, rows):
  """Tables and slots are stepped in place, and nothing is as large as a table."""
  size, dim, is_random = 300_000, 16, rows.endswith("at random")
  table = embed.TableConfig(
    size, dim, optimizer=getattr(embed, name)(), initializer=jax.nn.initializers.zeros, name="t",
    dtype=rows.split()[0], stochastic_rounding=is_random,
  )  # fmt: skip
  layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))

  def step(layer, ids):
    _, grads = embed.value_and_grad(lambda layer: jnp.sum(layer(embed.Padded(ids)) ** 2))(layer)
    embed.Optimizer(layer, optax.identity()).update(layer, grads)

  program = compile_step(step, [layer], np.zeros((64, 4), np.int32))
  # lookup, count of ids beyond, update
  assert program.as_text().count('custom_call_target="sparse_embed_') == 3
  assert_in_place(program, stored(layer), 16 * 64 * 5 * dim * 4 + 2**16)


# --- what JAX makes of a kernel -------------------------------------------------------------------


def test_a_kernel_is_differentiated_and_batched_as_what_it_means():
  rng = np.random.default_rng(0)
  table, ids = jnp.asarray(rng.normal(size=(5, 3)), jnp.float32), jnp.array([[0, 4], [4, 5]])
  loss = lambda f: lambda table: jnp.sum(jnp.sin(f(table, Bags(ids))))
  slope = jax.grad(loss(cpu_kernels.gather_and_combine))(table)
  expected = jax.grad(loss(lookup.gather_and_combine))(table)
  np.testing.assert_allclose(slope, expected, rtol=1e-6)
  tables = jnp.stack([table, 2 * table])
  batched = jax.jit(jax.vmap(lambda t: cpu_kernels.gather_and_combine(t, Bags(ids))))(tables)
  np.testing.assert_allclose(batched[1], 2 * batched[0], rtol=1e-6)


def test_exported_programs_have_no_kernel():
  table = embed.TableConfig(9, 3, name="t")
  layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  ids = embed.Padded(np.array([[1, 2], [3, -1]]))
  act = layer(ids)
  for any_batch in (False, True):
    exported = embed.export(lambda layer, ids: layer(ids), layer, ids, any_batch=any_batch)
    assert "sparse_embed_bag_sum" not in exported.program.mlir_module()
    np.testing.assert_allclose(exported.program.call(exported.arrays, ids.values), act, rtol=1e-6)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_other_platforms_have_no_kernel(platform):
  traced = jax.jit(cpu_kernels.gather_and_combine).trace(
    jnp.ones((4, 2)), Bags(jnp.zeros((3, 2), jnp.int32))
  )
  assert "sparse_embed" not in traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.weekly
def test_many_lookups_at_once():
  """Calls on as many threads as there are devices, of which none may wait for another to begin."""
  mesh = jax.make_mesh((8,), ("data",))
  table = embed.TableConfig(5000, 32, name="t", combiner="sum")
  layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0), mesh=mesh)
  rows = np.asarray(layer.tables["t"])
  ids = np.random.default_rng(0).integers(0, 5000, (8192, 8))
  expected = rows[ids].sum(1)
  for _ in range(5):
    np.testing.assert_allclose(layer(embed.Padded(ids)), expected, rtol=1e-4, atol=1e-5)


def test_a_lookup_of_a_step_is_in_the_exchange():
  """The kernel is where `exchange` looks up, and nowhere else."""
  stack = StackSpec("t", ("t",), Layout((9,)), 4, np.dtype(np.float32), embed.sgd())
  look_up = lambda table, bags: exchange.look_up(stack, table, [bags], ("t",))[0]
  text = text_of(look_up, jnp.ones((9, 4)), Bags(jnp.zeros((3, 2), jnp.int32)))
  assert text.count("sparse_embed_bag_sum") >= 1
