"""The recipe as users run it: every config in smoke mode, every key read, one device or eight."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
import recipe_runs
import ways
from flax import nnx
from recipe_runs import RESULT, lists_of, recorded_reads, two_tower_smoke

import embed
from recipes import baselines as command
from recipes import mesh as mesh_lib
from recipes.evaluation.baselines import ranking
from recipes.training import build
from recipes.two_tower import data, train

# Everything that can be switched on.
RICH = {
  "negatives.number": 16, "dropout": 0.2, "query_hidden": (16,), "candidate_hidden": (16,),
}  # fmt: skip


NAMES = ("recall", "ndcg", "hr", "precision")


@pytest.fixture(autouse=True)
def one_device(monkeypatch, request):
  """The runs here are on one device unless they ask for all."""
  if "mesh" not in request.node.name:
    monkeypatch.setattr(mesh_lib, "start", lambda: None)


@pytest.mark.ci
@pytest.mark.parametrize(
  "name", [*ways.ci("synthetic"), *ways.weekly("gowalla", "movielens100k", "movielens1m")]
)
def test_every_config_runs_and_every_key_is_read(name, tmp_path):
  config = two_tower_smoke(name, tmp_path, **RICH)
  with recorded_reads() as unread:
    check_result(train.run(config, str(tmp_path / "run")), config, tmp_path / "run")
    fitted = {name: task() for name, task in data.load(config).baseline_tasks(config).items()}
    assert not unread(config)
  assert {"popularity", "item kNN"} <= set(fitted)
  for metrics in fitted.values():
    assert f"test_ndcg@{config.ks[0]}" in metrics


def check_result(result, config, workdir):
  assert set(result) == RESULT
  assert json.loads((workdir / "result.json").read_text()) == result
  assert result["recipe"] == "two_tower"
  names = {f"{name}@{k}" for name in NAMES for k in config.ks} | {"mrr"}
  assert set(result["metrics"]) == {f"{split}_{n}" for split in ("valid", "test") for n in names}
  assert all(math.isfinite(value) for value in result["metrics"].values())
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  assert lines[0]["dropped_ids"] == 0
  assert any(config.select in line for line in lines)


def _losses(folder, on_mesh, steps=5, **changes):
  config = two_tower_smoke("synthetic", Path(folder), **dict(changes) | {"steps": steps})
  mesh = meshes.make_mesh() if on_mesh else None
  found = data.load(config)
  model = train.build_model(config, found, mesh)
  optimizer = embed.Optimizer(model, build.dense_optimizer(config))
  mesh_lib.replicate(mesh, model, optimizer)
  step = nnx.jit(train.make_train_step(config, found, mesh), donate_argnums=(0, 1))
  values = []
  for batch in data.train_batches(found, config):
    values.append(float(step(model, optimizer, mesh_lib.to_global(mesh, batch))["loss"]))
  return np.array(values), model


@pytest.mark.ci
def test_on_a_mesh_the_losses_are_those_of_one_device(tmp_path):
  """Sharded tables, and negatives from all devices: with those of its own alone a device would
  have an eighth of them, and another loss."""
  # The masks of dropout are drawn for the layout they are drawn in.
  changes = RICH | {"dropout": 0.0, "table.sharding": "mod", "table.learning_rate": 0.03}
  one, _ = _losses(str(tmp_path), False, **changes)
  spread, model = _losses(str(tmp_path), True, **changes)
  np.testing.assert_allclose(spread, one, rtol=1e-4)
  assert {len(x.sharding.device_set) for x in model.embed.tables.values()} == {8}


@pytest.mark.ci
def test_the_loss_is_the_sampled_softmax_of_the_towers(tmp_path):
  """With half of the correction."""
  config = two_tower_smoke("synthetic", tmp_path, logq=0.5, temperature=0.3, dropout=0.0)
  found = data.load(config)
  model, batch = train.build_model(config, found), data.TrainBatches(found, config)[0]
  counts = jnp.maximum(found.counts("train"), 0.5)

  @nnx.jit
  def both(model, batch):
    value = train.loss_function(config, found.num_items)(model, batch)
    candidates = batch["positive"]["candidate"], batch["negative"]["candidate"]
    query, positive = model(batch["query"], candidates[0])
    _, negative = model(batch["query"], candidates[1])
    ids = jnp.concatenate([candidate["item"] for candidate in candidates])
    rates = counts[ids] * config.batch_size / counts.sum()
    rates += config.negatives.number / found.num_items
    return value, query @ jnp.concatenate([positive, negative]).T / 0.3, ids, rates

  value, logits, ids, expected = both(model, batch)
  wanted = train.sampled_softmax(logits, ids, log_expected=0.5 * np.log(expected))
  assert float(value) == pytest.approx(float(wanted.mean()), rel=1e-5)


@pytest.mark.ci
def test_the_towers_learn_what_popularity_leaves(tmp_path):
  """Its log is added to the logits, so with the correction the batch's own items have none."""
  changes = {"negatives.number": 0, "dropout": 0.0, "popularity": 1.0}
  config = two_tower_smoke("synthetic", tmp_path, **changes)
  found = data.load(config)
  model, batch = train.build_model(config, found), data.TrainBatches(found, config)[0]
  value = nnx.jit(train.loss_function(config, found.num_items))(model, batch)
  candidate = batch["positive"]["candidate"]
  query, item = nnx.jit(lambda m, b: m(b["query"], candidate))(model, batch)
  wanted = train.sampled_softmax(query @ item.T / config.temperature, candidate["item"])
  assert float(value) == pytest.approx(float(wanted.mean()), rel=1e-5)


@pytest.mark.ci
def test_evaluation_is_a_full_ranking(tmp_path):
  config = two_tower_smoke("synthetic", tmp_path, ks=(5,), query=("user",), candidate=("item",))
  found = data.load(config)
  model = train.build_model(config, found)
  tables = {name: np.asarray(table, np.float64) for name, table in model.embed.tables.items()}
  scores = tables["user"] @ (tables["item"] / np.linalg.norm(tables["item"], axis=1)[:, None]).T
  metrics = train.evaluator(found, config)(model, "test")
  wanted = ranking(
    lambda start, stop: scores[start:stop],
    found.matrix("test"),
    found.matrix("train", "valid"),
    (5,),
  )
  assert metrics == pytest.approx(wanted, rel=1e-6)


@pytest.mark.ci
def test_scores_without_towers_are_popularity(tmp_path):
  """With rows of 0 the column of popularity is all: its ranking is the baseline's, of training."""
  draw = np.random.default_rng(0)
  lists = lambda size: [draw.permutation(40)[:size].tolist() for _ in range(30)]
  found = lists_of(lists(9), lists(3), lists(3), num_items=40)
  config = two_tower_smoke("synthetic", tmp_path, candidate=("item",), query=("history",), ks=(5,))
  config.popularity = 0.5
  model = train.build_model(config, found)
  tables = {name: np.zeros(table.shape, np.float32) for name, table in model.embed.tables.items()}
  model.embed.load_tables(tables)
  wanted = found.baseline_tasks(config)["popularity"]()
  metrics = train.evaluator(found, config)(model, "valid")
  assert metrics == pytest.approx({name: wanted[f"valid_{name}"] for name in metrics}, rel=1e-9)


@pytest.mark.ci
def test_an_item_that_training_has_not_had_scores_by_popularity_alone(tmp_path):
  changes = {"query": ("history",), "candidate": ("item",), "popularity": 1.0}
  config = two_tower_smoke("synthetic", tmp_path, **changes)
  model = train.build_model(config, lists_of([[1, 2]], [[0]], [[]], num_items=3))
  vectors = model.candidates({"item": jnp.arange(3)}, jnp.array([-1.0, -2.0, -3.0]))
  np.testing.assert_allclose(jnp.linalg.norm(vectors[:, :-1], axis=1), [0, 1, 1], atol=1e-5)
  assert vectors[:, -1].tolist() == [-1, -2, -3]
  of = lambda *items: model.queries({"history": embed.Padded(jnp.array([items]))})
  np.testing.assert_array_equal(of(0, 2, -1), of(-1, 2, -1))
  assert of(0, 2, -1)[0, -1] == pytest.approx(config.temperature)
  assert not of(0, -1)[0, :-1].any()


@pytest.mark.ci
def test_histories_share_the_items_table_or_have_their_own(tmp_path):
  found = data.load(two_tower_smoke("synthetic", tmp_path))
  shared = train.build_model(two_tower_smoke("synthetic", tmp_path, share_history=True), found)
  apart = train.build_model(two_tower_smoke("synthetic", tmp_path, share_history=False), found)
  assert set(apart.embed.tables) - set(shared.embed.tables) == {"history"}


@pytest.mark.ci
def test_queries_without_history_are_finite(tmp_path):
  config = two_tower_smoke("synthetic", tmp_path, query=("history",))
  model = train.build_model(config, data.load(config))
  empty = {"history": embed.Padded(np.full((2, 3), -1, np.int32))}
  value, grads = embed.value_and_grad(lambda model, query: model.queries(query).sum())(model, empty)
  assert float(value) == 0
  assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(nnx.as_pure(grads.dense)))


def test_a_baseline_is_asked_with_what_the_model_is_asked_with(tmp_path):
  """Item 3 follows item 2 alone, which validates: only who asks with item 2 finds item 3."""
  found = lists_of(
    [[0, 1], [2, 3], [2, 3], [0, 4], [1, 4], [4]], [[2]] + [[]] * 5, [[3]] + [[]] * 5, num_items=5
  )
  config = two_tower_smoke("synthetic", tmp_path, ks=(1,))
  config.baseline.ease_l2 = 0.1
  fits = found.baseline_tasks(config)
  for name in ("item kNN", "EASE"):
    assert fits[name]()["test_hr@1"] == 1.0, name
  assert fits["popularity"]()["test_hr@1"] == 0.0


@pytest.mark.weekly
def test_the_default_run_approaches_the_best_possible(tmp_path):
  config = recipe_runs.load("two_tower.synthetic", "")
  config.cache_dir = str(tmp_path / "cache")
  train.run(config, str(tmp_path / "run"))
  result = command.fit(tmp_path / "run")
  score = lambda name: result["baselines"][name]["test_ndcg@10"]
  assert 1.8 * score("popularity") < result["metrics"]["test_ndcg@10"] < score("best possible")
