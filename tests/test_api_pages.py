"""The pages of `docs/api` are the public API: each name once, with its true signature, an example,
and every member of a class."""

import inspect
import pathlib
import re
import types
from typing import NamedTuple, Never

import numpy as np
import pytest

import embed
from embed import checkpoint, deltas, importers, transforms

API = pathlib.Path(__file__).parents[1] / "docs" / "api"
MODULES = {
  "checkpoint": checkpoint,
  "deltas": deltas,
  "importers": importers,
  "transforms": transforms,
}

# The example of another one shows it: what it comes from, or goes with.
NO_EXAMPLE = {
  "embed.Ahead": "look_ahead",
  "embed.Imported": "from_tpu_embedding",
  "embed.Residual": "SparseEmbed.lookup",
  "embed.deltas.Fingerprints": "fingerprint",
  "embed.deltas.Owners": "apply_to_rows",
  "embed.deltas.fingerprint": "changes",
  "embed.deltas.read": "write",
}

# For the library's other files, or for JAX.
INTERNAL = {
  "embed.Plan": {"uniform", "with_features", "stacks"},
  "embed.RowGrads": {"of", "tree_flatten", "tree_unflatten"},
  "embed.transforms.Crossed": {"read"},  # as `Column.read`
  "embed.transforms.Weighted": {"read"},
}


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
CLASSES = [entry for entry in ENTRIES if entry.kind == "class"]
OBJECTS = [entry for entry in ENTRIES if entry.kind != "module"]


def resolve(name):
  found = embed
  for part in name.split(".")[1:]:
    found = getattr(found, part)
  return found


def examples(*docs):
  """The lines of code in docstrings."""
  return "\n".join(re.findall(r"^ *(?:>>>|\.\.\.) (.*)", "\n".join(docs), re.MULTILINE))


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
  public = [f"embed.{name}" for name in embed.__all__]
  public += [f"embed.{m}.{name}" for m, module in MODULES.items() for name in module.__all__]
  assert sorted(entry.name for entry in ENTRIES) == sorted(public)
  for entry in ENTRIES:
    value = resolve(entry.name)
    assert {"class": inspect.isclass, "module": inspect.ismodule}.get(
      entry.kind, inspect.isfunction
    )(value), entry


def test_every_page_is_in_the_index():
  index = (API / "index.md").read_text()
  listed = re.search(r"{toctree}\n:hidden:\n\n(.*?)\n```", index, re.DOTALL).group(1).split()
  assert sorted(listed) == sorted(p.stem for p in API.glob("*.md") if p.stem != "index")
  assert re.findall(r"\((\w+)\.md\)", index) == listed


@pytest.mark.parametrize("entry", [e for e in OBJECTS if e.signature], ids=lambda e: e.name)
def test_a_written_signature_is_the_true_one(entry):
  """Written where Sphinx would show a long or an empty one; () is a class that nobody makes."""
  value = resolve(entry.name)
  scope = {"np": np}
  exec(f"def written{entry.signature}: pass", scope)
  written = dict(inspect.signature(scope["written"]).parameters)
  if not written and inspect.isclass(value):
    return
  true = dict(inspect.signature(value.__init__ if inspect.isclass(value) else value).parameters)
  true.pop("self", None)
  true = {name: p for name, p in true.items() if p.annotation is not Never}  # `embed.frozen`
  common = set(inspect.signature(embed.sgd).parameters) - {"learning_rate"}
  returns = None if inspect.isclass(value) else inspect.signature(value).return_annotation
  if true and value is not embed.sgd and returns is embed.RowOptimizer:
    assert common <= set(true)
    true = {name: p for name, p in true.items() if name not in common}
    written.pop("common", None)
  plain = lambda parameters: [(name, p.kind, p.default) for name, p in parameters.items()]
  assert plain(written) == plain(true)


@pytest.mark.parametrize("entry", OBJECTS, ids=lambda e: e.name)
def test_has_an_example(entry):
  doc = inspect.getdoc(resolve(entry.name))
  if entry.name in NO_EXAMPLE:
    assert f"`{NO_EXAMPLE[entry.name]}" in doc
    return
  assert examples(doc)


@pytest.mark.parametrize("entry", CLASSES, ids=lambda e: e.name)
def test_every_member_is_shown_and_used(entry):
  cls = resolve(entry.name)
  found = members(cls)
  internal = INTERNAL.get(entry.name, set())
  assert internal <= set(found)
  assert sorted(entry.members) == sorted(set(found) - internal)
  docs = {name: inspect.getdoc(found[name]) for name in entry.members}
  code = examples(cls.__doc__, *filter(None, docs.values()))
  for name in entry.members:
    assert docs[name], name
    assert name == "__call__" or re.search(rf"\b{name}\b", code), name


def test_code_in_docstrings_ends_at_a_word():
  """reST does not see the end of `this`s, and takes what follows for code."""
  for entry in OBJECTS:
    value = resolve(entry.name)
    documented = [value, *(members(value)[name] for name in entry.members)]
    for doc in map(inspect.getdoc, documented):
      after = doc.split("`")[2::2]
      assert not [text for text in after if text[:1].isalnum()], (entry.name, after)


# --- the table of optimizers ---------------------------------------------------------------------


def rows():
  text = (API / "optimizers.md").read_text()
  return {
    cells[0].strip("`"): cells[1:]
    for line in re.findall(r"^\| (`.*) \|$", text, re.MULTILINE)
    if (cells := line.split(" | "))
  }


def test_every_optimizer_is_in_the_table():
  returns = lambda f: inspect.isfunction(f) and inspect.signature(f).return_annotation
  public = {name for name in embed.__all__ if returns(getattr(embed, name)) is embed.RowOptimizer}
  assert set(rows()) == public


@pytest.mark.parametrize(
  "name", [name for name in rows() if not name.endswith(("optax", "optimizer"))]
)
def test_slots_and_bytes_in_the_table(name):
  dim = 64
  slots = getattr(embed, name)().slots(dim)
  shapes, size = rows()[name][:2]
  assert re.findall(r"`(\w+)`", shapes) == list(slots)
  assert ("[V, D]" in shapes, "[V]" in shapes) == (
    any(not s.per_row for s in slots.values()),
    any(s.per_row for s in slots.values()),
  )
  each = [np.dtype(s.dtype).itemsize * (1 if s.per_row else dim) for s in slots.values()]
  factor, _, unit = size.partition(" ")
  assert int(factor) * {"": 1, "D": dim}[unit] == sum(each)
