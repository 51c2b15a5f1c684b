"""The settings that every run has: their defaults, and the page that lists them."""

import ast
import doctest
import importlib
import pathlib
import re

import ml_collections
import pytest

from recipes import catalogue, settings

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "recipes.md"


def documented():
  """The settings of the page and their defaults."""
  table = PAGE.read_text().partition("<!-- run settings -->")[2].partition("<!-- end -->")[0]
  rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \| \S.*\|$", table, re.MULTILINE)
  return {name: ast.literal_eval(default) for name, default in rows}


def test_docstrings():
  assert not doctest.testmod(settings).failed


def test_the_page_lists_every_setting_with_its_default():
  listed = documented()
  assert listed == settings.RUN
  assert list(listed) == list(settings.RUN), "the page has another order"
  assert {name: type(x) for name, x in listed.items()} == {
    name: type(x) for name, x in settings.RUN.items()
  }


@pytest.mark.parametrize("recipe", catalogue.recipes())
def test_no_config_file_has_to_name_one(recipe):
  for path in catalogue.configs(recipe):
    module = ".".join(path.with_suffix("").parts)
    config = importlib.import_module(module).get_config()
    settings.add(config)
    assert settings.RUN.keys() <= set(config), path


def test_what_a_config_says_comes_first():
  config = ml_collections.ConfigDict({"accumulate": 4})
  assert settings.value(config, "accumulate") == 4
  settings.add(config)
  assert (config.accumulate, config.clip_norm) == (4, 0.0)
