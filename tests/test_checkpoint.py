"""A checkpoint is logical tables by name and everything else by path, and comes back whole."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from cases import each, refused
from flax import nnx

import embed
from embed import autodiff as routing


class Model(nnx.Module):
  def __init__(self, seed, vocabulary_size=12, dim=4):
    rngs = nnx.Rngs(seed)
    movie = embed.TableConfig(vocabulary_size, dim, name="movie", optimizer=embed.adam(0.1))
    user = embed.TableConfig(7, 4, name="user", optimizer=embed.rowwise_adagrad(0.1))
    features = {"m": embed.FeatureConfig(movie), "u": embed.FeatureConfig(user)}
    self.embed = embed.SparseEmbed(features, rngs=rngs)
    self.layers = nnx.List([nnx.Linear(dim, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)])
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, ids):
    act = self.embed({"m": ids, "u": ids % 7})
    x = self.layers[1](self.layers[0](act["m"]))
    return jnp.mean((self.dropout(x) * act["u"]) ** 2)


def train_step(model, optimizer, ids):
  loss, grads = embed.value_and_grad(lambda m, ids: m(ids))(model, ids)
  optimizer.update(model, grads)
  return loss


def train(model, optimizer, steps, start=0):
  step = embed.jit_step(train_step, model, optimizer)
  return [float(step(np.arange(i, i + 5) % 12)) for i in range(start, start + steps)]


def pair(seed):
  model = Model(seed)
  return model, embed.Optimizer(model, optax.adam(0.01))


@pytest.mark.programs(150, "a whole model is made twice and goes through a checkpoint")
def test_a_run_goes_on_from_orbax_as_if_it_had_not_stopped(tmp_path):
  model, optimizer = pair(0)
  train(model, optimizer, 1)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "c", embed.checkpoint.to_tree(model=model, optimizer=optimizer))
  wanted = train(model, optimizer, 2, start=1)
  model, optimizer = pair(1)  # another seed: nothing of it may remain, dropout's counter included
  embed.checkpoint.restore(tmp_path / "c", model=model, optimizer=optimizer)
  assert train(model, optimizer, 2, start=1) == wanted


def test_names():
  """Of an abstract model."""
  tree = embed.checkpoint.to_tree(model=nnx.eval_shape(lambda: Model(0)))
  tables = tree["model"]["tables"]
  assert {k: sorted(v) for k, v in tables.items()} == {
    "embed/movie": ["momenta", "parameters", "velocities"],
    "embed/user": ["accumulators", "parameters"],
  }
  assert tables["embed/movie"]["momenta"].shape == (12, 4)
  assert tables["embed/user"]["accumulators"].shape == (7,)


def test_a_tree_outlives_the_model_it_went_into():
  source, model = Rows(), Rows()
  tree = embed.checkpoint.to_tree(model=source)
  embed.checkpoint.from_tree(tree, model=model)
  donate = nnx.jit(lambda m: m.embed.load_tables({"a": jnp.ones((3, 2))}), donate_argnums=0)
  donate(model)
  jax.block_until_ready(tree)  # raises if deleted
  donate(source)
  with pytest.raises(ValueError, match="copy the tree"):
    embed.checkpoint.from_tree(tree, model=model)


@pytest.mark.programs(30, "tables with all slots are made and read twice")
def test_what_does_not_fit_is_named_and_nothing_changes():
  model = Rows(embed.adam(), embed.sgd())
  before = jax.tree.map(np.array, embed.checkpoint.to_tree(model=model))

  def edited(**tables):
    kept = before["model"]["tables"]
    kept = {key: dict(of) for key, of in (kept | tables).items() if of is not None}
    return {"model": before["model"] | {"tables": kept}}

  a = before["model"]["tables"]["embed/a"]
  b = before["model"]["tables"]["embed/a/b"]
  cases = [
    (edited(**{"embed/a": a | {"parameters": np.zeros((4, 2))}}), r"embed/a/parameters has shape"),
    (
      edited(**{"embed/a": a | {"parameters": np.zeros(3)}}),
      r"embed/a/parameters has shape \(3,\)",
    ),
    (edited(**{"embed/a/b": None}), "embed/a/b/parameters is missing"),
    (edited(**{"embed/a": {"parameters": a["parameters"]}}), "embed/a/momenta is missing"),
    (edited(**{"embed/a/b": b | {"momenta": a["momenta"]}}), "embed/a/b/momenta is not in the"),
    ({}, "is missing"),
  ]
  refused(cases, lambda tree: embed.checkpoint.from_tree(tree, model=model))
  after = embed.checkpoint.to_tree(model=model)
  jax.tree.map(np.testing.assert_array_equal, before, after)


class Rows(nnx.Module):
  """Two tables whose keys in the tree begin alike."""

  def __init__(self, optimizer=None, inner=None):
    a = embed.TableConfig(3, 2, name="a", initializer=jax.nn.initializers.ones)
    b = embed.TableConfig(3, 2, name="a/b", optimizer=inner)
    self.embed = embed.SparseEmbed(
      [embed.FeatureConfig(a), embed.FeatureConfig(b)], optimizer, rngs=nnx.Rngs(0)
    )


@pytest.mark.programs(40, "tables with all slots are made and read, and three without")
def test_a_model_without_optimizer_restores_what_was_trained():
  trained = Rows(embed.adam(), embed.adam())
  trained.embed.load_tables({"a": np.full((3, 2), 7.0)})
  tree = embed.checkpoint.to_tree(model=trained)
  assert sorted(tree["model"]["tables"]["embed/a"]) == ["momenta", "parameters", "velocities"]
  for serving in (Rows(embed.frozen()), Rows()):
    embed.checkpoint.from_tree(tree, model=serving)
    assert list(serving.embed.variables["a"]) == ["parameters"]
    assert (serving.embed.tables["a"] == 7).all()
  activations, residual = serving.embed.lookup([np.array([0]), np.array([1])])
  with pytest.raises(ValueError, match="'a' has no optimizer, so it cannot be trained"):
    serving.embed.apply_gradients(activations, residual, step=0)
  with pytest.raises(ValueError, match="embed/a/momenta is missing"):
    embed.checkpoint.from_tree(embed.checkpoint.to_tree(model=serving), model=trained)


@pytest.mark.ci
def test_orbax_does_not_read_the_slots_that_are_left_out(tmp_path):
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "c", embed.checkpoint.to_tree(model=Rows(embed.adam())))
  serving = Rows()
  like = embed.checkpoint.like(model=serving)
  restore_args = ocp.checkpoint_utils.construct_restore_args(like)
  restore = ocp.args.PyTreeRestore(like, restore_args=restore_args, partial_restore=True)
  with ocp.PyTreeCheckpointer() as checkpointer:
    tree = checkpointer.restore(tmp_path / "c", args=restore)
  assert list(tree["model"]["tables"]["embed/a"]) == ["parameters"]
  embed.checkpoint.from_tree(tree, model=serving)
  assert (serving.embed.tables["a"] == 1).all()
  serving.embed.load_tables({"a": np.zeros((3, 2))})
  embed.checkpoint.restore(tmp_path / "c", model=serving)
  assert (serving.embed.tables["a"] == 1).all()


def two_layers(path, table, other_path, other_table):
  """A model of two layers of one table each."""
  layer = lambda name, seed: embed.SparseEmbed(
    embed.FeatureConfig(embed.TableConfig(4, 2, name=name)), rngs=nnx.Rngs(seed)
  )
  model = nnx.Dict({})
  for i, (keys, name) in enumerate([(path, table), (other_path, other_table)]):
    node = model
    for key in keys[:-1]:
      if key not in node:
        node[key] = nnx.Dict({})
      node = node[key]
    node[keys[-1]] = layer(name, i)
  return model


def test_two_tables_of_one_key_are_refused():
  model = two_layers(["tower/user"], "geo/id", ["tower/user/geo"], "id")
  for f in (embed.checkpoint.to_tree, embed.checkpoint.like):
    with pytest.raises(ValueError, match=r"key 'tower/user/geo/id'.*'geo/id'.*'id'.*Rename"):
      f(model=model)
  with pytest.raises(ValueError, match=r"Two SparseEmbed layers.*'a/b'.*Rename"):
    routing.sparse_embeds(two_layers(["a/b"], "t", ["a", "b"], "s"))
  arrays = nnx.Dict({"a/b": nnx.Param(jnp.ones(1)), "a": nnx.Dict({"b": nnx.Param(jnp.zeros(1))})})
  with pytest.raises(ValueError, match=r"Two arrays.*'a/b/value'.*Rename"):
    embed.checkpoint.to_tree(model=arrays)
  # The slash alone is no fault.
  model = two_layers(["tower/user"], "geo/id", ["tower/user/geo"], "name")
  tables = embed.checkpoint.to_tree(model=model)["model"]["tables"]
  assert set(tables) == {"tower/user/geo/id", "tower/user/geo/name"}


@pytest.mark.programs(40, "a step by optax is compiled, and goes through a checkpoint")
def test_slots_of_optax_have_names_and_come_back():
  optimizer = embed.from_optax(optax.adam(0.1))
  make = lambda: embed.SparseEmbed(
    embed.FeatureConfig(embed.TableConfig(4, 2, name="movie", optimizer=optimizer)),
    rngs=nnx.Rngs(0),
  )
  layer, other = make(), make()
  row = embed.RowGrads(np.array([1, 3]), np.ones((2, 2), np.float32))
  nnx.jit(lambda layer: layer.apply_row_gradients({"movie": row}))(layer)
  saved = jax.tree.map(np.array, embed.checkpoint.to_tree(model=layer))
  movie = saved["model"]["tables"]["movie"]
  assert sorted(movie) == ["0.count", "0.mu", "0.nu", "parameters"]
  assert movie["0.count"].dtype == np.int32
  assert movie["0.count"].tolist() == [0, 1, 0, 1]
  embed.checkpoint.from_tree(saved, model=other)
  restored = embed.checkpoint.to_tree(model=other)
  jax.tree.map(np.testing.assert_array_equal, restored, saved)


def one_table(seed=0, dtype=jnp.float32):
  table = embed.TableConfig(4, 2, name="movie", dtype=dtype)
  return embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(seed))


@pytest.fixture(scope="module")
def managed(tmp_path_factory):
  """Folders of managers, and the rows of their latest step."""
  root = tmp_path_factory.mktemp("managed")
  layers = [one_table(seed) for seed in (1, 2)]
  trees = [embed.checkpoint.to_tree(model=layer) for layer in layers]
  prefixed = ocp.CheckpointManagerOptions(step_prefix="step", step_format_fixed_length=6)
  for name, options in (("plain", None), ("prefixed", prefixed)):
    with ocp.CheckpointManager(root / name, options=options) as manager:
      for step, tree in zip((9, 10), trees, strict=True):
        manager.save(step, args=ocp.args.StandardSave(tree))
  items = {"model": ocp.args.StandardSave(trees[1]), "about": ocp.args.JsonSave({})}
  two = items | {"about": ocp.args.StandardSave({"x": np.zeros(2)})}
  for name, kinds in (("beside", items), ("several", two)):
    with ocp.CheckpointManager(root / name) as manager:
      manager.save(3, args=ocp.args.Composite(**kinds))
  (root / "empty").mkdir()
  (root / "file").write_text("")
  return root, np.asarray(layers[1].tables["movie"])


@pytest.mark.parametrize(
  "name", ["plain", "plain/10/default", "prefixed", "beside", "several/3/model"]
)
def test_restore_finds_the_latest_tree_of_a_manager(name, managed):
  root, rows = managed
  layer = one_table()
  embed.checkpoint.restore(root / name, model=layer)
  np.testing.assert_array_equal(layer.tables["movie"], rows)


def test_restore_names_a_folder_without_a_tree_to_restore(managed):
  layer = one_table()
  cases = [
    ("nowhere", r"nowhere is no folder.*that Orbax has written"),
    ("file", r"file is no folder"),
    ("empty", r"empty holds no checkpoint.*give the folder"),
    ("several", r"several/3 holds several trees: give one of .*/3/about, .*/3/model"),
  ]
  restore = lambda name: embed.checkpoint.restore(managed[0] / name, model=layer)
  refused(cases, restore, (FileNotFoundError, ValueError))


@pytest.mark.parametrize(("names", "inside"), [("model tower_2", ""), ("best 10", "default")])
def test_trees_that_are_no_steps_of_one_run_are_named(names, inside, managed, tmp_path):
  for name in names.split():
    shutil.copytree(managed[0] / "plain" / "10" / "default", tmp_path / name / inside)
  first, second = sorted(names.split())
  with pytest.raises(ValueError, match=f"several trees: .*{first}, .*{second}"):
    embed.checkpoint.restore(tmp_path, model=one_table())


def test_arrays_that_are_no_real_numbers_are_named():

  def check(dtype):
    layer = one_table()
    before = np.asarray(layer.tables["movie"])
    tree = embed.checkpoint.to_tree(model=layer)
    bad = np.zeros((4, 2), dtype)
    tree["model"]["tables"]["movie"]["parameters"] = bad
    with pytest.raises(ValueError, match=r"model/tables/movie/parameters has dtype"):
      embed.checkpoint.from_tree(tree, model=layer)
    with pytest.raises(ValueError, match="'movie' has dtype float32, got"):
      layer.load_tables({"movie": bad})
    np.testing.assert_array_equal(layer.tables["movie"], before)

  each([(case,) for case in [object, complex, "U1", "M8[s]"]], check)


def test_dense_arrays_may_be_complex_where_the_model_has_them_so():
  make = lambda value: nnx.Dict({"x": nnx.Param(jnp.asarray(value))})
  model = make(1j)
  embed.checkpoint.from_tree(embed.checkpoint.to_tree(model=make(2j)), model=model)
  assert model["x"][...] == 2j
  embed.checkpoint.from_tree(embed.checkpoint.to_tree(model=make(3.0)), model=model)
  assert model["x"][...] == 3
  with pytest.raises(ValueError, match="model/state/x/value has dtype complex64"):
    embed.checkpoint.from_tree(embed.checkpoint.to_tree(model=model), model=make(1.0))


def test_a_table_that_is_rounded_is_named_once(tmp_path):
  saved, rounded = one_table(), one_table(dtype=jnp.bfloat16)
  saved.load_tables({"movie": np.full((4, 2), 1 + 2**-9)})
  tree = embed.checkpoint.to_tree(model=saved)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "c", tree)
  for restore in (
    lambda model: embed.checkpoint.restore(tmp_path / "c", model=model),
    lambda model: embed.checkpoint.from_tree(tree, model=model),
  ):
    rounded.load_tables({"movie": np.zeros((4, 2))})
    with pytest.warns(UserWarning, match="rounded.*model/tables/movie") as warned:
      restore(rounded)
    assert [warning.filename for warning in warned] == [__file__]
    assert (rounded.tables["movie"] == 1).all()
  embed.checkpoint.from_tree(embed.checkpoint.to_tree(model=rounded), model=saved)  # exact


@pytest.mark.ci
def test_a_restored_model_goes_on_across_a_mesh(tmp_path):
  """The model has a mesh, and the code around it has none set; a step and a prediction after."""
  mesh = jax.make_mesh((8,), ("data",))
  table = embed.TableConfig(16, 4, name="t", optimizer=embed.adagrad(0.1))

  class Small(nnx.Module):
    def __init__(self, seed):
      self.embed = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(seed), mesh=mesh)
      self.head = nnx.Linear(4, 1, rngs=nnx.Rngs(seed))

    def __call__(self, ids):
      return self.head(self.embed(ids)).sum()

  def step(model, optimizer, ids):
    loss, grads = embed.value_and_grad(lambda model: model(ids))(model)
    optimizer.update(model, grads)
    return loss

  make = lambda seed: (model := Small(seed), embed.Optimizer(model, optax.sgd(0.1)))
  ids, (model, optimizer) = np.arange(8), make(0)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "c", embed.checkpoint.to_tree(model=model, optimizer=optimizer))
  restored, updater = make(1)
  embed.checkpoint.restore(tmp_path / "c", model=restored, optimizer=updater)
  assert float(restored(ids)) == float(model(ids))
  losses = [embed.jit_step(step, *pair)(ids) for pair in ((model, optimizer), (restored, updater))]
  assert float(losses[0]) == float(losses[1])
