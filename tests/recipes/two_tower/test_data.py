"""Protocols, splits and batches: what is kept, who sees what, and errors that name the line."""

import jax
import numpy as np
import pytest
import recipe_runs
import scipy.stats
from cases import each
from recipe_runs import lists_of, two_tower_smoke
from small_data import write_gowalla, write_movielens100k

from recipes.sequence.data import EvalBatches, SequenceData
from recipes.tables.transforms import Entities
from recipes.tables.values import SPLITS
from recipes.two_tower import data, train


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
  config = two_tower_smoke("synthetic", tmp_path_factory.mktemp("data"))
  return config, data.load(config)


# --- protocols ------------------------------------------------------------------------------------


@pytest.mark.ci
def test_movielens1m_by_hand(tmp_path):
  folder = tmp_path / "raw"
  folder.mkdir()
  (folder / "users.dat").write_text("1::F::1::10::48067\n7::M::56::16::70072\n8::M::56::16::7\n")
  (folder / "movies.dat").write_text("20::A (1995)::Drama|Comedy\n30::B::Comedy\n40::C::Drama\n")
  rows = [(1, 20, 3), (1, 30, 5), (1, 40, 2), (7, 20, 4), (7, 30, 5), (7, 40, 4), (8, 20, 5)]
  lines = "".join(f"{u}::{m}::{r}::9\n" for u, m, r in rows)
  (folder / "ratings.dat").write_text(lines)
  config = two_tower_smoke("movielens1m", tmp_path, data_dir=str(folder), core=2)
  with pytest.raises(ValueError, match="the valid split is empty"):  # two rows a user
    data.load(config)
  many = [(u, m, 3) for u in (1, 7, 8) for m in (20, 30, 40)]
  (folder / "ratings.dat").write_text("".join(f"{u}::{m}::{r}::9\n" for u, m, r in many))
  found = data.load(config)
  assert (found.num_users, found.num_items) == (3, 3)
  assert found.splits == {"train": (0, 3), "valid": (3, 6), "test": (6, 9)}
  items = Entities.load(found.serve, "items")
  assert items.titles == ["A (1995)", "B", "C"]
  genres = np.array([*items.transforms.vocabulary("genres"), "none"])
  ids = found.inputs("item", np.arange(3))["genres"].values
  assert genres[ids][:, :2].tolist()[0] == ["Drama", "Comedy"]


@pytest.mark.weekly
def test_movielens1m_has_the_published_counts(tmp_path):
  """Downloads the published archive: 6,033 users, 3,123 items and 834,449 rows."""
  config = recipe_runs.load("two_tower.movielens1m", "")
  config.cache_dir = str(tmp_path)
  found = data.load(config)
  assert (found.num_users, found.num_items, len(found.columns["user"])) == (6033, 3123, 834449)


def test_gowalla_is_as_given(tmp_path):
  folder = write_gowalla(tmp_path / "raw")
  found = data.load(two_tower_smoke("gowalla", tmp_path, data_dir=str(folder)))
  users, items = (Entities.load(found.serve, name).texts for name in ("users", "items"))
  for split in SPLITS:
    given = set()
    for line in (folder / f"{split}.txt").read_text().splitlines():
      user, *chosen = line.split()
      given |= {(user, item) for item in chosen}
    start, stop = found.splits[split]
    pairs = zip(found.columns["user"][start:stop], found.columns["item"][start:stop], strict=True)
    assert {(users[user], items[item]) for user, item in pairs} == given
    assert stop - start == len(given)


@pytest.mark.ci
def test_gowalla_without_a_validation_file(tmp_path):
  folder = write_gowalla(tmp_path / "raw", valid=False)
  found = data.load(two_tower_smoke("gowalla", tmp_path, data_dir=str(folder)))
  sizes = {name: stop - start for name, (start, stop) in found.splits.items()}
  assert sizes == {"train": 80 * 13, "valid": 80, "test": 80 * 4}


def test_gowalla_refit_trains_on_all_that_is_not_tested(tmp_path):
  folder = write_gowalla(tmp_path / "raw")
  held = data.load(two_tower_smoke("gowalla", tmp_path, data_dir=str(folder)))
  found = data.load(two_tower_smoke("gowalla", tmp_path, data_dir=str(folder), valid=0.0))
  assert (found.matrix("train") != held.matrix("train", "valid")).nnz == 0
  assert (found.matrix("test") != held.matrix("test")).nnz == 0
  assert found.splits["valid"][0] == found.splits["valid"][1]


@pytest.mark.ci
def test_movielens100k_is_eighty_twenty(tmp_path):
  found = data.load(two_tower_smoke("movielens100k", tmp_path))
  sizes = {name: stop - start for name, (start, stop) in found.splits.items()}
  assert sum(sizes.values()) == 1000
  (genres,) = [feature for feature in found.features["item"] if feature.name == "genres"]
  assert 6 <= genres.valency <= 7  # of every third column


# --- batches --------------------------------------------------------------------------------------


def test_splits_are_disjoint_and_ordered(loaded):
  _, found = loaded
  user, item, place = (np.asarray(found.columns[name]) for name in ("user", "item", "place"))
  assert len(set(zip(user.tolist(), item.tolist(), strict=True))) == len(user)
  assert found.splits["train"][0] == 0
  for split, (start, stop) in found.splits.items():
    assert (np.diff(user[start:stop]) >= 0).all()
    offsets = found.columns[f"{split}_offsets"]
    assert (offsets[0], offsets[-1]) == (start, stop)
    np.testing.assert_array_equal(
      np.arange(start, stop), offsets[user[start:stop]] + place[start:stop]
    )
  assert user.max() < found.num_users
  assert item.max() < found.num_items
  assert all(len(digest) == 64 for digest in found.sha256.values())


def test_training_batches(loaded):
  config, found = loaded
  source = data.TrainBatches(found, config)
  train = found.matrix("train")
  assert len(source) == config.steps
  for number in range(len(source)):
    batch = source[number]
    user, positive = batch["query"]["user"], batch["positive"]["candidate"]["item"]
    history = batch["query"]["history"].values
    assert history.shape == (config.batch_size, config.history)
    assert (train[user, positive] == 1).all()
    for row in range(config.batch_size):
      items = history[row][history[row] >= 0].tolist()
      others = set(train[user[row]].indices.tolist()) - {positive[row]}
      assert len(items) == len(set(items)) == min(config.history, len(others))
      assert set(items) <= others
    assert batch["negative"]["candidate"]["item"].shape == (config.negatives.number,)


@pytest.mark.ci
def test_a_long_history_is_sampled_evenly(tmp_path):
  config = two_tower_smoke("synthetic", tmp_path, history=4, steps=400, mean_items=40)
  found = data.load(config)
  source = data.TrainBatches(found, config)
  user = int(np.argmax(np.diff(found.columns["train_offsets"])))
  own, counts = found.matrix("train")[user].indices, np.zeros(found.num_items)
  for number in range(400):
    batch = source[number]
    for row in np.flatnonzero(batch["query"]["user"] == user):
      np.add.at(counts, batch["query"]["history"].values[row], 1)
  assert counts.sum() == counts[own].sum()
  assert scipy.stats.chisquare(counts[own]).pvalue > 1e-3


def test_batches_do_not_depend_on_who_reads_them(loaded):
  config, found = loaded
  config = config.copy_and_resolve_references()
  whole = data.TrainBatches(found, config)[4]
  parts = [data.TrainBatches(found, config, shard=(i, 4))[4] for i in range(4)]
  joined = jax.tree.map(lambda *x: np.concatenate(x), *parts)
  jax.tree.map(np.testing.assert_array_equal, joined, whole)
  split = data.EvalBatches(found, "test", config)[0]
  parts = [data.EvalBatches(found, "test", config, shard=(i, 4))[0] for i in range(4)]
  joined = jax.tree.map(lambda *x: np.concatenate(x), *parts)
  jax.tree.map(np.testing.assert_array_equal, joined, split)


def test_evaluation_sees_everybody_once(loaded):
  config, found = loaded
  cases = [("valid", ("train",), "users"), ("test", ("train", "valid"), "users")]
  for split, before, examples in [*cases, ("test", ("train", "valid"), "rows")]:
    config = config.copy_and_resolve_references()
    config.examples = examples
    relevant, seen = found.matrix(split), found.matrix(*before)
    source, users, pairs = data.EvalBatches(found, split, config), [], []
    for number in range(len(source)):
      batch = source[number]
      for row in np.flatnonzero(batch["mask"]):
        user = batch["query"]["user"][row]
        users.append(user)
        own = lambda name: sorted(batch[name][row][batch[name][row] >= 0].tolist())  # noqa: B023
        pairs += [(user, item) for item in own("relevant")]
        assert own("seen") == sorted(seen[user].indices.tolist())
        history = batch["query"]["history"].values[row]
        assert len(history[history >= 0]) == min(len(own("seen")), config.eval_history)
        assert set(history[history >= 0]) <= set(own("seen"))
    assert sorted(pairs) == sorted(zip(*map(np.ndarray.tolist, relevant.nonzero()), strict=True))
    if config.examples == "users":
      assert len(users) == len(set(users)) == np.count_nonzero(np.diff(relevant.indptr))


def test_a_long_history_is_thinned_out_evenly_for_evaluation(tmp_path):
  config = two_tower_smoke("synthetic", tmp_path, eval_history=3)
  found = data.load(config)
  batch = data.EvalBatches(found, "test", config)[0]
  for user, history in zip(batch["query"]["user"], batch["query"]["history"].values, strict=True):
    bounds = [found.columns[f"{name}_offsets"][user : user + 2] for name in ("train", "valid")]
    own = np.concatenate([found.columns["item"][start:stop] for start, stop in bounds])
    assert history.tolist() == [own[len(own) * i // 3] for i in range(3)]


def test_what_comes_later_trains_no_query(tmp_path):

  def check(ordered):
    found = lists_of([[10, 11, 12, 13], [20, 21]], [[14], [22]], [[15], [23]], ordered=ordered)
    config = two_tower_smoke("synthetic", tmp_path, batch_size=6, steps=8, history=3)
    of_item = {}
    for number in range(8):
      batch = data.TrainBatches(found, config)[number]
      items, histories = batch["positive"]["candidate"]["item"], batch["query"]["history"].values
      for item, history in zip(items, histories, strict=True):
        of_item.setdefault(int(item), set()).add(tuple(sorted(history.tolist())))
    if ordered:
      assert of_item == {
        10: {(-1, -1, -1)}, 11: {(-1, -1, 10)}, 12: {(-1, 10, 11)}, 13: {(10, 11, 12)},
        20: {(-1, -1, -1)}, 21: {(-1, -1, 20)},
      }  # fmt: skip
    else:
      assert of_item[10] == {(11, 12, 13)}
      assert of_item[20] == {(-1, -1, 21)}
    config.history, many = 2, set()
    for number in range(8):
      batch = data.TrainBatches(found, config)[number]
      rows = batch["query"]["history"].values[batch["positive"]["candidate"]["item"] == 13]
      many |= {tuple(sorted(row.tolist())) for row in rows}
    assert len(many) > 1  # another choice every time
    assert all(len(set(row)) == 2 and set(row) <= {10, 11, 12} for row in many)

  each([(case,) for case in [True, False]], check)


def test_a_test_asks_with_the_validation_items_as_the_other_recipes_do(tmp_path):
  lists = [[3, 1, 4, 5, 9, 2], [6, 8, 7, 0]]
  parts = (slice(-2), slice(-2, -1), slice(-1, None))
  found = lists_of(*([items[part] for items in lists] for part in parts))
  config = two_tower_smoke("synthetic", tmp_path, eval_batch_size=2)
  columns = {"items": np.concatenate(lists), "offsets": np.array([0, 6, 10])}
  sequences = SequenceData(columns, {"num_items": 10})
  sequence = recipe_runs.load("sequence.synthetic")
  sequence.eval_batch_size = 2
  for split in ("valid", "test"):
    batch = data.EvalBatches(found, split, config)[0]
    asked = EvalBatches(sequences, split, sequence)[0]
    assert batch["query"]["user"].tolist() == asked["user"].tolist() == [1, 0]
    np.testing.assert_array_equal(batch["query"]["history"].values, asked["items"])
    np.testing.assert_array_equal(batch["seen"], asked["seen"])
    np.testing.assert_array_equal(batch["relevant"].max(axis=1), asked["target"][:, 0])
  config.exclude_seen = False
  assert (data.EvalBatches(found, "test", config)[0]["seen"] == -1).all()


@pytest.mark.ci
def test_a_long_list_widens_its_own_batch_alone(tmp_path):
  examples = "rows"
  lengths = [500, *[5] * 8, 40]
  train = [list(range(length)) for length in lengths]
  found = lists_of(train, [[600]] * 10, [[700, 701]] * 10)
  changes = {"eval_batch_size": 2, "eval_history": 100, "examples": examples}
  source = data.EvalBatches(found, "test", two_tower_smoke("synthetic", tmp_path, **changes))
  batches = [source[number] for number in range(len(source))]
  assert (batches[0]["seen"].shape[1], batches[-1]["seen"].shape[1]) == (16, 1024)
  assert len({batch["seen"].shape for batch in batches}) <= 3
  assert batches[-1]["query"]["history"].values.shape == (2, 100)
  assert batches[0]["query"]["history"].values.shape == (2, 16)
  users = np.concatenate([batch["query"]["user"][batch["mask"]] for batch in batches])
  assert sorted(users.tolist()) == sorted([*range(10)] * 2)


def test_negatives_are_drawn_from_the_whole_catalogue(tmp_path):
  config = two_tower_smoke("synthetic", tmp_path, steps=40, **{"negatives.number": 512})
  found = data.load(config)
  source, counts = data.TrainBatches(found, config), np.zeros(found.num_items)
  for number in range(40):
    np.add.at(counts, source[number]["negative"]["candidate"]["item"], 1)
  assert scipy.stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.ci
def test_unknown_names(tmp_path):
  config = two_tower_smoke("synthetic", tmp_path, examples="items")
  with pytest.raises(ValueError, match=r"config\.examples is 'items': choose users, rows"):
    train.check(config, None)


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize(
  ("text", "message"), [("", r"test\.txt is empty"), ("7\n8\n", "the test split is empty")]
)
def test_damage_to_gowalla_is_named(text, message, tmp_path):
  folder = write_gowalla(tmp_path / "raw")
  (folder / "test.txt").write_text(text)
  with pytest.raises(ValueError, match=message):
    data.load(two_tower_smoke("gowalla", tmp_path, data_dir=str(folder)))


@pytest.mark.ci
def test_missing_files_are_named(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"LightGCN.*--config\.data_dir"):
    data.load(two_tower_smoke("gowalla", tmp_path, data_dir=""))
  folder = write_gowalla(tmp_path / "raw")
  (folder / "test.txt").unlink()
  with pytest.raises(FileNotFoundError, match=r"has no test\.txt.*LightGCN"):
    data.load(two_tower_smoke("gowalla", tmp_path, data_dir=str(folder)))
  folder = write_movielens100k(tmp_path / "ml")
  (folder / "u.item").unlink()
  with pytest.raises(FileNotFoundError, match=r"has no u\.item.*ml-100k\.zip"):
    data.load(two_tower_smoke("movielens100k", tmp_path, data_dir=str(folder)))
