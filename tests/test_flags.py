"""The library under settings of JAX and Flax that strict users switch on.

Each scenario gives the numbers that it gives without the setting.
"""

import contextlib
import functools
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from suites import slow_unless

import embed

ROWS, DIM, BAGS = 24, 4, 8
IDS = np.arange(BAGS * 3, dtype=np.int32).reshape(BAGS, 3) % 11 - 1


class Model(nnx.Module):
  def __init__(self, optimizer, combiner="mean", mesh=None, **table):
    movie = embed.TableConfig(ROWS, DIM, combiner=combiner, optimizer=optimizer, name="t", **table)
    features = {
      "bag": embed.FeatureConfig(movie),
      "seen": embed.FeatureConfig(movie, max_sequence_length=2),
      "one": embed.FeatureConfig(movie),
    }
    self.embed = embed.SparseEmbed(features, rngs=nnx.Rngs(0), mesh=mesh)
    self.head = nnx.Linear(DIM, 1, rngs=nnx.Rngs(0))

  def __call__(self, batch, weights=None):
    weights = None if weights is None else {"bag": weights}
    act = self.embed({name: batch[name] for name in batch}, weights)
    parts = [jnp.sum(x.astype(jnp.float32), axis=tuple(range(1, x.ndim - 1))) for x in act.values()]
    return self.head(sum(parts))


def batch_of(put=jnp.asarray):
  return {
    "bag": embed.Padded(put(IDS)), "seen": embed.Padded(put(IDS)), "one": put(np.abs(IDS[:, 0]))
  }  # fmt: skip


def train_step(model, optimizer, batch, weights):
  loss_fn = lambda m, batch, weights: jnp.mean(jnp.square(m(batch, weights)))
  loss, grads = embed.value_and_grad(loss_fn)(model, batch, weights)
  optimizer.update(model, embed.clip_by_global_norm(grads, 0.5))
  return loss


def trained(optimizer, jit=None, mesh=None, **table):
  """What two steps leave, as NumPy arrays; the setting holds in the steps alone."""
  model = Model(optimizer, mesh=mesh, **table)
  updater = embed.Optimizer(model, optax.adam(0.1))
  weights = embed.Padded(jnp.asarray(np.abs(IDS) + 1, jnp.float32))
  batch = batch_of()
  if mesh is not None:
    batch, weights = jax.device_put((batch, weights), jax.NamedSharding(mesh, jax.P("data")))
  step = functools.partial(jit(train_step), model, updater) if jit else None
  step = step or embed.jit_step(train_step, model, updater)

  def go():
    return step(batch, weights)

  def state():
    return [jax.tree.map(np.asarray, dict(model.embed.variables["t"])), model.head.kernel[...]]

  return go, state


def lookups(jit):
  model = Model(embed.adagrad(0.1))
  ragged = embed.Ragged(
    jnp.asarray(np.abs(IDS.reshape(-1))), jnp.arange(0, BAGS * 3 + 1, 3), max_valency=3
  )
  inputs = [batch_of(), {"bag": ragged}, {"one": jnp.asarray(np.abs(IDS))}]
  predict = lambda model, batch: model.embed(batch)
  predict = nnx.jit(predict, graph=False) if jit else predict
  return lambda: [predict(model, batch) for batch in inputs], list


def attend():
  model, query = Model(embed.adagrad(0.1)), jnp.ones((2, DIM))
  candidates = jnp.arange(3)
  scores = nnx.jit(lambda m, q, c: (m.embed.attend(q, "t"), m.embed.attend(q, "t", c)), graph=False)
  return lambda: scores(model, query, candidates), list


def mid_level():
  model = Model(embed.adam(0.1))

  @nnx.jit(donate_argnames="model")
  def step(model, batch):
    act, residual = model.embed.lookup(batch)
    model.embed.apply_gradients(jax.tree.map(jnp.ones_like, act), residual)

  batch = batch_of()
  return lambda: step(model, batch), lambda: [model.embed.tables["t"]]


def ahead():
  model = Model(embed.adagrad(0.1))
  loss_fn = lambda m, batch: jnp.mean(jnp.square(m(batch)))
  batch = batch_of()

  @nnx.jit
  def two(model, batch):
    ahead = embed.look_ahead(loss_fn)(model, batch)
    return embed.value_and_grad(loss_fn, ahead=ahead)(model, batch)[0]

  return lambda: two(model, batch), list


def deltas():
  old, new = Model(embed.adagrad(0.1)), Model(embed.adagrad(0.1))
  updater = embed.Optimizer(new, optax.sgd(0.1))
  start = jax.tree.map(jnp.copy, nnx.state(old))
  before = embed.deltas.fingerprint(0, model=new)
  train_step(new, updater, batch_of(), embed.Padded(jnp.ones(IDS.shape)))

  def go():
    nnx.update(old, start)
    embed.deltas.apply(embed.deltas.changes(before, 1, model=new)[0], 0, model=old)

  return go, lambda: [old.embed.tables["t"]]


BF16 = {"dtype": jnp.bfloat16}
EAGER = lambda step: step
CUSTOM = embed.CustomCombiner(
  lambda valency, vectors, weights: weights @ vectors, 3, 3, jax.nn.initializers.ones
)
DONATED = functools.partial(nnx.jit, donate_argnums=(0, 1))
SCENARIOS: dict[str, Callable[[], Any]] = {
  "lookups": lambda: lookups(jit=True),
  "eager lookups": lambda: lookups(jit=False),
  "sgd": lambda: trained(embed.sgd(0.1)),
  "adam": lambda: trained(embed.adam(embed.bias_corrected(0.1))),
  "rowwise_adagrad with decay": lambda: trained(
    embed.rowwise_adagrad(0.1, weight_decay_factor=0.1, clipvalue=0.5)
  ),
  "eager adagrad": lambda: trained(embed.adagrad(0.1), jit=EAGER),
  "nnx.jit": lambda: trained(embed.adagrad(0.1), jit=DONATED),
  "a custom combiner": lambda: trained(embed.adagrad(0.1), combiner=CUSTOM),
  "ftrl": lambda: trained(embed.ftrl(0.1)),
  "from_optax": lambda: trained(embed.from_optax(optax.sgd(0.1))),
  "each occurrence": lambda: trained(embed.adagrad(0.1, use_gradient_accumulation=False)),
  "bfloat16": lambda: trained(embed.adagrad(0.1), **BF16),
  "a mesh": lambda: trained(embed.adagrad(0.1), mesh=jax.make_mesh((2,), ("data",))),
  "a mesh, eager": lambda: trained(
    embed.adagrad(0.1), jit=EAGER, mesh=jax.make_mesh((2,), ("data",))
  ),
  "bfloat16 on a mesh": lambda: trained(
    embed.sgd(0.1), mesh=jax.make_mesh((2,), ("data",)), **BF16
  ),
  "attend": attend,
  "mid level": mid_level,
  "look_ahead": ahead,
  "deltas": deltas,
}


def numbers(scenario, setting, at_once=True):
  """What a scenario computes the second time; the setting holds from the first if `at_once`."""
  with setting() if at_once else contextlib.nullcontext():
    go, state = SCENARIOS[scenario]()
    go()
  with setting():
    out = go()
  return [np.asarray(x, np.float32) for x in jax.tree.leaves((out, state()))]


@functools.cache
def expected(scenario):
  return numbers(scenario, contextlib.nullcontext)


FLAGS: dict[str, Callable[[], Any]] = {
  "dtype_promotion=strict": lambda: jax.numpy_dtype_promotion("strict"),
  "rank_promotion=raise": lambda: jax.numpy_rank_promotion("raise"),
  "check_tracer_leaks": lambda: jax.checking_leaks(),
  "transfer_guard=disallow": lambda: jax.transfer_guard("disallow"),
  "enable_x64": lambda: jax.enable_x64(True),
  "debug_nans": lambda: jax.debug_nans(True),
}


EAGER_ONES = [name for name in SCENARIOS if "eager" in name]
CASES = [
  (scenario, flag)
  for scenario in SCENARIOS
  for flag in FLAGS
  if (scenario not in EAGER_ONES or flag != "transfer_guard=disallow")
]
is_quick = lambda scenario, flag: scenario == "sgd"  # every setting once
FULL = [
  ("bfloat16", "dtype_promotion=strict"),
  ("a mesh", "rank_promotion=raise"),
  ("eager adagrad", "check_tracer_leaks"),
  ("deltas", "transfer_guard=disallow"),
  ("attend", "enable_x64"),
  ("look_ahead", "debug_nans"),
]


@pytest.mark.parametrize(
  ("scenario", "flag"),
  slow_unless(CASES, lambda *case: is_quick(*case) or case in FULL, is_quick),
)
def test_a_setting_changes_nothing(scenario, flag):
  before = expected(scenario)
  jax.clear_caches()
  actual = numbers(scenario, FLAGS[flag], at_once=flag != "transfer_guard=disallow")
  for x, y in zip(actual, before, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scenario", slow_unless(EAGER_ONES, "eager lookups".__eq__))
def test_a_transfer_guard_wants_jitted_steps(scenario):
  """Outside of jit JAX moves constants at every operation; the error says what to write."""
  with pytest.raises(jax.errors.JaxRuntimeError) as caught:
    numbers(scenario, FLAGS["transfer_guard=disallow"], at_once=False)
  assert any("embed.jit_step" in note for note in caught.value.__notes__)


# --- settings that are refused --------------------------------------------------------------------


def test_hijax_variables_are_refused():
  with nnx.var_defaults(hijax=True), pytest.raises(ValueError, match="FLAX_HIJAX_VARIABLE"):
    Model(embed.sgd(0.1))


def test_without_jit_a_mesh_is_refused_and_one_device_works():
  model, mesh = Model(embed.adagrad(0.1)), jax.make_mesh((2,), ("data",))
  whole, split = model.embed(batch_of()), Model(embed.adagrad(0.1), mesh=mesh)
  with jax.disable_jit():
    actual = model.embed(batch_of())
    with pytest.raises(ValueError, match="one device after another"):
      split.embed(batch_of())
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), actual, whole)


# --- settings of the compiler ---------------------------------------------------------------------


@pytest.mark.weekly
def test_fast_math_changes_nothing():
  """XLA reads its flags once, so the scenarios run in a process of their own."""
  code = (
    "import contextlib, numpy, test_flags as t\n"
    "run = lambda name: t.numbers(name, contextlib.nullcontext)\n"
    "numpy.savez(sys.argv[1], **{f'{n} {i}': x for n in t.SCENARIOS for i, x in enumerate(run(n))})"
  )
  folders = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parent / "support")]
  flags = "--xla_cpu_enable_fast_math=true --xla_force_host_platform_device_count=8"
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "numbers.npz")
    subprocess.run(
      [sys.executable, "-c", f"import sys; sys.path += {folders}\n{code}", str(path)],
      env={**os.environ, "XLA_FLAGS": flags}, check=True,
    )  # fmt: skip
    with np.load(path) as actual:
      assert len(actual.files) > len(SCENARIOS)
      for name in actual.files:
        scenario, number = name.rsplit(" ", 1)
        before = expected(scenario)[int(number)]
        np.testing.assert_allclose(actual[name], before, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.ci
def test_a_model_that_is_made_with_64_bits():
  """From its making to a checkpoint: int32 ids and float32 rows, and the numbers of 32 bits."""

  def run():
    model = Model(embed.adagrad(0.1))
    step = embed.jit_step(train_step, model, embed.Optimizer(model, optax.adam(0.1)))
    weights = embed.Padded(np.abs(IDS) + 1.0)
    batch = batch_of(lambda ids: np.asarray(ids, np.int64))
    losses = [step(batch, weights) for _ in range(2)]
    tree = embed.checkpoint.to_tree(model=model)
    other = Model(embed.adagrad(0.1))
    embed.checkpoint.from_tree(tree, model=other)
    wide = batch | {"one": batch["one"] + 2**32}
    with pytest.raises(ValueError, match="out of range"):
      other(wide)
    outputs = nnx.jit(lambda m, batch: m.embed(batch), graph=False)(other, batch)
    dropped = nnx.jit(lambda m, ids: m.embed({"one": ids}), graph=False)
    return jax.tree.map(np.asarray, (losses, tree["model"]["tables"], outputs)), (
      lambda: np.asarray(dropped(other, wide["one"])["one"]),
      other,
    )

  wanted, _ = run()
  with jax.enable_x64(True):
    found, (dropped, model) = run()
    assert not dropped().any()
    assert int(model.embed.report["dropped_ids"]) == BAGS
  tables = jax.tree.leaves((wanted[1], found[1]))
  assert {x.dtype for x in tables} == {np.dtype(np.float32)}
  compare = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
  jax.tree.map(compare, found, wanted)
