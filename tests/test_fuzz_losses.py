"""Seventy ways of writing a loss or a training step: right, refused, or at least warned about.

Each way is trained for three steps and compared with float64: gradients of a dense-table loss by
JAX in float64, rows and slots by `fuzz_oracle`. Its decorator declares what may come out:

    right     the same numbers as the reference
    refused   a TypeError or ValueError that says what to write instead, before anything has moved
    either    right or refused
    told      right, refused, or a warning that names the layer
"""

import contextlib
import copy
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
  "t": ("momentum", {"learning_rate": 0.1, "momentum": 0.5}),  # moves touched rows without gradient
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


def plain_a_twice(p, batch):
  return 2 * plain_a(p, batch)


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
  plain_a_twice: touch("a"),
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
      table.step(touched[name], grads[name][touched[name]], number)
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
  last_only: bool = False  # compared after the last step alone
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


@loss("right")
def lookup_of_the_mid_level(m, batch):
  def encode(m, key, ids):
    acts, _ = m.inner["e"].lookup({key: embed.Padded(ids) if ids.ndim == 2 else ids})
    return acts[key]

  return canonical(m, batch, encode)


# --- under transformations ------------------------------------------------------------------------


@loss("right")
def nnx_jit_of_remat_of_jit(m, batch):
  return nnx.jit(nnx.remat(nnx.jit(canonical)))(m, batch)


def _yes(m):
  return jnp.sum(m.scale[...]) < 1e9


@loss("right", plain_a)
def nnx_switch(m, batch):
  branches = [
    lambda m, i: blank(),
    lambda m, i: m.encode("a", i),
    lambda m, i: m.encode("b", i[:, 0]),
  ]
  return only_a(m, batch, lambda m, ids: nnx.switch(jnp.int32(_yes(m)), branches, m, ids))


@loss("either", plain_a)
def lax_cond_over_a_closure(m, batch):
  f = lambda m, ids: jax.lax.cond(_yes(m), lambda: m.encode("a", ids), lambda: blank())
  return only_a(m, batch, f)


@loss("right", on_mesh=False)  # lax.scan takes no axis that is split
def lax_scan_over_activations(m, batch):
  copy_rows = lambda x: jax.lax.scan(lambda c, row: (c, row * 1.0), 0, x)[1]
  return canonical(m, batch, lambda m, k, i: copy_rows(m.encode(k, i)))


@loss("right", plain_a, on_mesh=False)  # vmap takes keys and rows that are split alike
def nnx_vmap_of_the_head_with_split_rngs(m, batch):
  drop = nnx.Dropout(0.0, rngs=nnx.Rngs(0))
  x = jnp.tanh(m.encode("a", batch["a"]))

  @nnx.split_rngs(splits=B)
  @nnx.vmap(in_axes=(nnx.StateAxes({nnx.RngState: 0, ...: None}), 0))
  def each(drop, row):
    return drop(row)

  return m.head(each(drop, x))


# --- transformations under which a gradient would be lost -----------------------------------------


@loss("refused", plain_a, says="vmap")
def jax_vmap_over_a_lookup(m, batch):
  return only_a(m, batch, lambda m, ids: jax.vmap(lambda i: m.encode("a", i[None])[0])(ids))


@loss("either", plain_a)
def nnx_fori_loop_over_a_lookup(m, batch):
  def body(i, carry):
    m, x = carry
    return m, x + m.encode("a", batch["a"]) / 2

  return m.head(jnp.tanh(nnx.fori_loop(0, 2, body, (m, blank()))[1]))


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
def a_clone_inside(m, batch):
  return canonical(nnx.clone(m), batch)


@loss("told")
def a_deepcopy_inside(m, batch):
  return canonical(copy.deepcopy(m), batch)


@loss("told")
def another_layer_put_into_the_model(m, batch):
  m.inner["e"] = embed.SparseEmbed(features_of(), rngs=nnx.Rngs(0))
  return canonical(m, batch)


@loss("told")
def a_layer_made_inside(m, batch):
  return canonical(m, batch, encoder(embed.SparseEmbed(features_of(), rngs=nnx.Rngs(0))))


@step("either", is_setup=True)
def nnx_cached_partial_of_the_step(model, optimizer):
  return nnx.cached_partial(nnx.jit(train_on(canonical)), model, optimizer)


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


@step("either", jit=False)
def nnx_jit_of_the_gradient_alone(model, optimizer, batch):
  value, grads = nnx.jit(embed.value_and_grad(canonical))(model, batch)
  optimizer.update(model, grads)
  return value


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


class WithFunction(Model):
  """Keeps a function that refers to the layer itself."""

  def __init__(self, **where):
    super().__init__(**where)
    self.look = nnx.static(encoder(self.inner["e"]))


@loss("told", make_model=WithFunction)
def a_function_kept_in_the_model(m, batch):
  return canonical(m, batch, m.look)


# --- derivatives of derivatives -------------------------------------------------------------------


def _plain_penalty(p, batch):
  x = jnp.tanh(rows_of(p["t"], batch["a"]))
  slope = jax.grad(lambda x: plain_head(p, x))(x)
  return plain_head(p, x) + jnp.sum(slope**2)


@loss("right", _plain_penalty, touched=touch("a"))
def a_penalty_on_the_gradient_of_activations(m, batch):
  x = jnp.tanh(m.encode("a", batch["a"]))
  slope = jax.grad(lambda x: m.head(x))(x)
  return m.head(x) + jnp.sum(slope**2)


def _plain_dense_penalty(p, batch):
  slope = jax.grad(lambda s: plain_a(p | {"scale": s}, batch))(p["scale"])
  return plain_a(p, batch) + jnp.sum(slope**2)


@loss("told", _plain_dense_penalty, touched=touch("a"))
def a_penalty_by_nnx_value_and_grad(m, batch):
  inner = lambda m: m.head(jnp.tanh(m.encode("a", batch["a"])))
  value, grads = nnx.value_and_grad(inner)(m)
  return value + jnp.sum(grads["scale"][...] ** 2)


@loss("either", _plain_dense_penalty, touched=touch("a"))
def a_penalty_by_nested_value_and_grad(m, batch):
  inner = lambda m: m.head(jnp.tanh(m.encode("a", batch["a"])))
  value, grads = embed.value_and_grad(inner)(m)
  return value + jnp.sum(grads.dense["scale"][...] ** 2)


def _plain_row_penalty(p, batch):
  slope = jax.grad(lambda t: plain_a(p | {"t": t}, batch))(p["t"])
  return plain_a(p, batch) + jnp.sum(slope**2)


@loss("either", _plain_row_penalty, touched=touch("a"))
def a_penalty_on_row_gradients(m, batch):
  inner = lambda m: m.head(jnp.tanh(m.encode("a", batch["a"])))
  value, grads = embed.value_and_grad(inner)(m)
  return value + jnp.sum(grads.rows["inner/e/t"].values ** 2)


def _plain_maml(p, batch):
  slope = jax.grad(lambda s: plain_a(p | {"scale": s}, batch))(p["scale"])
  return plain(p | {"scale": p["scale"] - 0.1 * slope}, batch)


@loss("told", _plain_maml, touched=touch(*"abc"))
def maml(m, batch):
  inner = lambda m: m.head(jnp.tanh(m.encode("a", batch["a"])))
  _, grads = embed.value_and_grad(inner)(m)
  m.scale.set_value(m.scale[...] - 0.1 * grads.dense["scale"][...])
  return canonical(m, batch)


@step("told")
def nnx_value_and_grad_of_embed_value_and_grad(model, optimizer, batch):
  inner = lambda m, batch: embed.value_and_grad(canonical)(m, batch)
  (value, _), grads = nnx.value_and_grad(inner, has_aux=True)(model, batch)
  optimizer.update(model, grads)
  return value


@step("told", make_optimizer=lambda m, tx: nnx.Optimizer(m, tx, wrt=nnx.Param))
def nnx_value_and_grad_and_nnx_optimizer(model, optimizer, batch):
  value, grads = nnx.value_and_grad(canonical)(model, batch)
  optimizer.update(model, grads)
  return value


@step("refused", make_optimizer=lambda m, tx: nnx.Optimizer(m, tx, wrt=nnx.Param), says="embed")
def our_gradients_and_nnx_optimizer(model, optimizer, batch):
  return train_on(canonical)(model, optimizer, batch)


@step("told")
def jax_grad_of_the_parameters(model, optimizer, batch):
  graphdef, params, rest = nnx.split(model, nnx.Param, ...)
  f = lambda params: canonical(nnx.merge(graphdef, params, rest), batch)
  value, grads = jax.value_and_grad(f)(params)
  optimizer.dense.update(model, grads)
  return value


# --- how the loss is called -----------------------------------------------------------------------


@step("right")
def has_aux(model, optimizer, batch):
  f = lambda m, batch: (canonical(m, batch), {"n": jnp.float32(3), "x": m.encode("b", batch["b"])})
  value, aux = train_on(f, has_aux=True)(model, optimizer, batch)
  assert aux["x"].shape == (B, D)
  return value


@step("either")
def the_model_by_keyword(model, optimizer, batch):
  value, grads = embed.value_and_grad(lambda model, batch: canonical(model, batch))(
    model=model, batch=batch
  )
  optimizer.update(model, grads)
  return value


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


def _plain_own_candidates(p, batch):
  ids = batch["c"]
  rows = jnp.where((ids >= 0)[..., None], p["u"][jnp.maximum(ids, 0)], 0)
  return jnp.sum(jnp.tanh(jnp.einsum("bd,bkd->bk", rows_of(p["t"], batch["a"]), rows)))


@loss("right", _plain_own_candidates, touched=touch(*"ac"))
def attend_to_candidates_of_each_query(m, batch):
  return jnp.sum(jnp.tanh(m.inner["e"].attend(m.encode("a", batch["a"]), "u", batch["c"])))


@loss("either", _plain_attend, touched=_attend_touched)
def attend_under_vmap(m, batch):
  f = jax.vmap(lambda q: m.inner["e"].attend(q, "u"))
  return jnp.sum(jnp.tanh(f(m.encode("a", batch["a"]))))


@loss("refused", says="attend")
def variables_read_inside(m, batch):
  return canonical(m, batch) + jnp.sum(m.inner["e"].variables["u"]["parameters"] ** 2)


@loss("refused")
def apply_gradients_inside(m, batch):
  acts, residual = m.inner["e"].lookup({"b": batch["b"]})
  m.inner["e"].apply_gradients({"b": acts["b"]}, residual, step=0)
  return canonical(m, batch)


@step("refused")
def the_optimizer_inside(model, optimizer, batch):
  def loss_fn(m, o, batch):
    _, grads = embed.value_and_grad(canonical)(m, batch)
    o.update(m, grads)
    return canonical(m, batch)

  value, grads = embed.value_and_grad(loss_fn)(model, optimizer, batch)
  optimizer.update(model, grads)
  return value


# --- arithmetic with gradients --------------------------------------------------------------------


def change(allowed, factor=1.0, **more):
  def add(function):
    run = train_on(canonical, function)
    run.__name__ = function.__name__
    return step(allowed, factor=factor, **more)(run)

  return add


@change("either", 2.0)
def the_operator_plus(grads):
  return grads + grads


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


@change("either", jit=False)
def gradients_through_the_host(grads):
  return jax.device_put(jax.device_get(grads))


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


@step("told", reference=_two_batches)
def two_microbatches_by_scan(model, optimizer, batch):
  graphdef, state = nnx.split(model)
  stacked = jax.tree.map(lambda *x: jnp.stack(x), batch, make_batch(100))

  def body(total, microbatch):
    value, grads = embed.value_and_grad(canonical)(nnx.merge(graphdef, state), microbatch)
    return jax.tree.map(jnp.add, total, grads), value

  shapes = jax.eval_shape(lambda: body_grads(graphdef, state, batch))
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
  total, values = jax.lax.scan(body, zeros, stacked)
  optimizer.update(model, total)
  return values[0]


def body_grads(graphdef, state, batch):
  return embed.value_and_grad(canonical)(nnx.merge(graphdef, state), batch)[1]


@step("either")
def a_step_if_finite_by_nnx_cond(model, optimizer, batch):
  value, grads = embed.value_and_grad(canonical)(model, batch)
  nnx.cond(
    jnp.isfinite(value),
    lambda m, o, g: o.update(m, g),
    lambda m, o, g: None,
    model,
    optimizer,
    grads,
  )
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


@step("either", is_setup=True, last_only=True)
def nnx_scan_over_steps(model, optimizer):
  """All three steps in one nnx.scan, at the first call."""
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *BATCHES)
  values = []

  @nnx.jit
  @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
  def steps(carry, batch):
    return carry, train_on(canonical)(*carry, batch)

  def run(batch):
    if not values:
      values.extend(np.asarray(steps((model, optimizer), stacked)[1]).tolist())
    return values.pop(0) if len(values) > 1 else values[0]

  return run


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
      if way.last_only and number < len(BATCHES) - 1:
        continue
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


# On eight devices, too, what is not composed or only warned about.
CASES = [
  *((way, False) for way in (*WAYS.values(), *map(composed, range(COMPOSED)))),
  *((way, True) for way in WAYS.values() if way.on_mesh and way.allowed != "told"),
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
