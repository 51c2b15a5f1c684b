"""The recipe as users run it: every config in smoke mode, every key read, one device and eight."""

import json
import math
from pathlib import Path

import numpy as np
import optax
import pytest
import recipe_runs
import ways
from cases import refused
from flax import nnx
from parts import prepare
from recipe_runs import recorded_reads, sequence_smoke

import embed
from recipes import baselines as command
from recipes import mesh as mesh_lib
from recipes.sequence import data, train
from recipes.sequence.model import SequenceModel

OTHERS = sorted({path.stem for path in Path("configs/sequence").glob("*.py")} - {"synthetic"})
NAMES = ("recall", "ndcg", "hr", "precision")
METRICS = {
  f"{split}_{name}"
  for split in ("valid", "test")
  for name in ("mrr", *(f"{each}@{k}" for each in NAMES for k in (5, 10)))
}


@pytest.mark.parametrize("name", [*ways.ci("synthetic"), *ways.weekly(*OTHERS)])
def test_every_config_runs_and_every_key_is_read(name, tmp_path, monkeypatch):
  if name != "synthetic":
    monkeypatch.setattr(mesh_lib, "start", lambda: None)  # one run on eight devices will do
  # A loss that samples reads what the other one leaves alone.
  config = sequence_smoke(name, tmp_path, loss="sampled_softmax")
  with recorded_reads() as unread:
    check_result(train.run(config, str(tmp_path / "run")), config, tmp_path / "run")
    assert not unread(config)


def check_result(result, config, workdir):
  assert json.loads((workdir / "result.json").read_text()) == result
  assert result["recipe"] == "sequence"
  assert set(result["metrics"]) == METRICS
  tasks = data.load(config).baseline_tasks(config)
  metrics = {name: task() for name, task in tasks.items()}
  fitted = {"popularity", "item kNN", *(["EASE"] if config.baseline.ease_l2 else [])}
  assert set(metrics) == fitted
  assert all(set(metrics[name]) == METRICS for name in fitted)
  assert all(math.isfinite(value) for value in result["metrics"].values())
  assert all(len(value) == 64 for value in result["data_sha256"].values())
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  assert [line["step"] for line in lines if "loss" in line] == [2, 4, 6]
  assert lines[0]["dropped_ids"] == 0


@pytest.mark.weekly
@pytest.mark.parametrize("model", ["sasrec", "hstu"])
def test_eight_devices_follow_one(model, tmp_path):
  changes = {"model": model, "loss": "sampled_softmax", "steps": 10, "dropout": 0.1}
  config = sequence_smoke("synthetic", tmp_path, **changes)
  mesh = mesh_lib.start()
  assert mesh.size == 8
  one, eight = losses(config, None), losses(config, mesh)
  np.testing.assert_allclose(one[:3], eight[:3], rtol=1e-5)
  np.testing.assert_allclose(one, eight, rtol=1e-3)


def losses(config, mesh):
  loaded = data.load(config)
  model = SequenceModel(config, loaded.num_items, mesh)
  optimizer = embed.Optimizer(model, optax.adamw(config.learning_rate))
  mesh_lib.replicate(mesh, model, optimizer)
  table = model.embed.arrays["item"]["parameters"].get_value()
  assert table.sharding.is_fully_replicated == (mesh is None)
  step = nnx.jit(train.make_train_step(config, loaded, mesh), donate_argnums=(0, 1))
  found = [
    step(model, optimizer, mesh_lib.to_global(mesh, batch))
    for batch in data.train_batches(loaded, config)
  ]
  return np.array([float(metrics["loss"]) for metrics in found])


def test_a_full_softmax_needs_no_samples(tmp_path):
  config = sequence_smoke("synthetic", tmp_path, loss="softmax", **{"negatives.number": 0})
  train.check(config, None)


@pytest.mark.ci
def test_one_device_and_eight_rank_alike(tmp_path):
  config = sequence_smoke("synthetic", tmp_path)
  loaded, mesh = data.load(config), mesh_lib.start()
  found = []
  for where in (None, mesh):
    model = SequenceModel(config, loaded.num_items, where)
    mesh_lib.replicate(where, model)
    found.append(train.evaluator(loaded, config, where)(model, "test"))
  assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.ci
def test_evaluation_against_slow_numpy(tmp_path):
  split = "test"
  config = sequence_smoke("beauty", tmp_path, positions="end")
  loaded = data.load(config)
  model = SequenceModel(config, loaded.num_items)
  found = train.evaluator(loaded, config)(model, split)
  table, ranks = np.asarray(model.embed.tables["item"]), []
  encode = nnx.jit(lambda model, batch: model(batch))
  view = nnx.view(model, deterministic=True)
  sequences = np.split(loaded.columns["items"], loaded.columns["offsets"][1:-1])
  for sequence in sequences:
    history = sequence[: len(sequence) - data.HELD_OUT[split]]
    target = sequence[len(history)]
    width = config.max_length
    batch = {"items": np.full((1, width), -1), "segments": np.full((1, width), -1)}
    batch["positions"] = np.zeros((1, width), np.int32)
    batch["items"][0, : len(history)] = history
    batch["segments"][0, : len(history)] = 0
    batch["positions"][0, : len(history)] = np.arange(width - len(history), width)
    scores = table @ np.asarray(encode(view, batch))[0, len(history) - 1]
    scores[history] = -np.inf
    ranks.append(1 + int(np.sum(scores > scores[target])) if target not in history else 1_000)
  ranks = np.array(ranks)
  assert found["hr@10"] == pytest.approx(np.mean(ranks <= 10))
  ndcg = np.where(ranks <= 10, 1 / np.log2(ranks + 1), 0).mean()
  assert found["ndcg@10"] == pytest.approx(ndcg)
  assert 0 < found["hr@5"] < found["hr@10"]


def test_cutoffs_beyond_the_catalogue_end_before_training(tmp_path):
  config = sequence_smoke("synthetic", tmp_path, ks=(5, 1000), select="valid_ndcg@5")
  with pytest.raises(ValueError, match=r"config\.ks is \(5, 1000\).* --config\.ks='\(5,\)'"):
    prepare("sequence", config)


def test_settings_that_make_no_sense(tmp_path):
  cases = [
    ({"negatives.number": 17}, r"negatives\.number is 17.*multiple of the 8 devices.* 16"),
    ({"loss": "hinge"}, "config.loss is 'hinge': choose softmax"),
    ({"model": "gru4rec"}, "config.model is 'gru4rec': choose sasrec"),
  ]
  mesh = mesh_lib.start()
  check = lambda changes: train.check(sequence_smoke("synthetic", tmp_path, **changes), mesh)
  refused(cases, check, ValueError)


@pytest.mark.weekly
@pytest.mark.parametrize("model", ["sasrec", "hstu"])
def test_the_default_run_approaches_the_best_possible(model, tmp_path):
  """Seen: 0.870 (SASRec) and 0.875 (HSTU) of the best possible, and twice EASE."""
  config = recipe_runs.load("sequence.synthetic", "")
  config.cache_dir, config.model = str(tmp_path / "cache"), model
  train.run(config, str(tmp_path / "run"))
  result = command.fit(tmp_path / "run")
  found, best = (
    m["test_ndcg@10"] for m in (result["metrics"], result["baselines"]["best possible"])
  )
  assert 0.84 * best < found < best
  assert found > 1.8 * result["baselines"]["EASE"]["test_ndcg@10"]
