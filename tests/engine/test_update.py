"""The distinct rows of a batch and their sums, in both formulations, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import embed
from embed.engine import grads as grads_lib
from embed.engine import update
from embed.engine.grads import DistinctRows, GradRows
from embed.engine.stack import Layout, StackSpec

# --- distinct ids ---------------------------------------------------------------------------------

WAYS = {"hash": grads_lib.distinct_by_hash, "sort": grads_lib.distinct_by_sort}
SIZE = 96  # one shape, one compilation
LARGEST = 2**31 - 1


def ids_made_to_collide():
  """Ids that share their cell in the first round of hashing."""
  bits = (4 * SIZE - 1).bit_length()
  every = np.arange(1 << 18, dtype=np.uint32)
  cells = (every * np.uint32(0x9E3779B1)) >> np.uint32(32 - bits)
  same = every[cells == cells[5]][:SIZE].astype(np.int32)
  assert len(same) == SIZE
  return same


ADVERSARIAL = {
  "all equal": np.full(SIZE, 7),
  "all padding": np.full(SIZE, LARGEST),
  "a range": np.arange(SIZE),
  "multiples of 2^20": np.arange(SIZE) << 20,
  "powers of two": 1 << (np.arange(SIZE) % 31),
  "the largest": LARGEST - 1 - np.arange(SIZE),
  "made to collide": ids_made_to_collide(),
}


@pytest.mark.parametrize("way", WAYS)
def test_distinct_ids(way):
  distinct = jax.jit(WAYS[way], static_argnums=1)

  def check(name, ids, fill):
    place, rows, number = map(np.asarray, distinct(ids.astype(np.int32), fill))
    wanted, used = np.unique(ids[ids != fill]), ids != fill
    assert number == len(wanted), name
    np.testing.assert_array_equal(np.sort(rows[:number]), wanted, name)
    assert (rows[number:] == fill).all(), name
    np.testing.assert_array_equal(rows[place[used]], ids[used], name)
    assert (place[~used] == len(ids)).all(), name

  draw = np.random.default_rng(0)
  for trial in range(20):
    check(f"drawn {trial}", draw.integers(0, LARGEST, SIZE), LARGEST)
    check(f"many duplicates {trial}", draw.integers(0, 10, SIZE), 9)
  for name, ids in ADVERSARIAL.items():
    check(name, ids, LARGEST)
  for length in (1, 65):
    check(f"of length {length}", np.arange(length)[::-1] * 3, LARGEST)


# --- sums and steps, in chunks --------------------------------------------------------------------


def test_spans_and_chunks_cover_every_row(monkeypatch):
  """More distinct rows than fit a span, and chunks that do not divide it."""
  monkeypatch.setattr(update, "SPAN", 10)
  monkeypatch.setattr(grads_lib, "CACHED", 4 * 2)  # rows of a chunk, numbers of a row
  rng = np.random.default_rng(0)
  v, d = 200, 2
  grads = rng.normal(size=(30, d)).astype(np.float32)
  table = rng.normal(size=(v, d)).astype(np.float32)
  row_step = lambda at, g, x: {"parameters": x["parameters"] - g, "n": x["n"] + 1}
  step = jax.jit(
    lambda arrays, part: update.step_summed(arrays, part.ids.reshape(-1), [part], row_step)
  )
  distinct = rng.permutation(np.arange(1, v))[:90].reshape(30, 3).astype(np.int32)
  some = distinct.copy()
  some[5:9, 1] = v  # padding
  some[:, 2] = some[::-1, 0]  # duplicates
  for ids in (some, distinct):
    stepped = step({"parameters": table, "n": np.zeros(v, np.float32)}, GradRows(grads, ids))
    new = np.asarray(stepped["parameters"])
    wanted, touched = table.copy(), np.zeros(v)
    for row, g in zip(ids, grads, strict=True):
      for i in row[row < v]:
        wanted[i] -= g
        touched[i] = 1
    np.testing.assert_allclose(new, wanted, atol=1e-5)
    np.testing.assert_array_equal(stepped["n"], touched)
    np.testing.assert_array_equal(new[touched == 0], table[touched == 0])


def test_both_formulations_step_alike():
  """What runs on an accelerator, run here, and what runs on CPU."""
  rng = np.random.default_rng(1)
  v, d = 50, 4
  ids = rng.integers(0, v + 1, (20, 5)).astype(np.int32)
  gains, grads = (rng.normal(size=(20, n)).astype(np.float32) for n in (5, d))
  stack = StackSpec("t", ("t",), Layout((v,)), d, np.dtype(np.float32), embed.adam(0.1))
  before = reference.initial_variables("adam", rng.normal(size=(v, d)))

  @jax.jit
  def steps(arrays, part):
    scalars = update.StepScalars.at(stack, 0)
    position, unique, _ = grads_lib.distinct_by_sort(grads_lib.flat_ids([part], v), v)
    sums = grads_lib.add_in_chunks(jnp.zeros((100, d)), grads_lib.with_ids([part], position))
    rows = [DistinctRows(unique, sums).as_grad_rows()]
    at_once = update.step_sorted(stack, scalars, arrays, rows, is_distinct=True)
    return update.step_table(stack, scalars, arrays, [part]), at_once

  arrays = {name: x.astype(np.float32) for name, x in before.items()}
  each = (gains[..., None] * grads[:, None]).reshape(-1, d)
  wanted = reference.apply_rows("adam", before, np.where(ids < v, ids, -1).reshape(-1), each, 0.1)
  for found in steps(arrays, GradRows(grads, ids, gains)):
    for name, x in wanted.items():
      np.testing.assert_allclose(found[name], x, rtol=1e-5, atol=1e-6, err_msg=name)


def test_which_steps_are_added_without_reading_a_row():
  """A linear step that nothing else enters, of rows that an addition does not round."""
  table = np.zeros((3, 2), np.float32)
  assert update._is_plain_sum(embed.sgd(0.1), table)
  assert not update._is_plain_sum(embed.sgd(0.1), table.astype(jnp.bfloat16))
  assert not update._is_plain_sum(embed.adagrad(0.1), table)
  for settings in (
    {"clipvalue": 1.0},
    {"weight_decay_factor": 0.5},
    {"clip_weight_min": -1.0},
    {"clip_weight_max": 1.0},
  ):
    assert not update._is_plain_sum(embed.sgd(0.1, **settings), table), settings


@pytest.mark.parametrize(("count", "weighted"), [(63, False), (65, True), (200, True)])
def test_chunks_are_added_and_stepped_once(count, weighted, monkeypatch):
  """In chunks of 64, also rows of the last one, which begins within the one before it."""
  rng, v, d = np.random.default_rng(0), 300, 4
  numbers = lambda *shape: rng.integers(-8, 9, shape).astype(np.float32)  # sums are exact
  gains = numbers(count, 3) if weighted else None
  part = GradRows(numbers(count, d), rng.integers(0, v + 2, (count, 3)).astype(np.int32), gains)
  to = numbers(v, d)
  stack = StackSpec("t", ("t",), Layout((v,)), d, np.dtype(np.float32), embed.adagrad(0.5))
  scalars = update.StepScalars.at(stack, 0)
  ids = rng.permutation(v)[:count].astype(np.int32)
  ids[::5] = v
  arrays = {"parameters": to, "accumulators": np.ones((v, d), np.float32)}
  by_sort = functools.partial(update.step_sorted, stack, is_distinct=True)
  step = lambda: jax.jit(lambda *x: by_sort(*x))(
    scalars, arrays, [GradRows(part.grads, ids[:, None])]
  )
  at_once = step()
  monkeypatch.setattr(grads_lib, "CHUNK", 0)
  monkeypatch.setattr(grads_lib, "_SMALLEST", 64)
  added = jax.jit(lambda to, part: grads_lib.add_in_chunks(to, [part, part]))(to, part)
  expected = to.copy()
  each = np.repeat(part.grads, 3, axis=0) * (1 if gains is None else gains.reshape(-1, 1))
  kept = part.ids.reshape(-1) < v
  np.add.at(expected, part.ids.reshape(-1)[kept], 2 * each[kept])
  np.testing.assert_array_equal(added, expected)
  # To a unit in the last place: XLA vectorizes loops of another length differently (JAX 0.12).
  once = functools.partial(np.testing.assert_array_max_ulp, maxulp=1)
  in_chunks = step()
  jax.tree.map(lambda a, b: once(np.asarray(a), np.asarray(b)), in_chunks, at_once)
  assert (np.asarray(at_once["parameters"]) != to).any()


@pytest.mark.ci
def test_what_many_occurrences_of_a_row_sum_to():
  """What is written at `embed.RowGrads` of sums in float32."""
  ids, grads = np.zeros((100_000, 1), np.int32), np.full((100_000, 1), 0.1, np.float32)
  summed = jax.jit(lambda part: grads_lib.sum_per_row([part], 2))(GradRows(grads, ids))
  assert summed.ids[0] == 0
  np.testing.assert_allclose(summed.values[0, 0], 100_000 * np.float32(0.1), rtol=2e-4)
