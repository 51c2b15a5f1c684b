"""The NumPy reference, by hand; tests of the library compare the rest with it."""

import numpy as np
import pytest
import reference

import embed


def test_gains_of_a_weighted_mean():
  weights = embed.Padded([[1.0, 3.0, 9.0], [1.0, 1.0, 1.0]])
  occ = reference.occurrences(embed.Padded([[3, 7, -1], [-1, -1, -1]]), weights, "mean")
  assert occ.shape == (2,)
  assert occ.ids.tolist() == [3, 7]
  assert occ.positions.tolist() == [0, 0]
  assert occ.gains.tolist() == [0.25, 0.75]
  table = np.arange(8.0)[:, None]
  assert reference.lookup(table, occ).tolist() == [[6.0], [0.0]]
  ids, gradients = reference.occurrence_gradients(occ, np.array([[4.0], [5.0]]))
  assert reference.row_gradients([*ids, 3], [*gradients, [10.0]]) == {3: 11.0, 7: 3.0}


def test_a_step_sums_clips_decays_and_clips_weights():
  variables = reference.initial_variables("adagrad", [[1.0], [2.0]], initial_accumulator_value=0.0)
  ids, gradients = [1, 1, -1], np.array([[1.0], [3.0], [9.0]])
  common = {"clipvalue": 3.0, "weight_decay_factor": 0.5, "clip_weight_min": 0.25}
  after = reference.apply_rows("adagrad", variables, ids, gradients, 0.5, **common)
  assert after["accumulators"].tolist() == [[0.0], [9.0]]  # 1 + 3, clipped to 3, squared
  assert after["parameters"].tolist() == [[1.0], [0.5]]  # 2 * 0.5 - 0.5 * 3 / 3
  after = reference.apply_rows("adagrad", variables, ids, gradients, 1.0, **common)
  assert after["parameters"].tolist() == [[1.0], [0.25]]
  assert variables["parameters"].tolist() == [[1.0], [2.0]]  # not in place


def test_hyperparameters_are_checked():
  with pytest.raises(TypeError, match="hyperparameters are"):
    reference.apply_rows("sgd", {"parameters": np.ones((1, 1))}, [0], [[1.0]], 0.5, momentum=0.5)
