"""The pages of `docs/api` are the public API: each name once, with its signature and members."""

import inspect
import pathlib
import re
import types
from typing import NamedTuple

import numpy as np

import embed
from embed import checkpoint, deltas, transforms

API = pathlib.Path(__file__).parents[1] / "docs" / "api"
MODULES = {"checkpoint": checkpoint, "deltas": deltas, "transforms": transforms}

# For the library's other files, or for JAX.
INTERNAL = {"embed.Plan": {"choose_strategies", "stacks", "uniform", "with_features"}}


class Entry(NamedTuple):
  kind: str  # "class", "function" or "module"
  name: str
  signature: str  # "" is the function's own
  members: list[str]


def entries(page):
  pattern = r"^\.\. auto(\w+):: ([\w.]+)(\(.*\))?\n((?: +:.*\n)*)"
  found = []
  for kind, name, signature, options in re.findall(pattern, page.read_text(), re.MULTILINE):
    members = re.findall(r":members: (.*)", options)
    found.append(Entry(kind, name, signature, members[0].split(", ") if members else []))
  return found


ENTRIES = [entry for page in sorted(API.glob("*.md")) for entry in entries(page)]


def resolve(name):
  found = embed
  for part in name.split(".")[1:]:
    found = getattr(found, part)
  return found


def members(cls):
  """The public functions and properties of a class that no base class has documented."""
  kinds = (types.FunctionType, property, classmethod, staticmethod)
  inherited = {name for base in cls.__mro__[1:] if base is not object for name in vars(base)}
  return {
    name: getattr(value, "__func__", value)
    for name, value in vars(cls).items()
    if isinstance(value, kinds) and (name == "__call__" or not name.startswith("_"))
    if name not in inherited
  }


def test_the_pages_are_the_public_api():
  """And all of it has a docstring."""
  public = [f"embed.{name}" for name in embed.__all__]
  public += [f"embed.{m}.{name}" for m, module in MODULES.items() for name in module.__all__]
  assert sorted(entry.name for entry in ENTRIES) == sorted(public)
  kinds = {"class": inspect.isclass, "module": inspect.ismodule, "function": inspect.isfunction}
  for entry in ENTRIES:
    value = resolve(entry.name)
    assert kinds[entry.kind](value), entry
    documented = [value]
    if entry.kind == "class":
      found, internal = members(value), INTERNAL.get(entry.name, set())
      assert internal <= set(found)
      assert sorted(entry.members) == sorted(set(found) - internal)
      documented += [found[name] for name in entry.members]
    assert all(inspect.getdoc(x) for x in documented), entry


def test_a_written_signature_is_the_true_one():
  """Written where Sphinx would show a long or an empty one; () is a class that nobody makes."""

  def parameters(f):
    found = inspect.signature(f.__init__ if inspect.isclass(f) else f).parameters.values()
    return [(p.name, p.kind, p.default) for p in found if p.name != "self"]

  for entry in ENTRIES:
    value = resolve(entry.name)
    if entry.signature and not (entry.signature == "()" and inspect.isclass(value)):
      scope = {"np": np}
      exec(f"def written{entry.signature}: pass", scope)
      assert parameters(scope["written"]) == parameters(value), entry
