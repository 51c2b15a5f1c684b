"""The baselines of rankings solve the equations they name, and are scored as everything else is."""

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
from ml_collections import ConfigDict
from slow_ranking import slow_ranking

from recipes import errors
from recipes.dlrm.baselines import logistic_regression
from recipes.dlrm.data import ClickData
from recipes.evaluation import baselines


@pytest.fixture(scope="module")
def train():
  draw = np.random.default_rng(0)
  taste, kind = draw.integers(0, 4, 60), draw.integers(0, 4, 30)
  likely = np.where(taste[:, None] == kind, 0.6, 0.05)
  return scipy.sparse.csr_matrix((draw.random((60, 30)) < likely).astype(np.float32))


def test_item_knn_by_hand():
  # Items 0 and 1 share one user of two each, 1 and 2 one of two and one, 0 and 2 none.
  train = scipy.sparse.csr_matrix(np.array([[1, 1, 0], [1, 0, 0], [0, 1, 1]], np.float32))
  half, other = 1 / 2, 1 / np.sqrt(2)
  expected = np.array([[0, half, 0], [half, 0, other], [0, other, 0]])
  np.testing.assert_allclose(baselines.item_knn(train).toarray(), expected, rtol=1e-6)
  # Item 1 has one neighbour, item 2, and asks for it alone; the other two have item 1.
  nearest = baselines.item_knn(train, neighbours=1).toarray()
  np.testing.assert_allclose(nearest, [[0, 0, 0], [half, 0, other], [0, other, 0]], rtol=1e-6)


def test_item_knn_is_the_cosine_of_all_pairs(train, monkeypatch):
  monkeypatch.setattr(baselines, "_BLOCK", 7)
  dense = train.toarray().astype(np.float64)
  norms = np.sqrt(dense.sum(axis=0))
  expected = dense.T @ dense / np.maximum(np.outer(norms, norms), 1e-9)
  np.fill_diagonal(expected, 0)
  found = baselines.item_knn(train, neighbours=30).toarray()
  np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)
  few = baselines.item_knn(train, neighbours=3).toarray()
  np.testing.assert_allclose(np.sort(few, axis=0)[-3:], np.sort(expected, axis=0)[-3:], rtol=1e-6)
  assert (np.count_nonzero(few, axis=0) <= 3).all()


def test_ease_is_ridge_regression_without_the_item_itself(train, monkeypatch):
  monkeypatch.setattr(baselines, "_BLOCK", 7)
  x, l2 = train.toarray().astype(np.float64), 3.0
  weights = baselines.ease(train, l2)
  for item in (0, 13, 29):
    others = np.delete(np.arange(30), item)
    own = x[:, others]
    wanted = np.linalg.solve(own.T @ own + l2 * np.eye(29), own.T @ x[:, item])
    np.testing.assert_allclose(weights[others, item], wanted, atol=1e-9)
    assert weights[item, item] == 0


def test_ranking_is_a_full_one_without_what_was_seen(train, monkeypatch):
  monkeypatch.setattr(baselines, "_EXAMPLES", 7)
  draw = np.random.default_rng(2)
  scores = np.round(draw.normal(size=(60, 30)), 1)
  relevant = scipy.sparse.csr_matrix((draw.random((60, 30)) < 0.1) & (train.toarray() == 0))
  found = baselines.ranking(lambda a, b: scores[a:b], relevant, train, (3, 5))
  sets = lambda matrix: [set(row.indices.tolist()) for row in matrix]
  scores = scores.astype(np.float32)
  wanted = slow_ranking(scores, sets(relevant), sets(train), (3, 5))
  assert found == pytest.approx(wanted, rel=1e-12)


def test_what_is_too_large_or_not_asked_for_is_left_out(train):
  relevant = {"valid": train, "test": train[:, :0] @ train[:0]}  # nothing to find in the test
  settings = {"ks": (5,), "exclude_seen": False}
  tasks = lambda rows, l2: baselines.tasks(
    rows,
    {"valid": train, "test": train},
    relevant,
    ConfigDict(settings | {"baseline": {"ease_l2": l2}}),
  )
  fits = tasks(train, 1.0)
  assert list(fits) == ["popularity", "item kNN", "EASE"]
  assert {name.partition("_")[0] for name in fits["EASE"]()} == {"valid"}
  many = scipy.sparse.csr_matrix(np.ones((1, 100_001), np.float32))
  assert list(tasks(many, 0.0)) == ["popularity"]
  with pytest.raises(errors.UserError, match=r"100001 x 100001 items, 80 GB.*Leave it out"):
    tasks(many, 1.0)["EASE"]()


def click_scores(dense, label, weight, test, penalties):
  """The scores of a regression that trains and validates on the same rows."""
  rows, splits = len(label), {"train": (0, len(label)), "valid": (0, len(label)), "test": test}
  columns = {"dense": dense.astype(np.float32), "label": label, "weight": weight}
  columns["ids"] = np.zeros((rows, 0), np.int32)
  data = ClickData(columns, {"splits": splits, "features": []})
  return logistic_regression(data, max_rows=1000, inverse_penalties=penalties)[1]


def test_logistic_regression_without_test_rows_is_validated_alone():
  dense, label = np.array([[1.0], [1.0], [0.0], [0.0]]), np.array([1, 1, 0, 0])
  scores = click_scores(dense, label, np.ones(4), (4, 4), [1.0])
  assert scores.pop("valid_logloss") < np.log(2)
  assert scores.pop("valid_ne") < 1
  assert scores == {
    "valid_auc": 1.0,
    "valid_calibration": pytest.approx(1, abs=1e-5),
    "c": 1.0,
    "rows": 4,
  }


def test_a_weight_of_a_row_is_its_number_in_logistic_regression():
  draw = np.random.default_rng(0)
  dense = draw.normal(size=(200, 3))
  label = (draw.random(200) < 1 / (1 + np.exp(-dense[:, 0]))).astype(int)
  weight = draw.integers(0, 4, 200)
  weighted = click_scores(dense, label, weight, (0, 200), [0.1, 1.0])
  every, total = np.repeat(np.arange(200), weight), weight.sum()
  repeated = click_scores(dense[every], label[every], np.ones(total), (0, total), [0.1, 1.0])
  assert weighted["rows"] == 200
  for name in ("valid_auc", "valid_logloss", "test_auc", "test_logloss", "c"):
    assert weighted[name] == pytest.approx(repeated[name], abs=1e-5)
