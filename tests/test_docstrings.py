"""The examples in the library's docstrings run and print what they say."""

import doctest
import importlib
import pathlib

import pytest

MODULES = sorted(
  path.stem for path in (pathlib.Path(__file__).parents[1] / "embed").glob("[!_]*.py")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
  result = doctest.testmod(importlib.import_module(f"embed.{name}"), optionflags=doctest.ELLIPSIS)
  assert not result.failed
