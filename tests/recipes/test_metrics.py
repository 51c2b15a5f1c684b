"""Metrics equal scikit-learn's, and a slow ranking, on everything at once, however batches fall."""

import math

import numpy as np
import pytest
from scipy.special import expit
from sklearn.metrics import log_loss, roc_auc_score
from slow_ranking import slow_ranking

from recipes import retrieval
from recipes.metrics import ClickMetrics, RankingMetrics


@pytest.mark.parametrize("batch", [1, 7, 64, 1000])
def test_uneven_last_batch(batch):
  draw = np.random.default_rng(0)
  logits = np.round(draw.normal(size=101), 1).astype(np.float32)  # rounded, so that there are ties
  labels = (draw.random(101) < expit(logits)).astype(np.float32)
  metrics = ClickMetrics()
  for start in range(0, 101, batch):
    rows = slice(start, start + batch)
    filling = batch - len(labels[rows])
    metrics.update(
      np.pad(logits[rows], (0, filling), constant_values=9.0),
      np.pad(labels[rows], (0, filling)),
      np.arange(batch) < batch - filling,
    )
  found = metrics.compute()
  assert found["auc"] == roc_auc_score(labels, logits)
  assert found["logloss"] == pytest.approx(log_loss(labels, expit(logits.astype(float))), rel=1e-12)


def test_hand_numbers():
  metrics = ClickMetrics()
  metrics.update([0.0, 1.0, -1.0], [1, 0, 0])  # of the two pairs, one is in order
  found = metrics.compute()
  assert found["auc"] == 0.5
  by_hand = (math.log(2) + math.log(1 + math.e) + math.log(1 + 1 / math.e)) / 3
  assert found["logloss"] == pytest.approx(by_hand, rel=1e-6)


def test_confident_mistakes_stay_finite():
  metrics = ClickMetrics()
  metrics.update([30.0, -30.0, 20.0], [0, 1, 1])
  assert 10 < metrics.compute()["logloss"] < 30


def test_errors():
  with pytest.raises(ValueError, match=r"must all be \[batch\]"):
    ClickMetrics().update(np.zeros((3, 1)), np.zeros(3))
  only_clicks = ClickMetrics()
  only_clicks.update([0.1, 0.2], [1, 1])
  with pytest.raises(ValueError, match="2 of the 2 examples are clicks"):
    only_clicks.compute()
  diverged = ClickMetrics()
  diverged.update([np.nan, 0.2], [0, 1])
  with pytest.raises(ValueError, match="not finite"):
    diverged.compute()
  with pytest.raises(ValueError, match="0 of the 0 examples"):
    ClickMetrics().compute()


@pytest.mark.parametrize("tied", [False, True])
def test_rankings_equal_a_slow_one(tied):
  draw, ks = np.random.default_rng(4), (1, 5, 10)
  scores = draw.normal(size=(40, 60)).astype(np.float32)
  if tied:
    scores = np.round(scores)
  relevant = [set(draw.choice(60, draw.integers(0, 15), replace=False).tolist()) for _ in scores]
  seen = [set(draw.choice(60, 8, replace=False).tolist()) - right for right in relevant]
  pad = lambda rows: np.array([sorted(row) + [-1] * (20 - len(row)) for row in rows])
  _, top_ids = retrieval.top_k_of_scores(scores, 10, pad(seen))
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


def test_no_recommendation_is_never_right():
  metrics = RankingMetrics((2,), mrr=False)
  metrics.update([[0, 1], [0, -1]], [[0, 9], [9, 1]])  # of the ids up to 9, -1 is not the last one
  assert metrics.compute()["recall@2"] == 0.25


def test_rankings_skip_what_fills_up():
  metrics = RankingMetrics((1,), mrr=False)
  metrics.update([[5], [6]], [[5], [0]], [True, False])
  assert metrics.compute() == {"recall@1": 1.0, "ndcg@1": 1.0, "hr@1": 1.0}


def test_ranking_errors():
  with pytest.raises(ValueError, match="1 ids a row, for metrics at 5"):
    RankingMetrics((5,)).update([[1]], [[1]])
  with pytest.raises(ValueError, match=r"must be \[batch, K\] and \[batch, R\]"):
    RankingMetrics((1,)).update([[1]], [1])
  with pytest.raises(ValueError, match="appears twice in a row of top_ids"):
    RankingMetrics((2,)).update([[1, 1]], [[1]])
  with pytest.raises(ValueError, match="appears twice in a row of relevant"):
    RankingMetrics((1,)).update([[1]], [[3, 2, 3]])
  with pytest.raises(ValueError, match="no example has a relevant item"):
    RankingMetrics((1,)).compute()
