"""Which cases of a parametrized test run in which tier: quick, `ci` or `weekly`."""

import pytest


def full_unless(cases, is_quick):
  """Parameters of one argument, all but the quick ones `ci`."""
  return [case if is_quick(case) else pytest.param(case, marks=pytest.mark.ci) for case in cases]


def slow_unless(cases, is_full, is_quick=lambda *case: True):
  """Parameters of one argument or tuples of several: `weekly`, `ci`, or quick if they are both."""
  cases = [case if isinstance(case, tuple) else (case,) for case in cases]

  def marks(case):
    if not is_full(*case):
      return pytest.mark.weekly
    return () if is_quick(*case) else pytest.mark.ci

  return [pytest.param(*case, marks=marks(case)) for case in cases]
