"""The settings of every run: defaults, flags, and the pages that list them and what may change."""

import re
from pathlib import Path

import pytest
from cases import refused
from ml_collections import ConfigDict

from recipes import errors
from recipes.run import settings
from recipes.run import workdir as runs

RECIPES = Path(__file__).parents[2] / "docs/recipes.md"


def test_the_page_of_recipes_lists_every_setting():
  table = RECIPES.read_text().partition("<!-- run settings -->")[2].partition("<!-- end -->")[0]
  assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(settings.RUN)


def test_strategies_by_table_are_one_setting():
  given = {"dataset": "synthetic", "table": {"sharding": {"user": "div"}}}
  for config in (given, settings.completed("dlrm", given)):
    assert settings.completed("dlrm", config).table.sharding.to_dict() == {"user": "div"}


def test_a_changed_group_is_named_by_what_has_changed(tmp_path):
  """And not by all of its settings, or all columns of a table."""
  columns = {f"c{i}": {"kind": "category"} for i in range(200)}
  stored = ConfigDict({"steps": 3, "columns": columns, "table": {"optimizer": "adam", "dim": 4}})
  with runs.held(stored, stored, tmp_path):
    (tmp_path / "checkpoints" / "2").mkdir(parents=True)
  wanted = ConfigDict(stored.to_dict() | {"table": {"optimizer": "sgd", "dim": 4}})
  with pytest.raises(ValueError, match=r"table.optimizer: 'adam' there, 'sgd' now"):
    runs.finished(wanted, tmp_path)
  wanted = ConfigDict(stored.to_dict() | {"columns": columns | {"c7": {"kind": "bag"}}})
  with pytest.raises(ValueError, match=r"columns.c7: {'kind': 'category'} there") as error:
    runs.finished(wanted, tmp_path)
  assert len(str(error.value)) < 1000


def test_values_that_make_no_sense_are_refused(monkeypatch):
  find = lambda name: None if name == "wandb" else find_spec(name)
  find_spec = settings.importlib.util.find_spec
  monkeypatch.setattr(settings.importlib.util, "find_spec", find)
  settings.check(ConfigDict(settings.RUN))
  cases = [
    ({"checkpoint_minutes": -1.0}, r"config\.checkpoint_minutes is -1\.0: choose"),
    ({"full_checkpoint_every": 0}, r"config\.full_checkpoint_every is 0: choose 1 or more"),
    (
      {"writers": ("tensorbord",)},
      r"config\.writers has 'tensorbord': choose some of tensorboard, ",
    ),
    ({"writers": ("wandb",)}, r"'wandb', and its package is not installed: pip install wandb"),
  ]
  call = lambda changes: settings.check(ConfigDict(settings.RUN | changes))
  refused(cases, call, errors.UserError)
