"""The distinct rows of a batch, in both formulations, for ids that hash badly too."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from suites import slow_unless

import embed
from embed.engine import grads as grads_lib
from embed.engine import update
from embed.engine.bags import Bags
from embed.engine.grads import GradRows
from embed.engine.stack import Layout, StackSpec

WAYS = {"hash": grads_lib.distinct_by_hash, "sort": grads_lib.distinct_by_sort}
SIZE = 96  # one shape, one compilation


@functools.cache
def compiled(way, fill):
  return jax.jit(functools.partial(WAYS[way], fill=fill))


def check(way, ids, fill):
  found = compiled(way, fill)(jnp.asarray(ids, jnp.int32))
  place, distinct, number = (np.asarray(x) for x in found)
  wanted = np.unique(ids[ids != fill])
  assert number == len(wanted)
  np.testing.assert_array_equal(np.sort(distinct[:number]), wanted)
  assert (distinct[number:] == fill).all()
  used = ids != fill
  np.testing.assert_array_equal(distinct[place[used]], ids[used])
  assert (place[~used] == len(ids)).all()


@pytest.mark.parametrize("way", WAYS)
@given(st.lists(st.integers(0, 2**31 - 2), min_size=SIZE, max_size=SIZE))
def test_any_ids(way, ids):
  check(way, np.array(ids), 2**31 - 1)


@pytest.mark.parametrize("way", WAYS)
@given(st.lists(st.integers(0, 9), min_size=SIZE, max_size=SIZE))
def test_many_duplicates_and_padding(way, ids):
  check(way, np.array(ids), 9)


ADVERSARIAL = {
  "all equal": np.full(SIZE, 7),
  "all padding": np.full(SIZE, 2**31 - 1),
  "a range": np.arange(SIZE),
  "multiples of 2^20": np.arange(SIZE) << 20,
  "powers of two": 1 << (np.arange(SIZE) % 31),
  "the largest": 2**31 - 2 - np.arange(SIZE),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_ids(way, name):
  check(way, ADVERSARIAL[name], 2**31 - 1)


def test_ids_made_to_collide():
  """Ids that share their cell in the first round are told apart in the next ones."""
  n, bits = SIZE, (4 * SIZE - 1).bit_length()
  every = np.arange(1 << 18, dtype=np.uint32)
  cells = (every * np.uint32(0x9E3779B1)) >> np.uint32(32 - bits)
  same = every[cells == cells[5]][:n].astype(np.int32)
  assert len(same) == n
  check("hash", same, 2**31 - 1)


@pytest.mark.ci
@pytest.mark.parametrize("n", [1, 65, 5000])
def test_any_length(n):
  for way in WAYS:
    check(way, np.arange(n) % 7, 7)
    check(way, np.arange(n)[::-1] * 3, 2**31 - 1)


@pytest.mark.ci
def test_spans_and_chunks_cover_every_row(monkeypatch):
  """More distinct rows than fit a span, and chunks that do not divide it."""
  monkeypatch.setattr(update, "SPAN", 10)
  monkeypatch.setattr(grads_lib, "CACHED", 3 * 2)
  rng = np.random.default_rng(0)
  v, d = 200, 2
  ids = rng.permutation(v)[:90].reshape(30, 3).astype(np.int32)
  ids[5:9, 1] = v  # padding
  ids[:, 2] = ids[::-1, 0]  # duplicates
  grads = rng.normal(size=(30, d)).astype(np.float32)
  table = rng.normal(size=(v, d)).astype(np.float32)
  part = GradRows(jnp.asarray(grads), jnp.asarray(ids))
  row_step = lambda at, g, x: {"parameters": x["parameters"] - g, "n": x["n"] + 1}
  arrays = {"parameters": jnp.asarray(table), "n": jnp.zeros(v)}
  stepped = update.step_summed(arrays, jnp.asarray(ids.reshape(-1)), [part], row_step)
  new = np.asarray(stepped["parameters"])
  wanted, touched = table.copy(), np.zeros(v)
  for row, g in zip(ids, grads, strict=True):
    for i in row[row < v]:
      wanted[i] -= g
      touched[i] = 1
  np.testing.assert_allclose(new, wanted, atol=1e-5)
  np.testing.assert_array_equal(stepped["n"], touched)
  np.testing.assert_array_equal(new[touched == 0], table[touched == 0])


@pytest.mark.ci
def test_both_formulations_step_alike():
  """What runs on an accelerator, run here, is what runs on CPU."""
  rng = np.random.default_rng(1)
  v, d = 50, 4
  ids = jnp.asarray(rng.integers(0, v + 1, (20, 5)), jnp.int32)
  grads, gains = rng.normal(size=(20, d)), rng.normal(size=(20, 5))
  part = grads_lib.from_activations(
    jnp.asarray(grads, jnp.float32), Bags(ids, jnp.asarray(gains, jnp.float32))
  )
  stack = StackSpec("t", ("t",), Layout((v,)), d, np.dtype(np.float32), embed.adam(0.1))
  scalars = update.StepScalars.at(stack, 0)
  arrays = {
    "parameters": jnp.asarray(rng.normal(size=(v, d)), jnp.float32),
    "momenta": jnp.zeros((v, d)),
    "velocities": jnp.zeros((v, d)),
  }
  on_cpu = update.step_table(stack, scalars, arrays, [part])
  step = functools.partial(update.step_stored, stack, scalars)
  position, unique, _ = grads_lib.distinct_by_sort(grads_lib.flat_ids([part], v), v)
  sums = grads_lib.add_in_chunks(jnp.zeros((100, d)), grads_lib.with_ids([part], position))
  at_once = update.step_in_chunks(stack, step, arrays, unique, sums)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), on_cpu, at_once)


def in_chunks_of(size, monkeypatch):
  monkeypatch.setattr(grads_lib, "CHUNK", 0)
  monkeypatch.setattr(grads_lib, "_SMALLEST", size)


@pytest.mark.parametrize("count", [63, 64, 65, 200])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_that_are_added_in_chunks_are_added_once(count, weighted, monkeypatch):
  rng, v, d = np.random.default_rng(0), 30, 4
  numbers = lambda *shape: rng.integers(-8, 9, shape).astype(np.float32)  # sums are exact
  gains = numbers(count, 3) if weighted else None
  part = GradRows(numbers(count, d), rng.integers(-1, v + 2, (count, 3)).astype(np.int32), gains)
  part = part._replace(ids=np.where(part.ids < 0, v, part.ids))
  to = numbers(v, d)
  at_once = grads_lib.add_in_chunks(jnp.asarray(to), [part, part])
  in_chunks_of(64, monkeypatch)
  np.testing.assert_array_equal(grads_lib.add_in_chunks(jnp.asarray(to), [part, part]), at_once)
  expected = to.copy()
  each = np.repeat(part.grads, 3, axis=0) * (1 if gains is None else gains.reshape(-1, 1))
  kept = part.ids.reshape(-1) < v
  np.add.at(expected, part.ids.reshape(-1)[kept], 2 * each[kept])
  np.testing.assert_array_equal(at_once, expected)


@pytest.mark.parametrize("count", [63, 64, 65, 200])
def test_rows_that_are_stepped_in_chunks_step_once(count, monkeypatch):
  """Also those of the last chunk, which begins within the one before it."""
  rng, v, d = np.random.default_rng(0), 300, 4
  stack = StackSpec("t", ("t",), Layout((v,)), d, np.dtype(np.float32), embed.adagrad(0.5))
  of_rows = functools.partial(update.step_stored, stack, update.StepScalars.at(stack, 0))
  arrays = {
    "parameters": rng.normal(size=(v, d)).astype(np.float32),
    "accumulators": np.ones((v, d), np.float32),
  }
  ids = rng.permutation(v)[:count].astype(np.int32)
  ids[::5] = v
  grads = rng.normal(size=(count, d)).astype(np.float32)
  step = lambda: jax.jit(lambda *x: update.step_in_chunks(stack, of_rows, *x))(arrays, ids, grads)
  at_once = step()
  in_chunks_of(64, monkeypatch)
  # To a unit in the last place: XLA vectorizes loops of another length differently (JAX 0.12).
  once = functools.partial(np.testing.assert_array_max_ulp, maxulp=1)
  jax.tree.map(lambda a, b: once(np.asarray(a), np.asarray(b)), step(), at_once)
  assert (np.asarray(at_once["parameters"]) != arrays["parameters"]).any()


@pytest.mark.ci
@pytest.mark.parametrize(
  ("number", "error"),
  slow_unless([(100_000, 2e-4), (1_000_000, 1e-2)], lambda number, _: number < 1_000_000),
)
def test_what_many_occurrences_of_a_row_sum_to(number, error):
  """What is written at `embed.RowGrads` of sums in float32."""
  ids, grads = jnp.zeros((number, 1), jnp.int32), jnp.full((number, 1), 0.1)
  summed = grads_lib.sum_per_row([GradRows(grads, ids)], 2)
  assert summed.ids[0] == 0
  np.testing.assert_allclose(summed.values[0, 0], number * np.float32(0.1), rtol=error)
