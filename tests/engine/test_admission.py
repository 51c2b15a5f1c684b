"""Admission of raw ids, against a vocabulary in plain Python."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from admission_reference import EMPTY, Reference
from suites import full_unless, slow_unless

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
  buckets = np.asarray(state["buckets"])[: vocabulary.buckets].astype(np.uint64)
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
  totals = np.asarray(state["totals"], np.uint64)
  assert (totals[:, 0] * 2**32 + totals[:, 1]).tolist() == reference.totals
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


def streams(size=64, steps=200, seed=0):
  """Batches of raw ids by what makes them hard."""
  draw = np.random.default_rng(seed)
  spread = lambda x: (np.asarray(x, np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
  power = lambda: draw.zipf(1.2, size) % 5000
  vocabulary = embed.DynamicVocabulary(64, bucket_width=4)
  alike = [x for x in range(20_000) if Reference(vocabulary).bucket(x) == 3][:200]
  with_padding = lambda: np.where(draw.random(size) < 0.5, np.uint64(EMPTY), spread(power()))
  return {
    "random": [draw.integers(0, 2**64 - 1, size, np.uint64) for _ in range(steps)],
    "power_law": [spread(power()) for _ in range(steps)],
    "drifting": [spread(power() + 20 * step) for step in range(steps)],
    "all_new": [spread(np.arange(size) + step * size) for step in range(steps)],
    "one_bucket": [draw.choice(np.array(alike, np.uint64), size) for _ in range(steps)],
    "padding": [with_padding() for _ in range(steps)],
  }


POLICIES = {
  "lru": {},
  "lfu": {"eviction": "lfu"},
  "fading": {"eviction": "lfu", "half_life": 7},
  "expiring": {"time_to_live": 3},
  "sightings": {"sightings": 3, "half_life": 5},
  "probability": {"probability": 0.3, "seed": 5},
  "everything": {
    "eviction": "lfu", "half_life": 3, "time_to_live": 9, "sightings": 2, "probability": 0.7,
    "trains_unknown": True,
  },
}  # fmt: skip


def test_two_buckets_by_hand():
  vocabulary = embed.DynamicVocabulary(4, bucket_width=2)
  bucket = Reference(vocabulary).bucket
  a, b, c = [raw for raw in range(100) if bucket(raw) == 0][:3]
  (other,) = [raw for raw in range(100) if bucket(raw) == 1][:1]
  state = admission.empty(vocabulary, LOCAL)
  rows = []
  for batch in ([a, a, EMPTY], [b, other, a], [b, c, b]):
    (of_batch, _), state = ADMIT(vocabulary, LOCAL, state, pairs(batch), False)
    rows.append(np.asarray(of_batch).tolist())
  assert rows == [[0, 0, -1], [1, 2, 0], [1, 0, 1]]  # c takes the row of a, which was used earlier
  counts = dict(zip(admission.COUNTS, np.asarray(state["totals"])[:, 1].tolist(), strict=True))
  assert counts == {"ids": 8, "hits": 3, "admissions": 4, "evictions": 1, "turned_away": 0}


@pytest.mark.parametrize("policy", full_unless(POLICIES, ("lru", "lfu").__contains__))
def test_a_drifting_stream(policy):
  vocabulary = embed.DynamicVocabulary(64, bucket_width=4, **POLICIES[policy])
  check(vocabulary, streams(steps=15)["drifting"], every=5)


@pytest.mark.ci
@pytest.mark.parametrize(
  ("policy", "stream"),
  slow_unless(
    itertools.product(POLICIES, streams(steps=0)),
    lambda *case: case in (("everything", "one_bucket"), ("everything", "padding")),
  ),
)
def test_200_batches(policy, stream):
  vocabulary = embed.DynamicVocabulary(64, bucket_width=4, **POLICIES[policy])
  check(vocabulary, streams()[stream], every=10)


@pytest.mark.ci
@pytest.mark.parametrize("policy", slow_unless(["lru", "expiring"], "lru".__eq__))
def test_the_kernel_finds_the_same_rows(policy, kernels):
  vocabulary = embed.DynamicVocabulary(64, bucket_width=4, **POLICIES[policy])
  batches = streams(steps=12)
  check(vocabulary, batches["padding"] + batches["one_bucket"], every=4)


def test_a_capacity_smaller_than_the_batch():
  state, _ = check(embed.DynamicVocabulary(8, bucket_width=4), streams(steps=20)["random"])
  assert int(state["batch"][4]) == 64 - 8


def test_rows_of_the_batch_before_are_kept_for_its_update():
  batches = streams(steps=40)["drifting"]
  check(embed.DynamicVocabulary(64, bucket_width=4), batches, keeps_previous=True)


def test_empty_batches():
  check(embed.DynamicVocabulary(16), [np.full(4, EMPTY, np.uint64)] * 2 + [np.zeros(0, np.uint64)])


@pytest.mark.ci
@pytest.mark.parametrize(
  ("policy", "devices", "kind"),
  slow_unless(
    itertools.product(["lru", "everything"], [2, 8], ["auto", "explicit"]),
    lambda *case: case == ("everything", 8, "auto"),
  ),
)
def test_on_meshes(policy, devices, kind):
  kind = jax.sharding.AxisType[kind.capitalize()]
  mesh = jax.make_mesh((devices,), ("data",), (kind,), devices=jax.devices()[:devices])
  placement = Placement(mesh, ("data",), (), ("data",))
  vocabulary = embed.DynamicVocabulary(60, bucket_width=4, **POLICIES[policy])  # 15 buckets
  batches = streams(steps=12)
  for stream in ("drifting", "padding"):
    with jax.set_mesh(mesh):
      check(vocabulary, batches[stream], placement, every=10)


def random_case(number):
  """A vocabulary and batches, by the number of the case."""
  draw = np.random.default_rng(number)
  pick = lambda *choices: choices[draw.integers(len(choices))]
  width = int(pick(1, 2, 3, 4, 16))
  vocabulary = embed.DynamicVocabulary(
    width * int(pick(1, 2, 5, 8)),
    eviction=pick("lru", "lfu"),
    half_life=pick(None, 1, 2, 5),
    time_to_live=pick(None, None, 1, 3),
    sightings=int(pick(1, 1, 2, 3)),
    probability=pick(1.0, 1.0, 0.5),
    seed=int(draw.integers(100)),
    trains_unknown=bool(pick(False, True)),
    bucket_width=width,
  )
  size, of = int(pick(0, 1, 8, 40)), int(pick(3, 20, 10**6))
  ids = lambda: draw.integers(0, of, size).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
  empty = lambda x: np.where(draw.random(size) < 0.1, np.uint64(EMPTY), x)
  return vocabulary, [empty(ids()) for _ in range(6)], bool(pick(False, True))


@pytest.mark.weekly
@pytest.mark.parametrize("first", range(0, 10_000, 100))
def test_ten_thousand_random_cases(first):
  """`pytest -m slow tests/engine/test_admission.py -k ten_thousand`; hours on two cores."""
  for number in range(first, first + 100):
    vocabulary, batches, keeps_previous = random_case(number)
    with jax.disable_jit():
      check(vocabulary, batches, keeps_previous=keeps_previous)
