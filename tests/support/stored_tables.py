"""Two small tables, for tests of how tables are stored."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import embed


def fetched(tree):
  return jax.tree.map(np.asarray, tree)


def wave(x):
  return jnp.sum(jnp.sin(x) * jnp.linspace(0.5, 1, x.shape[-1]))


@dataclasses.dataclass(frozen=True)
class TwoTables:
  """Tables "a" of `rows` rows and "b" of twice as many, and batches for them.

  A batch has an id that is dropped, so that it can be looked up in jitted functions alone.
  """

  rows: int

  def features(self, optimizer, dim=16, **settings):
    table = lambda name, size: embed.TableConfig(
      size, dim, optimizer=optimizer, combiner="mean", name=name, **settings
    )
    a, b = table("a", self.rows), table("b", 2 * self.rows)
    return {"x": embed.FeatureConfig(a), "y": embed.FeatureConfig(b), "z": embed.FeatureConfig(a)}

  def batch(self, step, size=16):
    """Bags with repeated ids and padding; one feature is ragged."""
    draw = np.random.default_rng(step)
    x = draw.integers(-1, 13, (size, 3)).astype(np.int32)
    x[0, 0] = self.rows  # the first that is no row
    splits = np.concatenate([[0], np.sort(draw.integers(0, 20, size - 1)), [20]]).astype(np.int32)
    return {
      "x": embed.Padded(x),
      "y": embed.Padded(draw.integers(-1, 2 * self.rows, (size, 4)).astype(np.int32)),
      "z": embed.Ragged(draw.integers(0, self.rows, 20).astype(np.int32), splits),
    }

  def made(self, given, mesh=None, **settings):
    """A layer with these settings of its plan for all tables."""
    plan = embed.plan(given, mesh, self.batch(0))
    for name, (key, value) in itertools.product(plan, settings.items()):
      setattr(plan[name], key, value)
    return embed.SparseEmbed(plan=plan, rngs=nnx.Rngs(0))
