"""Private and semi-private JAX, Flax and Orbax: where each was seen, and what would replace it.

The rest of the library uses only documented names of these packages.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors as flax_errors
from jax._src import core
from jax.extend import core as jex_core
from jax.extend import random as jex_random
from jax.interpreters import ad, batching, mlir

# A transformation closes over a Variable that has to change. Seen in Flax 0.12.8, which does not
# document it.
TraceContextError = flax_errors.TraceContextError

# To read the traced loss. Seen in JAX 0.10.2; `jax.extend.core` promises less than `jax` does.
Jaxpr, ClosedJaxpr, Literal, DropVar = (
  jex_core.Jaxpr,
  jex_core.ClosedJaxpr,
  jex_core.Literal,
  jex_core.DropVar,
)
jaxpr_as_fun = jex_core.jaxpr_as_fun


def is_traced(tree: Any) -> bool:
  """Whether any leaf of a tree has no value yet, inside a transformed or jitted function."""
  return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def is_staged(tree: Any) -> bool:
  """Whether any leaf of a tree is an input of a program that is being made, as under `jax.jit`.

  Seen in JAX 0.10.2; JAX has no public way to tell it from differentiation and batching.
  """
  return any(type(x).__name__ == "DynamicJaxprTracer" for x in jax.tree.leaves(tree))


def identity_primitive(name: str, jvp: Callable[..., Any]) -> Any:
  """A primitive that returns its first `number` arguments, and notes a batch in `batched`.

  Seen in JAX 0.10.2: `jax.extend.core.Primitive` and the registries of `jax.interpreters`. A public
  way to name an equation of a jaxpr with operands (as `jax.ad_checkpoint.checkpoint_name` does
  without) would replace it.

  Args:
    name: of the primitive.
    jvp: its rule, `jvp(primals, tangents, **params)`.
  """
  primitive = jex_core.Primitive(name)
  primitive.multiple_results = True
  same = lambda *args, number, **_: list(args[:number])

  def batch(args, dims, **params):
    params["batched"] = True
    return primitive.bind(*args, **params), dims[: params["number"]]

  primitive.def_impl(same)
  primitive.def_abstract_eval(same)
  mlir.register_lowering(primitive, mlir.lower_fun(same, multiple_results=True))
  batching.primitive_batchers[primitive] = batch
  ad.primitive_jvps[primitive] = jvp
  return primitive


def is_zero_tangent(tangent: Any) -> bool:
  """Whether a tangent is a symbolic zero: nothing differentiates with respect to its primal.

  Seen in JAX 0.10.2; `jax.custom_derivatives.SymbolicZero` is the public one, for custom rules.
  """
  return type(tangent) is ad.Zero


def is_differentiating() -> bool:
  """Whether the code runs right under `jax.grad`, `jax.jvp` or the like, not under a jit in it.

  Seen in JAX 0.10.2; `jax.extend.core.get_opaque_trace_state` could say so in public. False where
  JAX has no such thing any more.
  """
  context = getattr(core, "trace_ctx", None)
  return type(getattr(context, "trace", None)).__name__ in ("JVPTrace", "LinearizeTrace")


def default_device() -> Any:
  """The device that arrays are put on if nothing else is said.

  Seen in JAX 0.10.2: `jax.config.jax_default_device` is set in public, and read by this name alone.
  """
  default = jax.config.values["jax_default_device"]
  return default if isinstance(default, jax.Device) else jax.local_devices(backend=default)[0]


def is_jit_disabled() -> bool:
  """Whether `jax.disable_jit` holds.

  Seen in JAX 0.10.2: `jax.config.jax_disable_jit` is set in public, and read by this name alone.
  """
  return jax.config.values["jax_disable_jit"]


def is_batched(tree: Any) -> bool:
  """Whether any array of a tree has a batch dimension of `jax.vmap` around it.

  Seen in JAX 0.10.2; JAX has no public way to ask.
  """
  return any(type(x).__name__ == "BatchTracer" for x in jax.tree.leaves(tree))


VMAP = "flax.nnx.transforms.iteration"  # nnx.vmap and nnx.scan
OPTIMIZER = "flax.nnx.training.optimizer"


def is_called_by(module: str) -> bool:
  """Whether a module of Flax, or one whose name starts so, is on the call stack.

  Seen in Flax 0.12.8, whose transformations and optimizer are in the modules above; Flax has no way
  to ask.
  """
  return next(_frames(module), None) is not None


def _frames(module: str) -> Iterator[types.FrameType]:
  """The frames of the call stack that are of a module, or of one whose name starts so."""
  frame = inspect.currentframe()
  while frame is not None:
    if frame.f_globals.get("__name__", "").startswith(module):
      yield frame
    frame = frame.f_back


def caller() -> str:
  """The module of the nearest function on the call stack that is not of JAX or of this library.

  A pytree's `tree_flatten` asks who walks the tree. JAX has no way to ask (0.10.2).
  """
  frame = inspect.currentframe()
  while frame is not None:
    module = frame.f_globals.get("__name__", "")
    if module.partition(".")[0] not in ("jax", "embed"):
      return module
    frame = frame.f_back
  return ""


# The file in every folder of a tree that Orbax wrote. Seen in Orbax 0.12; no public API tells such
# folders from others.
ORBAX_METADATA = "_METADATA"


# --- integers that arithmetic cannot reach --------------------------------------------------------


def _opaque(name: str) -> Any:
  def refuse(*args, **kwargs):
    raise TypeError("The ids of row gradients are not random keys.")

  return jex_random.define_prng_impl(
    key_shape=(1,),
    seed=refuse,
    split=refuse,
    random_bits=refuse,
    fold_in=refuse,
    name=f"sparse_embed_{name}",
    tag=f"{name} of rows: write grads.map(f) or embed.accumulate",
  )


# JAX has no dtype without arithmetic but that of random keys (seen in 0.10.2); it awaits a public
# way to define extended dtypes.
_OPAQUE = {jnp.dtype(jnp.int32): _opaque("ids"), jnp.dtype(jnp.uint32): _opaque("keys")}


@jax.jit
def _hide(x: jax.Array) -> jax.Array:
  bits = ~jax.lax.bitcast_convert_type(x, jnp.uint32)  # zeros_like makes -1 of ids: padding
  return jax.random.wrap_key_data(bits[..., None], impl=_OPAQUE[x.dtype])


@jax.jit
def _show(x: jax.Array) -> jax.Array:
  return jax.lax.bitcast_convert_type(~jax.random.key_data(x)[..., 0], _dtype(x))


@functools.cache
def _integers() -> dict[Any, Any]:
  """The dtype of the integers behind each opaque dtype."""
  bits = jax.ShapeDtypeStruct((1,), jnp.uint32)
  wrap = lambda impl: jax.eval_shape(lambda x: jax.random.wrap_key_data(x, impl=impl), bits)
  return {wrap(impl).dtype: dtype for dtype, impl in _OPAQUE.items()}


def _dtype(x: Any) -> Any:
  """The dtype of the integers in an opaque array; None for any other array."""
  dtype = getattr(x, "dtype", None)
  is_opaque = dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
  return _integers().get(dtype) if is_opaque else None


def hide(tree: Any) -> Any:
  """A tree with its integers in a dtype without arithmetic, of the same shapes and shardings.

  `jax.tree.map(jnp.add, a, b)` or `lambda x: 2 * x` then raise a TypeError.

  >>> hidden = hide(jnp.array([3, 4]))
  >>> show(hidden).tolist(), show(jnp.zeros_like(hidden)).tolist()
  ([3, 4], [-1, -1])
  """
  is_integer = lambda x: isinstance(x, jax.Array) and x.dtype in _OPAQUE
  return jax.tree.map(lambda x: _hide(x) if is_integer(x) else x, tree)


def show(tree: Any) -> Any:
  """The inverse of `hide`; abstract arrays become abstract integers, others stay as they are."""

  def integers(x):
    dtype = _dtype(x)
    if dtype is None:
      return x
    if isinstance(x, jax.Array):
      return _show(x)
    return jax.ShapeDtypeStruct(x.shape, dtype)

  return jax.tree.map(integers, tree)
