"""TIGER: the trie by hand, beams against a slow ranking of every item, and the whole run."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import recipe_runs
from flax import nnx
from recipe_runs import sequence_smoke

from recipes import export, hosts
from recipes.run import workdir
from recipes.sequence import data, tiger, train

CODES = np.array([[1, 0, 2], [0, 3, 1], [1, 0, 2], [1, 0, 0], [2, 1, 1], [0, 0, 1]])
COUNTS = np.array([3, 9, 7, 1, 1, 1])
POPULAR = np.arange(12)[::-1] % 5


def test_the_trie_by_hand():
  """Prefixes 0, 1, 2; then 00, 03, 10, 21; then 001, 031, 100, 102, 211, of which 102 has two."""
  trie = tiger.Trie(CODES, COUNTS)
  assert trie.widest == (3, 2, 2, 2)
  children, is_there = trie.children(1, np.array([0, 1, 2]))
  assert is_there.tolist() == [[True, True], [True, False], [True, False]]
  assert children[is_there].tolist() == [0, 1, 2, 3]
  assert trie.prefixes(2, children[is_there]).tolist() == [[0, 0], [0, 3], [1, 0], [2, 1]]
  children, is_there = trie.children(2, np.array([2]))
  assert trie.prefixes(3, children)[0].tolist() == [[1, 0, 0], [1, 0, 2]]
  places, is_there = trie.children(3, np.array([3, 4]))
  assert trie.items[...][places][is_there].tolist() == [2, 0, 4]  # 2 is more popular than 0


def write_codes(folder, items, *, levels=3, size=4):
  """Writes codes of which some items share all; returns the file."""
  codes = np.random.default_rng(1).integers(size, size=(items, levels))
  columns = {
    "id": [str(i + 1) for i in range(items)],
    "codes": pa.array(codes.tolist(), pa.list_(pa.int32())),
  }
  folder.mkdir(exist_ok=True)
  pq.write_table(pa.table(columns), folder / "codes.parquet")
  return folder / "codes.parquet"


def smoke(folder, **changes):
  wanted = {
    "model": "tiger", "loss": "softmax", "tiger.codes": str(write_codes(folder / "c", 60)),
    "tiger.beam": 64, "heads": 2, "ks": (5, 10), "writers": (), "init": "xavier",
    "positions": "end",
  }  # fmt: skip
  return sequence_smoke("beauty", folder, **(wanted | changes))


@nnx.jit
def logits(made, query):
  """Of all codes of every level, after the codes of every item: `[M, B, N, K]`."""
  codes = made.codes[...]
  hidden = jnp.broadcast_to(query[:, None], (len(query), len(codes), query.shape[1]))
  outputs = made.decode(hidden, jnp.broadcast_to(codes[:, :-1], (*hidden.shape[:2], 2)))
  return jnp.stack([made.embed.attend(outputs[:, :, i], f"code_{i}") for i in range(3)])


def ranking(made, query, exclude):
  """Log-probabilities of all items, by a softmax over what continues a prefix; and their order."""
  codes, found = np.asarray(made.codes[...]), np.asarray(logits(made, query))
  score = np.zeros((len(query), len(codes)))
  for item, code in enumerate(codes):
    for level in range(3):
      siblings = sorted({c[level] for c in codes.tolist() if c[:level] == code[:level].tolist()})
      scores = found[level][:, item]
      score[:, item] += scores[:, code[level]] - np.log(np.exp(scores[:, siblings]).sum(axis=1))
  for row, items in enumerate(exclude):
    score[row, items[items >= 0]] = -np.inf
  return score, np.lexsort((np.broadcast_to(-POPULAR, score.shape), -score.round(4)))


@functools.partial(nnx.jit, static_argnums=2)
def top_k(made, query, k, exclude):
  return tiger.top_k(made, query, k, exclude)


@pytest.fixture
def small():
  """A model of 12 items in which three share their codes, with weights far from their start."""
  config = recipe_runs.load("sequence.synthetic", "smoke")
  changes = {"model": "tiger", "tiger.beam": 27, "table.init_scale": 1.0, "heads": 2, "seed": 1}
  config.update_from_flattened_dict(changes)
  codes = np.random.default_rng(3).integers(3, size=(12, 3))
  codes[[4, 7]] = codes[2]
  made = tiger.build_model(config, codes, POPULAR)
  made.eval()
  return made


@pytest.mark.ci
def test_a_wide_beam_ranks_as_the_probabilities_of_all_items(small):
  query = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
  exclude = np.full((5, 4), -1, np.int32)
  exclude[1, 0], exclude[2] = 2, [0, 4, 7, 7]
  scores, order = ranking(small, query, exclude)
  assert np.exp(scores[0, [0, 1, 2, 3, 5, 8, 9, 10]]).sum() == pytest.approx(1, rel=1e-4)
  found_scores, found = map(np.asarray, top_k(small, query, 12, exclude))
  for row in range(5):
    left = int(np.isfinite(scores[row]).sum())
    assert left == 12 - len(set(exclude[row][exclude[row] >= 0].tolist()))
    assert found[row].tolist() == [*order[row][:left], *[-1] * (12 - left)]
    np.testing.assert_allclose(found_scores[row][:left], scores[row][found[row][:left]], atol=1e-4)


@pytest.mark.ci
def test_a_narrow_beam_finds_items_only_and_none_twice(small):
  small.beam = 2
  query = np.random.default_rng(0).normal(size=(20, 8)).astype(np.float32)
  exclude = np.tile(np.arange(3, dtype=np.int32), (20, 1))
  scores, _ = ranking(small, query, exclude)
  found_scores, found = map(np.asarray, top_k(small, query, 4, exclude))
  for row in range(20):
    items = found[row][found[row] >= 0]
    assert len(set(items.tolist())) == len(items) > 0
    assert not set(items.tolist()) & {0, 1, 2}
    np.testing.assert_allclose(found_scores[row][: len(items)], scores[row][items], atol=1e-4)


def test_an_item_is_the_sum_of_its_codes(small):
  tables = [small.embed.tables[f"code_{level}"] for level in range(3)]
  expected = sum(table[code] for table, code in zip(tables, small.codes[...][5], strict=True))
  np.testing.assert_allclose(small.vectors(np.array([[5, -1]]))[0, 0], expected, rtol=1e-5)
  assert not np.any(small.vectors(np.array([-1])))
  params = jax.tree.leaves(nnx.state(small, nnx.Param))
  assert all(np.issubdtype(x.dtype, np.floating) for x in params)  # codes and trie are not trained


@pytest.mark.ci
def test_a_code_knows_the_codes_before_it_only(small):
  query = np.ones((1, 8), np.float32)
  decode = nnx.jit(lambda made, codes: made.decode(query, codes))
  one, two = decode(small, np.array([[0, 1]])), decode(small, np.array([[0, 2]]))
  np.testing.assert_array_equal(one[0, :2], two[0, :2])
  assert np.abs(one[0, 2] - two[0, 2]).max() > 1e-3
  np.testing.assert_allclose(decode(small, np.array([[0]])), one[:, :2], atol=1e-5)


@pytest.mark.ci
def test_the_loss_is_that_of_the_codes_of_the_targets(small):
  items = np.array([[3, 5, -1]], np.int32)
  batch = {
    "items": items, "segments": np.where(items < 0, -1, 0).astype(np.int32),
    "positions": np.array([[0, 1, 0]], np.int32), "targets": np.array([[5, 9, -1]], np.int32),
  }  # fmt: skip
  hidden = np.asarray(nnx.jit(lambda made, batch: made(batch))(small, batch))[0]
  scores, _ = ranking(small, hidden[:2], np.full((2, 1), -1))
  assert float(nnx.jit(tiger.loss_fn)(small, batch)) == pytest.approx(
    -np.mean(scores[[0, 1], [5, 9]]), rel=1e-4
  )


@pytest.mark.weekly
def test_a_run_learns_what_follows_and_resumes(tmp_path, monkeypatch):
  """Three of four items are followed by the next one: hits that no guess reaches."""
  monkeypatch.setattr(hosts, "start", lambda: None)
  changes = {"steps": 60, "eval_every": 30, "log_every": 30, "dim": 16, "warmup_steps": 10}
  changes |= {"learning_rate": 1e-2, "table.learning_rate": 1e-2, "dropout": 0.0, "patience": 0}
  config = smoke(tmp_path, **changes)
  result = train.run(config, str(tmp_path / "run"))
  assert result["metrics"]["test_hr@10"] > 0.6  # 0.17 by chance
  assert "codes" in result["data_sha256"]

  half = tmp_path / "half"

  class Killed(Exception):
    pass

  def stop(self):
    save(self)
    raise Killed

  save = train.Run.save
  with monkeypatch.context() as patch:
    patch.setattr(train.Run, "save", stop)
    with pytest.raises(Killed):
      train.run(config, str(half))
  Path(config.tiger.codes).unlink()  # each run has its own copy
  again = train.run(config, str(half))
  assert again["metrics"] == result["metrics"]
  assert workdir.open_run(half).load().codes is not None
  with pytest.raises(ValueError, match="tiger finds them by a beam search"):
    export.export(half, tmp_path / "served")


@pytest.mark.weekly
def test_one_device_and_eight_rank_alike(tmp_path):
  config, mesh = smoke(tmp_path, **{"table.init_scale": 0.5}), hosts.start()
  loaded, found = data.load(config), []
  for where in (None, mesh):
    made, _ = train.make_state(config, loaded, where)
    hosts.replicate(where, made)
    found.append(train.evaluator(loaded, config, where)(made, "test"))
  assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_published_codes_belong_to_the_items_by_their_first_id(tmp_path):
  path = tmp_path / "x.index.json"
  path.write_text(json.dumps({str(i): [f"<a_{i % 5}>", f"<b_{i}>"] for i in range(60)}))
  config = smoke(tmp_path, **{"tiger.codes": str(path), "tiger.first_id": 1})
  codes = data.load(config).codes
  assert codes.shape == (60, 2)
  assert codes[[0, 7]].tolist() == [[0, 0], [2, 7]]  # ids "1" and "8"
  config.tiger.first_id = 0
  with pytest.raises(ValueError, match=r"no codes of 1 of the 60 items, as '60'.*tiger\.first_id"):
    data.load(config)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"tiger.codes": ""}, r"tiger\.codes is empty.*recipes\.semantic_ids"),
    ({"loss": "bce"}, "loss is 'bce'.*write 'softmax'"),
    ({"tiger.beam": 9}, r"tiger\.beam is 9, fewer than the 10 items of config\.ks"),
    ({"tiger.blocks": 0}, r"tiger\.blocks 0.*choose 1 or more"),
  ],
)
def test_settings_that_make_no_sense(tmp_path, changes, message):
  with pytest.raises(ValueError, match=message):
    train.check(smoke(tmp_path, **changes), None)
