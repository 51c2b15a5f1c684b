"""The page about tables of one's own names every kind, option and protocol of splits."""

import dataclasses
import pathlib
import re

import pytest

from recipes.tables import settings, spec

PAGE = pathlib.Path(__file__).parents[3] / "docs/how_to/own_table.md"


@pytest.mark.ci
def test_every_kind_and_option_is_on_the_page():
  named = set(re.findall(r"`(\w+)(?:=[^`]*)?`", PAGE.read_text()))
  options = {field.name for kind in spec.KINDS.values() for field in dataclasses.fields(kind)}
  assert not {*spec.KINDS, *options, *filter(None, settings.SPLIT_BY)} - named
