"""Nested features: flattening to paths, matching with values, repacking, and naming their tables.

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
  """True for a named tuple."""
  return isinstance(value, tuple) and hasattr(value, "_fields")


def _children(config: Any) -> list[tuple[str, Any]]:
  """The (key, child) pairs of a container, with dict keys sorted."""
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
  """Yields each feature of a nested config with its path: dict keys sorted, sequences in order."""
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
  """Yields the path, the config and the entry in `values` of each feature.

  Features come in the order of `flatten_features`; a dict may hold any subset of the keys.

  Args:
    config: the feature config.
    values: values in the structure of `config`.
    what: the name of `values` in errors.
    path: the path of this part of the config.
    none_allowed: whether None may replace a container.
  """
  if isinstance(config, FeatureConfig):
    yield path, config, values
    return
  if values is None and none_allowed:
    return
  what_here = f"{what} at {'/'.join(path)!r}" if path else what
  is_dict, kind = isinstance(config, Mapping), type(config)
  if not (isinstance(values, Mapping) if is_dict else type(values) is kind):
    expected = "dict" if is_dict else kind.__name__
    raise TypeError(
      f"{what_here}: expected a {expected} like the feature config, got {type(values).__name__}."
    )
  if is_dict:
    unknown = sorted(str(key) for key in values if key not in config)
    if unknown:
      raise ValueError(
        f"{what_here}: unknown features {unknown}; the feature config has "
        f"{sorted(map(str, config))}. Pass those alone."
      )
    children = [(str(key), config[key], values[key]) for key in sorted(values)]
  else:
    if len(values) != len(config):
      raise ValueError(
        f"{what_here}: expected {len(config)} entries like the feature config, got {len(values)}."
      )
    pairs = zip(_children(config), values, strict=True)
    children = [(key, child, value) for (key, child), value in pairs]
  for key, child, value in children:
    yield from match(child, value, what, (*path, key), none_allowed=none_allowed)


def pack(config: Any, like: Any, flat: Mapping[Path, Any], path: Path = ()) -> Any:
  """Puts the entries of `flat`, by feature path, into the containers of `like`."""
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
  """The same features in new containers, which the caller cannot change."""
  return pack(config, config, dict(flatten_features(config)))


def name_tables(config: Any) -> dict[str, TableConfig]:
  """Names every table, in the order of first use; unnamed ones become `table_{position}`."""
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
