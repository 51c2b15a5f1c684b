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


def mixing_operation(closed: Any, elements: Sequence[bool]) -> str | None:
  """The first operation of a jaxpr that joins different elements of the arrays it is given.

  Args:
    closed: a closed jaxpr.
    elements: of each of its arguments, whether its elements are to be kept apart.

  Returns:
    The name of a primitive, such as "reduce_sum"; None if every result is elementwise.

  >>> import jax, numpy as np
  >>> mixes = lambda f: mixing_operation(jax.make_jaxpr(f)(np.ones(3), 0.5), [True, False])
  >>> mixes(lambda x, rate: x * rate), mixes(lambda x, rate: x / x.sum())
  (None, 'reduce_sum')
  """
  return _Walk().run(closed.jaxpr, elements)[1]


class _Walk:
  """Follows through a jaxpr which values hold elements of the arrays."""

  def run(self, jaxpr: Any, elements: Sequence[bool]) -> tuple[list[bool], str | None]:
    """Which results hold elements, and the first operation that mixes them."""
    holds: dict[Any, bool] = dict(zip(jaxpr.invars, elements, strict=True))
    of = lambda v: not hasattr(v, "val") and holds.get(v, False)  # literals have a `val`
    for eqn in jaxpr.eqns:
      inputs = [of(v) for v in eqn.invars]
      if not any(inputs):
        continue
      outputs, mixes = self._step(eqn, inputs)
      if mixes:
        return [], mixes
      holds.update(zip(eqn.outvars, outputs, strict=True))
    return [of(v) for v in jaxpr.outvars], None

  def _step(self, eqn: Any, inputs: Sequence[bool]) -> tuple[list[bool], str | None]:
    name, count = eqn.primitive.name, len(eqn.outvars)
    inner = [getattr(x, "jaxpr", x) for p in eqn.params.values() for x in _flat(p)]
    inner = [x for x in inner if hasattr(x, "eqns")]
    if inner:  # a call, a branch or a loop
      outputs = [False] * count
      for jaxpr in inner:
        own = inputs[len(inputs) - len(jaxpr.invars) :]  # a branch is given all but its index
        loops = name in ("while", "scan") or len(own) != len(jaxpr.invars)
        of_jaxpr, mixes = self.run(jaxpr, [True] * len(jaxpr.invars) if loops else own)
        if mixes:
          return [], mixes
        known = len(of_jaxpr) == count and not loops
        outputs = [
          a or b for a, b in zip(outputs, of_jaxpr if known else [True] * count, strict=True)
        ]
      return outputs, None
    sizes = {math.prod(v.aval.shape) for v, x in zip(eqn.invars, inputs, strict=True) if x}
    same_size = {math.prod(v.aval.shape) for v in eqn.outvars} == sizes
    is_elementwise = same_size and (name in _ELEMENTWISE or not name.startswith(_MIXING))
    return [True] * count, None if is_elementwise else name


def _flat(value: Any) -> Sequence[Any]:
  return value if isinstance(value, (tuple, list)) else (value,)
