"""The pages on moving here: their code runs where it is installed, to the same numbers as ours.

The tests that the page of TPUEmbedding names exist."""

import ast
import functools
import pathlib
import re

import numpy as np
import pages
import pytest

TESTS = pathlib.Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "moving" / "tpu_embedding.md").read_text()
ROWS = re.findall(r"^\| (\S+) \| (.*?) \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)


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


THEIRS = {"torch": "torch", "torchrec": "torchrec", "keras_rs": "keras_rs"}


@pytest.mark.weekly
@pytest.mark.filterwarnings("default")  # theirs
@pytest.mark.parametrize("page", THEIRS)
def test_both_sides_of_a_page_train_alike(page, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
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
