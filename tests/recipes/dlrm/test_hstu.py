"""HSTU as a ranker: its days are in order, and no target sees more than it may."""

import functools

import numpy as np
import pytest
import recipe_runs
from flax import nnx

from recipes.dlrm import data as data_lib
from recipes.dlrm import hstu, listens, train
from recipes.run import settings

COLUMNS, TARGET = 10, -1


def test_who_sees_whom_by_hand():
  segments = np.array([[0, 0, 0, 0, 1, -1]])
  is_target = np.array([[False, True, False, True, True, False]])
  seen = hstu.visible(segments, is_target)[0].astype(int).tolist()
  assert seen == [
    [1, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0],
    [1, 0, 1, 0, 0, 0],
    [1, 0, 1, 1, 0, 0],
    [0, 0, 0, 0, 1, 0],
    [0, 0, 0, 0, 0, 0],
  ]


def inputs(*sequences):
  """Rows of one: for each sequence its tokens, `(item, action, time)`, an action of -1 a target."""
  rows = [(item, number, place, time, action)
    for number, tokens in enumerate(sequences)
    for place, (item, action, time) in enumerate(tokens)]  # fmt: skip
  rows += [(-1, -1, -1, -1, -1)] * (COLUMNS - len(rows))
  item, segments, positions, times, actions = np.array(rows, np.int32).T[:, None]
  where = np.flatnonzero((actions[0] < 0) & (segments[0] >= 0)).astype(np.int32)[None]
  tokens = {name: item if name == "item" else np.minimum(item, 3) for name in listens.TOKENS}
  users = [len(s) if s else -1 for s in (*sequences, *[[]] * (2 - len(sequences)))]
  context = dict.fromkeys(listens.CONTEXTS, np.array([users], np.int32))
  return {
    "features": tokens | context, "segments": segments, "positions": positions, "times": times,
    "actions": actions, "where": where, "clock": where * 0,
  }  # fmt: skip


@functools.cache
def ranker(**changes):
  chosen = settings.completed("dlrm", recipe_runs.load("dlrm.dlrm_v4").to_dict() | changes)
  chosen.hstu.update({"time_buckets": 8, "action_bias": True})
  model = train.build_model(chosen, data_lib.describe(chosen))
  return nnx.view(model, deterministic=True)


@nnx.jit
def _call(model, batch):
  return model(batch)


def logits(batch):
  return np.asarray(_call(ranker(sequences=2), batch))


USER = [(7, 1, -90), (5, 4, -60), (3, TARGET, 0), (3, 1, 0), (9, TARGET, 40), (2, TARGET, 40)]


@pytest.mark.ci
def test_a_target_changes_no_other():
  one = logits(inputs(USER))
  for column, changed in ((2, 0), (4, 1), (5, 2)):
    other = USER.copy()
    other[column] = (11, *USER[column][1:])
    differs = logits(inputs(other)) != one
    assert differs.tolist() == [number == changed for number in range(3)]
