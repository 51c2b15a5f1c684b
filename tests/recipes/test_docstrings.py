"""The examples in the docstrings of the recipes run and print what they say."""

import doctest
import importlib
from pathlib import Path

import pytest
from cases import each

ROOT = Path(__file__).parents[2]
MODULES = sorted(
  ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
  for path in (ROOT / "recipes").rglob("*.py")
  if ">>>" in path.read_text() and path.parts[-2:] != ("two_tower", "data.py")  # rounds by machine
)


@pytest.mark.ci
def test_examples():
  def check(name):
    assert not doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed

  assert "recipes.config" in MODULES
  each({name: (name,) for name in MODULES}, check)
