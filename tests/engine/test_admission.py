"""Admission of raw ids, against a vocabulary in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from admission_reference import EMPTY, Reference

import embed
from embed.engine import admission
from embed.engine.mesh import LOCAL, Placement

ADMIT = jax.jit(admission.admit, static_argnums=(0, 1, 4))
TRANSLATE = jax.jit(admission.translate, static_argnums=(0, 1))


def pairs(raws):
  raws = np.asarray(raws, np.uint64)
  halves = np.stack([raws >> np.uint64(32), raws & np.uint64(2**32 - 1)], 1)
  return jnp.asarray(halves.astype(np.uint32))


def assert_same(state, vocabulary, reference):
  """The same owners, last uses and counts, row by row."""
  width = vocabulary.bucket_width
  buckets = np.asarray(state["buckets"]).astype(np.uint64)
  words = buckets.reshape(len(buckets), -1, width)
  for bucket, rows in enumerate(reference.buckets):
    count = len(rows)
    of = lambda word, bucket=bucket, count=count: words[bucket, word, :count].tolist()
    raws = [(high << 32) + low for high, low in zip(of(0), of(1), strict=True)]
    assert raws == [row.raw for row in rows]
    assert of(2) == [row.last for row in rows]
    if vocabulary.eviction == "lfu":
      assert of(3) == [row.count for row in rows]
  assert np.asarray(state["batch"]).tolist() == reference.counts
  assert int(state["filled"]) == reference.filled


def check(vocabulary, batches, placement=LOCAL, keeps_previous=False, every=1):
  state, reference = admission.empty(vocabulary, placement), Reference(vocabulary)
  for number, batch in enumerate(batches):
    (rows, is_new), state = ADMIT(vocabulary, placement, state, pairs(batch), keeps_previous)
    expected, new = reference.admit([int(raw) for raw in batch], keeps_previous)
    assert [None if row < 0 else row for row in np.asarray(rows).tolist()] == expected
    stands_for = [int(raw) for raw, is_it in zip(batch, np.asarray(is_new), strict=True) if is_it]
    assert sorted(stands_for) == sorted(new)
    if number % every == 0:
      assert_same(state, vocabulary, reference)
      known = TRANSLATE(vocabulary, placement, state, pairs(batch))
      found = [reference.find(int(raw)) for raw in batch]
      assert [None if row < 0 else row for row in np.asarray(known).tolist()] == found
  return state, reference


def stream(steps, size=64):
  """Raw ids of a power law that drifts, and padding."""
  draw = np.random.default_rng(0)
  for step in range(steps):
    ids = (draw.zipf(1.2, size) % 5000 + 20 * step).astype(np.uint64)
    yield np.where(draw.random(size) < 0.2, np.uint64(EMPTY), ids * np.uint64(0x9E3779B97F4A7C15))


POLICIES = {
  "lru": {},
  "short lives": {"time_to_live": 1, "bucket_width": 3},
  "lfu": {"eviction": "lfu", "bucket_width": 1},
  "everything": {"eviction": "lfu", "half_life": 3, "time_to_live": 9},
}


def test_two_buckets_by_hand():
  vocabulary = embed.DynamicVocabulary(4, bucket_width=2)
  bucket = Reference(vocabulary).bucket
  a, b, c = [raw for raw in range(100) if bucket(raw) == 0][:3]
  (other,) = [raw for raw in range(100) if bucket(raw) == 1][:1]
  state = admission.empty(vocabulary, LOCAL)
  rows, sums = [], 0
  for batch in ([a, a, EMPTY], [b, other, a], [b, c, b]):
    (of_batch, _), state = ADMIT(vocabulary, LOCAL, state, pairs(batch), False)
    rows.append(np.asarray(of_batch).tolist())
    sums += np.asarray(state["batch"])
  assert rows == [[0, 0, -1], [1, 2, 0], [1, 0, 1]]  # c takes the row of a, which was used earlier
  counts = dict(zip(admission.COUNTS, sums.tolist(), strict=True))
  assert counts == {"ids": 8, "hits": 3, "admissions": 4, "evictions": 1, "turned_away": 0}


def of_policy(policy, rows=64):
  settings = {"bucket_width": 4} | POLICIES[policy]
  return embed.DynamicVocabulary(rows - rows % settings["bucket_width"], **settings)


@pytest.mark.parametrize(
  "policy",
  ["lru", "everything", *(pytest.param(p, marks=pytest.mark.ci) for p in ("lfu", "short lives"))],
)
def test_a_drifting_stream(policy):
  check(of_policy(policy), stream(15), every=5)


@pytest.mark.ci
def test_on_a_mesh():
  mesh = jax.make_mesh((8,), ("data",))
  placement = Placement(mesh, ("data",), ("data",))
  with jax.set_mesh(mesh):
    for rows in (60, 64):  # 15 buckets are whole on every device, 16 are split
      check(of_policy("everything", rows), stream(12), placement, every=10)
