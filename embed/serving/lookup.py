"""Lookups in plain arrays, by the rules of TensorFlow's `serving_embedding_lookup`."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from embed import config as config_lib
from embed import inputs as ragged
from embed import structure
from embed.engine import combining
from embed.engine import lookup as lookup_lib


def serving_lookup(
  inputs: Any,
  weights: Any,
  tables: Mapping[Any, Any],
  feature_config: Any,
  *,
  quantize: bool = False,
  combiner_weights: Mapping[str, Any] | None = None,
) -> Any:
  """Looks up activations in tables that are plain arrays, without module, state or mesh.

  It can be jitted and exported, with `feature_config` bound beforehand. It follows TensorFlow's
  `serving_embedding_lookup` on CPU where that differs from training, and so from a call of
  `SparseEmbed`:

  - A dense array keeps its shape: `[batch, 1]` gives `[batch, 1, dim]`.
  - In a weighted `Sparse`, "mean" and "sqrtn" ignore ids whose weight is not positive, unless
    `validate_weights_and_indices` is False and the rank is 2.
  - `output_shape` applies only to `Ragged`. With as many entries as bags, it is the shape of the
    combined bags; with k times as many, bags become sequences of length k, and weights and combiner
    are ignored.
  - `QuantizationConfig` is ignored, unless `quantize`.

  TensorFlow has no `Padded`, which is looked up as in training. Negative ids are padding.

  Args:
    inputs: in the structure of `feature_config`; a dict may hold any subset. Each is a dense
      integer array, `Padded`, `Ragged` or `Sparse`.
    weights: the parallel structure of floats, or None; an entry may be None.
    tables: the rows of each table, float `[vocabulary_size, dim]`, NumPy or JAX, by table name, as
      in `sparse_embed.tables`, or, outside of jit, by `TableConfig`. An eager call copies NumPy
      tables, and tables on a mesh, to one device: copy them once before many calls.
    feature_config: a `FeatureConfig` or any nesting of them.
    quantize: whether to apply the table's `QuantizationConfig` to rows.
    combiner_weights: the learned weights of each `CustomCombiner`, float32 `[num_weights]` by table
      name, as in `sparse_embed.combiner_weights`.

  Returns:
    The structure of `inputs`, arrays of the table's dtype, `[..., dim]` or
    `[batch, max_sequence_length, dim]`. Empty bags, padding and the end of sequences are zeros.

  Raises:
    ValueError: naming the feature, for an id that is not below `vocabulary_size`, also without
      `validate_weights_and_indices`; for weights of a dense or sequence feature, or of another kind
      than the ids; for an `output_shape` that does not fit; and for features that are not in the
      config. Naming the table, if it is missing or has another shape, or if the weights of its
      combiner are missing. Under jit, ids out of range are dropped; JAX cuts arguments of a jitted
      function to 32 bits before that, so check wider ids on the host.
    TypeError: for another kind of container than in the config.

  >>> import functools
  >>> movie = embed.TableConfig(vocabulary_size=3, dim=1, combiner="sum", name="movie")
  >>> features = {"watched": embed.FeatureConfig(movie)}
  >>> lookup = jax.jit(functools.partial(embed.serving_lookup, feature_config=features))
  >>> rows = np.array([[1.0], [10.0], [100.0]], np.float32)
  >>> batch = {"watched": embed.Padded(np.array([[0, 2], [1, -1]]))}
  >>> lookup(batch, None, {"movie": rows})["watched"].tolist()
  [[101.0], [10.0]]
  """
  names = {table: name for name, table in structure.name_tables(feature_config).items()}
  activations = {}
  for path, (feature, x, w) in ragged.flatten(feature_config, inputs, weights).items():
    rows = _rows(tables, feature.table, names[feature.table])
    learned = _learned(combiner_weights or {}, feature.table, names[feature.table])
    name = structure.feature_name(path, feature)
    activations[path] = _serve(name, feature, (x, w), (rows, learned), quantize)
  return structure.pack(feature_config, inputs, activations)


def _rows(tables: Mapping[Any, Any], table: config_lib.TableConfig, name: str) -> jax.Array:
  """The rows of a table, by its config or its name, checked and on one device."""
  key = table if table in tables else name
  if key not in tables:
    keys = sorted(k.name or "?" if isinstance(k, config_lib.TableConfig) else k for k in tables)
    raise ValueError(f"There is no table {name!r} in `tables`, which has {keys}.")
  rows, shape = jnp.asarray(tables[key]), (table.vocabulary_size, table.dim)
  if isinstance(rows, jax.core.Tracer):
    if any(jax.typeof(rows).sharding.spec):
      raise ValueError(
        f"Table {name!r} is split over an Explicit mesh. Bring it to one device before jit, "
        "with np.asarray, or export the model with embed.export."
      )
  elif not isinstance(rows.sharding, jax.sharding.SingleDeviceSharding):
    rows = jnp.asarray(np.asarray(rows))  # device_put would keep an Explicit mesh in its type
  if rows.shape != shape or not jnp.issubdtype(rows.dtype, jnp.floating):
    raise ValueError(
      f"Table {name!r} must be floats {shape}, [vocabulary_size, dim]. "
      f"Got {rows.dtype} {rows.shape}."
    )
  return rows


def _learned(weights: Mapping[str, Any], table: config_lib.TableConfig, name: str) -> Any:
  """The learned weights of a table's custom combiner, None if it has none."""
  num_weights = getattr(table.combiner, "num_weights", 0)
  if not num_weights:
    return None
  if name not in weights or np.shape(weights[name]) != (num_weights,):
    raise ValueError(
      f"Table {name!r} has a CustomCombiner with {num_weights} learned weights: give "
      f"combiner_weights={{{name!r}: sparse_embed.combiner_weights[{name!r}][...]}}."
    )
  return jnp.asarray(weights[name], jnp.float32)


def _serve(
  name: str, feature: config_lib.FeatureConfig, inputs: Any, table_arrays: Any, quantize: bool
) -> jax.Array:
  """Activations of a feature: its config is changed so that training's rules give serving's.

  Args:
    name: of the feature, in errors.
    feature: its config.
    inputs: ids and weights.
    table_arrays: rows and learned weights of the table.
    quantize: as in `serving_lookup`.
  """
  (x, w), (rows, learned) = inputs, table_arrays
  table, output_shape = feature.table, feature.output_shape
  is_padded, is_ragged = isinstance(x, ragged.Padded), isinstance(x, ragged.Ragged)
  reshapes = is_ragged and output_shape is not None and None not in output_shape
  rules = dataclasses.replace(
    feature,
    max_sequence_length=0 if output_shape is not None else feature.max_sequence_length,
    output_shape=output_shape if (is_padded or is_ragged) and not reshapes else None,
    validate_weights_and_indices=True,  # in serving it decides only whether weights are pruned
  )
  ragged.check(name, rules, x, w)
  shape = None
  if reshapes:
    shape = output_shape
    length = _length(name, shape, np.shape(x.row_splits)[0] - 1)
    if length > 1:
      rules, w = dataclasses.replace(rules, max_sequence_length=length), None
  elif not (is_padded or is_ragged or isinstance(x, ragged.Sparse)):
    shape = np.shape(x)
  bags = ragged.to_bags(name, rules, x, w)
  if isinstance(x, ragged.Sparse) and w is not None and table.combiner in ("mean", "sqrtn"):
    prunes = feature.validate_weights_and_indices or len(x.dense_shape) > 2
    bags = _prune(bags, table.vocabulary_size) if prunes else bags
  look_up = functools.partial(
    _look_up, rows, quantization=table.quantization_config if quantize else None
  )
  custom = table.combiner if isinstance(table.combiner, config_lib.CustomCombiner) else None
  if custom and ragged.combines(name, rules, x, w):
    bags = ragged.in_places(bags, table.vocabulary_size, custom.max_valency)
    one_by_one = lookup_lib.Occurrences(bags.ids[..., None], None, None)
    vectors = look_up(one_by_one, shape=bags.ids.shape)
    act = combining.combine(table, vectors, bags.ids, bags.weights, learned)
  else:
    # The bags of a sequence hold one id each, so that any combiner would do.
    combiner = table.combiner if isinstance(table.combiner, str) else "sum"
    occ = lookup_lib.occurrences(bags, combiner, table.vocabulary_size)
    act = look_up(occ, shape=bags.shape)
  return act if shape is None else act.reshape(*shape, table.dim)


def _length(name: str, output_shape: Any, num_bags: int) -> int:
  """The length of the sequences that an `output_shape` makes of ragged bags; 1 combines them."""
  size = math.prod(output_shape)
  if size == num_bags:
    return 1
  if not num_bags or not size or size % num_bags:
    raise ValueError(
      f"Feature {name!r}: its output_shape {output_shape} has {size} entries, not a multiple of "
      f"the {num_bags} bags of the input."
    )
  return size // num_bags


def _prune(bags: ragged.Bags, vocabulary_size: int) -> ragged.Bags:
  """Turns ids whose weight is not positive into padding."""
  assert bags.weights is not None
  keep = bags.weights > 0
  return bags._replace(
    ids=jnp.where(keep, bags.ids, vocabulary_size), weights=jnp.where(keep, bags.weights, 0)
  )


# Eager calls compile it once per shape; within an outer jit it is inlined.
_look_up = jax.jit(lookup_lib.lookup, static_argnames=("shape", "quantization"))
