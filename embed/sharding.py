"""Who owns which row: the only place that knows of mesh axes.

A table and its slots are split by rows over one mesh axis, and their Variables carry that as
metadata from construction on, so that `nnx.get_partition_spec` and `nnx.get_named_sharding` see
it. On one device the annotation has no effect.
"""

from typing import Any


def row_sharding(axis: str | None, ndim: int) -> dict[str, Any]:
  """Variable metadata of an array whose first axis is rows.

  Args:
    axis: the mesh axis that rows are split over; None keeps them whole.
    ndim: 2 for `[V, D]`, 1 for a slot of one value per row.

  >>> row_sharding("data", 2)["out_sharding"]
  ('data', None)
  """
  # Not eager: the array is placed where it is made, not when it is wrapped.
  return {"out_sharding": (axis, *[None] * (ndim - 1)), "eager_sharding": False}
