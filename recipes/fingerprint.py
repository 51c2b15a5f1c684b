"""A hash of the code that a function runs, so that what it has built is known to be its own."""

import ast
import functools
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

_OWN = __name__.rpartition(".")[0]  # the package whose code is followed


def fingerprint(function: Callable) -> str:
  """Returns a hash of a function's source and of all that it refers to in this package.

  Followed, by name, are functions, classes and constants at the top level of modules. Comments,
  docstrings and layout do not count, and neither does the code of other packages.

  Args:
    function: defined in a file; a `functools.partial` counts as the function that it calls.
  """
  while isinstance(function, functools.partial):
    function = function.func
  reached: dict[tuple[str, str], str] = {}
  # Of a function within another one, the outer one: it holds the values that the inner one sees.
  _follow(function.__module__, function.__qualname__.partition(".")[0], "", reached)
  # The same in a checkout and installed, as `embed.recipes`: what one has built, the other reads.
  named = {(_plain(module), name): code for (module, name), code in reached.items()}
  text = "\n".join(f"{module} {name}\n{code}" for (module, name), code in sorted(named.items()))
  return hashlib.sha256(text.encode()).hexdigest()


def _plain(module: str) -> str:
  return f"recipes{module.removeprefix(_OWN)}" if f"{module}.".startswith(f"{_OWN}.") else module


def _follow(module: str, name: str, attribute: str, reached: dict[tuple[str, str], str]) -> None:
  """Adds to `reached` the source of a module's top-level name and of all names used in it.

  Args:
    module, name: where it is used; an import is followed to the definition.
    attribute: the attribute taken of it, which says what is used of an imported module.
    reached: source by module and name.
  """
  if (module, name) in reached:
    return
  for node in _definitions(module).get(name, ()):
    if isinstance(node, ast.ImportFrom):
      package = "." * node.level + (node.module or "")
      package = importlib.util.resolve_name(package, module.rpartition(".")[0])
      original = next(a.name for a in node.names if name == (a.asname or a.name))
      if not f"{package}.".startswith(f"{_OWN}."):
        continue
      if f"{package}.{original}" not in sys.modules:
        _follow(package, original, attribute, reached)
      elif attribute:
        _follow(f"{package}.{original}", attribute, "", reached)
    elif not isinstance(node, ast.Import):
      reached[module, name] = reached.get((module, name), "") + ast.unparse(node)
      for used in _used(node):
        _follow(module, *used, reached)


def _used(node: ast.stmt) -> set[tuple[str, str]]:
  """Returns the names in a statement, each with the attribute that is taken of it, or "".

  The parameters of a function are its own, not the module's names.
  """
  parts = list(ast.walk(node))
  names = {(part.id, "") for part in parts if isinstance(part, ast.Name)}
  names |= {
    (part.value.id, part.attr)
    for part in parts
    if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name)
  }
  own: set[str] = set()
  if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
    own = {part.arg for part in ast.walk(node.args) if isinstance(part, ast.arg)}
  return {(name, attribute) for name, attribute in names if name not in own}


def _definitions(module: str) -> dict[str, list[ast.stmt]]:
  source = Path(str(sys.modules[module].__file__))
  return _parsed(source, source.stat().st_mtime_ns)


@functools.lru_cache
def _parsed(source: Path, changed: int) -> dict[str, list[ast.stmt]]:
  """Returns the statements that define or change each top-level name of a file."""
  del changed  # only a part of the cache's key
  tree = ast.parse(source.read_text())
  for node in ast.walk(tree):
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
      has_docstring = ast.get_docstring(node) is not None
      node.body = node.body[has_docstring:] or [ast.Pass()]
  definitions: dict[str, list[ast.stmt]] = {}
  for statement in _top_level(tree.body):
    for name in _defined(statement):
      definitions.setdefault(name, []).append(statement)
  return definitions


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
  """Yields the statements of a module, those within `if`, `try` and `with` one by one."""
  for node in body:
    if isinstance(node, ast.If | ast.Try | ast.With):
      for field in ("body", "orelse", "finalbody"):
        yield from _top_level(getattr(node, field, []))
    else:
      yield node


def _defined(node: ast.stmt) -> set[str]:
  if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
    return {node.name}
  if isinstance(node, ast.Import | ast.ImportFrom):
    return {alias.asname or alias.name for alias in node.names}
  names = (part for part in ast.walk(node) if isinstance(part, ast.Name))
  return {name.id for name in names if isinstance(name.ctx, ast.Store)}
