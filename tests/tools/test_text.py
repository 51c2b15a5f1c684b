"""Columns of text, and sizes in bytes."""

import pytest

from embed import planning
from embed.engine import cost


def test_columns_are_aligned():
  lines = [("table", "rows", "slots"), ("movie", "60000", "a, b"), ("u", "7", "")]
  assert planning.aligned(lines, left=(0, 2)).split("\n") == [
    "table   rows  slots",
    "movie  60000  a, b",
    "u          7",
  ]


@pytest.mark.parametrize(
  ("num_bytes", "expected"),
  [(0, "0"), (1023, "1023"), (1024, "1.0k"), (3 << 19, "1.5M"), (5 << 30, "5.0G")],
)
def test_sizes_have_the_largest_unit_that_fits(num_bytes, expected):
  assert cost.readable(num_bytes) == expected
