"""The JSON files of runs, checkpoints, exports and caches: the parts that readers rely on."""

import sys
from typing import Any

_NUMBER, _NONE = (int, float), type(None)
_STEP = (int, _NONE)
_SCORES = {str: _NUMBER}

RESULT = {
  "recipe": str,
  "config": {"select": str, "model?": str, "dataset?": str, "data_file?": str, "source?": str},
  "seed": int, "steps": int, "tested_step": int, "seconds": _NUMBER,
  "metrics": _SCORES, "baselines": {str: _SCORES},
  "notes?": [str],
  "data_sha256": {str: str},
  "device": {"kind": str, "count": int, "host_cores": _STEP},
  "versions": {"jax": str, "flax": str, "sparse-embed": str},
}  # fmt: skip
LINE = {"step": int, str: _NUMBER}  # of metrics.jsonl
MANIFEST = {"files": {str: {"size": int, "xxh3_128": str}}}
CHECKPOINT = {"follows": _STEP, "best_step": _STEP}  # besides MANIFEST
PREPARED = {"columns": {str: {"size": int, "mtime_ns": int, "sha256": str}}}
READING = {"columns": {str: dict}, "format": dict}
SERVED = {
  "format": int, "recipe": str, "step": int, "columns": {str: dict}, "text": dict, "ann": bool,
  "exclude_seen": bool,
}  # fmt: skip


def check(value: Any, schema: Any, name: str = "the content") -> None:
  """Checks a value of JSON against types of its parts.

  Args:
    value: to check.
    schema: a type or a tuple of types; `[schema]` of lists; or of objects `{name: schema}`, where
      a name that ends in "?" may be missing, and `str` is any other name.
    name: of the value, for errors.

  Raises:
    ValueError: a part is missing or of another type; names it.

  >>> check({"step": 1, "files": {"a": 2}}, {"step": int, "files": {str: int}, "best?": int})
  >>> check({"step": "1"}, {"step": int})
  Traceback (most recent call last):
  ValueError: step is '1', expected int
  """
  types = schema if isinstance(schema, tuple) else (type(schema),)
  if not isinstance(schema, dict | list):
    types = schema if isinstance(schema, tuple) else (schema,)
  is_flag = isinstance(value, bool) and bool not in types and object not in types
  is_huge = isinstance(value, _NUMBER) and abs(value) > sys.float_info.max
  if not isinstance(value, types) or is_flag or is_huge:
    known = " or ".join(sorted("null" if each is _NONE else each.__name__ for each in types))
    raise ValueError(f"{name} is {value!r:.60}, expected {known}")
  if isinstance(schema, list):
    for index, each in enumerate(value):
      check(each, schema[0], f"{name}[{index}]")
  elif isinstance(schema, dict):
    named = {key.removesuffix("?"): each for key, each in schema.items() if key is not str}
    for key in named:
      if key not in value and key in schema:
        raise ValueError(f"{name} has no {key!r}")
    for key, each in value.items():
      if (part := named.get(key, schema.get(str))) is not None:
        check(each, part, key)
