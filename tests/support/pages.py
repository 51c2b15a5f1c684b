"""The pages of the documentation as programs, and the files of results that they state."""

import doctest
import json
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"


def blocks(page, language="python"):
  """The code of a page: line numbers and sources. What is not ours, and may not run, is "py"."""
  text = (DOCS / page).read_text()
  for found in re.finditer(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
    yield text[: found.start(1)].count("\n"), found.group(1)


def run(page):
  """Runs a page from top to bottom, as one program; returns its names."""
  scope = {"__name__": "__main__"}
  for line, code in blocks(page):
    if code.startswith(">>> "):
      test = doctest.DocTestParser().get_doctest(code, scope, page, str(DOCS / page), line)
      assert not doctest.DocTestRunner().run(test, clear_globs=False).failed, f"{page}:{line + 1}"
      scope = test.globs
    else:
      exec(compile("\n" * line + code, DOCS / page, "exec"), scope)
  return scope


def result(name):
  return json.loads((DOCS / "results" / name).read_text())


def short(x):
  """Three digits of a time in milliseconds."""
  return f"{x:.2f}" if x < 10 else f"{x:.1f}" if x < 100 else f"{x:.0f}"
