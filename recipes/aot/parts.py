"""What a recipe trains and evaluates, as shapes alone, to compile without chips."""

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import embed

from .. import mesh as mesh_lib
from ..evaluation import retrieval


@dataclasses.dataclass(frozen=True)
class Parts:
  """The parts of a step to compile, as shapes without arrays; see `nnx.eval_shape`.

  Attributes:
    model: built on the mesh it is given.
    step: `(model, optimizer, batch) -> scalars by name`, the function that training compiles.
    predict: the compiled `(model, batch) -> outputs` that evaluation calls.
    batch: a dict of `jax.ShapeDtypeStruct`, global, `[examples, ...]`.
    eval_batch: what `predict` gets, with shardings; None for a batch like the one of training.
  """

  model: nnx.Module
  optimizer: embed.Optimizer
  step: Any
  predict: Any
  batch: Any
  eval_batch: Any = None


def of_recipe(recipe: str, config, mesh: jax.sharding.Mesh) -> Parts:
  """Returns what `train.run` of a recipe would train under `config` on the mesh.

  Loads the data, but for a data set of dlrm whose columns the config tells.
  """
  train = importlib.import_module(f"...{recipe}.train", __name__)
  train.check(config, mesh)
  data_lib = train.data_lib
  data = data_lib.describe(config) if recipe == "dlrm" else data_lib.load(config)
  config = config if recipe == "dlrm" and config.steps else train.decide(config, data, mesh)
  batch = data_lib.batch_shapes(data, config)
  model, optimizer = nnx.eval_shape(lambda: train.make_state(config, data, mesh))
  predict, ranked = _EVALUATIONS[recipe](train, data, config, mesh)
  eval_batch = None if ranked is None else mesh_lib.over_examples(mesh, ranked)
  step = train.make_train_step(config, data, mesh)
  return Parts(model, optimizer, step, predict, batch, eval_batch)


def _clicks(train, data, config, mesh):
  del data, config, mesh
  return train.predict, None


def _towers(train, data, config, mesh):
  rank = train.make_rank(config, mesh, data.num_items)

  @nnx.jit(graph=False)
  def predict(model, batch: dict[str, Any]):
    return rank(model, batch["candidates"], batch["query"], batch["seen"])

  ranked = _widest(train.data_lib.EvalBatches(data, "test", config))
  rows = retrieval.catalogue_batches(data.num_items, config.eval_batch_size, mesh).size
  width = config.dim + bool(config.popularity.weight)
  return predict, ranked | {"candidates": jax.ShapeDtypeStruct((rows, width), jnp.float32)}


def _sequences(train, data, config, mesh):
  recommend = train.make_recommend(
    data.num_items, max(config.ks), mesh, exclude_seen=config.exclude_seen
  )
  return recommend, _widest(train.data_lib.EvalBatches(data, "test", config))


_EVALUATIONS = {"dlrm": _clicks, "two_tower": _towers, "sequence": _sequences}


def _widest(batches) -> dict[str, Any]:
  """Returns the shapes of the last batch, whose lists are the longest."""
  shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
  return jax.tree.map(shape, batches[len(batches) - 1])
