"""Columns that share a table: within the same files, and declared alike."""

import pytest

from recipes.errors import UserError
from recipes.tables import spec


def test_columns_that_share_a_table_and_its_combiner():
  check = lambda columns: spec.check_shared(spec.parse(columns), "config.columns")
  bag = {"kind": "bag", "table": "t", "min_count": 2, "combiner": "sum"}
  check({"a": {"kind": "category", "table": "t"}, "b": bag, "c": bag})
  with pytest.raises(UserError, match="'b' and 'c' share the table 't', but differ in combiner"):
    check({"a": {"kind": "category", "table": "t"}, "b": bag, "c": bag | {"combiner": "mean"}})
