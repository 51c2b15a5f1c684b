"""The examples in the library's docstrings run and print what they say.

Those of the public API run as a reader would paste them: after the imports that the pages of
`docs/api` begin with, and with nothing else in scope.
"""

import doctest
import importlib
import pathlib
import re

import pytest

import embed
from embed import checkpoint, deltas, transforms

pytestmark = pytest.mark.ci

ROOT = pathlib.Path(__file__).parents[1]
MODULES = sorted(
  ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
  for path in (ROOT / "embed").rglob("*.py")
  if ">>>" in path.read_text()
)
PUBLIC = {name for module in (embed, checkpoint, deltas, transforms) for name in module.__all__}


@pytest.fixture(scope="module")
def scope():
  """What a reader has imported."""
  names = {}
  for page in ("index.md", "transforms.md"):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "api" / page).read_text(), re.S)
    exec(block, names)
  return names


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, scope):
  module = importlib.import_module(name)
  runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
  for example in doctest.DocTestFinder().find(module):
    first = example.name.removeprefix(name).split(".")[1:2]
    if PUBLIC.intersection(first):
      example.globs = dict(scope)
    runner.run(example)
  assert not runner.summarize(verbose=False).failed
