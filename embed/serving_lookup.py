"""Lookups in plain arrays, by the rules of TensorFlow's `serving_embedding_lookup`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from embed import inputs as inputs_lib
from embed import structure
from embed.config import FeatureConfig, TableConfig
from embed.engine import bags as bags_lib
from embed.engine import lookup as lookup_lib
from embed.engine.xla import is_traced


def serving_lookup(
  inputs: Any, weights: Any, tables: Mapping[Any, Any], feature_config: Any
) -> Any:
  """Activations of a batch, from tables that are plain arrays: no module, no state, no mesh.

  Bind `feature_config`, then jit or export. It differs from `SparseEmbed` in three rules:

  - A dense array keeps its shape: `[batch, 1]` gives `[batch, 1, dim]`.
  - In a weighted `Sparse`, "mean" and "sqrtn" leave out ids whose weight is not positive, unless
    `validate_weights_and_indices` is False and the rank is 2.
  - `output_shape` applies only to `Padded` and `Ragged`.

  Args:
    inputs: in the structure of `feature_config`; a dict may hold any subset. Each is a dense
      integer array, `Padded`, `Ragged` or `Sparse`; negative ids are padding.
    weights: weights in the same structure, or None; an entry may be None.
    tables: float `[vocabulary_size, dim]`, NumPy or JAX, by the table's name or, outside of jit, by
      its `TableConfig`. An eager call copies NumPy tables, and tables on a mesh, to one device.
    feature_config: a `FeatureConfig` or any nesting of them.

  Returns:
    float32 activations in the structure of `inputs`, `[..., dim]` or
    `[batch, max_sequence_length, dim]`. Empty bags, padding and the end of sequences are zeros.

  Raises:
    ValueError: for an invalid input, naming its feature, or an invalid table. Under jit, ids
      `>= vocabulary_size` are dropped instead, and JAX first truncates ids to 32 bits.
    TypeError: if a container is of another kind than in the config.
  """
  names = {table: name for name, table in structure.name_tables(feature_config).items()}
  activations = {}
  for path, feature, x, w in inputs_lib.matched(feature_config, inputs, weights):
    rows = _rows(tables, feature.table, names[feature.table])
    activations[path] = _look_up(structure.feature_name(path, feature), feature, x, w, rows)
  return structure.pack(feature_config, inputs, activations)


def _rows(tables: Mapping[Any, Any], table: TableConfig, name: str) -> jax.Array:
  """The rows of a table, found by its config or by its name."""
  key = table if table in tables else name
  if key not in tables:
    given = sorted(k.name or "?" if isinstance(k, TableConfig) else k for k in tables)
    raise ValueError(f"There is no table {name!r} in `tables`, which has {given}.")
  rows, shape = jnp.asarray(tables[key]), (table.vocabulary_size, table.dim)
  if not is_traced(rows) and not isinstance(rows.sharding, jax.sharding.SingleDeviceSharding):
    rows = jnp.asarray(np.asarray(rows))  # device_put would keep an Explicit mesh in its type
  if rows.shape != shape or not jnp.issubdtype(rows.dtype, jnp.floating):
    raise ValueError(
      f"Table {name!r} must be floats {shape}, [vocabulary_size, dim]. "
      f"Got {rows.dtype} {rows.shape}."
    )
  return rows


def _look_up(name: str, feature: FeatureConfig, x: Any, w: Any, rows: jax.Array) -> jax.Array:
  """Activations of a feature, with serving's rules expressed in terms of training's."""
  table, stated = feature.table, feature.output_shape
  has_bags = isinstance(x, (inputs_lib.Padded, inputs_lib.Ragged))
  rules = dataclasses.replace(
    feature,
    max_sequence_length=feature.max_sequence_length if stated is None else 0,
    output_shape=stated if has_bags else None,
    validate_weights_and_indices=True,  # in serving, it decides on pruning, below
  )
  checked = inputs_lib.check((), name, rules, x, w)
  bags, _ = bags_lib.from_input(checked.parts, checked.form, table.vocabulary_size)
  is_pruned = isinstance(x, inputs_lib.Sparse) and (
    feature.validate_weights_and_indices or len(x.dense_shape) > 2
  )
  if is_pruned and bags.gains is not None and table.combiner != "sum":
    keep = bags.gains > 0
    ids = jnp.where(keep, bags.ids, table.vocabulary_size)
    bags = dataclasses.replace(bags, ids=ids, gains=jnp.where(keep, bags.gains, 0))
  act = _gather_and_combine(rows, bags.normalized(str(table.combiner), table.vocabulary_size))
  return act if isinstance(x, inputs_lib.KINDS) else act.reshape(*np.shape(x), table.dim)


# Compiled once per shape in eager calls; within a caller's jit it is part of that program.
_gather_and_combine = jax.jit(lookup_lib.gather_and_combine)
