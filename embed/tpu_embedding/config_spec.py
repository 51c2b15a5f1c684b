"""`EmbeddingConfigSpec`: tables, features and their optimizers, from one nested mapping."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from embed.config import FeatureConfig, TableConfig, check, setting
from embed.layer import SparseEmbed
from embed.optimizers import RowOptimizer, named

_KEYS = {  # keys of an entry, TensorFlow's first
  "feature": (
    "table_id", "max_sequence_length", "weight_key", "validate_weights_and_indices", "output_shape",
  ),
  "table": (
    "vocabulary_size", "dimension", "initializer", "combiner", "hot_id_replication",
    "learning_rate", "learning_rate_fn", "optimization_parameters", "layout",
    "dtype", "stochastic_rounding",
  ),
}  # fmt: skip
_ALWAYS = ("use_gradient_accumulation", "lazy_adam")  # always True here


class EmbeddingConfigSpec:
  """The embedding of a model, declared as in TPUEstimator's `EmbeddingConfigSpec`.

  Argument names are TensorFlow's; entries are mappings, which replace feature columns. Everything
  may come from one dictionary or `ml_collections.ConfigDict`: `EmbeddingConfigSpec(**config)`.

  Args:
    feature_to_config_dict: `{feature: entry}`. An entry has `table_id`, the name of its table, and
      may have `weight_key`, the column with the weights of its ids, and `max_sequence_length`,
      `validate_weights_and_indices` and `output_shape`, as in `FeatureConfig`.
    table_to_config_dict: `{table: entry}`. An entry has `vocabulary_size` and `dimension`, and may
      have `combiner`, `initializer`, `dtype` and `stochastic_rounding`, as in `TableConfig`,
      `optimization_parameters` instead of the shared ones, and `learning_rate` or
      `learning_rate_fn`, a function of the step, instead of the optimizer's own rate. TensorFlow's
      `hot_id_replication` and `layout` have no effect: they place rows on TPUs.
    optimization_parameters: the optimizer of every table without one: `embed.adagrad(0.1)`, or
      `{"name": "adagrad", "learning_rate": 0.1}`. With None, such tables can only be looked up.
    clipping_limit: the `clipvalue` of each optimizer that has none: every table's summed row
      gradient is clipped to `[-c, c]`, elementwise. (TensorFlow stores it and never reads it.)
    gradient_multiplier_fn: must be None; multiply gradients in the training step, with `Grads.map`.
    pipeline_execution_with_tensor_core: stored, without effect. A training step pipelines, with a
      `lookup` of the next batch before `apply_gradients`; a layer cannot.
    partition_strategy: "div" or "mod", the way that rows are spread over the mesh.

  Attributes:
    features: `{feature: FeatureConfig}`.
    tables: `{table: TableConfig}`, each with its optimizer.
    optimizer: the shared optimizer, with clipping.
    weight_keys: `{feature: column}`, for the features with weights.

  Raises:
    ValueError: naming the table or feature and what is wrong with its entry.
    TypeError: for an entry that is not a mapping, or keys that are not strings.

  >>> spec = embed.EmbeddingConfigSpec(
  ...   feature_to_config_dict={"watched": {"table_id": "movie", "weight_key": "seconds"}},
  ...   table_to_config_dict={"movie": {"vocabulary_size": 100, "dimension": 4, "combiner": "sum"}},
  ...   optimization_parameters={"name": "adagrad", "learning_rate": 0.1},
  ... )
  >>> layer = spec.make(rngs=nnx.Rngs(0))
  >>> batch = {"watched": embed.Padded([[3, 7]]), "seconds": embed.Padded([[0.5, 2]]), "label": [1]}
  >>> layer(*spec.inputs(batch))["watched"].shape
  (1, 4)
  """

  def __init__(
    self,
    feature_to_config_dict: Mapping[str, Any],
    table_to_config_dict: Mapping[str, Any],
    optimization_parameters: RowOptimizer | Mapping[str, Any] | None = None,
    clipping_limit: float | None = None,
    pipeline_execution_with_tensor_core: bool = False,
    gradient_multiplier_fn: None = None,
    partition_strategy: str = "div",
  ):
    limit = setting("clipping_limit", clipping_limit)
    is_positive = isinstance(limit, int | float) and not isinstance(limit, bool) and limit > 0
    check("clipping_limit", limit, limit is None or is_positive, "a positive number, or None")
    is_strategy = partition_strategy in ("div", "mod")
    expected = "'div' or 'mod'; to replicate a table, use embed.plan"
    check("partition_strategy", partition_strategy, is_strategy, expected)
    expected = "None; write grads = grads.map(lambda g: f(step) * g) in the training step"
    check(
      "gradient_multiplier_fn", gradient_multiplier_fn, gradient_multiplier_fn is None, expected
    )
    self.pipeline_execution_with_tensor_core = pipeline_execution_with_tensor_core
    self.partition_strategy = partition_strategy
    self.optimizer = _optimizer("optimization_parameters", optimization_parameters, limit)
    self.tables = {
      name: _table(name, entry, self.optimizer, limit)
      for name, entry in _entries("table", table_to_config_dict).items()
    }
    self.features, self.weight_keys = {}, {}
    for name, entry in _entries("feature", feature_to_config_dict).items():
      weight_key = entry.pop("weight_key", None)
      if weight_key is not None:
        self.weight_keys[name] = weight_key
      self.features[name] = _feature(name, entry, self.tables)
    used = {feature.table.name for feature in self.features.values()}
    for name in self.tables:
      if name not in used:
        raise ValueError(f"Table {name!r} is used by no feature; remove it.")
    for name, key in self.weight_keys.items():
      if not isinstance(key, str):
        raise TypeError(f"Feature {name!r}: weight_key must be a string. Got {key!r}.")
      if key in self.features:
        raise ValueError(f"Feature {name!r}: its weight_key {key!r} is a feature, which has ids.")

  def make(self, *, rngs: nnx.Rngs, mesh: Any = None, axis: Any = "data") -> SparseEmbed:
    """Makes the layer, with tables split by `partition_strategy`; arguments as in `SparseEmbed`."""
    where = {"mesh": mesh, "axis": axis, "sharding": self.partition_strategy}
    return SparseEmbed(self.features, self.optimizer, rngs=rngs, **where)

  def inputs(self, columns: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The layer's arguments, from a batch by column: `layer(*spec.inputs(batch))`.

    Args:
      columns: the ids of each feature and, under its `weight_key`, the weights, in the same kind of
        input. Other columns, such as labels, are ignored. A missing column raises ValueError.

    Returns:
      `(features, weights)`, where `weights` is None if no feature has any.
    """
    missing = [key for key in (*self.features, *self.weight_keys.values()) if key not in columns]
    if missing:
      raise ValueError(f"The batch has no column {missing[0]!r}; it has {sorted(columns)}.")
    weights = {name: columns[key] for name, key in self.weight_keys.items()}
    return {name: columns[name] for name in self.features}, weights or None


def _mapping(what: str, value: Any) -> dict[str, Any]:
  """A dict with string keys, from a dict or an `ml_collections.ConfigDict` (not a `Mapping`)."""
  if not hasattr(value, "items"):
    raise TypeError(f"{what} must be a mapping. Got {type(value)}.")
  mapping = dict(value.items())
  for key in mapping:
    if not isinstance(key, str):
      raise TypeError(f"{what}: keys must be strings. Got {key!r}.")
  return mapping


def _entries(kind: str, value: Any) -> dict[str, dict[str, Any]]:
  """The entries of tables or of features by name, with known keys."""
  known, entries = _KEYS[kind], {}
  for name, given in _mapping(f"{kind}_to_config_dict", value).items():
    what = f"{kind.capitalize()} {name!r}"
    entries[name] = _mapping(what, given)
    for key in entries[name]:
      if key not in known:
        raise ValueError(f"{what}: unknown key {key!r}. There are {', '.join(sorted(known))}.")
  return entries


def _named_optimizer(what: str, value: Any) -> RowOptimizer:
  """Makes the optimizer that `{"name": "adagrad", **arguments}` names."""
  arguments, functions = _mapping(what, value), named()
  name = arguments.pop("name", None)
  for key in _ALWAYS:
    if not arguments.pop(key, True):
      raise ValueError(f"{what}: {key}=False has no counterpart. Leave it out.")
  if name not in functions:
    raise ValueError(f"{what}: unknown name {name!r}. There are {', '.join(sorted(functions))}.")
  try:
    return functions[name](**arguments)
  except (TypeError, ValueError) as error:
    raise ValueError(f"{what}: {error}") from None


def _optimizer(what: str, value: Any, clipping_limit: float | None) -> RowOptimizer | None:
  """Makes an optimizer; sets the limit as its `clipvalue` if it trains and has none of its own."""
  if value is None:
    return None
  optimizer = _named_optimizer(what, value) if hasattr(value, "items") else value
  if not isinstance(optimizer, RowOptimizer):
    raise ValueError(
      f'{what} must be an optimizer such as embed.adagrad(0.1), or {{"name": "adagrad", '
      f'"learning_rate": 0.1}}. Got {value!r}.'
    )
  if optimizer.equation is None or optimizer.clipvalue is not None:
    return optimizer
  return optimizer.replace(clipvalue=clipping_limit)


def _table(
  name: str, entry: dict[str, Any], default: RowOptimizer | None, clipping_limit: float | None
) -> TableConfig:
  """Makes the config of a table, with its own optimizer or rate, or with the default optimizer."""
  what = f"Table {name!r}"
  for key in ("vocabulary_size", "dimension"):
    if key not in entry:
      raise ValueError(f"{what} has no {key!r}.")
  for key in ("hot_id_replication", "layout"):
    entry.pop(key, None)
  own = entry.pop("optimization_parameters", None)
  optimizer = _optimizer(f"{what}: optimization_parameters", own, clipping_limit) or default
  rate, schedule = (entry.pop(key, None) for key in ("learning_rate", "learning_rate_fn"))
  if rate is not None and schedule is not None:
    raise ValueError(f"{what}: only one of learning_rate and learning_rate_fn can be set.")
  rate = schedule if rate is None else rate
  if rate is not None:
    if optimizer is None or optimizer.equation is None:
      raise ValueError(f"{what} has a learning rate, but no optimizer that takes one.")
    optimizer = optimizer.replace(learning_rate=rate)
  try:
    return TableConfig(name=name, dim=entry.pop("dimension"), optimizer=optimizer, **entry)
  except ValueError as error:
    raise ValueError(f"{what}: {error}") from None


def _feature(name: str, entry: dict[str, Any], tables: Mapping[str, TableConfig]) -> FeatureConfig:
  table: Any = entry.pop("table_id", None)
  if table not in tables:
    raise ValueError(
      f"Feature {name!r} has table_id {table!r}, which is not in table_to_config_dict: "
      f"{sorted(tables)}."
    )
  try:
    return FeatureConfig(tables[table], **entry)
  except (TypeError, ValueError) as error:
    raise type(error)(f"Feature {name!r}: {error}") from None
