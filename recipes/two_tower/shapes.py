"""The model, its optimizer and batches as shapes alone, to compile without chips."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .. import hosts
from ..aot import compile as aot
from ..evaluation import retrieval
from ..training import train_step
from . import data as data_lib
from . import train


def parts(config, mesh: jax.sharding.Mesh) -> aot.Parts:
  """Returns what `train.run` would train under `config` on the mesh; loads the data."""
  train.check(config, mesh)
  data = data_lib.load(config)
  config = train.decide(config, data, mesh)
  batch = data_lib.batch_shapes(data, config)
  model, optimizer = nnx.eval_shape(lambda: train.make_state(config, data, mesh))
  rank = train.make_rank(config, mesh, data.num_items)

  @nnx.jit(graph=False)
  def predict(model, batch: dict[str, Any]):
    return rank(model, batch["candidates"], batch["query"], batch["seen"])

  shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
  batches = data_lib.EvalBatches(data, "test", config)
  ranked = jax.tree.map(shape, batches[len(batches) - 1])
  rows = retrieval.catalogue_batches(data.num_items, config.eval_batch_size, mesh).size
  ranked["candidates"] = jax.ShapeDtypeStruct((rows, config.dim), jnp.float32)
  return aot.Parts(
    model,
    optimizer,
    train.objective(config, data, mesh),
    predict,
    batch,
    hosts.over_examples(mesh, ranked),
    train_step.options(config),
  )
