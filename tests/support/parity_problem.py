"""The problem that other libraries solve in tests/parity, in NumPy: tables, bags and gradients.

A step looks up bags and takes the gradient of `sum(activations * cotangents)`: gradients are given,
and after 100 steps the table shows what its optimizer made of them.
"""

from typing import NamedTuple

import numpy as np

V, D, BATCH, VALENCY, STEPS = 24, 4, 24, 4, 100
KINDS = ("sum", "mean", "weighted", "rare")


class Step(NamedTuple):
  ids: np.ndarray  # [BATCH, VALENCY], -1 behind a bag's end
  weights: np.ndarray | None  # of the same shape
  cotangents: np.ndarray  # [BATCH, D]

  def bags(self):
    """Ids and weights of all bags one after another, and where each bag begins; and its end."""
    real = self.ids >= 0
    weights = None if self.weights is None else self.weights[real]
    return self.ids[real], weights, np.concatenate([[0], np.cumsum(real.sum(1))])


def table():
  return np.random.default_rng(0).uniform(-1, 1, (V, D)).astype(np.float32)


def steps(kind):
  """100 steps. All rows are looked up in each, but for "rare": there most are in few of them."""
  draw = np.random.default_rng(KINDS.index(kind) + 1)
  for _ in range(STEPS):
    if kind == "rare":
      ids = np.minimum(draw.zipf(1.5, (BATCH, VALENCY)) - 1, V - 1)
      ids[draw.random(BATCH) < 0.7, :] = 0
    else:
      ids = draw.integers(0, V, (BATCH, VALENCY))
      ids[:, 0] = draw.permutation(V)
    ids[np.arange(VALENCY) >= draw.integers(1, VALENCY + 1, (BATCH, 1))] = -1
    weights = draw.uniform(0.5, 2, ids.shape).astype(np.float32) if kind == "weighted" else None
    yield Step(ids, weights, draw.normal(size=(BATCH, D)).astype(np.float32))


def combiner(kind):
  return "mean" if kind == "mean" else "sum"


# --- clicks, for a whole model --------------------------------------------------------------------

USERS, ITEMS, DENSE, CLICK_DIM, CLICKS = 943, 1682, 2, 8, 256


def clicks(seed, batches):
  """Batches of made-up clicks on MovieLens 100k's users and items: users, items, dense, labels."""
  tastes = np.random.default_rng(7)
  user, item = tastes.normal(size=(USERS, 2)), tastes.normal(size=(ITEMS, 2))
  draw = np.random.default_rng(seed)
  for _ in range(batches):
    users, items = draw.integers(0, USERS, CLICKS), draw.integers(0, ITEMS, CLICKS)
    dense = draw.normal(size=(CLICKS, DENSE)).astype(np.float32)
    score = (user[users] * item[items]).sum(1) + dense[:, 0]
    labels = (draw.random(CLICKS) < 1 / (1 + np.exp(-score))).astype(np.float32)
    yield users, items, dense, labels
