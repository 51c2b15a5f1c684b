"""Which cases of a parametrized test run in which suite: quick, `full` or `slow`."""

import pytest


def full_unless(cases, is_quick):
  """Parameters of one argument, all but the quick ones `full`."""
  return [case if is_quick(case) else pytest.param(case, marks=pytest.mark.full) for case in cases]


def slow_unless(cases, is_full, is_quick=lambda *case: True):
  """Parameters of one argument or tuples of several: `slow`, `full`, or quick if they are both."""
  cases = [case if isinstance(case, tuple) else (case,) for case in cases]

  def marks(case):
    if not is_full(*case):
      return pytest.mark.slow
    return () if is_quick(*case) else pytest.mark.full

  return [pytest.param(*case, marks=marks(case)) for case in cases]
