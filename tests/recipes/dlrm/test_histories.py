"""Histories in list columns: their last values by hand, and models that attend to them."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import ways
from flax import nnx
from ml_collections import ConfigDict
from served_models import own_probabilities, run_of
from small_tables import completed, write_csv

import embed
from recipes import evaluate, export, serving
from recipes.dlrm import data, histories
from recipes.errors import UserError
from recipes.training.features import Feature, cut_ids

HEADER = ("movie", "genre", "clicked", "part", "seen", "liked", "genres")
ROWS = [
  ("a", "x", 1, "train", "", "", ""),
  ("b", "y", 0, "train", "a|b|a|b", "a", "x|y|x|y"),
  ("b", "x", 1, "valid", "b|", "", "y|NA"),
  ("a", "x", 0, "valid", "c", "", "x"),
  ("a", "y", 0, "test", "[null, 'a']", "['a']", "|z"),
  ("b", "x", 1, "test", "", "", ""),
]
_PAST = {"kind": "sequence", "min_count": 1, "max_length": 3}
COLUMNS = {
  "movie": "item",
  "genre": {"kind": "category", "min_count": 1},
  "clicked": "label",
  "part": "split",
  "seen": _PAST | {"table": "movie"},
  "liked": _PAST | {"table": "movie"},
  "genres": _PAST | {"table": "genre"},
}


def load(tmp_path, rows=ROWS, columns=COLUMNS, **given):
  path = write_csv(tmp_path / "log.csv", HEADER, rows)
  return data.load(completed("dlrm", tmp_path / "cache", files=str(path), columns=columns, **given))


def test_the_last_values_by_hand(tmp_path):
  loaded = load(tmp_path)
  ids, none = cut_ids(loaded.columns["ids"], loaded.features), [-1, -1, -1]
  # Training has 4 a and 3 b, 3 x and 3 y; 2 is the row of unknown ones.
  assert ids["seen"].tolist() == [none, [1, 0, 1], [1, -1, -1], [2, -1, -1], [0, -1, -1], none]
  assert ids["liked"].tolist() == [none, [0, -1, -1], none, none, [0, -1, -1], none]
  assert ids["genres"].tolist() == [none, [1, 0, 1], [1, -1, -1], [0, -1, -1], [2, -1, -1], none]
  assert {f.name: f.history for f in loaded.features if f.history} == {
    "seen": "movie", "liked": "movie", "genres": "genre",
  }  # fmt: skip


# --- models ---------------------------------------------------------------------------------------


def test_din_by_hand():
  din = histories.DIN(2, (), dtype=jnp.float32, rngs=nnx.Rngs(0))  # a linear weight
  din.out.kernel[...] = jnp.array([0, 0, 0, 0, 0.0, 1.0, 1.0, 1.0])[:, None]  # (k - q)[1] + k q
  keys = np.array([[[1.0, 0.0], [2.0, 1.0], [9.0, 9.0]]], np.float32)
  query, mask = np.array([[1.0, 1.0]], np.float32), np.array([[True, True, False]])
  # The first weighs (0 - 1) + 1 = 0, the second (1 - 1) + 3 = 3; the third is none.
  output = nnx.jit(lambda din, *given: din(*given))(din, keys, query, mask)
  np.testing.assert_allclose(output, [[6.0, 3.0]])


def attending(name, features, *, dim=4, linear=0):
  config = ConfigDict({"history": {"model": name}, "dropout": 0.0, "dim": dim})
  options = {"linear": linear, "dtype": jnp.float32, "rngs": nnx.Rngs(0)}
  return histories.Histories(config, features, **options)


@pytest.mark.parametrize("name", ["din", *ways.ci("transformer", "hstu")])
@pytest.mark.programs(20, "an encoder is initialized")
def test_masks_places_and_the_candidate(name):
  features = (Feature("item", 9), Feature("seen", 9, valency=5, table="item", history="item"))
  model = attending(name, features).models["seen"]
  draw = np.random.default_rng(0)
  keys, query = draw.normal(size=(3, 5, 4)), draw.normal(size=(3, 4))
  lengths = np.array([5, 3, 0])
  mask = np.arange(5) < lengths[:, None]
  call = nnx.jit(lambda model, keys, query: model(keys, query, mask))
  ask = lambda keys, query: np.asarray(call(model, np.float32(keys), np.float32(query)))
  found = ask(keys, query)
  noise = np.where(mask[..., None], keys, 99.0)
  np.testing.assert_allclose(ask(noise, query), found, atol=1e-6)  # padding is not seen
  assert np.isfinite(found).all()
  if name == "din":
    np.testing.assert_array_equal(found[2], 0)
  assert np.abs(ask(keys, -query) - found)[:2].max(axis=1).min() > 1e-3
  turned = keys.copy()
  turned[1, :3] = keys[1, 2::-1]
  same = np.allclose(ask(turned, query)[1], found[1], atol=1e-5)
  assert same == (name == "din")  # a sum has no order, and places have one


FEATURES = (
  Feature("item", 9),
  Feature("city", 3),
  Feature("bought", 9, valency=3, table="item", history="item"),
  Feature("cities", 3, valency=1, table="city", history="city"),
)


@nnx.jit
def call(module, activations, inputs):
  return module.arguments("bought", activations, inputs), module(activations, inputs)


def test_positions_meet_the_candidate():
  module = attending("din", FEATURES, dim=2, linear=1)
  shapes = {"item": (1, 3), "city": (1, 3), "bought": (1, 3, 3), "cities": (1, 1, 3)}
  activations = {n: np.arange(np.prod(s), dtype=np.float32).reshape(s) for n, s in shapes.items()}
  inputs = {"bought": embed.Padded(np.array([[4, 2, -1]])), "cities": np.array([1])}
  (keys, query, mask), made = call(module, activations, inputs)
  assert keys[0].tolist() == [[0, 1], [3, 4], [6, 7]]
  assert query.tolist() == [[0, 1]]
  assert mask.tolist() == [[True, True, False]]
  assert {x.shape for x in made.values()} == {(1, 3)}
  assert (made["bought"][0, 2], made["cities"][0, 2]) == ((2 + 5) / 2, 2)  # of the linear model
  with pytest.raises(UserError, match="'bought' shares its table with no single value"):
    attending("din", FEATURES[1:])


# --- serving --------------------------------------------------------------------------------------


def log():
  """Returns drawn rows, of which one in six has no history."""
  draw, rows = np.random.default_rng(0), []
  for i in range(300):
    count = int(draw.integers(6))
    seen, genres = (draw.integers(n, size=count).tolist() for n in (50, 9))
    movie, genre, clicked = (int(draw.integers(n)) for n in (50, 9, 2))
    row = (f"i{movie}", f"s{genre}", clicked, ("train", "valid", "test")[i % 3])
    lists = ([f"i{x}" for x in seen], [f"i{x}" for x in seen[::2]], [f"s{x}" for x in genres])
    rows.append(dict(zip(HEADER, (*row, *lists), strict=True)))
  return rows


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """Returns a function that makes a run of a model and exports it: training, folder, log."""

  @functools.cache
  def of(model):
    folder, rows = tmp_path_factory.mktemp(model), log()
    written = [["|".join(x) if isinstance(x, list) else x for x in row.values()] for row in rows]
    path = write_csv(folder / "log.csv", HEADER, written)
    table = {"files": str(path), "columns": COLUMNS, "batch_size": 64, "dim": 4}
    training = run_of("dlrm", table | {"history": {"model": model}}, folder / "run")
    return training, export.export(folder / "run", folder / "served", platforms=("cpu",)), rows

  return of


def in_order(rows):
  """Returns rows as a run writes them, those of a split together."""
  return [row for part in ("train", "valid", "test") for row in rows if row["part"] == part]


@pytest.mark.ci
@pytest.mark.parametrize("model", ["din", *ways.weekly("transformer", "hstu")])
def test_an_export_answers_as_the_run(model, run):
  training, folder, rows = run(model)
  expected, served = own_probabilities(training), serving.load(folder)
  assert np.ptp(expected) > 0.05
  np.testing.assert_allclose(served.predict(in_order(rows)), expected, atol=1e-6, rtol=0)


@pytest.mark.ci
def test_other_files_are_measured(run):
  training, folder, rows = run("din")
  expected = own_probabilities(training)
  label = np.array([row["clicked"] for row in in_order(rows)])
  logloss = -np.mean(np.log(np.where(label, expected, 1 - expected)))
  found = evaluate.evaluate(folder.parent / "run", training.config.files)
  assert found["metrics"]["logloss"] == pytest.approx(logloss)


@pytest.mark.ci
def test_requests_with_little_or_wrong_in_them(run):
  _, folder, rows = run("din")
  served, lists = serving.load(folder), ("seen", "liked", "genres")
  row = rows[0] | dict.fromkeys(lists)
  assert set(lists) <= set(served.columns)
  ask = lambda **given: served.predict([row | given])[0]
  none = ask()
  assert ask(seen=[], liked="") == none
  assert 0 < ask(movie="nothing") < 1
  assert ask(seen="i3||new") == ask(seen=["i3", None, "new"]) != none
  with pytest.raises(UserError, match="rows has no column 'genres'"):
    served.predict([{name: row[name] for name in row if name != "genres"}])
