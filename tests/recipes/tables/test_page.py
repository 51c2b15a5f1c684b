"""The page about tables of one's own names every kind and every option, with its default."""

import ast
import dataclasses
import pathlib
import re

from recipes.tables import settings, spec

PAGE = (pathlib.Path(__file__).parents[3] / "docs/how_to/own_table.md").read_text()
COMMON = {"column", "dim", "optimizer", "side"}  # below the table, for all kinds that have them


def test_every_kind_and_option_is_on_the_page():
  rows = {}
  for line in PAGE.splitlines():
    if line.startswith("| `"):
      names, *cells = line.replace(r"\|", "¦").strip("| ").split(" | ")
      for name in re.findall(r"`(\w+)`", names):
        rows[name] = rows.get(name, "") + " ".join(cells)
  inherited = {"bag": "category", "sequence": "bag", "codes": "bag"}
  inherited |= {"user": "category", "item": "category"}
  for name, cls in spec.KINDS.items():
    assert name in rows, name
    known = (
      {field.name for field in dataclasses.fields(spec.KINDS[inherited[name]])}
      if name in inherited
      else set()
    )
    for field in dataclasses.fields(cls):
      if field.name not in COMMON | known and (name, field.name) != ("user", "separator"):
        assert f"`{field.name}=" in rows[name], (name, field.name)
  for option in COMMON - {"side", "column"}:
    assert f"`{option}=" in PAGE
  assert '`side="user"`' in PAGE
  assert "`column`" in PAGE


def test_defaults_on_the_page_are_the_defaults():
  table = "\n".join(line for line in PAGE.splitlines() if line.startswith("| `"))
  stated = re.findall(r"`(\w+)=([^`]+)`", table)
  fields = [field for cls in spec.KINDS.values() for field in dataclasses.fields(cls)]
  checked = 0
  for name, value in stated:
    if defaults := [field.default for field in fields if field.name == name and name != "side"]:
      assert ast.literal_eval(value.replace(r"\|", "|")) in defaults, name
      checked += 1
  assert checked > 12
  assert settings.DEFAULTS["split"]["valid"] == settings.DEFAULTS["split"]["test"] == 0.1
  assert settings.DEFAULTS["exclude_seen"] is True


def test_every_protocol_is_on_the_page():
  for by in filter(None, settings.SPLIT_BY):
    assert f"| `{by}` |" in PAGE
