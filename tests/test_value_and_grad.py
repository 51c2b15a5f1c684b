"""Row gradients come out of a loss exactly, wherever the layer is called, or an error says why."""

import functools

import jax
import jax.numpy as jnp
import layers
import numpy as np
import optax
import pytest
from flax import errors, nnx
from nested_model import A, B, D, Model, V, dense, twice

import embed


@pytest.fixture(scope="module")
def model():
  """One model for the tests that only look at it."""
  return Model()


def traced(loss, *args, **options):
  """`embed.value_and_grad`, while tracing alone: no program."""
  return nnx.eval_shape(embed.value_and_grad(loss, **options), *args)


@functools.cache
def reference():
  """The loss of all of LOSSES, head(tanh(rows of A)) + head(sin(rows of B)), and its gradients."""
  model = Model()
  table, kernel = np.asarray(model.inner["e"].tables["t"]), np.asarray(model.out.kernel[...])
  x, y = np.tanh(table[A]), np.sin(table[B])
  of_rows = np.zeros((V, D))
  np.add.at(of_rows, A, (1 - x**2) * kernel[:, 0])
  np.add.at(of_rows, B, np.cos(table[B]) * kernel[:, 0])
  value = (x @ kernel).sum() + (y @ kernel).sum()  # the bias starts at 0
  return value, of_rows, (x.sum(0) + y.sum(0))[:, None]


def nested_jit_called_twice(m):
  encode = nnx.jit(lambda m, ids: m.encode("a", ids))  # its second call is a cache hit
  return m.head(jnp.tanh(encode(m, jnp.array(A)))) + m.head(jnp.sin(encode(m, jnp.array(B))))


def remat(m):
  f = nnx.remat(lambda m, ids: jnp.tanh(m.encode("a", ids)))
  g = nnx.remat(lambda m, ids: jnp.sin(m.encode("a", ids)))
  return m.head(f(m, jnp.array(A))) + m.head(g(m, jnp.array(B)))


def cond_in_both_branches(m):
  yes = jnp.sum(m.out.kernel[...]) < 1e9
  x = nnx.cond(yes, lambda m: jnp.tanh(m.encode("a", A)), lambda m: m.encode("b", A[::-1]), m)
  y = nnx.cond(~yes, lambda m: m.encode("a", A), lambda m: jnp.sin(m.encode("b", B)), m)
  return m.head(x) + m.head(y)


def scan_without_a_lookup(m):
  x, y = jnp.tanh(m.encode("a", A)), jnp.sin(m.encode("b", B))
  add = lambda carry, x: (carry[0], carry[1] + carry[0].head(x[None]))
  f = nnx.scan(add, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
  m, total = f((m, 0.0), jnp.concatenate([x, y]))
  return total


LOSSES = [
  twice,
  nested_jit_called_twice,
  remat,
  cond_in_both_branches,
  pytest.param(scan_without_a_lookup, marks=pytest.mark.ci),
]


@nnx.jit(static_argnums=0)
def differentiate(loss, model):
  value, grads = embed.value_and_grad(loss)(model)
  return value, grads.rows["inner/e/t"], grads.dense


@pytest.mark.parametrize("loss", LOSSES)
def test_row_gradients_equal_the_dense_gradient(loss, model):
  wanted, of_rows, of_kernel = reference()
  value, rows, of_dense = differentiate(loss, model)
  np.testing.assert_allclose(value, wanted, rtol=1e-6)
  np.testing.assert_allclose(dense(rows), of_rows, atol=1e-6)
  assert sorted(i for i in np.asarray(rows.ids).tolist() if i < V) == [1, 2, 3, 4, 5]
  np.testing.assert_allclose(of_dense["out"]["kernel"][...], of_kernel, atol=1e-5)
  assert of_dense["out"]["bias"][...].tolist() == [len(A) + len(B)]


def of_ids(f):
  """A loss that gives `f` a function from ids to activations, which closes over the model."""
  return lambda m: jnp.sum(f(lambda ids: m.encode("a", ids)))


def one_branch(m):
  yes = jnp.sum(m.out.kernel[...]) < 1e9
  return m.head(nnx.cond(yes, lambda m: jnp.tanh(m.encode("a", A)), lambda m: jnp.zeros((4, D)), m))


def scan_of_lookups(m):
  add = lambda carry, ids: (carry[0], carry[1] + carry[0].encode("a", ids).sum())
  return nnx.scan(add, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)((m, 0.0), A[:, None])[1]


def condition_of_a_loop(m):
  more = lambda total: m.encode("a", A).sum() > total
  return twice(m) + jax.lax.while_loop(more, lambda total: total + 1e9, 0.0)


def replaced(m):
  m.inner["e"].load_tables({"t": jnp.zeros((V, D))})
  return twice(m)


def updated(m):
  activations, residual = m.inner["e"].lookup({"a": A})
  m.inner["e"].apply_gradients(activations, residual)
  return twice(m)


REFUSED = {  # and what the error names
  "vmap": (of_ids(lambda encode: jax.vmap(encode)(A[:, None])), "vmap"),
  "scan": (
    of_ids(lambda encode: jax.lax.scan(lambda c, ids: (c, encode(ids)), 0, A[:, None])[1]),
    "scan",
  ),
  "nnx.scan": (scan_of_lookups, "outside of scans"),
  "fori_loop": (
    of_ids(lambda encode: jax.lax.fori_loop(0, 3, lambda _, x: x + encode(A).sum(), 0.0)),
    "loop",
  ),
  "the condition of a loop": (condition_of_a_loop, "loop"),
  "jax.jit": (of_ids(lambda encode: jax.jit(encode)(A)), "nnx.jit"),
  "nnx.jit(graph=False)": (
    lambda m: m.head(nnx.jit(lambda m: m.encode("a", A), graph=False)(m)),
    "graph=False",
  ),
  "jax.checkpoint": (of_ids(lambda encode: jax.checkpoint(encode)(A)), "nnx.remat"),
  "a cached graph": (
    lambda m: nnx.cached_partial(nnx.jit(lambda m: m.encode("a", A).sum()), m)(),
    "graph structure",
  ),
  "one branch": (one_branch, "both branches of nnx.cond"),
  "tables": (lambda m: jnp.sum(m.inner["e"].tables["t"]), "attend"),
  "load_tables": (replaced, "replaced inside"),
  "update": (updated, "updated inside"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_lose_a_gradient_raises(name, model):
  loss, named = REFUSED[name]
  with pytest.raises((ValueError, TypeError)) as error:
    traced(loss, model)
  assert named in "".join([str(error.value), *getattr(error.value, "__notes__", ())])


@pytest.mark.ci
def test_a_copy_that_looks_up_as_well_is_loud(model):
  def loss(m):
    copy = nnx.merge(*nnx.split(m))
    return m.head(jnp.tanh(copy.encode("a", A))) + m.head(jnp.sin(m.encode("b", B)))

  with pytest.raises(ValueError, match="copy of the model"):
    embed.value_and_grad(loss)(model)
  assert np.isnan(nnx.jit(lambda m: embed.value_and_grad(loss)(m)[0])(model))


def test_gradients_without_the_rows_are_refused(model):
  """Those of nnx, and those from which a table is missing."""

  def dense_way(model, optimizer):
    _, grads = nnx.value_and_grad(twice)(model)
    optimizer.update(model, grads)

  def no_table(model, optimizer):
    _, grads = embed.value_and_grad(twice)(model)
    optimizer.update(model, embed.Grads(grads.dense, {}))

  optimizer = embed.Optimizer(model, optax.sgd(0.1))
  with pytest.raises(TypeError, match=r"embed\.value_and_grad"):
    nnx.eval_shape(dense_way, model, optimizer)
  with pytest.raises(ValueError, match="inner/e/t"):
    nnx.eval_shape(no_table, model, optimizer)
  with pytest.raises(ValueError, match="inside the model"):
    traced(lambda m, e: m.out(e({"a": A})["a"]).sum(), model, model.inner["e"])


def test_a_layer_from_outside_of_the_loss_is_refused(model):
  """But not a frozen one, which has no gradient to lose, nor another argument."""
  other = Model()
  for loss in (lambda m: twice(model), lambda m: twice(m) + twice(other), lambda m: twice(Model())):
    with pytest.raises(ValueError, match="table 't' in a SparseEmbed that is not in its first"):
      traced(loss, model)
  table = embed.TableConfig(V, D, optimizer=embed.frozen())
  teacher = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(1))
  traced(lambda m, other: twice(m) + twice(other), model, other)
  traced(lambda m: twice(m) + jnp.sum(teacher(A)), model)


def test_a_table_not_looked_up_has_an_empty_entry(model):
  _, grads = traced(lambda m: jnp.sum(m.out(jnp.ones((1, D)))), model)
  assert grads.rows["inner/e/t"].values.shape == (0, D)


def test_other_state_survives():
  """Batch statistics, random counters of an argument by keyword, and aux come through."""

  class Normalized(Model):
    def __init__(self):
      super().__init__()
      self.bn, self.dropout = nnx.BatchNorm(D, rngs=nnx.Rngs(0)), nnx.Dropout(0.5)

  def loss(m, ids, *, rngs):
    x = m.bn(m.dropout(m.encode("a", ids), rngs=rngs))
    return jnp.sum(x**2), {"x": x}

  model, rngs = Normalized(), nnx.Rngs(3)
  step = nnx.jit(embed.value_and_grad(loss, has_aux=True))
  (_, aux), _ = step(model, A, rngs=rngs)
  assert aux["x"].shape == (4, D)
  assert np.abs(model.bn.mean[...]).sum() > 0
  first = np.asarray(aux["x"])
  (_, aux), _ = step(model, A, rngs=rngs)
  assert not np.array_equal(first, aux["x"]), "the dropout mask did not change"


def test_a_shared_layer_is_one_entry():
  class Towers(nnx.Module):
    def __init__(self):
      self.query = self.candidate = Model()

  @nnx.jit
  def differentiate(model):
    loss = lambda m: (
      m.query.head(jnp.tanh(m.query.encode("a", A)))
      + m.candidate.head(jnp.sin(m.candidate.encode("b", B)))
    )
    (rows,) = embed.value_and_grad(loss)(model)[1].rows.values()
    return rows

  np.testing.assert_allclose(dense(differentiate(Towers())), reference()[1], atol=1e-6)


def test_a_model_that_jit_closes_over_cannot_change():
  """Lookups are fine there; for all else Flax raises."""
  layer = layers.one_table()
  optimizer, ids = embed.Optimizer(layer, optax.sgd(0.1)), np.array([1, 2])
  grads = nnx.jit(embed.value_and_grad(lambda m: m(ids).sum()))(layer)[1]

  def mid_level(ids):
    activations, residual = layer.lookup(ids)
    layer.apply_gradients(activations, residual)

  changes = [
    lambda ids: embed.value_and_grad(lambda layer, ids: layer(ids).sum())(layer, ids)[0],
    lambda ids: optimizer.update(layer, grads),
    lambda ids: layer.load_tables({"t": jnp.ones(layers.ROWS.shape) * ids[0]}),
    mid_level,
  ]
  for change in changes:
    with pytest.raises(errors.TraceContextError, match="different trace level"):
      jax.eval_shape(change, ids)
  np.testing.assert_array_equal(jax.jit(lambda ids: layer(ids))(ids), layers.ROWS[ids])
  np.testing.assert_array_equal(layer.tables["t"], layers.ROWS)


def test_a_loss_inside_a_loss_leaves_the_outer_one_its_layers():
  """The inner loss takes a layer of the outer model, or one that is constant in both."""
  a, b, fixed = (layers.one_table() for _ in range(3))
  ids = np.array([1, 2])

  def inner(b, other):
    return (b(ids) * other(ids)).sum()

  def outer(model, fixed):
    value = sum(embed.value_and_grad(inner)(model[1], other)[0] for other in (model[0], fixed))
    return value + (model[0](ids) * fixed(ids)).sum()

  model = nnx.List([a, b])
  _, grads = nnx.jit(embed.value_and_grad(outer))(model, fixed)
  wanted = 2 * layers.ROWS[[1, 2]]  # b + fixed, and a + fixed; all are equal
  for rows in grads.rows.values():
    order = np.argsort(rows.ids)[:2]
    np.testing.assert_allclose(np.asarray(rows.values)[order], wanted, rtol=1e-6)
