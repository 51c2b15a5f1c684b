"""Whether each element of a function's results depends on one element of its arrays alone."""

import math
from collections.abc import Sequence
from typing import Any

# Primitives that keep the number of elements and still mix them, by the beginning of their names.
_MIXING = (
  "all_", "arg", "cholesky", "conv", "cum", "dot_general", "dynamic", "eig", "fft", "gather", "lu",
  "pad", "psum", "qr", "reduce", "rev", "scatter", "select_and", "slice", "sort", "svd", "top_k",
  "transpose", "triangular",
)  # fmt: skip
_ELEMENTWISE = ("convert_element_type", "reduce_precision")


def mixing_operation(
  closed: Any, elements: Sequence[bool], carried: Sequence[tuple[int, int]] = ()
) -> str | None:
  """The operation of a jaxpr that joins different elements of the arrays it is given.

  Args:
    closed: a closed jaxpr.
    elements: of each of its arguments, whether its elements are to be kept apart.
    carried: pairs `(result, argument)` of a state that one call hands to the next one. What is
      joined in it counts only where another result depends on it.

  Returns:
    The name of a primitive, such as "reduce_sum"; None if every result is elementwise.

  >>> import jax, numpy as np
  >>> mixes = lambda f: mixing_operation(jax.make_jaxpr(f)(np.ones(3), 0.5), [True, False])
  >>> mixes(lambda x, rate: x * rate), mixes(lambda x, rate: x / x.sum())
  (None, 'reduce_sum')
  """
  arguments: list[_Held] = ["" if x else None for x in elements]
  while True:
    results = _run(closed.jaxpr, arguments)
    after = list(arguments)
    for result, argument in carried:
      after[argument] = _join([after[argument], results[result]])
    if after == arguments:
      break
    arguments = after
  of_state = {result for result, _ in carried}
  return _join([x for i, x in enumerate(results) if i not in of_state]) or None


# What a value holds: None no elements of the arrays, "" elements apart, or what has joined them.
_Held = str | None


def _join(held: Sequence[_Held]) -> _Held:
  return next(filter(None, held), "" if "" in held else None)


def _run(jaxpr: Any, arguments: Sequence[_Held]) -> list[_Held]:
  """What the results of a jaxpr hold."""
  holds: dict[Any, _Held] = dict(zip(jaxpr.invars, arguments, strict=True))
  of = lambda v: None if hasattr(v, "val") else holds.get(v)  # literals have a `val`
  for eqn in jaxpr.eqns:
    inputs = [of(v) for v in eqn.invars]
    if _join(inputs) is not None:
      holds.update(zip(eqn.outvars, _step(eqn, inputs), strict=True))
  return [of(v) for v in jaxpr.outvars]


def _step(eqn: Any, inputs: Sequence[_Held]) -> Sequence[_Held]:
  name, count = eqn.primitive.name, len(eqn.outvars)
  inner = [getattr(x, "jaxpr", x) for p in eqn.params.values() for x in _flat(p)]
  inner = [x for x in inner if hasattr(x, "eqns")]
  outputs: list[_Held] = [None] * count
  for jaxpr in inner:  # of a call, a branch or a loop
    own = inputs[len(inputs) - len(jaxpr.invars) :]  # a branch is given all but its index
    loops = name in ("while", "scan") or len(own) != len(jaxpr.invars)
    results = _run(jaxpr, [_join(inputs)] * len(jaxpr.invars) if loops else own)
    known = results if len(results) == count and not loops else [_join(results)] * count
    outputs = [_join(pair) for pair in zip(outputs, known, strict=True)]
  if inner:
    return [_join([x, *inputs[:1]]) for x in outputs] if name == "cond" else outputs
  sizes = {math.prod(v.aval.shape) for v, x in zip(eqn.invars, inputs, strict=True) if x == ""}
  same_size = not sizes or {math.prod(v.aval.shape) for v in eqn.outvars} == sizes
  is_elementwise = same_size and (name in _ELEMENTWISE or not name.startswith(_MIXING))
  return [_join([*filter(None, inputs), "" if is_elementwise else name])] * count


def _flat(value: Any) -> Sequence[Any]:
  return value if isinstance(value, (tuple, list)) else (value,)
