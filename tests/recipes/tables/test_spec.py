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
    "both": {"kind": "cross", "columns": ["user", "city"], "buckets": 10},
    "city": {"kind": "category", "hash": 100},
    "home.city": {"kind": "category", "hash": 50, "side": "user"},
  }
  expanded = spec.as_dicts(spec.parse(columns))
  assert spec.parse(expanded) == spec.parse(columns)
  assert list(expanded) == list(columns)
  assert expanded["y"]["positive"] == ("4", "5")


def test_values_of_a_label_are_written_as_files_are_read():
  label = {"kind": "label", "positive": (5.0, 4, "3.0", "x.0"), "drop": [True, "False", 2.5]}
  assert spec.parse({"y": label})["y"] == spec.Label(
    positive=("5", "4", "3", "x.0"), drop=("true", "false", "2.5")
  )


@pytest.mark.ci
def test_crosses_have_columns_of_their_side():
  city = {"kind": "category", "side": "user"}
  cross = {"kind": "cross", "columns": ["u", "city"], "side": "user"}
  spec.parse({"u": "user", "city": city, "x": cross})
  spec.parse({"u": "user", "city": "category", "x": cross | {"side": ""}})
  spec.parse({"u": "user", "city": "category", "x": cross}, "config.user_table.columns")
  with pytest.raises(UserError, match=r"\['x'\] crosses 'city', .* side='', and has side='user'"):
    spec.parse({"u": "user", "city": "category", "x": cross})
  with pytest.raises(UserError, match=r"\['x'\] crosses 'u', .* side='user', and has side='item'"):
    spec.parse({"u": "user", "city": city, "x": cross | {"side": "item"}})
  with pytest.raises(UserError, match="an item with a separator cannot be crossed"):
    spec.parse({"u": {"kind": "item", "separator": "|"}, "city": city, "x": cross | {"side": ""}})


def test_errors_name_the_column():
  cases = [
    ({"a": "lable"}, r"\['a'\] is of the unknown kind 'lable'; did you mean 'label'"),
    ({"a": None}, r"\['a'\] is None: give a kind, or a dict"),
    ({"a": ["label"]}, r"\['a'\] is \['label'\]: give a kind, or a dict"),
    ({"a": {"kind": ["label"]}}, r"\['a'\] is of the unknown kind \['label'\]"),
    ({"a": {"kind": "label", 3: 4}}, r"\['a'\]: a label has no option 3"),
    ({3: "label"}, "declares 3: give the name of a column"),
    (["a"], r"config.columns is \['a'\]: give a dict"),
    ({"a": {"kind": "label", "positive": [None]}}, r"\['a'\]: positive is \[None\]: give texts"),
    ({"a": {"kind": "label", "positive": [["x"]]}}, r"\['a'\]: positive is .*: give texts"),
    ({"a": {"kind": "label", "at_least": "3"}}, r"\['a'\]: at_least is '3': give a number"),
    (
      {"a": {"kind": "number", "buckets": ["a"]}},
      r"\['a'\]: buckets is \['a'\]: .* give boundaries",
    ),
    ({"a": {"kind": "number", "buckets": [1, True]}}, "give boundaries as numbers"),
    ({"a": {"kind": "number", "buckets": [1, float("nan")]}}, "give boundaries as numbers"),
    ({"my_buckets": {"kind": "number", "dim": [1, 2]}}, r"\['my_buckets'\]: dim is .*0 or more"),
    ({"my_buckets": {"kind": "cross", "buckets": [1, 2]}}, "buckets is .*: choose 2 or more"),
    ({"a": {"log": True}}, r"\['a'\] is of the unknown kind None"),
    ({"a": {"kind": "number", "logg": 1}}, r"\['a'\]: a number has no option 'logg'; did you mean"),
    ({"a": {"kind": "number", "log": 1}}, r"\['a'\]: log is 1: write True or False"),
    ({"a": {"kind": "category", "hash": "x"}}, "hash is 'x': choose 0 or more"),
    ({"a": {"kind": "category", "min_count": 0}}, "min_count is 0: choose 1 or more"),
    ({"a": {"kind": "category", "hash": 9, "size": 9}}, "give hash or size, not both"),
    ({"a": {"kind": "category", "pattern": "(a"}}, "write a regular expression with one group"),
    (
      {"a": {"kind": "category", "pattern": "a"}},
      "pattern is 'a': write a regular expression with one",
    ),
    ({"a": {"kind": "category", "side": "left"}}, "side is 'left'"),
    ({"a": {"kind": "number", "missing": "zero"}}, "missing is 'zero'"),
    ({"a": {"kind": "number", "buckets": [2, 1]}}, "numbers that increase"),
    ({"a": {"kind": "bag", "separator": ""}}, "separator is '': give the text"),
    ({"a": {"kind": "bag", "combiner": "max"}}, "choose 'mean' or 'sum' or 'sqrtn'"),
    ({"a": {"kind": "cross", "columns": ["b"]}}, "name two or more"),
    ({"a": {"kind": "cross", "columns": ["b", "c"]}}, r"crosses 'b', which must be declared"),
    ({"a": {"kind": "label", "positive": ["x"], "at_least": 3}}, "not both"),
    ({"a": "user", "b": "user"}, "a and b are both a user"),
    (
      {"a": {"kind": "category", "table": "t"}, "b": {"kind": "category", "table": "t", "oov": 3}},
      "'a' and 'b' share the table 't', but differ in oov: 1 and 3",
    ),
  ]
  refused(
    cases, lambda columns: spec.check_shared(spec.parse(columns), "config.columns"), UserError
  )


@pytest.mark.ci
def test_columns_that_share_a_table_and_its_combiner():
  check = lambda columns: spec.check_shared(spec.parse(columns), "config.columns")
  bag = {"kind": "bag", "table": "t", "min_count": 2, "combiner": "sum"}
  check({"a": {"kind": "category", "table": "t"}, "b": bag, "c": bag})
  with pytest.raises(UserError, match="'b' and 'c' share the table 't', but differ in combiner"):
    check({"a": {"kind": "category", "table": "t"}, "b": bag, "c": bag | {"combiner": "mean"}})
