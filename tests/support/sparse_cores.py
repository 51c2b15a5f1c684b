"""An emulator: Pallas kernels for SparseCores become plain XLA on CPU, under jit and shard_map.

`with emulated(): ...` lowers every `pl.kernel` on a mesh of vector subcores by JAX's own discharge
of refs, for all subcores one after another. Memory that nobody has written is NaN, or the smallest
integer, so that a kernel that reads it, or leaves a part of its output out, gives wrong numbers.
A copy is made when it is started: races between subcores and missing waits are not found.

JAX's own interpreters cannot: `interpret=True` has no axis of subcores, and `InterpretParams` runs
subcore 0 alone and knows no copies by a list of rows (both JAX 0.10.2).

All of this is JAX's own, and private. With other versions than the one below these tests are
skipped; continuous integration installs this one for them.
"""

import contextlib
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax import lax

KNOWN = "0.10.2"

if jax.__version__ != KNOWN:
  pytest.skip(
    f"SparseCores are emulated with JAX {KNOWN} only, and this is {jax.__version__}: read "
    "tests/support/sparse_cores.py against the new version and change KNOWN",
    allow_module_level=True,
  )

from jax._src import core, state
from jax._src.interpreters import mlir
from jax._src.pallas import core as pallas_core
from jax._src.pallas import mpmd
from jax._src.pallas import primitives as pallas_primitives
from jax._src.pallas.mosaic import primitives as tpu_primitives
from jax._src.pallas.mosaic import sc_core, tpu_info
from jax._src.state import discharge, indexing


@contextlib.contextmanager
def emulated(chip: str = "TPU_V6E") -> Iterator[None]:
  """Kernels that are traced inside are told that the CPU is this chip."""
  before = tpu_info.registry.get("cpu")
  version = tpu_info.ChipVersion[chip]
  tpu_info.registry["cpu"] = lambda: tpu_info.get_tpu_info_for_chip(version, 1)
  jax.clear_caches()
  try:
    yield
  finally:
    jax.clear_caches()
    if before is None:
      del tpu_info.registry["cpu"]
    else:
      tpu_info.registry["cpu"] = before


# --- the kernel on all subcores -------------------------------------------------------------------


def _unwritten(aval) -> jax.Array:
  """What memory holds before anything is written to it."""
  if jnp.issubdtype(aval.dtype, jnp.floating):
    return jnp.full(aval.shape, jnp.nan, aval.dtype)
  if jnp.issubdtype(aval.dtype, jnp.integer):
    return jnp.full(aval.shape, jnp.iinfo(aval.dtype).min, aval.dtype)
  return jnp.zeros(aval.shape, pallas_core.SEMAPHORE_INTERPRET_DTYPE)


def _discharged(jaxpr, args) -> list:
  """The results of a body, followed by the final values of all of its refs."""
  return discharge._eval_jaxpr_discharge_state(jaxpr, [True] * len(jaxpr.invars), (), *args)


def _run(*args, jaxprs, meshes, out_avals, input_output_aliases, **_):
  """All subcores, in turn: `mpmd_map` as a function of arrays."""
  (jaxpr,), (mesh,) = jaxprs, meshes
  input_of = {output: i for i, output in input_output_aliases.items()}
  outs = [
    args[input_of[i]] if i in input_of else _unwritten(aval) for i, aval in enumerate(out_avals)
  ]
  shared = len(args) + len(outs)
  scratch = lambda: [_unwritten(v.aval.inner_aval) for v in jaxpr.invars[shared:]]
  sizes = dict(mesh.shape)
  with core.extend_axis_env_nd(list(sizes.items())):
    body = jax.make_jaxpr(lambda *xs: _discharged(jaxpr, xs))(*args, *outs, *scratch())

  def one(worker, refs):
    position = {}
    for name in reversed(list(sizes)):
      position[name], worker = (worker % sizes[name]).astype(jnp.int32), worker // sizes[name]
    results = _evaluated(body, [*refs, *scratch()], position)
    new = results[-len(jaxpr.invars) :][:shared]
    for output, i in input_of.items():  # one memory
      new[len(args) + output] = new[i]
    return new

  refs = [*map(jnp.asarray, args), *outs]
  return lax.fori_loop(0, math.prod(sizes.values()), one, refs)[len(args) :]


def _evaluated(closed, args, position) -> list:
  """A body of which the position among the subcores is known."""
  values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
  values |= dict(zip(closed.jaxpr.invars, args, strict=True))
  read = lambda v: v.val if isinstance(v, core.Literal) else values[v]
  for eqn in closed.jaxpr.eqns:
    if eqn.primitive is lax.axis_index_p and eqn.params["axis_name"] in position:
      out = position[eqn.params["axis_name"]]
    else:
      out = eqn.primitive.bind(*map(read, eqn.invars), **eqn.primitive.get_bind_params(eqn.params))
    values.update(zip(eqn.outvars, out if eqn.primitive.multiple_results else [out], strict=True))
  return [read(v) for v in closed.jaxpr.outvars]


mlir.register_lowering(mpmd.mpmd_map_p, mlir.lower_fun(_run, multiple_results=True), platform="cpu")


# --- copies ---------------------------------------------------------------------------------------


def _rows(transforms):
  """The list of rows that a ref is indexed by and the id that is skipped, or None."""
  for t in transforms or ():
    if not isinstance(t, indexing.NDIndexer):
      continue
    first, *others = t.indices
    is_list = isinstance(first, sc_core.Indices) or len(getattr(first, "shape", ())) == 1
    if not is_list:
      continue
    assert len(transforms) == 1, "a list of rows, and nothing else"
    for extra, size in zip(others, t.shape[1:], strict=True):
      assert isinstance(extra, indexing.Slice), "whole rows"
      assert (extra.start, extra.size) == (0, size), "whole rows"
    values, skipped = first, None
    if isinstance(first, sc_core.Indices):
      values, skipped = first.values, first.ignored_value
    if isinstance(values, state.TransformedRef):
      values = discharge.transform_array(values.ref, values.transforms)
    return values, skipped
  return None


def _copy(should, in_avals, out_avals, *args, tree, device_id_type, priority, add):
  """A copy, of whole windows or by a list of rows on one side, as it is started."""
  source, target, _, _, _ = tpu_primitives._dma_unflatten(tree, args)
  (source, of_source), (target, of_target) = map(
    tpu_primitives._get_ref_and_transforms, (source, target)
  )
  gathered, scattered = _rows(of_source), _rows(of_target)
  if scattered is not None:
    ids, skipped = scattered
    rows = discharge.transform_array(source, of_source)
    size = target.shape[0]
    kept = jnp.ones(ids.shape, bool) if skipped is None else ids != skipped
    at = jnp.where(kept, ids, size)
    place = target.at[at]
    target = place.add(rows, mode="drop") if add else place.set(rows, mode="drop")
    # Out of range the chip writes elsewhere, and of a row that occurs twice anything may be left.
    often = jnp.zeros(size, jnp.int32).at[at].add(1, mode="drop").max(initial=0) > 1
    wrong = jnp.any(kept & ((ids < 0) | (ids >= size))) | (often & (not add))
    target = jnp.where(wrong, jnp.full((), jnp.nan, target.dtype), target)
  elif gathered is not None:
    ids, skipped = gathered
    old = discharge.transform_array(target, of_target)
    # Out of range is a fault on the chip. Here it is NaN.
    poison = jnp.nan if jnp.issubdtype(source.dtype, jnp.floating) else None
    rows = source.at[ids].get(mode="fill", fill_value=poison, wrap_negative_indices=False)
    kept = jnp.ones(ids.shape, bool) if skipped is None else ids != skipped
    new = jnp.where(kept.reshape(-1, *[1] * (rows.ndim - 1)), rows + old if add else rows, old)
    target = discharge.transform_swap_array(target, of_target, new)[1]
  else:
    assert not add
    whole = discharge.transform_array(source, of_source)
    target = discharge.transform_swap_array(target, of_target, whole)[1]
  results = [None] * len(args)
  abstract_source = tpu_primitives._dma_unflatten(tree, in_avals)[0]
  results[len(tpu_primitives._dma_tree_leaves(abstract_source))] = target
  return results, []


def _waited(should, in_avals, out_avals, *args, **_):
  return [None] * len(args), []


discharge.register_partial_discharge_rule(tpu_primitives.dma_start_p)(_copy)
discharge.register_partial_discharge_rule(tpu_primitives.dma_wait_p)(_waited)


# --- memory that is allocated inside ------------------------------------------------------------


def _scoped(should, in_avals, out_avals, *args, jaxpr, collective_axes, ref_transforms):
  assert not collective_axes
  body = discharge.pe.convert_constvars_jaxpr(jaxpr)
  scratch = [_unwritten(v.aval.inner_aval) for v in jaxpr.invars]
  is_ref = [isinstance(v.aval, state.AbstractRef) for v in body.invars]
  results = _discharged(body, [*args, *scratch])
  after = iter(results[len(body.outvars) :])
  refs = [next(after) if is_one else None for is_one in is_ref][: len(args)]
  kept = [x if is_wanted else None for x, is_wanted in zip(refs, should, strict=True)]
  return kept, results[: len(body.outvars)]


discharge.register_partial_discharge_rule(pallas_primitives.run_scoped_p)(_scoped)
