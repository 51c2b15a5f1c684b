"""Row gradients come out of a loss exactly, wherever the layer is called, or an error says why."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from nested_model import A, B, D, Model, V, dense, twice
from suites import slow_unless

import embed


def reference(model):
  """The dense gradient of head(tanh(rows of A)) + head(sin(rows of B))."""

  def loss(table):
    return model.head(jnp.tanh(table[A])) + model.head(jnp.sin(table[B]))

  return jax.grad(loss)(model.inner["e"].tables["t"])


def one_call_of_two_features(m):
  act = m.inner["e"]({"a": A, "b": B})
  return m.head(jnp.tanh(act["a"])) + m.head(jnp.sin(act["b"]))


def nested_jit_called_twice(m):
  encode = nnx.jit(lambda m, ids: m.encode("a", ids))  # its second call is a cache hit
  return m.head(jnp.tanh(encode(m, jnp.array(A)))) + m.head(jnp.sin(encode(m, jnp.array(B))))


def remat(m):
  f = nnx.remat(lambda m, ids: jnp.tanh(m.encode("a", ids)))
  g = nnx.remat(lambda m, ids: jnp.sin(m.encode("a", ids)))
  return m.head(f(m, jnp.array(A))) + m.head(g(m, jnp.array(B)))


def cond_in_one_branch(m):
  yes = jnp.sum(m.out.kernel[...]) < 1e9
  x = nnx.cond(yes, lambda m: jnp.tanh(m.encode("a", A)), lambda m: jnp.zeros((4, D)), m)
  y = nnx.cond(~yes, lambda m: m.encode("a", A), lambda m: jnp.sin(m.encode("b", B)), m)
  return m.head(x) + m.head(y)


def cond_in_both_branches(m):
  yes = jnp.sum(m.out.kernel[...]) < 1e9
  x = nnx.cond(yes, lambda m: jnp.tanh(m.encode("a", A)), lambda m: m.encode("b", A[::-1]), m)
  y = nnx.cond(~yes, lambda m: m.encode("a", A), lambda m: jnp.sin(m.encode("b", B)), m)
  return m.head(x) + m.head(y)


def jit_in_remat_in_cond(m):
  inner = nnx.jit(lambda m: jnp.tanh(m.encode("a", A)))
  yes = jnp.sum(m.out.kernel[...]) < 1e9
  x = nnx.cond(yes, nnx.remat(lambda m: inner(m)), lambda m: jnp.zeros((4, D)), m)
  return m.head(x) + m.head(jnp.sin(m.encode("b", B)))


def checkpoint_with_the_model_as_argument(m):
  f = jax.checkpoint(lambda m, ids: jnp.tanh(m.encode("a", ids)))
  return m.head(f(m, A)) + m.head(jnp.sin(m.encode("b", B)))


def checkpoint_that_closes_over_the_model(m):
  f = jax.checkpoint(lambda ids: jnp.tanh(m.encode("a", ids)))
  return m.head(f(A)) + m.head(jnp.sin(m.encode("b", B)))


def jax_jit_that_closes_over_the_model(m):
  f = jax.jit(lambda ids: jnp.tanh(m.encode("a", ids)))
  return m.head(f(A)) + m.head(jnp.sin(m.encode("b", B)))


def rebuilt_from_its_own_state(m):
  copy = nnx.merge(*nnx.split(m))
  return m.head(jnp.tanh(copy.encode("a", A))) + m.head(jnp.sin(m.encode("b", B)))


def partial_that_caches_its_graph(m):
  f = nnx.cached_partial(nnx.jit(lambda m, ids: jnp.tanh(m.encode("a", ids))), m)
  return m.head(f(A)) + m.head(jnp.sin(m.encode("b", B)))


def capture(m):
  x, _ = nnx.capture(lambda m: m.encode("a", A), nnx.Intermediate)(m)
  return m.head(jnp.tanh(x)) + m.head(jnp.sin(m.encode("b", B)))


def scan_without_a_lookup(m):
  x, y = jnp.tanh(m.encode("a", A)), jnp.sin(m.encode("b", B))
  add = lambda carry, x: (carry[0], carry[1] + carry[0].head(x[None]))
  f = nnx.scan(add, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
  m, total = f((m, 0.0), jnp.concatenate([x, y]))
  return total


LOSSES = [
  twice,
  checkpoint_that_closes_over_the_model,
  jax_jit_that_closes_over_the_model,
  rebuilt_from_its_own_state,
  partial_that_caches_its_graph,
  capture,
  scan_without_a_lookup,
  one_call_of_two_features,
  nested_jit_called_twice,
  remat,
  cond_in_one_branch,
  cond_in_both_branches,
  jit_in_remat_in_cond,
  checkpoint_with_the_model_as_argument,
]


@pytest.mark.parametrize(
  ("loss", "compiled"),
  slow_unless(
    itertools.product(LOSSES, [False, True]),
    lambda loss, compiled: not compiled or loss in (remat, cond_in_both_branches),
    lambda loss, compiled: not compiled,
  ),
)
def test_row_gradients_equal_the_dense_gradient(loss, compiled):
  model = Model()
  f = embed.value_and_grad(loss)
  value, grads = (nnx.jit(f) if compiled else f)(model)
  np.testing.assert_allclose(value, loss(model), rtol=1e-6)
  rows = grads.rows["inner/e/t"]
  np.testing.assert_allclose(dense(rows), reference(model), atol=1e-6)
  touched = sorted(i for i in np.asarray(rows.ids).tolist() if i < V)
  assert touched == [1, 2, 3, 4, 5]
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that it trains no table
    wanted = nnx.grad(loss)(model)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grads.dense, wanted)


def test_a_branch_not_taken_touches_nothing():
  model = Model()

  def loss(m, flag):
    return nnx.cond(flag, lambda m: m.encode("a", A).sum(), lambda m: jnp.zeros(()), m)

  f = nnx.jit(embed.value_and_grad(loss))
  assert (np.asarray(f(model, False)[1].rows["inner/e/t"].ids) == V).all()
  assert (np.asarray(f(model, True)[1].rows["inner/e/t"].ids) < V).sum() == 3


def closed(f):
  return lambda m: jnp.sum(f(lambda ids: m.encode("a", ids)))


def stored(m):
  return m.inner["e"].arrays["t"]["parameters"].get_value()


REFUSED = {
  "vmap": closed(lambda encode: jax.vmap(encode)(A[:, None])),
  "vmap with the model as argument": lambda m: jnp.sum(
    jax.vmap(lambda m, i: m.encode("a", i), in_axes=(None, 0))(m, A[:, None])
  ),
  "nnx.vmap": lambda m: jnp.sum(
    nnx.vmap(lambda m, i: m.encode("a", i), in_axes=(None, 0))(m, A[:, None])
  ),
  "scan": closed(lambda encode: jax.lax.scan(lambda c, i: (c, encode(i)), 0, A[:, None])[1]),
  "nnx.scan": lambda m: nnx.scan(
    lambda c, i: (c[0], c[1] + c[0].encode("a", i).sum()),
    in_axes=(nnx.Carry, 0),
    out_axes=nnx.Carry,
  )((m, 0.0), A[:, None])[1],
  "fori_loop": closed(
    lambda encode: jax.lax.fori_loop(0, 3, lambda _, c: c + encode(A).sum(), 0.0)
  ),
  "the condition of a loop": lambda m: (
    twice(m) + jax.lax.while_loop(lambda c: m.encode("a", A).sum() > c, lambda c: c + 1e9, 0.0)
  ),
  "tables": lambda m: jnp.sum(m.inner["e"].tables["t"]),
  "stored rows": lambda m: sum(jnp.sum(x) for x in jax.tree.leaves(nnx.state(m, embed.Table))),
  "a function with a rule of its own": lambda m: twice(m) + jax.nn.relu(stored(m)).sum(),
  "rows scanned over": lambda m: twice(m) + jax.lax.map(jnp.sum, stored(m)).sum(),
  "rows in a loop": lambda m: (
    twice(m)
    + jax.lax.while_loop(
      lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + stored(m).sum()), (0, 0.0)
    )[1]
  ),
  "load_tables": lambda m: m.inner["e"].load_tables({"t": jnp.zeros((V, D))}) or twice(m),
  "update": lambda m: (
    m.inner["e"].apply_row_gradients({"t": embed.RowGrads([1], jnp.ones((1, D)))}) or twice(m)
  ),
}
CAUSE = {
  "tables": "attend",
  "nnx.vmap": "vmap",
  "stored rows": "regularise",
  "a function with a rule of its own": "regularise",
  "rows scanned over": "regularise",
  "rows in a loop": "regularise",
  "load_tables": "load_tables",
  "update": "updated inside the loss",
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_lose_a_gradient_raises(name, compiled):
  f = embed.value_and_grad(REFUSED[name])
  with pytest.raises(ValueError, match=CAUSE.get(name, "loss")):
    (nnx.jit(f) if compiled else f)(Model())


def test_the_dense_way_is_refused():
  model = Model()
  wrt = nnx.DiffState(0, nnx.Any(nnx.Param, embed.Table))
  with (
    pytest.raises(ValueError, match=r"embed\.value_and_grad"),
    pytest.warns(UserWarning, match="no gradient"),
  ):
    nnx.value_and_grad(twice, argnums=wrt)(model)
  with pytest.warns(UserWarning, match="no gradient"):
    _, grads = nnx.value_and_grad(twice)(model)
  with pytest.raises(TypeError, match=r"embed\.value_and_grad"):
    embed.Optimizer(model, optax.sgd(0.1)).update(model, grads)


def test_a_layer_from_outside_of_the_loss_is_told():
  model, other = Model(), Model()
  with pytest.raises(ValueError, match="in the model around it"):
    embed.value_and_grad(lambda m: twice(model))(model)
  with pytest.warns(UserWarning, match="table 't' in a SparseEmbed that is not in its first"):
    embed.value_and_grad(lambda m: twice(m) + twice(other))(model)

  def made(m):
    return twice(m) + twice(Model())

  with pytest.warns(UserWarning, match="not in its first argument"):
    embed.value_and_grad(made)(model)
  embed.value_and_grad(lambda m, other: twice(m) + twice(other))(model, other)  # told, by its place


def test_a_frozen_layer_from_outside_is_nothing_to_tell():
  model = Model()
  table = embed.TableConfig(V, D, optimizer=embed.frozen())
  teacher = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(1))
  embed.value_and_grad(lambda m: twice(m) + jnp.sum(teacher(A)))(model)
  nnx.value_and_grad(lambda m: jnp.sum(m.out(teacher(A))))(model)


def test_jaxs_own_differentiation_says_that_it_trains_no_table():
  model = Model()
  with pytest.warns(UserWarning, match=r"Table 't' is looked up under JAX's own differentiation"):
    nnx.value_and_grad(twice)(model)
  with pytest.warns(UserWarning, match=r"nothing trains them"):
    nnx.value_and_grad(lambda m: m.inner["e"].attend(jnp.ones((1, D)), "t").sum())(model)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_a_gradient_of_a_gradient_reaches_the_rows(compiled):
  """A penalty on the gradient of the kernel, against plain JAX."""
  model = Model()

  def penalised(m):
    loss, grads = embed.value_and_grad(twice)(m)
    return loss + jnp.sum(grads.dense["out"]["kernel"][...] ** 2)

  f = embed.value_and_grad(penalised)
  value, grads = (nnx.jit(f) if compiled else f)(model)
  bias = model.out.bias[...]

  def plain(table, kernel):
    loss = lambda k: jnp.sum(jnp.tanh(table[A]) @ k + bias) + jnp.sum(jnp.sin(table[B]) @ k + bias)
    return loss(kernel) + jnp.sum(jax.grad(loss)(kernel) ** 2)

  table, kernel = model.inner["e"].tables["t"], model.out.kernel[...]
  wanted, (of_rows, of_kernel) = jax.value_and_grad(plain, argnums=(0, 1))(table, kernel)
  np.testing.assert_allclose(value, wanted, rtol=1e-5)
  np.testing.assert_allclose(dense(grads.rows["inner/e/t"]), of_rows, atol=1e-5)
  np.testing.assert_allclose(grads.dense["out"]["kernel"][...], of_kernel, atol=1e-5)


def test_layers_whose_stacks_have_one_name_stay_apart():
  """`tower/user` with table "geo/id" and `tower/user/geo` with "id" share nothing but letters."""

  def layer(name, seed):
    table = embed.TableConfig(V, D, name=name, optimizer=embed.sgd(1.0))
    return embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(seed))

  class Two(nnx.Module):
    def __init__(self):
      self.a, self.b = layer("b/id", 0), nnx.Dict(x=layer("id", 1))

  model = Two()
  _, grads = embed.value_and_grad(lambda m: m.a(A).sum() + 2 * m.b["x"](B).sum())(model)
  assert sorted(grads.rows) == ["a/b/id", "b/x/id"]


def test_a_missing_table_raises():
  model = Model()
  _, grads = embed.value_and_grad(twice)(model)
  with pytest.raises(ValueError, match="inner/e/t"):
    embed.Optimizer(model, optax.sgd(0.1)).update(model, embed.Grads(grads.dense, {}))


def test_a_table_not_looked_up_has_an_empty_entry():
  model = Model()
  _, grads = embed.value_and_grad(lambda m: jnp.sum(m.out(jnp.ones((1, D)))))(model)
  assert grads.rows["inner/e/t"].values.shape == (0, D)


def test_other_state_survives():
  """Batch statistics, random counters of another argument, and aux come through."""

  def loss(m, ids, rngs):
    x = m.bn(m.dropout(m.encode("a", ids), rngs=rngs))
    return jnp.sum(x**2), {"x": x}

  model, rngs = Model(), nnx.Rngs(3)
  step = nnx.jit(embed.value_and_grad(loss, has_aux=True))
  (_, aux), _ = step(model, A, rngs)
  assert aux["x"].shape == (4, D)
  assert np.abs(model.bn.mean[...]).sum() > 0
  first = np.asarray(aux["x"])
  (_, aux), _ = step(model, A, rngs)
  assert not np.array_equal(first, aux["x"]), "the dropout mask did not change"


def test_the_report_counts_through_jit_and_grad():
  model = Model()
  step = nnx.jit(embed.value_and_grad(lambda m, ids: m.encode("a", ids).sum()))
  step(model, np.array([0, V, V + 5, -1]))
  step(model, np.array([0, V, 1, -1]))
  assert int(model.inner["e"].report["dropped_ids"]) == 3


def test_a_shared_layer_is_one_entry():
  class Towers(nnx.Module):
    def __init__(self):
      shared = Model()
      self.query, self.candidate = shared, shared

  model = Towers()
  f = embed.value_and_grad(
    lambda m: (
      m.query.head(jnp.tanh(m.query.encode("a", A)))
      + m.candidate.head(jnp.sin(m.candidate.encode("b", B)))
    )
  )
  _, grads = f(model)
  (rows,) = grads.rows.values()
  np.testing.assert_allclose(dense(rows), reference(model.query), atol=1e-6)


def test_a_layer_given_twice_is_refused():
  model = Model()
  f = embed.value_and_grad(lambda m, e: m.out(e({"a": A})["a"]).sum())
  with pytest.raises(ValueError, match="inside the model"):
    f(model, model.inner["e"])


def test_random_state_may_come_by_keyword():
  f = embed.value_and_grad(lambda m, *, rngs: jnp.sum(m.dropout(m.encode("a", A), rngs=rngs)))
  rngs = nnx.Rngs(0)
  assert f(Model(), rngs=rngs)[0] != f(Model(), rngs=rngs)[0]


def test_what_the_loss_returns_is_checked():
  model = Model()
  with pytest.raises(TypeError, match="has_aux=True"):
    embed.value_and_grad(lambda m: (twice(m), 1))(model)
  with pytest.raises(TypeError, match=r"\(loss, aux\)"):
    embed.value_and_grad(twice, has_aux=True)(model)
  (_, aux), _ = embed.value_and_grad(lambda m: (twice(m), {"n": 3}), has_aux=True)(model)
  assert isinstance(aux["n"], jax.Array)


def test_capture_outside_of_a_loss_is_free():
  out, _ = nnx.capture(lambda m: m.encode("a", A), nnx.Intermediate)(Model())
  assert out.shape == (4, D)


def test_an_inference_closure_needs_no_state():
  model = Model()
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    out = jax.jit(lambda ids: model.encode("a", ids))(A)
  np.testing.assert_array_equal(out, model.encode("a", A))


def test_a_table_variable_of_the_users_own_is_an_ordinary_array():
  class Averaged(nnx.Module):
    def __init__(self):
      self.model = Model()
      self.average = embed.Table(jnp.ones((V, D)))

  loss = lambda m: twice(m.model) + jnp.sum(m.average[...])
  _, grads = embed.value_and_grad(loss)(Averaged())
  assert sorted(grads.rows) == ["model/inner/e/t"]


def test_a_model_that_jit_closes_over_cannot_change():
  """Lookups are fine there; for all else the error says what to write."""
  movie = embed.TableConfig(5, 2, optimizer=embed.sgd(0.1), name="movie")
  model = embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0))
  optimizer, ids = embed.Optimizer(model, optax.sgd(0.1)), np.array([1, 2])
  loss_fn = lambda model, ids: model(ids).sum()
  _, grads = embed.value_and_grad(loss_fn)(model, ids)

  def mid_level(ids):
    activations, residual = model.lookup(ids)
    model.apply_gradients(jnp.ones_like(activations), residual)

  changes = [
    lambda ids: embed.value_and_grad(loss_fn)(model, ids)[0],
    lambda ids: optimizer.update(model, grads),
    lambda ids: model.load_tables({"movie": jnp.ones((5, 2)) * ids[0]}),
    mid_level,
  ]
  before = np.asarray(model.tables["movie"])
  for change in changes:
    with pytest.raises(ValueError, match=r"closes over.*as an argument to nnx\.jit"):
      jax.jit(change)(ids)
  np.testing.assert_array_equal(jax.jit(lambda ids: model(ids))(ids), before[ids])
  np.testing.assert_array_equal(model.tables["movie"], before)


def test_shapes_inside_a_loss():
  movie = embed.TableConfig(5, 2, optimizer=embed.sgd(0.1), name="movie")
  model = embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0))
  ids, call = np.array([1, 2]), lambda model, ids: model(ids)

  def loss_fn(model, ids):
    (number, dim), same = nnx.eval_shape(call, model, ids).shape, jax.eval_shape(model, ids).shape
    assert (number, dim) == same
    return model(ids).sum() / number

  _, grads = embed.value_and_grad(loss_fn)(model, ids)
  assert embed.global_norm(grads) == 1
