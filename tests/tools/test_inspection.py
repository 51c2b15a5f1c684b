"""What `python -m embed inspect` says of checkpoints and profiles."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import embed
from embed import __main__ as program
from embed.tools import inspection


class Model(nnx.Module):
  """Two tables, one of which is trained: rows 1 and 3 of four move."""

  def __init__(self):
    ones = jax.nn.initializers.ones
    movie = embed.TableConfig(4, 4, ones, name="movie", optimizer=embed.adam(0.0))
    user = embed.TableConfig(3, 2, ones, name="user", optimizer=embed.sgd(), dtype=jnp.bfloat16)
    features = {"m": embed.FeatureConfig(movie), "u": embed.FeatureConfig(user)}
    self.embed = embed.SparseEmbed(features, rngs=nnx.Rngs(0))
    self.scale = nnx.Param(jnp.ones(()))


def trained():
  model = Model()
  optimizer = embed.Optimizer(model, optax.sgd(0.0))
  loss = lambda model, ids: model.embed({"m": ids})["m"].sum() * model.scale[...]
  optimizer.update(model, embed.value_and_grad(loss)(model, np.array([1, 3]))[1])
  return embed.checkpoint.to_tree(model=model, optimizer=optimizer)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A workdir as recipes write it: checkpoints of two steps, of which the last is trained."""
  folder = tmp_path_factory.mktemp("run")
  trees = {1: embed.checkpoint.to_tree(model=Model()), 12: trained()}
  with ocp.CheckpointManager(folder / "checkpoints") as manager:
    for step, tree in trees.items():
      items = {"state": ocp.args.StandardSave(tree), "progress": ocp.args.JsonSave({"step": step})}
      manager.save(step, args=ocp.args.Composite(**items))
  return folder


@pytest.mark.ci
def test_a_checkpoint(run, monkeypatch, capsys):
  """Of any folder of a run; shapes alone read nothing."""
  assert program.main(["inspect", str(run)]) == 0
  path, _, header, movie, user, _, total = capsys.readouterr().out.splitlines()
  assert path == str(run / "checkpoints" / "12" / "state")
  assert header.split()[:4] == ["table", "rows", "dim", "dtype"]
  assert movie.split() == [
    "embed/movie", "4", "4", "float32", "192", "momenta,", "velocities", "2", "50%"
  ]  # fmt: skip
  assert user.split() == ["embed/user", "3", "2", "bfloat16", "12", "1.414"]
  assert total.startswith("tables: 2, 204 with their slots; other arrays: ")
  for part in ("checkpoints", "checkpoints/12", "checkpoints/12/state"):
    assert inspection.describe(run / part) == inspection.describe(run)
  monkeypatch.setattr(inspection, "statistics", None)
  assert program.main(["inspect", "--shapes", str(run / "checkpoints" / "1")]) == 0
  out = capsys.readouterr().out
  assert "embed/movie" in out
  assert "50%" not in out


def test_untouched_rows_have_the_commonest_slots():
  """Also of a slot of one value per row; every slot has to have it."""
  rows = np.ones((4, 2))
  accumulators, counts = np.array([0.1, 0.1, 0.1, 0.5]), np.array([0, 1, 0, 2])
  assert inspection.statistics({"parameters": rows, "a": accumulators}) == ("1.414", "75%")
  assert inspection.statistics({"parameters": rows, "a": accumulators, "n": counts})[1] == "50%"
  momenta = np.array([[0, 0], [0, 0], [0, 1], [2, 2]])  # a row whole, or not
  assert inspection.statistics({"parameters": rows, "m": momenta})[1] == "50%"
