"""Checkpoints and deltas that earlier versions have written, restored by this one.

    python tests/test_versions.py  # writes those of the current version, once, when it is released

A folder of `data/versions` holds a checkpoint of `nodes` after one step, the delta of a second
step, and the arrays after it.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import embed

VERSIONS = pathlib.Path(__file__).parent / "data" / "versions"


def weighted(valency, vectors, weights):
  """A sum with a learned weight for each position, of one bag: `[3, D]` and `[3]` to `[D]`."""
  del valency
  return weights @ vectors


class Model(nnx.Module):
  def __init__(self, seed, **where):
    combiner = embed.CustomCombiner(weighted, 3, 3, jax.nn.initializers.ones, 0.1)
    tables = {
      "adam": embed.TableConfig(11, 4, name="adam", optimizer=embed.adam(0.1)),
      "half": embed.TableConfig(
        7, 4, name="half", optimizer=embed.rowwise_adagrad(0.1), dtype=jnp.bfloat16
      ),
      "optax": embed.TableConfig(
        5, 3, name="optax", optimizer=embed.from_optax(optax.rmsprop(0.1)), combiner=combiner
      ),
    }
    features = {name: embed.FeatureConfig(table) for name, table in tables.items()}
    self.embed = embed.SparseEmbed(features, rngs=nnx.Rngs(seed), **where)
    self.head = nnx.Linear(4, 1, rngs=nnx.Rngs(seed))

  def __call__(self, batch):
    x = self.embed(batch)
    return jnp.mean(self.head(x["adam"] + x["half"]) ** 2) + jnp.mean((x["optax"] - 1) ** 2)


def nodes(seed, **where):
  model = Model(seed, **where)
  return {"model": model, "optimizer": embed.Optimizer(model, optax.adam(0.01))}


def train(nodes, step):
  ids = np.arange(step, step + 4)
  batch = {
    "adam": ids,
    "half": ids % 7,
    "optax": embed.to_padded([[i % 5, (i + 1) % 5] for i in ids.tolist()]),
  }
  model, optimizer = nodes["model"], nodes["optimizer"]
  _, grads = embed.value_and_grad(lambda model: model(batch))(model)
  optimizer.update(model, grads)


def arrays(nodes):
  """The arrays of a checkpoint by path, bfloat16 as its bits."""
  leaves = jax.tree_util.tree_leaves_with_path(embed.checkpoint.to_tree(**nodes))
  numpy = lambda x: np.array(x).view(np.uint16) if x.dtype == jnp.bfloat16 else np.array(x)
  return {jax.tree_util.keystr(path): numpy(x) for path, x in leaves}


def write(folder):
  import orbax.checkpoint as ocp

  trained = nodes(0)
  train(trained, 1)
  since = embed.deltas.fingerprint(1, **trained)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder.resolve() / "checkpoint", embed.checkpoint.to_tree(**trained))
  train(trained, 2)
  delta, _ = embed.deltas.changes(since, 2, **trained)
  embed.deltas.write(folder / "delta", delta)
  np.savez_compressed(folder / "after.npz", **arrays(trained))
  versions = {module.__name__: module.__version__ for module in (embed, jax)}
  (folder / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


@pytest.mark.programs(35, "restores a whole model on eight devices")
@pytest.mark.parametrize("version", sorted(path.name for path in VERSIONS.iterdir()))
def test_a_checkpoint_and_a_delta_restore(version):
  where = {"mesh": jax.make_mesh((8,), ("data",))}
  restored = nodes(1, **where)  # another seed: nothing of it may remain
  embed.checkpoint.restore(VERSIONS / version / "checkpoint", **restored)
  assert embed.deltas.apply(embed.deltas.read(VERSIONS / version / "delta"), 1, **restored) == 2
  with np.load(VERSIONS / version / "after.npz") as expected:
    actual = arrays(restored)
    assert set(actual) == set(expected.files)
    for path in expected.files:
      np.testing.assert_array_equal(actual[path], expected[path], err_msg=path)


if __name__ == "__main__":
  write(VERSIONS / embed.__version__)
