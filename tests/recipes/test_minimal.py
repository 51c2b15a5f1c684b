"""The recipe in one file: short, alone, close to the best score; resumed and sharded exactly."""

import ast
import pathlib

import jax
import meshes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import embed
from recipes import minimal

ROOT = pathlib.Path(__file__).parents[2]
SOURCE = ROOT / "recipes" / "minimal.py"
ROWS, STEPS, SAVE_EVERY = 16_003, 60, 20  # neither the rows nor the last batch divide by 8


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
  return minimal.write_clicks(tmp_path_factory.mktemp("minimal") / "clicks.csv", ROWS)


@pytest.fixture(autouse=True)
def save_often(monkeypatch):
  monkeypatch.setattr(minimal, "SAVE_EVERY", SAVE_EVERY)


def run(clicks, workdir, devices, steps=STEPS):
  """Runs the program on some of the devices; returns its scores."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax, "device_count", lambda: devices)
    return minimal.main([f"--csv={clicks}", f"--workdir={workdir}", f"--steps={steps}"])


def saved(workdir, step=STEPS):
  """The arrays of a checkpoint."""
  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(workdir / "checkpoints" / str(step) / "default")


@pytest.fixture(scope="module")
def whole(clicks, tmp_path_factory):
  """The scores and the workdir of a run on one device that was never stopped."""
  workdir = tmp_path_factory.mktemp("whole")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(minimal, "SAVE_EVERY", SAVE_EVERY)
    return run(clicks, workdir, devices=1), workdir


def test_it_is_one_short_file():
  assert len(SOURCE.read_text().splitlines()) <= 250
  for node in ast.walk(ast.parse(SOURCE.read_text())):
    if isinstance(node, ast.ImportFrom):
      assert not node.level
      assert node.module.split(".")[0] != "recipes"
    elif isinstance(node, ast.Import):
      assert not [alias for alias in node.names if alias.name.split(".")[0] == "recipes"]


@pytest.mark.ci
def test_it_comes_close_to_the_best_possible_scores(whole):
  constant, model, best = (whole[0][name] for name in ("constant rate", "model", "best possible"))
  assert constant["auc"] == 0.5
  assert best["auc"] - 0.06 < model["auc"] < best["auc"]
  assert best["logloss"] < model["logloss"] < constant["logloss"] - 0.1


def test_the_test_rows_have_ids_that_training_never_saw(clicks):
  rows = minimal.read_rows(clicks)
  train, test = rows[: ROWS * 4 // 5], rows[ROWS * 4 // 5 :]
  transforms = minimal.fit_transforms(train)
  known = {row["user"] for row in train}
  unknown = [row for row in test if row["user"] not in known]
  ids = minimal.make_batch(unknown, transforms)["inputs"]["user"]
  assert (ids >= len(transforms.columns["user"].tokens)).all()
  trained = minimal.make_batch(train, transforms)["inputs"]["user"]
  assert np.isin(ids, trained).mean() > 0.5


def test_empty_cells_and_new_values_have_ids(clicks, tmp_path):
  """In a file with the documented header alone."""
  header = ["user", "item", "city", "tags", "price", "clicked"]
  cells = [",i1,Paris,,,0", "nobody,,,new|tag1|tag2|tag3|tag4,1e9,1"]
  (tmp_path / "own.csv").write_text("\n".join([",".join(header), *cells]) + "\n")
  transforms = minimal.fit_transforms(minimal.read_rows(clicks))
  batch = minimal.make_batch(minimal.read_rows(tmp_path / "own.csv"), transforms)
  assert batch["label"].tolist() == [0, 1]
  ids = batch["inputs"]
  assert ids["tags"].values.shape == (2, 4)
  assert (ids["tags"].values[0] == -1).all()
  assert (ids["tags"].values[1] >= 0).all()
  for name in ("user", "price"):
    assert ids[name][0] == -1, name
  assert ids["item"][1] == ids["city"][1] == -1
  assert ids["user"][1] >= 0
  assert ids["price"][1] >= 9
  assert ids["city"][0] >= 0


class Killed(BaseException):
  """Not an `Exception`: nothing may catch it on the way."""


@pytest.mark.ci
def test_killed_in_the_middle_it_ends_as_if_it_had_not_been(clicks, whole, tmp_path, monkeypatch):
  taken = []

  def step_that_dies(step, *modules):
    compiled = jit_step(step, *modules)

    def call(*args):
      if len(taken) == STEPS // 2:  # between two checkpoints
        raise Killed
      taken.append(None)
      return compiled(*args)

    return call

  jit_step = embed.jit_step
  monkeypatch.setattr(embed, "jit_step", step_that_dies)
  with pytest.raises(Killed):
    run(clicks, tmp_path, devices=1)
  monkeypatch.setattr(embed, "jit_step", jit_step)
  assert run(clicks, tmp_path, devices=1) == whole[0]
  meshes.assert_equal(saved(tmp_path), saved(whole[1]))
