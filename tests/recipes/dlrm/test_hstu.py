"""HSTU as a ranker: its days are in order, and no target sees more than it may."""

import functools

import numpy as np
import pytest
import recipe_runs
from flax import nnx

from recipes.dlrm import baselines, hstu, listens, train
from recipes.dlrm import data as data_lib
from recipes.run import settings

COLUMNS, TARGET = 10, -1


def config(folder, **changes):
  return recipe_runs.dlrm_smoke("dlrm_v4", folder, **changes)


def test_sequences_share_rows_in_order():
  lengths, days = np.array([3, 3, 2, 5, 1, 1, 1]), np.array([0, 0, 0, 0, 1, 1, 1])
  row, column, number = listens._place(lengths, days, width=6, most=2)
  assert row.tolist() == [0, 0, 1, 2, 3, 3, 4]  # 5 does not fit beside 2, day 1 starts a row
  assert column.tolist() == [0, 3, 0, 0, 0, 1, 0]
  assert number.tolist() == [0, 1, 0, 0, 0, 1, 0]


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


@pytest.mark.ci
def test_every_event_is_a_target_once_and_sees_the_past_alone(tmp_path):
  loaded = data_lib.load(config(tmp_path, targets=3, sequences=2, width=22))
  found = listens.inputs(
    {name: column[:] for name, column in loaded.columns.items()},
    configs=data_lib.feature_configs(loaded.features, dim=1),
  )
  # The log, as drawn: 30 users, of 5 days.
  drawn = listens._draw({
    "sizes": {"item": 40, "artist": 10, "album": 20, "user": 30},
    "num_days": 5, "events": 15.9, "data_seed": 0,
  })  # fmt: skip
  assert found["weight"].sum() == len(drawn["user"])
  assert found["label"].sum() == np.sum(drawn["action"] & listens.PLAYED)
  is_target = found["actions"] < 0
  mask = np.asarray(hstu.visible(found["segments"], is_target & (found["segments"] >= 0)))
  rows, asks, sees = np.nonzero(mask & ~np.eye(mask.shape[1], dtype=bool))
  assert (found["times"][rows, sees] < found["times"][rows, asks]).mean() > 0.99
  assert (found["times"][rows, sees] <= found["times"][rows, asks]).all()
  # The first target of a row is at 0 s, in the order of time within the week.
  at = found["where"][:, 0]
  assert (np.take_along_axis(found["times"], at[:, None], axis=1) == 0).all()
  assert (np.diff(found["clock"][:, 0]) >= 0).all()
  assert loaded.best["test_auc"] > 0.75
  is_tested = drawn["time"] >= 4 * 86_400
  rate, played = (
    np.mean((drawn["action"] & listens.PLAYED)[x]) for x in (drawn["time"] < 3 * 86_400, is_tested)
  )
  expected = -played * np.log(rate) - (1 - played) * np.log(1 - rate)
  assert baselines.constant_rate(loaded)["test_logloss"] == pytest.approx(expected)


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


@pytest.mark.ci
def test_an_event_changes_the_targets_after_it():
  other = USER.copy()
  other[3] = (11, 1, 0)
  differs = logits(inputs(other)) != logits(inputs(USER))
  assert differs.tolist() == [False, True, True]
