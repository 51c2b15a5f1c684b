"""Declarations: shorthand, options with their types, and errors that name the column."""

import pytest
from cases import refused

from recipes.errors import UserError
from recipes.tables import spec


def test_a_name_is_a_kind_with_its_defaults():
  assert spec.parse({"clicked": "label"}) == {"clicked": spec.Label()}
  kinds = spec.parse({"price": {"kind": "number", "log": True, "buckets": [1, 2.5]}})
  assert kinds == {"price": spec.Number(log=True, buckets=(1.0, 2.5))}


@pytest.mark.ci
def test_expanded_declarations_parse_to_the_same():
  columns = {
    "y": {"kind": "label", "positive": [4, 5]},
    "user": "user",
    "tags": {"kind": "bag", "separator": ","},
    "city": {"kind": "category", "hash": 100},
    "home.city": {"kind": "category", "hash": 50, "side": "user"},
  }
  expanded = spec.as_dicts(spec.parse(columns))
  assert spec.parse(expanded) == spec.parse(columns)
  assert list(expanded) == list(columns)
  assert expanded["y"]["positive"] == ("4", "5")


def test_values_of_a_label_are_written_as_files_are_read():
  label = {"kind": "label", "positive": (5.0, 4, "3.0", "x.0"), "drop": [True, "False", 2.5]}
  expected = spec.Label(positive=("5", "4", "3", "x.0"), drop=("true", "false", "2.5"))
  assert spec.parse({"y": label})["y"] == expected


def test_errors_name_the_column():
  number, category = {"kind": "number"}, {"kind": "category"}
  cases = [
    ({"a": "lable"}, r"\['a'\] is of the unknown kind 'lable'; did you mean 'label'"),
    ({"a": {"kind": "label", "at_least": "3"}}, r"\['a'\].at_least is '3': give a value like 0.0"),
    ({"a": number | {"buckets": [2, 1]}}, "buckets has boundaries that do not increase"),
    ({"a": number | {"logg": 1}}, r"\['a'\] has no setting 'logg'; did you mean 'log'"),
    ({"a": number | {"log": 1}}, r"\['a'\].log is 1: give a value like False"),
    ({"a": number | {"decimal": ";"}}, "decimal is ';': choose '.' or ','"),
    ({"a": number | {"decimal": ",", "thousands": ","}}, "decimal and thousands are the same mark"),
    ({"a": category | {"hash": 9, "size": 9}}, "give hash or size, not both"),
    ({"a": {"kind": "bag", "separator": ""}}, "separator is the text between two values"),
    ({"a": {"kind": "label", "positive": ["x"], "at_least": 3}}, "not both"),
    ({"a": "user", "b": "user"}, "a and b are both a user"),
  ]
  refused(cases, spec.parse, UserError)


@pytest.mark.ci
def test_columns_that_share_a_table_agree():
  category, bag = {"kind": "category", "table": "t"}, {"kind": "bag", "table": "t"}
  check = lambda columns: spec.check_tables(spec.parse(columns))
  check({"a": category, "b": bag | {"combiner": "sum"}, "c": bag | {"combiner": "sum"}})
  cases = [
    ({"a": category, "b": category | {"oov": 3}}, "'a' and 'b' share the table 't'.* oov"),
    ({"a": category, "b": bag | {"combiner": "sum"}, "c": bag}, "'b' and 'c' .* combiner"),
  ]
  refused(cases, check, UserError)
