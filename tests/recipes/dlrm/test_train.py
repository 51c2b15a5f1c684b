"""The recipe as users run it: every config in smoke mode, every key read, the result's shape."""

import dataclasses
import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import recipe_runs
from recipe_runs import RESULT, dlrm_smoke, recorded_reads, slow_but

from recipes import baselines as command
from recipes import hosts
from recipes.dlrm import baselines, data, train
from recipes.evaluation.metrics import CLICK_NAMES
from recipes.run import results
from recipes.training import build
from recipes.training.features import Feature

CONFIGS = sorted(path.stem for path in Path("configs/dlrm").glob("*.py"))


@pytest.mark.ci
@pytest.mark.parametrize("name", slow_but(CONFIGS, ("synthetic",)))
def test_every_config_runs_and_every_key_is_read(name, tmp_path, monkeypatch):
  with recorded_reads() as unread:
    for model in ("hstu",) if name == "dlrm_v4" else ("dlrm", "dcnv2", "deepfm"):
      # Vocabularies, dense optimizers and models read different keys; three runs cover them all.
      first = model == "dlrm"
      if name != "synthetic" or not first:
        monkeypatch.setattr(hosts, "start", lambda: None)  # one run on eight devices will do
      changes = {"dense_optimizer": "adamw" if first else "adagrad"}
      if name == "criteo_kaggle":
        changes["vocabulary"] = "hash" if first else "min_count"
      config = dlrm_smoke(name, tmp_path, model=model, **changes)
      check_result(train.run(config, str(tmp_path / model)), config, tmp_path / model)
    assert not unread(config)


def check_result(result, config, workdir):
  assert set(result) == RESULT
  assert json.loads((workdir / "result.json").read_text()) == result
  assert result["config"] == json.loads(json.dumps(config.to_dict()))
  assert result["recipe"] == "dlrm"
  assert (result["seed"], result["steps"]) == (config.seed, config.steps)
  assert list(result["curves"]) == ["test_reliability"]
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


@pytest.mark.ci
def test_the_dense_part_by_adagrad(tmp_path):
  changes = {"learning_rate": 0.5, "warmup_steps": 0, "final_rate": 1.0}
  tx = train.dense_optimizer(
    dlrm_smoke("synthetic", tmp_path, dense_optimizer="adagrad", **changes)
  )
  weights, grads = jnp.zeros(3), jnp.array([3.0, 0.0, -1e-4])
  updates, state = tx.update(grads, tx.init(weights), weights)
  # From an accumulator of 0 the first step is the rate itself, however small the gradient.
  np.testing.assert_allclose(updates, [-0.5, 0.0, 0.5], rtol=1e-6)
  updates, _ = tx.update(grads, state, weights)
  np.testing.assert_allclose(updates, [-0.5 / 2**0.5, 0.0, 0.5 / 2**0.5], rtol=1e-6)


@pytest.mark.parametrize(
  ("name", "given", "rate"),
  [("adam", -1.0, 2e-3), ("rowwise_adagrad", -1.0, 0.2), ("adam", 0.0, 0.0), ("sgd", 0.5, 0.5)],
)
def test_rates_of_tables_go_by_the_optimizer_unless_given(tmp_path, name, given, rate):
  """A rate of 0 leaves the rows as they are, as a warm start may want."""
  changes = {"table.learning_rate": given, "warmup_steps": 0}
  optimizer = build.table_optimizer(dlrm_smoke("synthetic", tmp_path, **changes), name)
  np.testing.assert_allclose(optimizer.learning_rate(0), rate, rtol=1e-6)


def test_unknown_names(tmp_path):
  config = dlrm_smoke("synthetic", tmp_path, **{"table.optimizer": "adamw"})
  with pytest.raises(ValueError, match="unknown table optimizer 'adamw': choose one of"):
    build.table_optimizer(config)
  config.dense_optimizer = "sgd"
  with pytest.raises(ValueError, match="unknown dense optimizer 'sgd': choose adamw or adagrad"):
    train.dense_optimizer(config)
  config.table.optimizer, config.model = "sgd", "xdeepfm"
  with pytest.raises(ValueError, match="unknown model 'xdeepfm': choose dlrm, dcnv2"):
    train.build_model(config, data.load(config))


def test_report_puts_the_baselines_beside_the_run():
  result = {
    "recipe": "dlrm", "config": {"model": "dcnv2"}, "seed": 3, "steps": 9, "tested_step": 6,
    "seconds": 1.0,
    "metrics": {"valid_auc": 0.1, "test_auc": 0.25}, "device": {"kind": "cpu", "count": 1},
    "baselines": {"best possible": {"test_auc": 0.75}},
  }  # fmt: skip
  table = results.report(result).splitlines()
  assert table[1].split() == ["dlrm/dcnv2", "0.2500"]
  assert table[2].split() == ["best", "possible", "0.7500"]
  assert "state of step 6 of 9" in table[3]


def clicks(label, dense, ids, splits, **columns):
  columns |= {"label": label, "dense": dense, "ids": ids}
  columns = {name: np.asarray(column) for name, column in columns.items()}
  return data.ClickData(
    columns, splits, (Feature("city", 3),), {}, {}, dense_names=("price", "age")
  )


def test_the_constant_rate_by_hand(monkeypatch):
  monkeypatch.setattr(baselines, "_ROWS", 3)
  label = np.array([1, 0, 0, 0, 1, 0, 1, 1], np.uint8)
  splits = {"train": (0, 4), "valid": (4, 6), "test": (6, 8)}
  found = clicks(label, np.zeros((8, 2), np.float32), np.zeros((8, 1), np.int32), splits)
  scores = baselines.constant_rate(found)
  assert scores["valid_logloss"] == pytest.approx(-(np.log(0.25) + np.log(0.75)) / 2)
  assert scores["test_logloss"] == pytest.approx(-np.log(0.25))
  assert scores["test_auc"] == 0.5
  weighted = dataclasses.replace(
    found, columns=found.columns | {"weight": np.array([3, 1, 1, 1, 1, 3, 1, 1], np.float32)}
  )
  scores = baselines.constant_rate(weighted)
  assert scores["test_logloss"] == pytest.approx(-np.log(0.5))
  assert scores["valid_logloss"] == pytest.approx(-np.log(0.5))


def test_the_most_telling_column():
  draw = np.random.default_rng(0)
  label, splits = draw.integers(0, 2, 400), {"train": (0, 200), "valid": (200, 300)}
  splits["test"] = (300, 400)
  noise = draw.normal(size=(400, 2)).astype(np.float32)
  city = np.where(draw.random(400) < 0.9, label, 1 - label).astype(np.int32)[:, None]
  name, auc = baselines.most_telling(clicks(label, noise, city, splits))
  assert (name, auc) == ("city", pytest.approx((city[300:, 0] == label[300:]).mean(), abs=0.03))
  leak = noise.copy()
  leak[:, 1] -= 9 * label  # a click makes it smaller
  assert baselines.most_telling(clicks(label, leak, city, splits)) == ("age", 1.0)
  city[:, 0] = np.where(label, 2, -1)  # a missing value tells as much
  assert baselines.most_telling(clicks(label, noise, city, splits)) == ("city", 1.0)


def test_notes_say_what_wins_and_what_is_too_good():
  result = {
    "config": {"select": "valid_auc"},
    "metrics": {"valid_auc": 0.7, "test_auc": 0.75, "test_logloss": 0.7},
    "baselines": {
      "constant rate": {"test_auc": 0.5, "test_logloss": 0.69},
      "logistic regression": {"test_auc": 0.76, "test_logloss": 0.8},
      "best possible": {"test_auc": 0.9, "test_logloss": 0.1},
    },
  }
  (line,) = results.notes(result)
  assert "logistic regression by test auc (0.7600, the model 0.7500)" in line
  assert "constant rate by test logloss (0.6900, the model 0.7000)" in line
  assert line.index("try config.model=wide_deep") < line.index("try a lower")
  result["metrics"] |= {"test_auc": 0.995, "test_logloss": 0.2}
  (line,) = results.notes(result, lambda: ("age", 0.99))
  assert line.startswith("test auc is 0.9950")
  assert "'age' alone has 0.9900" in line
  result["metrics"]["test_auc"] = 0.9
  assert results.notes(result) == []
  ranks = {"test_ndcg@10": 0.1, "test_recall@10": 0.3}
  ranking = {"config": {"select": "valid_ndcg@10"}, "metrics": ranks}
  ranking["baselines"] = {"item kNN": {"test_ndcg@10": 0.2, "test_recall@10": 0.2}}
  assert "item kNN by test ndcg@10 (0.2000" in results.notes(ranking)[0]


@pytest.mark.weekly
def test_the_default_run_approaches_the_best_possible(tmp_path):
  config = recipe_runs.load("dlrm.synthetic", "")
  config.cache_dir = str(tmp_path / "cache")
  train.run(config, str(tmp_path / "run"))
  result = command.fit(tmp_path / "run")
  auc, bound = result["metrics"]["test_auc"], result["baselines"]["best possible"]["test_auc"]
  linear = result["baselines"]["logistic regression"]["test_auc"]
  assert linear + 0.02 < auc < bound
