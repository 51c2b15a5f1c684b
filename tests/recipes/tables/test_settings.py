"""Settings of a table: completed by defaults, checked, and filled in by the number of rows."""

import pytest
from cases import each, refused
from ml_collections import ConfigDict
from small_tables import completed

from recipes import config as config_lib
from recipes.errors import UserError
from recipes.tables import settings


def test_everything_left_out_is_the_default(tmp_path):
  given = ConfigDict({"columns": {"y": "label"}, "dlrm": {"top": [8]}, "learning_rate": 1})
  config = completed("dlrm", tmp_path, **given.to_dict())
  assert config.learning_rate == 1.0
  assert config.dlrm.top == (8,)
  assert config.dlrm.bottom == (128,)
  assert config.columns["y"].to_dict() == {
    "kind": "label", "column": "", "positive": (), "at_least": None, "drop": (), "decimal": ".",
  }  # fmt: skip


def test_names_with_dots_and_other_signs(tmp_path):
  columns = {"hours-per-week": "number", "items": "category", "education.num": "number"}
  config = completed("dlrm", tmp_path, columns=columns)
  assert list(config.columns) == list(columns)
  assert list(config.to_dict()["columns"]) == list(columns)


@pytest.mark.ci
def test_paths_and_numbers_become_text(tmp_path):
  path = tmp_path / "a.csv"
  for files, texts in [
    (path, str(path)),
    ([path, "b.csv"], [str(path), "b.csv"]),
    ({"train": path, "test": [path]}, {"train": str(path), "test": [str(path)]}),
  ]:
    config = completed("dlrm", tmp_path, files=files)
    assert config.to_dict()["files"] == texts


def test_mistakes_name_the_setting(tmp_path):
  cases = [
    ({"column": {}}, "config has no setting 'column'; did you mean 'columns'"),
    ({"table": {"optimiser": "sgd"}}, "config.table has no setting 'optimiser'; did you mean"),
    ({"table": "adam"}, "config.table is 'adam': give a value like {"),
    ({"steps": "many"}, "config.steps is 'many': give a value like 0"),
    ({"split": {"on": True}}, "config.split.on is True: give a value like ''"),
    ({"columns": {"a": "lable"}}, r"config.columns\['a'\]"),
  ]
  refused(cases, lambda given: completed("dlrm", tmp_path, **given), UserError)


@pytest.mark.ci
def test_settings_are_checked_before_anything_is_read(tmp_path):
  cases = [
    ({}, "config.files is empty"),
    ({"files": {"tran": "a"}}, "config.files has no split 'tran'; did you mean 'train'"),
    ({"on_bad_row": "drop"}, "config.on_bad_row is 'drop'"),
    ({"split": {"by": "files"}}, "config.split.by is 'files'"),
    ({"split": {"valid": 0.6, "test": 0.5}}, r"config.split holds out \(0.6, 0.5\)"),
    ({"files": "nowhere.csv"}, "there is no file nowhere.csv"),
  ]

  def check(given, message):
    config = completed("dlrm", tmp_path, columns={"y": "label"}, **given)
    with pytest.raises(UserError, match=message):
      settings.settings(config)

  each(cases, check)


def test_steps_follow_from_the_rows(tmp_path):
  given = {"batch_size": 10, "steps": 7, "warmup_steps": 3, "log_every": 2}
  cases = [(100, 64, 30), (1_000_000, 4096, 3675), (50_000, 256, 2940)]  # of 15 epochs

  def check(rows, batch, steps):
    config = completed("dlrm", tmp_path)
    chosen = config_lib.with_schedule(config, rows, None)
    assert (chosen.batch_size, chosen.steps, chosen.eval_every) == (batch, steps, steps // 15)
    assert config.steps == 0
    chosen = config_lib.with_schedule(completed("dlrm", tmp_path, **given), rows, None)
    assert {name: chosen[name] for name in given} == given

  each(cases, check)
