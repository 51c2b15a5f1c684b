"""Click metrics equal scikit-learn's on everything at once, however the batches fall."""

import math

import numpy as np
import pytest
from scipy.special import expit
from sklearn.metrics import log_loss, roc_auc_score

from recipes.metrics import ClickMetrics


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
