"""Ways of writing a loss or a training step: right, refused, or at least warned about.

Each way is trained for three steps and compared with float64: gradients of a dense-table loss by
JAX in float64, rows and slots by `fuzz_oracle`. Its decorator declares what may come out:

    right     the same numbers as the reference
    refused   a TypeError or ValueError that says what to write instead, before anything has moved
    either    right or refused
    told      right, refused, or a warning that names the layer
"""

import contextlib
import dataclasses
import functools
import os
import re
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import fuzz_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import embed

B, D, RATE = 8, 3, 0.1


def blank(value=0.0, shape=(B, D)):
  """What a branch without a lookup returns; under `jax.set_mesh` JAX wants one type of them all."""
  x, mesh = jnp.full(shape, value), jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return x
  return jax.sharding.reshard(x, jax.P("data" if shape[0] % mesh.size == 0 else None))


SIZES = {"t": 20, "u": 10}
OPTIMIZERS = {
  "t": ("adagrad_momentum", {"learning_rate": 0.1, "momentum": 0.5}),  # moves rows without gradient
  "u": ("adagrad", {"learning_rate": 0.1}),
}


def make_batch(seed):
  """Bags for "a" and "c", single ids for "b"; duplicates and padding among them."""
  rng = np.random.default_rng(seed)
  bags = lambda size: rng.integers(-1, size, (B, 3)).astype(np.int32)
  return {"a": bags(20), "b": rng.integers(0, 20, B).astype(np.int32), "c": bags(10)}


BATCHES = [make_batch(seed) for seed in range(3)]


def features_of(sizes=SIZES, **config):
  tables = {
    name: embed.TableConfig(size, D, combiner="sum", name=name,
                            optimizer=getattr(embed, OPTIMIZERS[name][0])(**OPTIMIZERS[name][1]))
    for name, size in sizes.items()
  }  # fmt: skip
  return {
    "a": embed.FeatureConfig(tables["t"], **config),
    "b": embed.FeatureConfig(tables["t"]),
    "c": embed.FeatureConfig(tables["u"]),
  }


def encoder(layer):
  """Activations of one feature by a layer, whatever the model."""

  def encode(m, key, ids, weights=None):
    ids = embed.Padded(ids) if ids.ndim == 2 else ids
    return layer({key: ids}, None if weights is None else {key: embed.Padded(weights)})[key]

  return encode


class Model(nnx.Module):
  """The layer two modules deep, in a container."""

  def __init__(self, sizes=SIZES, config=None, **where):
    rngs = nnx.Rngs(0)
    self.inner = nnx.Dict(
      e=embed.SparseEmbed(features_of(sizes, **(config or {})), rngs=rngs, **where)
    )
    self.out = nnx.Linear(D, 1, rngs=rngs)
    self.scale = nnx.Param(jnp.ones(D))
    self.dropout = nnx.Dropout(0.0)

  def encode(self, key, ids, weights=None):
    return encoder(self.inner["e"])(self, key, ids, weights)

  def head(self, x):
    return jnp.sum(jnp.tanh(self.out(x * self.scale[...])))

  def loss(self, batch):
    return canonical(self, batch)


def canonical(m, batch, encode=None):
  """The loss that most ways compute: two bags and one id, of two tables."""
  encode = encode or (lambda m, key, ids: m.encode(key, ids))
  a, b, c = (encode(m, key, jnp.asarray(batch[key])) for key in "abc")
  return m.head(jnp.tanh(a)) + m.head(jnp.sin(b) * c)


def only_a(m, batch, encode):
  """Of one feature alone."""
  return m.head(jnp.tanh(encode(m, jnp.asarray(batch["a"]))))


# --- the reference --------------------------------------------------------------------------------


def rows_of(table, ids):
  """Sums of rows along the last axis of bags, or single rows; negative ids are padding."""
  ids = jnp.asarray(ids)
  rows = jnp.where((ids >= 0)[..., None], table[jnp.maximum(ids, 0)], 0)
  return rows.sum(axis=1) if ids.ndim == 2 else rows


def plain_head(p, x):
  return jnp.sum(jnp.tanh((x * p["scale"]) @ p["kernel"] + p["bias"]))


def plain(p, batch):
  a, b, c = rows_of(p["t"], batch["a"]), rows_of(p["t"], batch["b"]), rows_of(p["u"], batch["c"])
  return plain_head(p, jnp.tanh(a)) + plain_head(p, jnp.sin(b) * c)


def plain_a(p, batch):
  return plain_head(p, jnp.tanh(rows_of(p["t"], batch["a"])))


def plain_ab(p, batch):
  return plain_a(p, batch) + plain_head(p, rows_of(p["t"], batch["b"]))


def touch(*keys):
  """The ids that a batch looks up through some features."""

  def touched(batch):
    found = {"t": [], "u": []}
    for key in keys:
      ids = np.asarray(batch[key]).ravel()
      found["u" if key == "c" else "t"] += ids[ids >= 0].tolist()
    return {name: np.unique(np.array(ids, np.int64)) for name, ids in found.items()}

  return touched


TOUCHED = {
  plain: touch(*"abc"),
  plain_a: touch("a"),
  plain_ab: touch(*"ab"),
}


@functools.cache
def derivative(f):
  return jax.jit(jax.value_and_grad(f))


class Reference:
  """The model in float64."""

  def __init__(self, model):
    tables = model.inner["e"].tables
    self.tables = {n: oracle.Table(np.asarray(tables[n]), OPTIMIZERS[n]) for n in SIZES}
    dense = {"kernel": model.out.kernel, "bias": model.out.bias, "scale": model.scale}
    self.dense = {name: np.asarray(v[...], np.float64) for name, v in dense.items()}

  def params(self):
    return {n: t.rows.copy() for n, t in self.tables.items()} | dict(self.dense)

  def gradients(self, f, batch, params=None):
    with jax.enable_x64(True):
      value, grads = derivative(f)(self.params() if params is None else params, batch)
      return float(value), {name: np.asarray(g, np.float64) for name, g in grads.items()}

  def apply(self, grads, touched, number):
    for name, table in self.tables.items():
      table.step(touched[name], grads[name][touched[name]])
    self.dense = {name: v - RATE * grads[name] for name, v in self.dense.items()}

  def step(self, f, batch, number, touched=None, factor=1.0):
    """One ordinary step, its gradients times a factor."""
    value, grads = self.gradients(f, batch)
    touched = (touched or TOUCHED[f])(batch)
    self.apply({name: factor * g for name, g in grads.items()}, touched, number)
    return value


def expected_steps(f=plain, touched=None, factor=1.0):
  """The reference of a way that is an ordinary step of the loss `f`."""
  return lambda ref, batch, n: ref.step(f, batch, n, touched, factor)


# --- declaring ways -------------------------------------------------------------------------------

ALLOWED = {
  "right": {"right"},
  "refused": {"refused"},
  "either": {"right", "refused"},
  "told": {"right", "refused", "warned"},
}


@dataclasses.dataclass
class Way:
  name: str
  allowed: str
  run: Callable[..., Any]  # (model, optimizer, batch) -> loss
  reference: Callable[..., Any]  # (Reference, batch, step number) -> loss or None
  jit: bool = True
  says: str = ""  # what the error has to name
  make_model: Callable[..., Any] = Model
  tx: Callable[[], Any] = lambda: optax.sgd(RATE)
  make_optimizer: Callable[..., Any] = embed.Optimizer
  is_setup: bool = False  # whether `run` gets model and optimizer and returns `(batch) -> loss`
  on_mesh: bool = True  # False where JAX itself cannot on Explicit axes


WAYS: dict[str, Way] = {}


def step(allowed, f=plain, *, touched=None, factor=1.0, reference=None, **more):
  """Declares a training step `(model, optimizer, batch) -> loss`."""

  def add(run):
    ref = reference or expected_steps(f, touched, factor)
    assert run.__name__ not in WAYS
    WAYS[run.__name__] = Way(run.__name__, allowed, run, ref, **more)
    return run

  return add


def train_on(loss, change=lambda grads: grads, **options):
  """README's training step of a loss, whose gradients go through `change`."""

  def run(model, optimizer, batch):
    value, grads = embed.value_and_grad(loss, **options)(model, batch)
    optimizer.update(model, change(grads))
    return value

  return run


def loss(allowed, f=plain, **more):
  """Declares a loss `(m, batch)`, trained by README's step."""

  def add(function):
    run = train_on(function)
    run.__name__ = function.__name__
    step(allowed, f, **more)(run)
    return function

  return add


# --- lookups where they belong --------------------------------------------------------------------


@loss("right")
def three_calls(m, batch):
  return canonical(m, batch)


@loss("right", plain_a, touched=touch("a", "c"))
def a_lookup_whose_result_is_dropped(m, batch):
  m.encode("c", batch["c"])  # touched, with a gradient of 0
  return m.head(jnp.tanh(m.encode("a", batch["a"])))


def _plain_stopped(p, batch):
  return plain(p | {"u": jax.lax.stop_gradient(p["u"])}, batch)


@loss("right", _plain_stopped, touched=touch(*"abc"))
def stop_gradient_of_activations(m, batch):
  stop = lambda m, key, ids: (jax.lax.stop_gradient if key == "c" else lambda x: x)(
    m.encode(key, ids)
  )
  return canonical(m, batch, stop)


# --- under transformations ------------------------------------------------------------------------


def _yes(m):
  return jnp.sum(m.scale[...]) < 1e9


@loss("right", on_mesh=False)  # lax.scan takes no axis that is split
def lax_scan_over_activations(m, batch):
  copy_rows = lambda x: jax.lax.scan(lambda c, row: (c, row * 1.0), 0, x)[1]
  return canonical(m, batch, lambda m, k, i: copy_rows(m.encode(k, i)))


# --- transformations under which a gradient would be lost -----------------------------------------


@loss("refused", plain_a, says="vmap")
def jax_vmap_over_a_lookup(m, batch):
  return only_a(m, batch, lambda m, ids: jax.vmap(lambda i: m.encode("a", i[None])[0])(ids))


@loss("either", plain_a)
def jax_vjp_of_a_lookup(m, batch):
  return only_a(m, batch, lambda m, ids: jax.vjp(lambda s: m.encode("a", ids) * s, 1.0)[0])


@loss("either", plain_a)
def custom_vjp_around_a_lookup(m, batch):
  @jax.custom_vjp
  def f(ids):
    return m.encode("a", ids)

  f.defvjp(lambda ids: (f(ids), None), lambda _, g: (None,))
  return only_a(m, batch, lambda m, ids: f(ids))


# --- models that are not the one that is differentiated -------------------------------------------


@step("told")
def a_closure_over_the_model(model, optimizer, batch):
  return train_on(lambda m, batch: canonical(model, batch))(model, optimizer, batch)


@step("told")
def merged_inside_from_a_split_outside(model, optimizer, batch):
  tables_and_slots = nnx.Any(embed.Table, embed.SlotVariable)
  graphdef, tables, _ = nnx.split(model, tables_and_slots, ...)

  def loss_fn(m, batch):
    whole = nnx.merge(graphdef, tables, nnx.state(m, nnx.Not(tables_and_slots)))
    return canonical(whole, batch)

  return train_on(loss_fn)(model, optimizer, batch)


@loss("told")
def another_layer_put_into_the_model(m, batch):
  m.inner["e"] = embed.SparseEmbed(features_of(), rngs=nnx.Rngs(0))
  return canonical(m, batch)


@loss("told")
def a_layer_made_inside(m, batch):
  return canonical(m, batch, encoder(embed.SparseEmbed(features_of(), rngs=nnx.Rngs(0))))


@step("right", is_setup=True)
def nnx_jit_partial_of_the_step(model, optimizer):
  run = train_on(canonical)
  return nnx.jit_partial(run, model, optimizer, donate_argnums=0, graph_updates=False)


@step("refused", says="Module")
def the_functional_idiom(model, optimizer, batch):
  graphdef, state = nnx.split(model)
  loss_fn = lambda graphdef, state, batch: canonical(nnx.merge(graphdef, state), batch)
  value, grads = embed.value_and_grad(loss_fn)(graphdef, state, batch)
  optimizer.update(model, grads)
  return value


@step("right", jit=False)
def jax_jit_of_a_step_that_merges(model, optimizer, batch):
  graphdef, state = nnx.split((model, optimizer))

  @jax.jit
  def run(state, batch):
    model, optimizer = nnx.merge(graphdef, state)
    value = train_on(canonical)(model, optimizer, batch)
    return value, nnx.state((model, optimizer))

  value, new = run(state, batch)
  nnx.update((model, optimizer), new)
  return value


@step(
  "told", jit=False, reference=lambda ref, batch, number: None
)  # plain NNX keeps nothing either
def jax_jit_of_the_step(model, optimizer, batch):
  return jax.jit(train_on(canonical))(model, optimizer, batch)


@step("right", jit=False)
def an_eager_step(model, optimizer, batch):
  return train_on(canonical)(model, optimizer, batch)


@step("told")
def a_teacher_beside_the_model(model, optimizer, batch):
  teacher = Model()

  def loss_fn(m, teacher, batch):
    return canonical(m, batch) + 0 * canonical(teacher, batch)

  value, grads = embed.value_and_grad(loss_fn)(model, teacher, batch)
  optimizer.update(model, grads)
  return value


# --- derivatives of derivatives -------------------------------------------------------------------


@step("told", make_optimizer=lambda m, tx: nnx.Optimizer(m, tx, wrt=nnx.Param))
def nnx_value_and_grad_and_nnx_optimizer(model, optimizer, batch):
  value, grads = nnx.value_and_grad(canonical)(model, batch)
  optimizer.update(model, grads)
  return value


@step("refused", make_optimizer=lambda m, tx: nnx.Optimizer(m, tx, wrt=nnx.Param), says="embed")
def our_gradients_and_nnx_optimizer(model, optimizer, batch):
  return train_on(canonical)(model, optimizer, batch)


# --- how the loss is called -----------------------------------------------------------------------


# --- whole tables ---------------------------------------------------------------------------------


def _plain_attend(p, batch):
  query = rows_of(p["t"], batch["a"])
  return jnp.sum(jnp.tanh(query @ p["u"].T))


def _attend_touched(batch):
  return touch("a")(batch) | {"u": np.arange(SIZES["u"])}


@loss("right", _plain_attend, touched=_attend_touched)
def attend(m, batch):
  return jnp.sum(jnp.tanh(m.inner["e"].attend(m.encode("a", batch["a"]), "u")))


def _plain_candidates(p, batch):
  query = rows_of(p["t"], batch["a"])
  return jnp.sum(jnp.tanh(query @ p["t"][batch["b"]].T))


@loss("right", _plain_candidates, touched=touch(*"ab"))
def attend_to_candidates(m, batch):
  return jnp.sum(jnp.tanh(m.inner["e"].attend(m.encode("a", batch["a"]), "t", batch["b"])))


@loss("refused", says="attend")
def variables_read_inside(m, batch):
  return canonical(m, batch) + jnp.sum(m.inner["e"].variables["u"]["parameters"] ** 2)


@loss("refused")
def apply_gradients_inside(m, batch):
  acts, residual = m.inner["e"].lookup({"b": batch["b"]})
  m.inner["e"].apply_gradients({"b": acts["b"]}, residual, step=0)
  return canonical(m, batch)


# --- arithmetic with gradients --------------------------------------------------------------------


def change(allowed, factor=1.0, **more):
  def add(function):
    run = train_on(canonical, function)
    run.__name__ = function.__name__
    return step(allowed, factor=factor, **more)(run)

  return add


@change("right")
def rows_made_by_hand(grads):
  rows = {key: embed.RowGrads(r.ids, r.values) for key, r in grads.rows.items()}
  return embed.Grads(grads.dense, rows)


def _true_norm(ref, batch):
  _, grads = ref.gradients(plain, batch)
  return np.sqrt(sum(np.sum(g * g) for g in grads.values()))


def _clipped(ref, batch, number):
  return ref.step(plain, batch, number, factor=min(1.0, 0.1 / _true_norm(ref, batch)))


@change("right", reference=_clipped)
def clip_by_global_norm(grads):
  return embed.clip_by_global_norm(grads, 0.1)


def _two_batches(ref, batch, number):
  other = make_batch(100)
  value, first = ref.gradients(plain, batch)
  _, second = ref.gradients(plain, other)
  touched = [TOUCHED[plain](b) for b in (batch, other)]
  both = {n: np.union1d(touched[0][n], touched[1][n]) for n in SIZES}
  ref.apply({n: first[n] + second[n] for n in first}, both, number)
  return value


@step("right", reference=_two_batches)
def two_microbatches_accumulated(model, optimizer, batch):
  f = embed.value_and_grad(canonical)
  (value, first), (_, second) = f(model, batch), f(model, make_batch(100))
  optimizer.update(model, embed.accumulate([first, second]))
  return value


# --- batches --------------------------------------------------------------------------------------


@loss("either", lambda p, b: plain_head(p, jnp.tanh(rows_of(p["t"], b["a"])))
      + plain_head(p, rows_of(p["t"], b["b"][:3])),
      touched=lambda b: touch(*"ab")({"a": b["a"], "b": b["b"][:3]}))  # fmt: skip
def features_of_different_batch_sizes(m, batch):
  act = m.inner["e"]({"a": embed.Padded(batch["a"]), "b": batch["b"][:3]})
  return m.head(jnp.tanh(act["a"])) + m.head(act["b"])


def _plain_weighted(p, batch):
  ids, w = batch["a"], jax.lax.stop_gradient(jnp.tanh(p["scale"]))
  rows = jnp.where((ids >= 0)[..., None], p["t"][jnp.maximum(ids, 0)], 0)
  return plain_head(p, jnp.einsum("bld,l->bd", rows, w))


@loss("right", _plain_weighted, touched=touch("a"))
def weights_are_constants(m, batch):
  weights = jnp.broadcast_to(jnp.tanh(m.scale[...]), (B, 3))
  return m.head(m.encode("a", batch["a"], weights))


# --- whole loops ----------------------------------------------------------------------------------


@step("right")
def the_mid_level(model, optimizer, batch):
  given = {"a": embed.Padded(batch["a"]), "b": batch["b"], "c": embed.Padded(batch["c"])}
  acts, residual = model.inner["e"].lookup(given)

  def head(acts, model):
    return model.head(jnp.tanh(acts["a"])) + model.head(jnp.sin(acts["b"]) * acts["c"])

  value, (grads, dense) = nnx.value_and_grad(head, argnums=(0, 1))(acts, model)
  model.inner["e"].apply_gradients(grads, residual, step=optimizer.step[...])
  optimizer.dense.update(model, dense)
  return value


# --- a grammar of wrappers ------------------------------------------------------------------------
# Each takes `f(m, ids)` and returns one that means the same.


def _zeros(m, ids):
  return blank(0.0, (len(ids), D))


def _row_0(m, ids):
  return m.encode("b", jnp.zeros(len(ids), int))


WRAPPERS = {
  "jit": nnx.jit,
  "remat": nnx.remat,
  "cond": lambda f: lambda m, ids: nnx.cond(_yes(m), f, _zeros, m, ids),
  "cond_other": lambda f: lambda m, ids: nnx.cond(~_yes(m), _row_0, f, m, ids),
  "switch": lambda f: (
    lambda m, ids: nnx.switch(2 * jnp.int32(_yes(m)), [_zeros, _zeros, f], m, ids)
  ),
  "halves": lambda f: (
    lambda m, ids: jnp.concatenate([f(m, ids[:4]), f(m, ids[4:])]) if len(ids) > 4 else f(m, ids)
  ),
  "mean_of_two": lambda f: lambda m, ids: (f(m, ids) + f(m, ids)) / 2,
  "checkpoint": jax.checkpoint,
  "after_vmap": lambda f: lambda m, ids: jax.vmap(lambda x: x * 1.0)(f(m, ids)),
  "after_checkpoint": lambda f: lambda m, ids: jax.checkpoint(jnp.sinh)(jnp.arcsinh(f(m, ids))),
  "scope": jax.named_scope("inner"),
  "method": lambda f: lambda m, ids: (lambda self: f(self, ids))(m),
}


def composed(seed):
  """A loss with each lookup under one to three wrappers."""
  rng = np.random.default_rng(seed)
  chosen = {
    key: [list(WRAPPERS)[i] for i in rng.integers(0, len(WRAPPERS), rng.integers(1, 4))]
    for key in "abc"
  }

  def loss_fn(m, batch):
    def encode(m, key, ids):
      f = lambda m, ids: m.encode(key, ids)
      for wrapper in chosen[key]:
        f = WRAPPERS[wrapper](f)
      return f(m, ids)

    return canonical(m, batch, encode)

  return Way(f"composed_{seed} {chosen}", "right", train_on(loss_fn), expected_steps(plain))


COMPOSED = 12


# --- running --------------------------------------------------------------------------------------

# What an error of `embed` says to write, or to be wrong.
INSTEAD = (
  r"embed\.|[Ww]rite|[Uu]se |[Pp]ass|[Ll]ook up|[Gg]ive|[Tt]ake|must|outside|expected|its dim"
)


def says_what_to_write(way, error):
  """Whether an error helps: one of `embed`, one that names it, or Python's own of an operator."""
  *_, last = traceback.extract_tb(error.__traceback__)
  ours = os.path.dirname(embed.__file__) in last.filename
  if not ours and not re.search(r"embed\.|unsupported operand", str(error)):
    return False
  return not ours or (re.search(INSTEAD, str(error)) and re.search(way.says, str(error)))


def observe(model):
  variables = {n: dict(v) for n, v in model.inner["e"].variables.items()}
  dense = {"kernel": model.out.kernel, "bias": model.out.bias, "scale": model.scale}
  return jax.tree.map(np.array, variables | {name: v[...] for name, v in dense.items()})


def difference(model, ref):
  """None, or what differs, to float32's precision of a step of size 0.1."""
  found = observe(model)
  wanted = {n: t.variables for n, t in ref.tables.items()} | ref.dense
  for path, x in jax.tree_util.tree_leaves_with_path(wanted):
    y = functools.reduce(lambda d, k: d[k.key], path, found)
    error = np.max(np.abs(np.asarray(y, np.float64) - x))
    if not error <= 2e-5 * max(1.0, np.max(np.abs(x))):
      return f"{jax.tree_util.keystr(path)} differs by {error:.2e}"
  return None


def outcome(way, mesh=None):
  """ "right", "refused", "warned", or "wrong: ..."."""
  with (
    warnings.catch_warnings(record=True) as caught,
    jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext(),
  ):
    warnings.simplefilter("always")
    model = way.make_model()
    try:
      optimizer = way.make_optimizer(model, way.tx())
    except (TypeError, ValueError) as error:
      return refusal(way, error, model, None)
    ref, before = Reference(model), observe(model)
    if way.is_setup:
      ready = way.run(model, optimizer)
      run = lambda model, optimizer, batch: ready(batch)
    else:
      run = nnx.jit(way.run, donate_argnums=(0, 1)) if way.jit else way.run
    problem = None
    for number, batch in enumerate(BATCHES):
      try:
        value = run(model, optimizer, batch)
      except (TypeError, ValueError) as error:
        return refusal(way, error, model, before if number == 0 else None)
      except Exception as error:
        return f"wrong: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
      wanted = way.reference(ref, batch, number)
      problem = difference(model, ref)
      if (
        problem is None
        and wanted is not None
        and not np.isclose(value, wanted, rtol=1e-4, atol=1e-5)
      ):
        problem = f"the loss is {float(value)}, not {wanted}"
      if problem:
        problem = f"wrong: step {number}: {problem}"
        break
  if problem is None:
    return "right"
  named = [w for w in caught if re.search("inner/e|SparseEmbed|table 't'|'t'", str(w.message))]
  return "warned" if named else problem


def refusal(way, error, model, before):
  message = str(error)
  if not says_what_to_write(way, error):
    return (
      f"wrong: an error that does not say what to write: {type(error).__name__}: {message[:200]!r}"
    )
  if before is not None and not any(x.is_deleted() for x in jax.tree.leaves(nnx.state(model))):
    for a, b in zip(jax.tree.leaves(observe(model)), jax.tree.leaves(before), strict=True):
      if not np.array_equal(a, b):
        return f"wrong: refused after something had moved: {message[:200]!r}"
  return "refused"


CASES = [
  (way, mesh)
  for mesh in (False, True)
  for way in (*WAYS.values(), *map(composed, range(COMPOSED)))
  if way.on_mesh or not mesh
]


@pytest.mark.weekly
@pytest.mark.parametrize(("way", "on_mesh"), CASES, ids=lambda x: getattr(x, "name", x))
def test_a_way(way, on_mesh):
  """On one device, or on eight with Explicit axes."""
  found = outcome(way, jax.make_mesh((8,), ("data",)) if on_mesh else None)
  assert found in ALLOWED[way.allowed], f"{way.name}: {found}; allowed: {way.allowed}"


@pytest.mark.weekly
@pytest.mark.parametrize("name", ["three_calls", "jax_vmap_over_a_lookup"])
def test_the_runner_tells_right_from_wrong(name):
  way = WAYS[name]
  wrong = dataclasses.replace(
    way, reference=expected_steps(plain, factor=1.01), says="no such word"
  )
  assert outcome(wrong).startswith("wrong")
