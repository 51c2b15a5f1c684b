"""Metrics equal scikit-learn's, and a slow ranking, on everything at once, however batches fall."""

import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from scipy.special import expit
from sklearn.metrics import log_loss, roc_auc_score
from slow_ranking import slow_ranking

from recipes.evaluation import metrics as metrics_lib
from recipes.evaluation import retrieval
from recipes.evaluation.metrics import (
  BinnedClickMetrics,
  RankingMetrics,
  click_metrics,
  ranking_names,
)


def test_clicks_by_hand():
  found = click_metrics([0.0, 1.0, -1.0], [1, 0, 0])
  assert found["auc"] == 0.5
  by_hand = (math.log(2) + math.log(1 + math.e) + math.log(1 + 1 / math.e)) / 3
  assert found["logloss"] == pytest.approx(by_hand, rel=1e-6)
  assert 10 < click_metrics([30.0, -30.0, 20.0], [0, 1, 1])["logloss"] < 30  # and finite


@pytest.mark.parametrize("on_mesh", [False, True])
def test_weighted_equals_sklearn(on_mesh, monkeypatch):
  monkeypatch.setattr(metrics_lib, "_MAX_WEIGHTED", 200)  # what is summed moves to the host
  draw = np.random.default_rng(9)
  logits = np.round(draw.normal(size=640), 2).astype(np.float32)
  labels = (draw.random(640) < expit(logits)).astype(np.float32)
  weight, mask = draw.exponential(size=640).astype(np.float32), draw.random(640) < 0.9
  weight[::7] = 0
  binned = BinnedClickMetrics(meshes.make_mesh() if on_mesh else None, weighted=True)
  for start in range(0, 640, 64):
    batch = [jnp.asarray(x[start : start + 64]) for x in (logits, labels, mask, weight)]
    binned.update(*batch)
  given = labels[mask], logits[mask].astype(float)
  auc = roc_auc_score(*given, sample_weight=weight[mask])
  loss = log_loss(given[0], expit(given[1]), sample_weight=weight[mask])
  exact = click_metrics(logits, labels, weight * mask)
  assert exact == pytest.approx({"auc": auc, "logloss": loss}, rel=1e-12)
  assert binned.compute() == pytest.approx({"auc": auc, "logloss": loss}, rel=1e-6)
  assert abs(binned.compute()["auc"] - auc) <= binned.auc_error() + 1e-7


def test_equal_logits_of_many_rows_keep_their_weight():
  """A sum of .1 in float32 is off by 1 % after a million rows in one bin."""
  metrics = BinnedClickMetrics(weighted=True)
  labels = jnp.arange(1 << 16) % 2
  for _ in range(16):
    metrics.update(jnp.zeros(1 << 16), labels, weight=jnp.full(1 << 16, 0.1))
  found = metrics.compute()
  assert found["auc"] == pytest.approx(0.5, abs=1e-9)
  assert found["logloss"] == pytest.approx(math.log(2), rel=1e-5)
  assert metrics._total.sum() == pytest.approx(0.1 * (1 << 20), rel=4e-3)


def test_errors():
  with pytest.raises(ValueError, match=r"must all be \[batch\]"):
    BinnedClickMetrics().update(np.zeros((3, 1)), np.zeros(3))
  with pytest.raises(ValueError, match=r"mask \(2,\) and weight"):
    BinnedClickMetrics().update(np.zeros(3), np.zeros(3), np.ones(2, bool))
  for logits, labels, message in (
    ([0.1, 0.2], [1, 1], "2 of the 2 examples are clicks"),
    ([np.nan, 0.2], [0, 1], "not finite"),
    ([], [], "0 of the 0 examples"),
  ):
    binned = BinnedClickMetrics()
    binned.update(np.array(logits), np.array(labels))
    for compute in (binned.compute, lambda x=logits, y=labels: click_metrics(x, y)):
      with pytest.raises(ValueError, match=message):
        compute()


def test_binned_by_hand():
  metrics = BinnedClickMetrics()
  logits = jnp.array([2.0, 1.0, 1.0, -1.0, -1.0 + 2**-17])  # the last two are in one bin
  metrics.update(logits, jnp.array([1, 1, 0, 0, 1]))
  # Of six pairs: 2 > 1, 2 > -1, 1 = 1, 1 > -1, -1 < 1, and the one that is counted as a tie.
  assert metrics.compute()["auc"] == pytest.approx((3 + 0.5 + 0.5) / 6, rel=1e-15)
  assert metrics.auc_error() == pytest.approx(2 / 6 / 2, rel=1e-15)
  metrics.update(jnp.array([-40.0]), jnp.array([1]))  # goes on after the first answer
  found = metrics.compute()
  assert found["auc"] == pytest.approx((3 + 0.5 + 0.5) / 8, rel=1e-15)
  losses = [math.log1p(math.exp(-x)) for x in (2, 1, -1 + 2**-17)]
  losses += [math.log1p(math.exp(x)) for x in (1, -1)] + [-math.log(2**-52)]
  assert found["logloss"] == pytest.approx(sum(losses) / 6, rel=1e-6)


# Many ties, neighbours within a bin, the edges of the bins, and logits that no model should have.
LOGITS = st.one_of(
  st.integers(-20, 20).map(float),
  st.floats(-4, 4, width=32, allow_subnormal=False),
  st.floats(-(2**-13), 2**-13, width=32, allow_subnormal=False),
  st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False),
  st.sampled_from([16.0, -16.0, 2.0**-16, -(2.0**-16), 3e38, -3e38]),
)
EXAMPLES = st.lists(st.tuples(LOGITS, st.booleans(), st.booleans()), min_size=2, max_size=60)


def add(metrics, logits, labels, mask, batch):
  """Feeds the examples in batches of one size, of which the last one is filled up."""
  for start in range(0, len(logits), batch):
    rows = slice(start, start + batch)
    filling = (0, batch - len(logits[rows]))
    metrics.update(
      jnp.pad(logits[rows], filling, constant_values=5.0),
      jnp.pad(labels[rows], filling),
      jnp.pad(mask[rows], filling),
    )
  return metrics


@pytest.mark.full
@hypothesis.given(EXAMPLES, st.sampled_from([8, 64]))
def test_binned_equals_sklearn_within_its_bound(examples, batch):
  logits, labels, mask = (np.array(x) for x in zip(*examples, strict=True))
  logits, labels = logits.astype(np.float32), labels.astype(np.float32)
  hypothesis.assume(len(set(labels[mask])) == 2)
  metrics = add(BinnedClickMetrics(), logits, labels, mask, batch)
  found = metrics.compute()
  kept, right = logits[mask], labels[mask]
  assert abs(found["auc"] - roc_auc_score(right, kept)) <= metrics.auc_error() + 1e-12
  wanted = log_loss(right, expit(kept.astype(np.float64)))
  assert found["logloss"] == pytest.approx(wanted, rel=1e-5, abs=1e-7)
  bins = np.asarray(metrics_lib._bins(jnp.asarray(kept)))
  if len(np.unique(bins)) == len(np.unique(kept)):  # every bin holds one score: ties are exact
    assert found["auc"] == pytest.approx(roc_auc_score(right, kept), abs=1e-12)


def test_binned_is_close_on_scores_as_models_have_them():
  draw = np.random.default_rng(7)
  logits = draw.normal(-3.0, 1.2, 300_000).astype(np.float32)
  labels = (draw.random(300_000) < expit(logits)).astype(np.float32)
  metrics = add(BinnedClickMetrics(), logits, labels, np.ones(300_000, bool), 50_000)
  found, exact = metrics.compute(), click_metrics(logits, labels)
  assert metrics.auc_error() < 3e-6
  assert abs(found["auc"] - exact["auc"]) < 1e-7
  assert found["logloss"] == pytest.approx(exact["logloss"], rel=1e-6)


def test_binned_over_a_mesh_is_the_same_and_sends_no_example():
  draw, mesh = np.random.default_rng(3), meshes.make_mesh()
  logits = np.round(draw.normal(size=640), 2).astype(np.float32)
  labels, mask = (draw.random(640) < expit(logits)).astype(np.float32), draw.random(640) < 0.9
  one = add(BinnedClickMetrics(), logits, labels, mask, 64)
  several = add(BinnedClickMetrics(mesh), logits, labels, mask, 64)
  assert several.compute()["auc"] == one.compute()["auc"]
  assert several.compute()["logloss"] == pytest.approx(one.compute()["logloss"], rel=1e-6)
  split = jax.NamedSharding(mesh, jax.P(mesh.axis_names))
  args = [jax.device_put(x, split) for x in (logits, labels, mask)]
  compiled = several._add.lower(several._counts, *args).compile()
  text = compiled.as_text()
  assert "all-gather" not in text
  assert "all-to-all" not in text
  # Counts are added to where they are, not copied: they are most of the memory.
  assert compiled.memory_analysis().alias_size_in_bytes >= 2 * metrics_lib._BINS * 4
  assert compiled.memory_analysis().temp_size_in_bytes < metrics_lib._BINS


def test_counts_move_to_the_host_before_they_overflow(monkeypatch):
  monkeypatch.setattr(metrics_lib, "_MAX_COUNT", 100)
  draw = np.random.default_rng(5)
  logits = np.round(draw.normal(size=500), 1).astype(np.float32)
  labels = (draw.random(500) < expit(logits)).astype(np.float32)
  metrics = BinnedClickMetrics()
  add(metrics, logits, labels, np.ones(500, bool), 40)
  assert metrics._count <= 100
  assert metrics._total.sum() >= 400
  assert metrics.compute()["auc"] == pytest.approx(roc_auc_score(labels, logits), abs=1e-12)


def test_ten_billion_examples_are_counted():
  """As many as no test can feed: counts of that size are put where they would be."""
  metrics = BinnedClickMetrics()
  metrics.update(jnp.array([-1.0, 0.0, 0.0, 1.0]), jnp.array([0, 0, 1, 1]))
  metrics._empty()
  metrics._total *= 2_500_000_000
  metrics._loss, metrics._weight = 1e10 * math.log(2), 1e10
  metrics._sums.clear()
  found = metrics.compute()
  assert found == {"auc": 0.875, "logloss": pytest.approx(math.log(2), rel=1e-12)}
  assert metrics.auc_error() == 0.125


@pytest.mark.parametrize("tied", [False, True])
def test_rankings_equal_a_slow_one(tied):
  draw, ks = np.random.default_rng(4), (1, 5, 10)
  scores = draw.normal(size=(40, 60)).astype(np.float32)
  if tied:
    scores = np.round(scores)
  relevant = [set(draw.choice(60, draw.integers(0, 15), replace=False).tolist()) for _ in scores]
  seen = [set(draw.choice(60, 8, replace=False).tolist()) - right for right in relevant]
  pad = lambda rows: np.array([sorted(row) + [-1] * (20 - len(row)) for row in rows])
  _, top_ids = retrieval.top_k(jnp.eye(len(scores)), jnp.asarray(scores).T, 10, pad(seen))
  metrics = RankingMetrics(ks)
  for start in range(0, 40, 16):  # uneven batches
    rows = slice(start, start + 16)
    metrics.update(top_ids[rows], pad(relevant)[rows])
  wanted = slow_ranking(scores, relevant, seen, ks)
  assert metrics.compute() == pytest.approx(wanted, rel=1e-12)


def test_rankings_by_hand():
  metrics = RankingMetrics((2,))
  metrics.update([[5, 3], [1, 2]], [[3, 9, 4], [7, -1, -1]])
  metrics.update([[0, 1], [4, -1]], [[0, -1], [-1, -1]])  # the last has nothing to find
  found = metrics.compute()
  ideal = 1 + 1 / math.log2(3)
  assert found["recall@2"] == pytest.approx((1 / 3 + 0 + 1) / 3)
  assert found["ndcg@2"] == pytest.approx((1 / math.log2(3) / ideal + 0 + 1) / 3)
  assert found["hr@2"] == pytest.approx(2 / 3)
  assert found["mrr"] == pytest.approx((1 / 2 + 0 + 1) / 3)
  assert set(found) == set(ranking_names((2,), 10))


@pytest.mark.parametrize(
  ("k", "top_ids", "relevant", "message"),
  [
    (5, [[1]], [[1]], "1 ids a row, for metrics at 5"),
    (1, [[1]], [1], r"must be \[batch, K\] and \[batch, R\]"),
    (2, [[1, 1]], [[1]], "appears twice in a row of top_ids"),
    (1, [[1]], [[3, 2, 3]], "appears twice in a row of relevant"),
    (1, [[1]], [[-1]], "no example has a relevant item"),
  ],
)
def test_ranking_errors(k, top_ids, relevant, message):
  metrics = RankingMetrics((k,))
  score = lambda: (metrics.update(top_ids, relevant), metrics.compute())
  with pytest.raises(ValueError, match=message):
    score()
