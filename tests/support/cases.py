"""Tables of cases in one test: all of them run, and each one that fails is named."""

import pytest


def each(cases, check):
  """Calls `check` with the arguments of each case, `{name: arguments}`."""
  problems = {}
  for name, arguments in cases.items():
    try:
      check(*arguments)
    except (Exception, pytest.fail.Exception) as error:
      problems[name] = f"{type(error).__name__}: {error}"
  assert not problems, "\n\n".join(f"{name}: {problem}" for name, problem in problems.items())


def refused(cases, call, error=ValueError):
  """Each case `(given, text)` makes `call(given)` raise this error; `text` matches its words."""

  def check(given, text):
    with pytest.raises(error, match=text):
      call(given)

  each({f"{number}: {case[0]!r:.200}": case for number, case in enumerate(cases)}, check)
