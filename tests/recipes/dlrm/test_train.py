"""The recipe as users run it: every config in smoke mode, every key read, the result's shape."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
import recipe_runs
import ways
from cases import each, refused
from recipe_runs import RESULT, dlrm_smoke, recorded_reads

from recipes import baselines as command
from recipes import mesh as mesh_lib
from recipes.dlrm import baselines, data, train
from recipes.evaluation.metrics import CLICK_NAMES
from recipes.training import build

OTHERS = sorted({path.stem for path in Path("configs/dlrm").glob("*.py")} - {"synthetic"})


@pytest.mark.parametrize("name", [*ways.ci("synthetic"), *ways.weekly(*OTHERS)])
def test_every_config_runs_and_every_key_is_read(name, tmp_path, monkeypatch):
  """On eight devices, of which the other configs need none."""
  if name != "synthetic":
    monkeypatch.setattr(mesh_lib, "start", lambda: None)
  config = dlrm_smoke(name, tmp_path, model="dcnv2")
  with recorded_reads() as unread:
    check_result(train.run(config, str(tmp_path / "run")), config, tmp_path / "run")
    config.update(model="dlrm", dense_optimizer="adagrad")  # which read other keys
    jax.eval_shape(lambda: train.build_model(config, data.load(config)))
    train.dense_optimizer(config)
  assert not unread(config)


def check_result(result, config, workdir):
  assert set(result) == RESULT
  assert json.loads((workdir / "result.json").read_text()) == result
  assert result["config"] == json.loads(json.dumps(config.to_dict()))
  assert result["recipe"] == "dlrm"
  assert (result["seed"], result["steps"]) == (config.seed, config.steps)
  users = ("gauc", "gauc_share") if config.dataset == "movielens1m" else ()
  names = (*CLICK_NAMES, *users)
  assert set(result["metrics"]) == {f"{split}_{n}" for split in ("valid", "test") for n in names}
  for task in baselines.tasks(data.load(config), config).values():
    assert {f"test_{name}" for name in CLICK_NAMES} <= set(task())
  assert all(math.isfinite(value) for value in result["metrics"].values())
  assert all(len(value) == 64 for value in result["data_sha256"].values())
  assert {"jax", "flax", "optax", "python", "sparse-embed"} <= set(result["versions"])
  assert result["device"]["platform"] == "cpu"
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  logged = [line["step"] for line in lines if "loss" in line]
  assert logged == list(range(config.log_every, config.steps + 1, config.log_every))
  assert lines[0]["dropped_ids"] == 0
  evaluated = [line["step"] for line in lines if "valid_auc" in line]
  assert evaluated == list(range(config.eval_every, config.steps + 1, config.eval_every))
  assert list((workdir / "tensorboard").iterdir())


def test_the_dense_part_by_adagrad(tmp_path):
  changes = {"learning_rate": 0.5, "warmup_steps": 0, "final_rate": 1.0}
  tx = train.dense_optimizer(
    dlrm_smoke("synthetic", tmp_path, dense_optimizer="adagrad", **changes)
  )
  weights, grads = np.zeros(3, np.float32), np.array([3.0, 0.0, -1e-4], np.float32)
  update = jax.jit(tx.update)
  updates, state = update(grads, jax.jit(tx.init)(weights), weights)
  # From an accumulator of 0 the first step is the rate itself, however small the gradient.
  np.testing.assert_allclose(updates, [-0.5, 0.0, 0.5], rtol=1e-6)
  updates, _ = update(grads, state, weights)
  np.testing.assert_allclose(updates, [-0.5 / 2**0.5, 0.0, 0.5 / 2**0.5], rtol=1e-6)


def test_rates_of_tables_go_by_the_optimizer_unless_given(tmp_path):
  """A rate of 0 leaves the rows as they are, as a warm start may want."""
  cases = [
    ("adam", -1.0, 2e-3),
    ("rowwise_adagrad", -1.0, 0.2),
    ("adam", 0.0, 0.0),
    ("sgd", 0.5, 0.5),
  ]

  def check(name, given, rate):
    changes = {"table.learning_rate": given, "warmup_steps": 0}
    optimizer = build.table_optimizer(dlrm_smoke("synthetic", tmp_path, **changes), name)
    np.testing.assert_allclose(optimizer.learning_rate(0), rate, rtol=1e-6)

  each(cases, check)


def test_unknown_names(tmp_path):
  with pytest.raises(ValueError, match=r"table\.optimizer is 'adamw': choose adagrad, adam"):
    build.table_optimizer(dlrm_smoke("synthetic", tmp_path), "adamw")
  cases = [
    ({"model": "deepfm"}, "config.model is 'deepfm': choose dlrm, dcnv2"),
    ({"dense_optimizer": "sgd"}, "choose adamw, adagrad"),
    ({"history.model": "gru"}, "choose pooled, din"),
    ({"dcnv2.structure": "serial"}, "choose parallel, stacked"),
  ]
  refused(cases, lambda changes: train.check(dlrm_smoke("synthetic", tmp_path, **changes), None))


def clicks(label, dense, ids, splits, **columns):
  columns |= {"label": label, "dense": dense, "ids": ids}
  columns = {name: np.asarray(column) for name, column in columns.items()}
  features = [{"name": "city", "vocabulary_size": 3}]
  return data.ClickData(columns, {"splits": splits, "features": features})


@pytest.mark.programs(30, "losses are computed outside of jit")
def test_the_constant_rate_by_hand():
  label = np.array([1, 0, 0, 0, 1, 0, 1, 1], np.uint8)  # all of the test are clicks
  splits = {"train": (0, 4), "valid": (4, 6), "test": (6, 8)}
  found = clicks(label, np.zeros((8, 2), np.float32), np.zeros((8, 1), np.int32), splits)
  scores = baselines.constant_rate(found)
  assert scores["valid_logloss"] == pytest.approx(-(np.log(0.25) + np.log(0.75)) / 2)
  assert scores["test_logloss"] == pytest.approx(-np.log(0.25))
  assert scores["valid_auc"] == 0.5
  assert "test_auc" not in scores
  weighted = dataclasses.replace(
    found, columns=found.columns | {"weight": np.array([3, 1, 1, 1, 1, 3, 1, 1], np.float32)}
  )
  scores = baselines.constant_rate(weighted)
  assert scores["test_logloss"] == pytest.approx(-np.log(0.5))
  assert scores["valid_logloss"] == pytest.approx(-np.log(0.5))


@pytest.mark.weekly
def test_the_default_run_approaches_the_best_possible(tmp_path):
  config = recipe_runs.load("dlrm.synthetic", "")
  config.cache_dir = str(tmp_path / "cache")
  train.run(config, str(tmp_path / "run"))
  result = command.fit(tmp_path / "run")
  auc, bound = result["metrics"]["test_auc"], result["baselines"]["best possible"]["test_auc"]
  linear = result["baselines"]["logistic regression"]["test_auc"]
  assert linear + 0.02 < auc < bound


def test_the_rate_warms_up_and_falls_to_its_share(tmp_path):
  changes = {"learning_rate": 0.5, "warmup_steps": 4, "steps": 12, "final_rate": 0.25}
  rate = build.schedule(dlrm_smoke("synthetic", tmp_path, **changes), 0.5)
  halfway = 0.5 * (0.25 + 0.75 / 2)  # of the cosine
  np.testing.assert_allclose([rate(n) for n in (0, 2, 4, 8, 12)], [0, 0.25, 0.5, halfway, 0.125])
