"""Tables of cases in one test: all of them run, and each one that fails is named."""

import pytest


def each(cases, check):
  """Calls `check(*case)` for the cases of a list, or of a dict of their names."""
  named = cases.items() if isinstance(cases, dict) else [(repr(case), case) for case in cases]
  problems = []
  for name, case in named:
    try:
      check(*case)
    except (Exception, pytest.fail.Exception) as error:
      problems.append(f"{name:.300}: {type(error).__name__}: {error}")
  assert not problems, "\n\n".join(problems)


def refused(cases, call, error=ValueError):
  """Each case `(given, text)` makes `call(given)` raise this error; `text` matches its words."""

  def check(given, text):
    with pytest.raises(error, match=text):
      call(given)

  each(cases, check)
