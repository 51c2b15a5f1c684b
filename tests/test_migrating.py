"""The pages on moving here: their code runs, and theirs where it is installed, to the same numbers.

Of TPUEmbedding no promise is missing, and the tests that its page names exist."""

import ast
import functools
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pages
import pytest

TESTS = pathlib.Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "moving" / "tpu_embedding.md").read_text()
ROWS = re.findall(r"^\| (\S+) \| (.*?) \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)

# The original's promises: how many there are of each subject.
NUMBERED = {
  "T": 12, "F": 5, "O": 12, "5.": 9, "C": 11, "Q": 7, "N": 7, "L": 11, "P": 5, "K": 7, "V": 7,
  "E": 12,
}  # fmt: skip
OTHERS = ["§8", "§10.1", "§11", "§12", "§15"]


def test_every_promise_is_there():
  wanted = [f"{key}{i + 1}" for key, count in NUMBERED.items() for i in range(count)]
  found = [row[0] for row in ROWS if row[0] != "id" and not row[0].startswith("-")]
  assert sorted(set(found)) == sorted([*wanted, *OTHERS])
  for key, promise, here, _ in ROWS:
    assert promise.strip(), key
    assert key in ("id", "---") or re.match(r"(same|more|otherwise|not here)\b", here), key


@functools.cache
def functions(name):
  tree = ast.parse((TESTS / name).read_text())
  return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_row_names_tests_that_exist():
  for key, _, _, tests in ROWS:
    if key == "id" or key.startswith("-"):
      continue
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
    assert named, f"{key} names no test"
    assert len(named) == tests.count("`") // 2, key
  for name, function in re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE):
    assert function in functions(name), f"{name}::{function}"


@pytest.mark.weekly
def test_the_example_runs_on_one_device():
  """As most machines have it."""
  environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
  code = "import pages; assert pages.run('moving/tpu_embedding.md')['loss'] > 0"
  subprocess.run([sys.executable, "-c", code], check=True, cwd=TESTS / "support", env=environment)


@pytest.mark.ci
def test_the_example_runs():
  scope = pages.run("moving/tpu_embedding.md")
  assert 0 < float(scope["loss"]) < 10
  model, tree = scope["model"], scope["tree"]["model"]["tables"]
  assert tree["embed/movie"]["parameters"].shape == (1000, 8)
  trained = scope["act"]["watched"]
  assert trained.shape == (16, 8)
  assert abs(trained - model.embed(scope["batch"])["watched"]).max() < 1e-6


THEIRS = {"torch": "torch", "torchrec": "torchrec", "keras_rs": "keras_rs"}


@pytest.mark.ci
@pytest.mark.filterwarnings("default")  # theirs
@pytest.mark.parametrize("page", THEIRS)
def test_both_sides_of_a_page_train_alike(page, monkeypatch):
  monkeypatch.setenv("KERAS_BACKEND", "jax")
  pytest.importorskip(THEIRS[page])
  theirs = {"__name__": "__main__"}
  for line, code in pages.blocks(f"moving/{page}.md", "py"):
    exec(compile("\n" * line + code, page, "exec"), theirs)
  blocks = [code for _, code in pages.blocks(f"moving/{page}.md")]
  ours = {"__name__": "__main__"}
  exec(blocks[0], ours)
  np.testing.assert_allclose(ours["table"], theirs["table"], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(float(ours["loss"]), float(theirs["loss"]), rtol=1e-5)
  assert abs(ours["table"] - ours["start"]).max() > 0.05


@pytest.mark.ci
@pytest.mark.filterwarnings("default")
def test_a_trained_torchrec_collection_is_imported():
  """The state of a real optimizer, by the page's lines."""
  pytest.importorskip("torchrec")
  theirs = {"__name__": "__main__"}
  for _, code in pages.blocks("moving/torchrec.md", "py"):
    exec(code, theirs)
  ours = pages.run("moving/torchrec.md")
  variables = ours["embed"].importers.from_torch(*theirs["state"])
  np.testing.assert_array_equal(variables["movie"]["parameters"], theirs["table"])
  ours["model"].load_variables(variables)
  assert (variables["movie"]["accumulators"][[3, 5, 7]] > 0).all()
