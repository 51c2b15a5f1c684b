"""Vectors that another model has computed: read, encoded, learned from, and served."""

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import refused
from flax import nnx
from served_models import asked_towers, own_probabilities, own_towers, run_of
from small_tables import completed

import embed
from recipes import export, serving
from recipes.dlrm import data
from recipes.errors import UserError
from recipes.serving.rows import Reader, as_table
from recipes.tables import spec
from recipes.training import layers
from recipes.two_tower import data as tower_data

COLUMNS = {
  "clicked": "label",
  "movie": "item",
  "price": "number",
  "query": {"kind": "vector", "width": 2},
  "image": {"kind": "vector", "width": 3},
  "part": "split",
}
A, B = [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]  # images of the items a and b


def write(path, **columns):
  pq.write_table(pa.table(columns), path)
  return str(path)


def tables(folder, queries=None):
  """Six rows of the items a, b, c and x, of which a and b have an image."""
  rows = write(
    folder / "rows.parquet",
    clicked=[1, 0, 1, 0, 1, 0],
    movie=["a", "b", "a", "c", "x", "b"],
    price=[1.0, 3.0, 1.0, 3.0, 1.0, 3.0],
    query=queries or [[1.0, 2.0], None, [3.0, 4.0], [0.0, 0.0], [5.0, 6.0], []],
    image=[A, B, A, None, None, B],
    part=["train"] * 4 + ["test"] * 2,
  )
  return {"files": rows, "columns": COLUMNS, "split": {"valid": 0.0}, "select": ""}


# --- what is read ---------------------------------------------------------------------------------


def test_a_vector_is_a_list_or_a_text():
  reader = Reader({"v": spec.Vector(width=2)}, ("NA",))
  lists, texts = [[1, 2.5], None, [], [np.nan, np.nan]], ["1|2.5", "", None, "NA|NA"]
  for stored in (pa.array(lists), pa.array(texts)):
    found = reader.read(as_table({"v": stored}))["v"]
    assert found.to_pylist() == [[1, 2.5], None, None, None]


@pytest.mark.ci
def test_a_row_whose_vector_is_not_one_is_bad(tmp_path):
  place = "rows.parquet, row 3, column 'query': "
  cases = [
    ([1.0], rf"{place}'\[1.0\]' is not 2 numbers"),
    ([1.0, None], rf"{place}'\[1.0, NULL\]' is not 2 numbers"),
    ([1.0, 2.0, None], rf"{place}'\[1.0, 2.0, NULL\]' is not 2 numbers"),
    ([1.0, np.inf], rf"{place}'\[1.0, inf\]' is not 2 numbers"),
  ]

  def call(stored):
    table = tables(tmp_path, queries=[[1.0, 2.0], None, stored, None, None, None])
    data.load(completed("dlrm", tmp_path / "cache", **table))

  refused(cases, call, UserError)


# --- what a model gets ----------------------------------------------------------------------------


def test_columns_by_hand(tmp_path):
  loaded = data.load(completed("dlrm", tmp_path / "cache", **tables(tmp_path)))
  dense = np.asarray(loaded.columns["dense"])
  assert dense[:, 1:3].tolist() == [[1, 2], [0, 0], [3, 4], [0, 0], [5, 6], [0, 0]]
  assert dense[:, 3:].tolist() == [A, B, A, [0, 0, 0], [0, 0, 0], B]
  assert dict(loaded.vectors) == {"query": (1, 3), "image": (3, 6)}


def inputs(dim, **more):
  """`Inputs` of two tables and a vector, whose projection has the kernel `[[1, 0], [0, 10]]`."""
  config = lambda name: embed.FeatureConfig(embed.TableConfig(4, 2, name=name))
  rngs = nnx.Rngs(0)
  tables = embed.SparseEmbed({n: config(n) for n in ("movie", "city")}, rngs=rngs)
  made = layers.Inputs(tables, (0, 3), dim=dim, vectors={"image": (1, 3)}, rngs=rngs, **more)
  made.projections["image"].kernel[...] = jnp.array([[1.0, 0.0], [0.0, 10.0]])
  return made


ROWS = {"movie": np.float32([[1, 2]]), "city": np.float32([[5, 6]])}
DENSE = np.array([[7.0, 8.0, 9.0, 11.0]], np.float32)


@pytest.mark.ci
def test_inputs_by_hand():
  made = inputs(2)
  assert made.widths == {"movie": 2, "city": 2, "image": 2}
  vectors, numbers, linear = nnx.jit(lambda made: made(ROWS, DENSE))(made)
  assert jax.tree.map(lambda x: x.tolist(), vectors) == {
    "movie": [[1, 2]], "city": [[5, 6]], "image": [[8, 90]],
  }  # fmt: skip
  assert numbers.tolist() == [[7, 11]]
  assert float(linear) == 0


@pytest.mark.ci
def test_a_linear_model_is_the_last_column_of_everything():
  made = inputs(1, linear=1)
  assert made.widths == {"movie": 1, "city": 1, "image": 1}
  made.wide.kernel[...] = jnp.array([[100.0], [1000.0]])
  vectors, numbers, linear = nnx.jit(lambda made: made(ROWS, DENSE))(made)
  assert jax.tree.map(lambda x: x.tolist(), vectors) == {
    "movie": [[1]], "city": [[5]], "image": [[8]],
  }  # fmt: skip
  assert numbers.tolist() == [[7, 11]]
  assert linear.tolist() == [[2 + 6 + 90 + 700 + 11_000]]


# --- what is learned and served -------------------------------------------------------------------


@pytest.fixture(scope="module")
def log(tmp_path_factory):
  """A log of 40 users and 30 items, some of them with a vector."""
  folder, draw = tmp_path_factory.mktemp("log"), np.random.default_rng(0)
  names = lambda kind, ids: [f"{kind}{i}" for i in ids]
  pairs = [(u, i, n) for u in range(40) for n, i in enumerate(draw.choice(30, 6, replace=False))]
  user, item, when = map(list, zip(*pairs, strict=True))
  vectors = lambda rows: [None if n % 7 == 0 else list(draw.normal(size=5)) for n in range(rows)]
  tastes, images = vectors(40), vectors(30)
  rows = write(
    folder / "log.parquet",
    clicked=draw.integers(2, size=len(pairs)),
    who=names("u", user),
    what=names("i", item),
    when=when,
    taste=[tastes[each] for each in user],
    image=[images[each] for each in item],
  )
  taste, image = ({"kind": "vector", "width": 5, "side": side} for side in ("user", "item"))
  columns = {"clicked": "label", "who": "user", "what": "item", "when": "time"}
  return {
    "files": rows,
    "columns": columns | {"taste": taste, "image": image},
    "batch_size": 16,
    "dim": 4,
    "table": {"optimizer": "sgd"},
  }


@pytest.mark.weekly
def test_an_exported_click_model_scores_rows_with_vectors(log, tmp_path):
  training = run_of("dlrm", log | {"model": "dcnv2"}, tmp_path / "run")
  served = serving.load(export.export(tmp_path / "run", tmp_path / "served", platforms=("cpu",)))
  rows = pq.read_table(log["files"])
  scores = served.predict(rows.drop(["clicked", "when"]))
  expected = own_probabilities(training)
  parts = pq.read_table(training.serve.parent / "split.parquet")["part"].to_pylist()
  order = np.argsort([("train", "valid", "test").index(part) for part in parts], kind="stable")
  np.testing.assert_allclose(scores[order], expected, atol=1e-6)
  assert np.ptp(expected) > 0.1
  assert np.isfinite(
    served.predict([{"who": "x", "what": "y", "taste": None, "image": None}])
  ).all()


@pytest.mark.ci
def test_exported_towers_rank_with_vectors(log, tmp_path):
  table = log | {"eval_history": 8, "ks": (5,), "select": "valid_ndcg@5"}
  training = run_of("two_tower", table, tmp_path / "run")
  assert training.config.query[-1] == "taste"
  assert training.config.candidate[-1] == "image"
  served = serving.load(export.export(tmp_path / "run", tmp_path / "served", platforms=("cpu",)))
  users, scores, ids = own_towers(training)
  asked, histories = asked_towers(training, served, users)
  found = served.recommend({"who": asked, "history": ["|".join(each) for each in histories]})
  np.testing.assert_allclose(found.scores, scores, atol=1e-5)
  assert (found.items == np.array(served._items.texts, object)[ids]).mean() > 0.99
  # A new user is known by a vector alone.
  new = served.recommend({"taste": [[3.0, 0.0, 0.0, 0.0, -3.0], None]}, 3)
  assert new.is_popular.tolist() == [False, True]
  same = served.recommend({"taste": np.array([[3.0, 0, 0, 0, -3]])}, 3)
  np.testing.assert_array_equal(same.items[0], new.items[0])
  loaded = tower_data.load(training.config)
  assert loaded.columns["item_image"].shape == (30, 5)
