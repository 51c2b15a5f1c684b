"""Nested features: flattened to paths, matched with values, packed again, and their tables named.

A feature config is any nesting of dicts, lists, tuples and named tuples of `FeatureConfig`. It is
walked without `jax.tree`, which would keep the insertion order of an OrderedDict, lose None leaves,
and raise the same error for a wrong container and a wrong key.
"""

import collections
from collections.abc import Iterator, Mapping
from typing import Any

from embed.config import FeatureConfig, TableConfig

Path = tuple[str, ...]


def is_namedtuple(value: Any) -> bool:
  """Whether a value is a named tuple."""
  return isinstance(value, tuple) and hasattr(value, "_fields")


def _children(config: Any) -> list[tuple[str, Any]]:
  """The (key, child) pairs of a container, dict keys sorted."""
  if isinstance(config, Mapping):
    kinds = sorted({type(key).__name__ for key in config})
    if len(kinds) > 1:
      raise ValueError(f"A dict of features has keys of the types {kinds}. Write strings alone.")
    return [(str(key), config[key]) for key in sorted(config)]
  if is_namedtuple(config):
    return list(zip(config._fields, config, strict=True))
  if isinstance(config, (list, tuple)):
    return [(str(i), child) for i, child in enumerate(config)]
  raise ValueError(
    "A feature config is any nesting of dicts, lists, tuples and named tuples of "
    f"embed.FeatureConfig. Got {config!r}."
  )


def flatten_features(config: Any, path: Path = ()) -> Iterator[tuple[Path, FeatureConfig]]:
  """Yields each feature of a nested config with its path: dict keys sorted, sequences in order.

  >>> watched = FeatureConfig(TableConfig(9, 2))
  >>> [path for path, _ in flatten_features({"b": watched, "a": [watched]})]
  [('a', '0'), ('b',)]
  """
  if isinstance(config, FeatureConfig):
    yield path, config
    return
  for key, child in _children(config):
    yield from flatten_features(child, (*path, key))


def feature_name(path: Path, feature: FeatureConfig | None = None) -> str:
  """The name of a feature in errors: its own, or its path in the config ("a/0")."""
  return (feature.name if feature is not None else None) or "/".join(path) or "<the feature>"


def match(
  config: Any, values: Any, what: str, path: Path = (), *, none_allowed: bool = True
) -> Iterator[tuple[Path, FeatureConfig, Any]]:
  """Yields each feature, its path and its entry of `values`, which has the same structure.

  In the order of `flatten_features`; a dict may hold any subset of the keys.

  Args:
    config: the feature config.
    values: the same nesting of values.
    what: the name of `values` in errors.
    path: of this part of the config.
    none_allowed: whether None may replace a container.

  >>> watched = FeatureConfig(TableConfig(9, 2))
  >>> matched = match({"a": [watched, watched], "b": watched}, {"a": [1, 2]}, "values")
  >>> [(path, value) for path, _, value in matched]
  [(('a', '0'), 1), (('a', '1'), 2)]
  """
  if isinstance(config, FeatureConfig):
    yield path, config, values
    return
  where = f" at {'/'.join(path)!r}" if path else ""
  if values is None and none_allowed:
    return
  if isinstance(config, Mapping):
    if not isinstance(values, Mapping):
      raise TypeError(f"{what}{where}: expected a dict like the feature config, got {type(values)}")
    unknown = sorted(str(key) for key in values if key not in config)
    if unknown:
      raise ValueError(
        f"{what}{where}: unknown features {unknown}; the feature config has "
        f"{sorted(map(str, config))}. Pass those alone."
      )
    for key in sorted(values):
      inner = (*path, str(key))
      yield from match(config[key], values[key], what, inner, none_allowed=none_allowed)
    return
  kind = type(config)
  if type(values) is not kind:
    raise TypeError(
      f"{what}{where}: expected a {kind.__name__} like the feature config, got "
      f"{type(values).__name__}."
    )
  if len(values) != len(config):
    raise ValueError(
      f"{what}{where}: expected {len(config)} entries like the feature config, got {len(values)}."
    )
  for (key, child), value in zip(_children(config), values, strict=True):
    yield from match(child, value, what, (*path, key), none_allowed=none_allowed)


def pack(config: Any, like: Any, flat: Mapping[Path, Any], path: Path = ()) -> Any:
  """Puts the entries of `flat`, by feature path, into the containers of `like`.

  >>> watched = FeatureConfig(TableConfig(9, 2))
  >>> pack({"a": [watched], "b": watched}, {"a": [1]}, {("a", "0"): 10})
  {'a': [10]}
  """
  if isinstance(config, FeatureConfig):
    return flat[path]
  if isinstance(config, Mapping):
    return {key: pack(config[key], like[key], flat, (*path, str(key))) for key in like}
  packed = [
    pack(child, value, flat, (*path, key))
    for (key, child), value in zip(_children(config), like, strict=True)
  ]
  return type(config)(*packed) if is_namedtuple(config) else type(config)(packed)


def own(config: Any) -> Any:
  """The same features in containers of their own, which the caller cannot change.

  >>> features = {"a": [FeatureConfig(TableConfig(9, 2))]}
  >>> kept = own(features)
  >>> features["a"].clear()
  >>> len(kept["a"])
  1
  """
  return pack(config, config, dict(flatten_features(config)))


def name_tables(config: Any) -> dict[str, TableConfig]:
  """Names every table, in the order of first use; unnamed ones become `table_{position}`.

  >>> movie, user = TableConfig(9, 2, name="movie"), TableConfig(5, 2)
  >>> list(name_tables([FeatureConfig(movie), FeatureConfig(user)]))
  ['movie', 'table_1']
  """
  features = list(flatten_features(config))
  paths = collections.Counter("/".join(path) for path, _ in features)
  if paths and max(paths.values()) > 1:
    raise ValueError(f"Two features have the same path, {max(paths, key=lambda p: paths[p])!r}.")
  tables = list(dict.fromkeys(feature.table for _, feature in features))
  if not tables:
    raise ValueError("The feature config holds no embed.FeatureConfig.")
  names = [table.name or f"table_{i}" for i, table in enumerate(tables)]
  for name, count in collections.Counter(names).items():
    if count > 1:
      raise ValueError(f"Tables must have a unique name. Multiple tables with name {name} found.")
  return dict(zip(names, tables, strict=True))
