"""Metrics equal scikit-learn's and a slow ranking's; users by hand."""

import math

import jax
import numpy as np
import pytest
from scipy.special import expit
from sklearn.metrics import log_loss, roc_auc_score
from slow_ranking import slow_ranking

from recipes import errors
from recipes.evaluation import retrieval
from recipes.evaluation.metrics import (
  RankingMetrics,
  Users,
  click_metrics,
  gauc,
  ranking_names,
)


def test_clicks_by_hand():
  found = click_metrics([0.0, 1.0, -1.0], [1, 0, 0])
  assert found["auc"] == 0.5
  loss = (math.log(2) + math.log(1 + math.e) + math.log(1 + 1 / math.e)) / 3
  assert found["logloss"] == pytest.approx(loss, rel=1e-6)
  assert found["ne"] == pytest.approx(loss / (math.log(3) / 3 + 2 / 3 * math.log(3 / 2)), rel=1e-6)
  assert found["calibration"] == pytest.approx(1.5, rel=1e-12)  # 1/2 + 1/2 + 1/2 over a click
  assert 10 < click_metrics([30.0, -30.0, 20.0], [0, 1, 1])["logloss"] < 30  # and finite


def drawn(rows, seed=9, decimals=2):
  draw = np.random.default_rng(seed)
  logits = np.round(draw.normal(size=rows), decimals).astype(np.float32)
  labels = (draw.random(rows) < expit(logits)).astype(np.float32)
  weight = draw.exponential(size=rows).astype(np.float32)
  weight[::7] = 0
  return logits, labels, weight


def expected(logits, labels, weight):
  """The metrics in float64, by scikit-learn and by their definitions."""
  logits, weight = logits.astype(np.float64), weight.astype(np.float64)
  rate = np.average(labels, weights=weight)
  loss = log_loss(labels, expit(logits), sample_weight=weight)
  return {
    "auc": roc_auc_score(labels, logits, sample_weight=weight),
    "logloss": loss,
    "ne": loss / -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate)),
    "calibration": np.average(expit(logits), weights=weight) / rate,
  }


def test_clicks_equal_scikit_learn():
  rows = drawn(600)
  assert click_metrics(*rows) == pytest.approx(expected(*rows), rel=1e-12)


def test_what_examples_do_not_define_is_left_out():
  assert click_metrics([0.0], [0]) == {"logloss": pytest.approx(math.log(2))}
  assert click_metrics([0.0], [1]).keys() == {"logloss", "calibration"}
  assert click_metrics([0.0], [0], [0.0]) == click_metrics([], []) == {}
  with pytest.raises(errors.UserError, match="not finite"):
    click_metrics([np.nan, 0.2], [0, 1])


# --- users ----------------------------------------------------------------------------------------


def slow_gauc(logits, labels, users, weight):
  """Scikit-learn's AUC, user by user."""
  aucs, amounts = [], []
  for user in set(users.tolist()):
    rows = (users == user) & (weight > 0)
    if len(set(labels[rows])) == 2:
      aucs.append(roc_auc_score(labels[rows], logits[rows], sample_weight=weight[rows]))
      amounts.append(weight[rows].sum())
  return np.average(aucs, weights=amounts)


def test_gauc_by_hand():
  # User 4 has 3 pairs, 1.5 of them in order; user 2 one, in order; 5 and 6 have one outcome.
  users = [4, 2, 4, 5, 4, 2, 4, 6]
  logits = [2.0, 1.0, 2.0, 3.0, 1.0, 0.0, 3.0, 7.0]
  labels = [1, 1, 0, 1, 0, 0, 0, 0]
  found = gauc(logits, labels, users, np.ones(8))
  assert found == {"gauc": pytest.approx((4 * (1.5 / 3) + 2 * 1) / 6), "gauc_share": 6 / 8}
  alone = {"gauc_share": 0.0}  # users of one row
  assert gauc([1.0, 2.0], [1, 0], [0, 1], np.ones(2)) == gauc([], [], [], []) == alone


def test_gauc_equals_scikit_learn():
  logits, labels, weight = drawn(600)
  ids = np.random.default_rng(1).integers(-1, 45, 600)
  found = gauc(logits, labels, Users("user", 40).codes(ids), weight)
  known = (ids >= 0) & (ids < 40)  # others share an id
  within = slow_gauc(*(x[known] for x in (logits, labels, ids, weight)))
  assert found["gauc"] == pytest.approx(within, rel=1e-6)
  assert 0.5 < found["gauc_share"] < 1


# --- rankings -------------------------------------------------------------------------------------


def test_rankings_equal_a_slow_one():
  draw, ks = np.random.default_rng(4), (1, 5, 10)
  scores = np.round(draw.normal(size=(40, 60))).astype(np.float32)  # with ties
  relevant = [set(draw.choice(60, draw.integers(0, 15), replace=False).tolist()) for _ in scores]
  seen = [set(draw.choice(60, 8, replace=False).tolist()) - right for right in relevant]
  pad = lambda rows: np.array([sorted(row) + [-1] * (20 - len(row)) for row in rows])
  best = jax.jit(retrieval.top_k, static_argnums=2)
  _, top_ids = best(np.eye(len(scores), dtype=np.float32), scores.T, 10, pad(seen))
  top_ids = np.asarray(top_ids)
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
  assert found["precision@2"] == pytest.approx((1 / 2 + 0 + 1 / 2) / 3)
  assert found["mrr"] == pytest.approx((1 / 2 + 0 + 1) / 3)
  assert set(found) == set(ranking_names((2,), 10))


def test_cutoffs_are_in_the_catalogue_and_rankings_have_something_to_find():
  with pytest.raises(errors.UserError, match=r"write --config\.ks='\(5,\)', and for example"):
    ranking_names((5, 1000), 40)
  with pytest.raises(errors.UserError, match="no example has a relevant item"):
    RankingMetrics((1,)).compute()
