"""Histories of a log: positions by hand, no look ahead anywhere, and models that attend to them."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import ways
from cases import refused
from flax import nnx
from ml_collections import ConfigDict
from served_models import own_probabilities, run_of
from small_tables import completed, write_csv

import embed
from recipes import evaluate, export, serving
from recipes.dlrm import data, histories
from recipes.errors import UserError
from recipes.training.features import Feature, cut_ids

HEADER = ("who", "what", "where", "clicked", "when", "part")
ROWS = [
  ("ann", "a", "x", 1, 10, "train"),
  ("bob", "a", "x", 1, 20, "train"),
  ("ann", "b", "y", 0, 20, "train"),
  ("ann", "c", "x", 1, 20, "valid"),  # at the time of the row before
  ("ann", "a", "", 0, 31, "test"),
  ("cid", "b", "y", 0, 25, "valid"),
  ("bob", "c", "y", 1, 40, "test"),
]
SEEN = {"kind": "sequence", "of": "what", "max_length": 2}
PLACES = {"kind": "sequence", "of": "where", "max_length": 2}
LIKED = {"kind": "sequence", "of": "what", "where": "clicked", "max_length": 3}
COLUMNS = {
  "who": "user",
  "what": "item",
  "where": {"kind": "category", "min_count": 1},
  "clicked": "label",
  "when": "time",
  "part": "split",
  "seen": SEEN,
  "places": PLACES,
}


def load(tmp_path, rows=ROWS, columns=COLUMNS, **given):
  path = write_csv(tmp_path / "log.csv", HEADER, rows)
  return data.load(completed("dlrm", tmp_path / "cache", files=str(path), columns=columns, **given))


def ids_of(loaded, rows=slice(None)):
  return cut_ids(loaded.columns["ids"][rows], loaded.features)


def test_histories_by_hand(tmp_path):
  loaded = load(tmp_path, columns=COLUMNS | {"liked": LIKED})
  ids, none = ids_of(loaded), [-1, -1]
  # Training has a and b, and x and y; 2 is the row of unknown ones. Splits: 3, 2 and 2 rows.
  assert ids["what"].tolist() == [0, 0, 1, 2, 1, 0, 2]
  assert ids["seen"].tolist() == [none, none, [0, -1], [0, -1], none, [1, 2], [0, -1]]
  assert ids["places"].tolist() == [none, none, [0, -1], [0, -1], none, [1, 0], [0, -1]]
  assert ids["liked"].tolist()[5:] == [[0, 2, -1], [0, -1, -1]]
  by_name = {feature.name: feature for feature in loaded.features}
  assert by_name["seen"].table == by_name["liked"].table == "what"
  assert by_name["places"].table == "where"
  some = np.array([5, 0])
  np.testing.assert_array_equal(loaded.columns["ids"][some], loaded.columns["ids"][:][some])
  assert sorted(loaded.columns) == ["dense", "ids", "label"]


def test_declarations_that_make_no_sense(tmp_path):
  cases = [
    ({"who": "category"}, "no column is declared as 'user', whose earlier rows 'seen' holds"),
    ({"when": "category"}, "no column is declared as 'time', which says what rows 'seen' holds"),
    ({"seen": SEEN | {"of": "shop"}}, r"columns\['seen'\]\.of is 'shop': name a declared item"),
    ({"seen": SEEN | {"of": "part"}}, "name a declared item, or a category of one value"),
    ({"seen": LIKED | {"where": "where"}}, r"\.where is 'where': name a declared label"),
    ({"seen": SEEN | {"table": "what"}}, "of names values of earlier rows"),
    (
      {"seen": SEEN, "more": SEEN | {"combiner": "sum"}},
      "'seen' and 'more' share the table 'what', and differ in combiner",
    ),
    ({"seen": LIKED | {"of": ""}}, "where is for a history: name its column with of"),
  ]

  refused(cases, lambda changes: load(tmp_path, columns=COLUMNS | changes), UserError)


# --- no look ahead --------------------------------------------------------------------------------

# Ids are whole numbers with a row each, so that no vocabulary depends on the later rows.
FREE = COLUMNS | {
  "what": {"kind": "item", "size": 50},
  "where": {"kind": "category", "size": 9},
  "who": {"kind": "user", "size": 12},
  "seen": SEEN | {"max_length": 4},
  "places": PLACES | {"max_length": 4},
  "liked": LIKED,
}
NOW = 55  # of times from 0 to 99


def log(changed: bool):
  """Returns rows in no order; if changed, all of what is later than `NOW` is another.

  Rows of that time itself, which are not in each other's histories, keep their users.
  """
  draw = np.random.default_rng(0)
  rows, later = [], np.random.default_rng(1)
  for i in range(300):
    when = int(draw.integers(100))
    row = [*map(int, (draw.integers(10), draw.integers(50), draw.integers(9), draw.integers(2)))]
    if changed and when >= NOW:
      row[1:3] = int(later.integers(50)), int(later.integers(9))
    if changed and when > NOW:
      row[0], when = int(later.integers(12)), int(later.integers(NOW + 1, 200))
    rows.append((*row, when, ("train", "valid", "test")[i % 3]))
  return rows


def test_no_later_row_changes_an_earlier_history(tmp_path):
  rows, before = log(False), []
  for folder, changed in (("one", False), ("other", True)):
    (tmp_path / folder).mkdir()
    loaded = load(tmp_path / folder, log(changed), columns=FREE)
    order = [row for part in ("train", "valid", "test") for row in rows if row[5] == part]
    early = np.array([row[4] <= NOW for row in order])  # those of the time itself as well
    trained = next(iter(data.eval_batches(loaded, "train", 100)))["features"]["seen"].values
    tested = next(iter(data.eval_batches(loaded, "test", 100)))["features"]["seen"].values
    parts = ids_of(loaded)
    history = [parts[name][early] for name in ("seen", "places", "liked")]
    is_early = early[:100], early[-100:]
    before.append([*history, trained[is_early[0]], tested[is_early[1]]])
    assert any((np.asarray(part) >= 0).any() for part in history)
    assert loaded.columns["ids"][:][~early].any()
  assert sum(row[4] < NOW for row in order) < early.sum() < len(rows)
  for one, other in zip(*before, strict=True):
    np.testing.assert_array_equal(one, other)


# --- models ---------------------------------------------------------------------------------------


def test_din_by_hand():
  din = histories.DIN(2, (), dtype=jnp.float32, rngs=nnx.Rngs(0))  # a linear weight
  din.out.kernel[...] = jnp.array([0, 0, 0, 0, 0.0, 1.0, 1.0, 1.0])[:, None]  # (k - q)[1] + k q
  keys = np.array([[[1.0, 0.0], [2.0, 1.0], [9.0, 9.0]]], np.float32)
  query, mask = np.array([[1.0, 1.0]], np.float32), np.array([[True, True, False]])
  # The first weighs (0 - 1) + 1 = 0, the second (1 - 1) + 3 = 3; the third is none.
  output = nnx.jit(lambda din, *given: din(*given))(din, keys, query, mask)
  np.testing.assert_allclose(output, [[6.0, 3.0]])


def attending(name, features, widths, linear=0):
  config, options = ConfigDict({"history": {"model": name}, "dropout": 0.0}), {"linear": linear}
  options |= {"dtype": jnp.float32, "rngs": nnx.Rngs(0)}
  return histories.Histories(config, features, widths, **options)


@pytest.mark.parametrize("name", ["din", *ways.ci("transformer", "hstu")])
@pytest.mark.programs(20, "an encoder is initialized")
def test_masks_places_and_the_candidate(name):
  features = (Feature("item", 9), Feature("seen", 9, valency=5, table="item", history="item"))
  model = attending(name, features, dict.fromkeys(("item", "seen"), 4)).models["seen"]
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


def test_a_history_meets_its_candidate_and_has_a_vector_of_its_width():
  widths = {"item": 3, "city": 5, "bought": 3, "cities": 5}
  module = attending("din", FEATURES, widths, linear=1)
  shapes = {"item": (1, 3), "city": (1, 5), "bought": (1, 3, 3), "cities": (1, 1, 5)}
  activations = {n: np.arange(np.prod(s), dtype=np.float32).reshape(s) for n, s in shapes.items()}
  inputs = {"bought": embed.Padded(np.array([[4, 2, -1]])), "cities": np.array([1])}
  (keys, query, mask), made = call(module, activations, inputs)
  assert keys[0].tolist() == [[0, 1], [3, 4], [6, 7]]
  assert query.tolist() == [[0, 1]]
  assert mask.tolist() == [[True, True, False]]
  assert {name: x.shape for name, x in made.items()} == {n: (1, w) for n, w in widths.items()}
  assert (made["bought"][0, 2], made["cities"][0, 4]) == ((2 + 5) / 2, 4)  # of the linear model
  with pytest.raises(UserError, match="'bought' shares its table with no single value"):
    attending("din", FEATURES[1:], widths)


# --- serving --------------------------------------------------------------------------------------


def as_rows(rows):
  """Returns rows of `log` as dicts, with texts as ids."""
  texts = [(f"u{who}", f"i{what}", f"s{where}", *rest) for who, what, where, *rest in rows]
  return [dict(zip(HEADER, row, strict=True)) for row in texts]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """Returns a function that makes a run of a model and exports it: training, folder, log."""

  @functools.cache
  def of(model):
    folder, rows = tmp_path_factory.mktemp(model), as_rows(log(False))
    path = write_csv(folder / "log.csv", HEADER, [row.values() for row in rows])
    columns = COLUMNS | {"seen": SEEN | {"max_length": 4}, "liked": LIKED}
    table = {"files": str(path), "columns": columns, "batch_size": 64, "dim": 4}
    training = run_of("dlrm", table | {"history": {"model": model}}, folder / "run")
    return training, export.export(folder / "run", folder / "served", platforms=("cpu",)), rows

  return of


def in_order(rows):
  """Returns rows as a run writes them, those of a split together."""
  return [row for part in ("train", "valid", "test") for row in rows if row["part"] == part]


def with_lists(rows):
  """Returns rows with the lists of what their users did before, found one by one."""
  asked = []
  for row in rows:
    mine = [each for each in rows if each["who"] == row["who"] and each["when"] < row["when"]]
    mine.sort(key=lambda each: each["when"])
    seen, places = ([each[name] for each in mine] for name in ("what", "where"))
    liked = [each["what"] for each in mine if each["clicked"]]
    asked.append(row | {"seen": seen, "places": places, "liked": liked})
  return asked


@pytest.mark.ci
@pytest.mark.parametrize("model", ["din", *ways.weekly("transformer", "hstu")])
def test_an_export_answers_as_the_run_by_lists(model, run):
  training, folder, rows = run(model)
  expected, served = own_probabilities(training), serving.load(folder)
  assert np.ptp(expected) > 0.05
  found = served.predict(in_order(with_lists(rows)))
  np.testing.assert_allclose(found, expected, atol=1e-6, rtol=0)


@pytest.mark.ci
def test_other_files_are_measured_by_their_own_log(run):
  training, folder, rows = run("din")
  expected = own_probabilities(training)
  label = np.array([row["clicked"] for row in in_order(rows)])
  logloss = -np.mean(np.log(np.where(label, expected, 1 - expected)))
  found = evaluate.evaluate_files(folder.parent / "run", training.config.files)
  assert found["metrics"]["logloss"] == pytest.approx(logloss)


@pytest.mark.ci
def test_requests_with_little_or_wrong_in_them(run):
  _, folder, rows = run("din")
  served, lists = serving.load(folder), ("seen", "places", "liked")
  row = rows[0] | dict.fromkeys(lists)
  assert set(lists) <= set(served.columns)
  ask = lambda **given: served.predict([row | given])[0]
  none = ask()
  assert ask(seen=[], liked="") == none
  assert 0 < ask(who="nobody", what="nothing") < 1
  assert ask(seen="i3|new") == ask(seen=["i3", None, "new"]) != none
  with pytest.raises(UserError, match="rows has no column 'places'"):
    served.predict([{name: row[name] for name in row if name != "places"}])
