"""The page on moving here: both sides of a tab train alike, and its settings are optimizers."""

import re

import numpy as np
import optax
import pages
import pytest

import embed

LINES = (pages.DOCS / "moving.md").read_text().splitlines()
THEIRS = {"TorchRec and FBGEMM": "torchrec", "torch": "torch", "keras-rs": "keras_rs"}
LETTERS = {"lr": 0.1, "m": 0.9, "n": True, "a": 0.1, "d": 0.1, "e": 1e-8}  # in the tables


def run(tab, language="python"):
  """The names of a tab's first program, after what all tabs share."""
  start = LINES.index(f"::::{{tab-item}} {tab}")
  shared, *_ = pages.blocks("moving.md")
  first = next(block for block in pages.blocks("moving.md", language) if block[0] > start)
  scope = {"__name__": "__main__"}
  for line, code in (shared, first):
    exec(compile("\n" * line + code, "moving.md", "exec"), scope)
  return scope


@pytest.mark.ci
def test_ours_trains_and_the_settings_are_optimizers():
  for tab in THEIRS:
    scope = run(tab)
    table, start = scope["model"].tables["movie"], scope["start"]
    assert abs(table - start).max() > 0.05
    assert (table[4] == start[4]).all()  # in no batch
  rows = "".join(line for line in LINES if line.startswith("|"))
  settings = [code for code in re.findall(r"`(embed\.\w+\(.*?\))`", rows) if "lr" in code]
  assert len(settings) > 15
  for code in settings:
    optimizer = eval(code, {"embed": embed, "optax": optax, **LETTERS})
    assert isinstance(optimizer, embed.RowOptimizer), code


@pytest.mark.weekly
@pytest.mark.filterwarnings("default")  # theirs
@pytest.mark.parametrize("tab", THEIRS)
def test_both_sides_of_a_tab_train_alike(tab, monkeypatch):
  monkeypatch.setenv("KERAS_BACKEND", "jax")
  pytest.importorskip(THEIRS[tab])
  theirs, ours = run(tab, "py"), run(tab)
  table = ours["model"].tables["movie"]
  np.testing.assert_allclose(table, theirs["table"], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(float(ours["loss"]), float(theirs["loss"]), rtol=1e-5)
