"""A checkpoint is logical tables by name and everything else by path, and comes back whole."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from meshes import make_mesh

import embed
from embed import checkpoint
from embed.layer import sparse_embeds


class Model(nnx.Module):
  def __init__(self, seed, **where):
    rngs = nnx.Rngs(seed)
    movie = embed.TableConfig(12, 4, name="movie", optimizer=embed.adam(0.1))
    user = embed.TableConfig(7, 4, name="user", optimizer=embed.rowwise_adagrad(0.1))
    features = {"m": embed.FeatureConfig(movie), "u": embed.FeatureConfig(user)}
    self.embed = embed.SparseEmbed(features, rngs=rngs, **where)
    self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)])
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, ids):
    act = self.embed({"m": ids, "u": ids % 7})
    x = self.layers[1](self.layers[0](act["m"]))
    return jnp.mean((self.dropout(x) * act["u"]) ** 2)


def pair(seed):
  model = Model(seed)
  return model, embed.Optimizer(model, optax.adam(0.01))


def train_step(model, optimizer, ids):
  loss, grads = embed.value_and_grad(lambda m, ids: m(ids))(model, ids)
  optimizer.update(model, grads)
  return loss


def train(model, optimizer, steps, start=0):
  step = embed.jit_step(train_step, model, optimizer)
  return [float(step(np.arange(i, i + 5) % 12)) for i in range(start, start + steps)]


def save(path, tree):
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, tree)


@pytest.mark.programs(30, "trains, saves and restores whole models")
def test_a_run_goes_on_from_orbax_as_if_it_had_not_stopped(tmp_path):
  model, optimizer = pair(0)
  train(model, optimizer, 1)
  save(tmp_path / "c", embed.checkpoint.to_tree(model=model, optimizer=optimizer))
  wanted = train(model, optimizer, 2, start=1)
  # Of another seed: nothing of it may remain, dropout's counter included.
  other, other_optimizer = pair(1)
  embed.checkpoint.restore(tmp_path / "c", model=other, optimizer=other_optimizer)
  assert train(other, other_optimizer, 2, start=1) == wanted
  states = [jax.tree.leaves(nnx.state(x)) for x in ((model, optimizer), (other, other_optimizer))]
  for a, b in zip(*states, strict=True):
    is_key = jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
    np.testing.assert_array_equal(*map(jax.random.key_data, (a, b)) if is_key else (a, b))


def test_names():
  """Of an abstract model too."""
  model = nnx.eval_shape(lambda: Model(0))
  tables = embed.checkpoint.to_tree(model=model)["model"]["tables"]
  assert {key: {k: x.shape for k, x in table.items()} for key, table in tables.items()} == {
    "embed/movie": dict.fromkeys(["momenta", "parameters", "velocities"], (12, 4)),
    "embed/user": {"accumulators": (7,), "parameters": (7, 4)},
  }


# --- what does not fit ----------------------------------------------------------------------------


class Rows(nnx.Module):
  """Two tables whose keys in the tree begin alike."""

  def __init__(self, optimizer=None, inner=None):
    a = embed.TableConfig(3, 2, name="a", initializer=jax.nn.initializers.ones)
    b = embed.TableConfig(3, 2, name="a/b", optimizer=inner)
    self.embed = embed.SparseEmbed(
      [embed.FeatureConfig(a), embed.FeatureConfig(b)], optimizer, rngs=nnx.Rngs(0)
    )


def test_what_does_not_fit_is_named_and_nothing_changes():
  model = Rows(embed.adam(), embed.sgd())
  like = jax.tree.map(np.asarray, embed.checkpoint.to_tree(model=model))

  def edited(table, key, value=None):
    tree = jax.tree.map(lambda x: x, like)
    arrays = tree["model"]["tables"].setdefault(table, {})
    arrays.pop(key, None)
    arrays |= {} if value is None else {key: np.asarray(value)}
    return tree

  zeros = np.zeros((3, 2), np.float32)
  cases.refused(
    [
      ({}, "is missing"),
      (edited("embed/a/b", "parameters"), "embed/a/b/parameters is missing"),
      (edited("embed/a", "momenta"), "embed/a/momenta is missing"),
      (
        edited("embed/a", "parameters", np.zeros((4, 2))),
        r"embed/a/parameters has shape \(4, 2\), the model's has \(3, 2\).*load_variables",
      ),
      (edited("embed/a/b", "momenta", zeros), "embed/a/b/momenta is not in the model"),
      *(
        (edited("embed/a", "parameters", zeros.astype(dtype)), "parameters has dtype")
        for dtype in (object, complex, "U1", "M8[s]")
      ),
    ],
    lambda tree: embed.checkpoint.from_tree(tree, model=model),
  )
  jax.tree.map(np.testing.assert_array_equal, embed.checkpoint.to_tree(model=model), like)


def test_a_tree_outlives_the_model_it_went_into():
  source, model = Rows(), Rows()
  tree = embed.checkpoint.to_tree(model=source)
  embed.checkpoint.from_tree(tree, model=model)
  donate = nnx.jit(lambda m: m.embed.load_tables({"a": jnp.zeros((3, 2))}), donate_argnums=0)
  donate(model)
  jax.block_until_ready(tree)  # raises if deleted
  donate(source)
  with pytest.raises(ValueError, match="copy the tree"):
    embed.checkpoint.from_tree(tree, model=model)


@pytest.mark.parametrize("optimizer", [None, embed.frozen()])
def test_a_model_without_optimizer_restores_what_was_trained(optimizer, tmp_path):
  """From a tree and from Orbax, slots are left out for tables that are not trained."""
  trained = Rows(embed.adam(), embed.adam())
  trained.embed.load_tables({"a": np.full((3, 2), 7.0)})
  tree = embed.checkpoint.to_tree(model=trained)
  assert sorted(tree["model"]["tables"]["embed/a"]) == ["momenta", "parameters", "velocities"]
  save(tmp_path / "c", tree)
  for restore in (
    lambda model: embed.checkpoint.from_tree(tree, model=model),
    lambda model: embed.checkpoint.restore(tmp_path / "c", model=model),
  ):
    served = Rows(optimizer, optimizer)
    restore(served)
    assert list(served.embed.variables["a"]) == ["parameters"]
    assert (np.asarray(served.embed.tables["a"]) == 7).all()


def test_two_tables_of_one_key_are_refused():
  layer = lambda name: embed.SparseEmbed(
    embed.FeatureConfig(embed.TableConfig(4, 2, name=name)), rngs=nnx.Rngs(0)
  )
  model = nnx.Dict({"tower/user": layer("geo/id"), "tower/user/geo": layer("id")})
  arrays = nnx.Dict({"a/b": nnx.Param(jnp.ones(1)), "a": nnx.Dict({"b": nnx.Param(jnp.zeros(1))})})
  same = [
    (model, r"key 'tower/user/geo/id'.*'geo/id'.*'id'.*Rename"),
    (arrays, r"Two arrays.*'a/b/value'.*Rename"),
  ]
  cases.refused(same, lambda model: embed.checkpoint.to_tree(model=model))
  with pytest.raises(ValueError, match=r"Two SparseEmbed layers.*'a/b'.*Rename"):
    sparse_embeds(nnx.Dict({"a/b": layer("t"), "a": nnx.Dict({"b": layer("s")})}))


# --- Orbax ----------------------------------------------------------------------------------------


def one_table(seed=0, rows=4, dtype=jnp.float32):
  table = embed.TableConfig(rows, 2, name="movie", dtype=dtype)
  return embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(seed))


@pytest.fixture(scope="module")
def managed(tmp_path_factory):
  """Folders of managers, and the rows of their latest step."""
  root = tmp_path_factory.mktemp("managed")
  tables = [one_table(seed) for seed in (1, 2)]
  trees = [embed.checkpoint.to_tree(model=layer) for layer in tables]
  with ocp.CheckpointManager(root / "plain") as manager:
    for step, tree in zip((9, 10), trees, strict=True):
      manager.save(step, args=ocp.args.StandardSave(tree))
  items = {"model": trees[1], "about": {"x": np.zeros(2)}}
  with ocp.CheckpointManager(root / "several") as manager:
    saved = {name: ocp.args.StandardSave(item) for name, item in items.items()}
    manager.save(3, args=ocp.args.Composite(**saved))
  return root, np.asarray(tables[1].tables["movie"])


@pytest.mark.parametrize("name", ["plain/10/default", "several/3/model"])
def test_restore_reads_the_tree_of_a_manager(name, managed):
  root, rows = managed
  layer = one_table()
  embed.checkpoint.restore(root / name, model=layer)
  np.testing.assert_array_equal(layer.tables["movie"], rows)


@pytest.mark.parametrize(
  ("name", "words"),
  [
    ("nowhere", "nowhere holds no tree.*Give its folder: none"),
    ("several/3", "3 holds no tree.*Give its folder: .*/3/about, .*/3/model"),
    ("plain/10/default", r"movie/parameters has shape \(4, 2\), the model's has \(5, 2\)"),
  ],
)
def test_restore_names_a_folder_without_a_tree_that_fits(name, words, managed):
  with pytest.raises((ValueError, FileNotFoundError), match=words):
    embed.checkpoint.restore(managed[0] / name, model=one_table(rows=5))


# --- in part --------------------------------------------------------------------------------------


class Tower(nnx.Module):
  """Tables of two columns, and a dense layer that reads them all."""

  def __init__(self, seed, optimizer=None, mesh=None, **sizes):
    tables = {name: embed.TableConfig(size, 2, name=name) for name, size in sizes.items()}
    features = {name: embed.FeatureConfig(table) for name, table in tables.items()}
    rngs = nnx.Rngs(seed)
    self.embed = embed.SparseEmbed(features, optimizer or embed.adagrad(), rngs=rngs, mesh=mesh)
    self.first = nnx.Linear(2 * len(sizes), 3, rngs=rngs)


RAW, MORE = (embed.DynamicVocabulary(size, bucket_width=4) for size in (8, 12))
SAVED = {"item": 4, "old": 8, "user": RAW}
PARTS = {  # a model, and words in the paths of the arrays that it does not take
  "one table more": (SAVED | {"city": 2}, ["kernel", "city"]),
  "another optimizer": (
    SAVED | {"optimizer": embed.adagrad_momentum()},
    ["accumulators", "momenta"],
  ),
  "other sizes": (SAVED | {"item": 5, "user": MORE}, ["item", "user"]),
  "raw ids where there were none": (SAVED | {"old": RAW, "user": 8}, ["old", "user"]),
}


@pytest.mark.ci
@pytest.mark.parametrize("mesh", [None, make_mesh()], ids=["one device", "eight"])
def test_a_model_takes_the_part_of_a_checkpoint_that_fits(mesh, tmp_path):
  """Each array is that of the checkpoint to the bit, or else the model's own."""
  saved = Tower(0, **SAVED)
  saved.embed.admit({"user": np.arange(5)})
  flat = lambda model: checkpoint._flat(embed.checkpoint.to_tree(model=model))
  whole = jax.tree.map(np.asarray, flat(saved))
  save(tmp_path / "c", embed.checkpoint.to_tree(model=saved))

  def check(given, new):
    model = Tower(1, mesh=mesh, **given)
    before = jax.tree.map(np.asarray, flat(model))
    found = embed.checkpoint.restore(tmp_path / "c", partial=True, model=model)
    assert found["new"] == [path for path in before if any(word in path for word in new)]
    assert found["taken"] == [path for path in before if path not in found["new"]]
    assert found["unused"] == [path for path in whole if path not in before]
    after, taken = flat(model), {path: whole[path] for path in found["taken"]}
    jax.tree.map(np.testing.assert_array_equal, after, before | taken)

  cases.each(PARTS, check)
  with pytest.raises(ValueError, match=r"No table or parameter.*'model'.*'embed/old'.*'tower'"):
    embed.checkpoint.restore(tmp_path / "c", partial=True, tower=Tower(1, item=4))
