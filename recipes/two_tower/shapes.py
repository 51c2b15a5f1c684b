"""The model, its optimizer and batches as shapes alone, to compile without chips."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import embed

from .. import aot, hosts, optimizers, retrieval, train_step
from ..errors import from_settings
from ..tables.settings import steps_of_data
from . import data as data_lib
from . import train


def parts(config, mesh: jax.sharding.Mesh) -> aot.Parts:
  """Returns what `train.run` would train under `config` on the mesh; loads the data."""
  train.check(config, mesh)
  data = data_lib.load(config)
  start, stop = data.splits["train"]
  config = steps_of_data(config, stop - start, train_step.units(config, mesh))
  config = train.with_all_features(config, data)
  batch = data_lib.batch_shapes(data, config)
  inputs = lambda: train.inputs(config, batch)
  with from_settings():
    model = nnx.eval_shape(lambda: train.build_model(config, data, mesh, inputs))
    tx = optimizers.dense_optimizer(config)
    optimizer = nnx.eval_shape(lambda m: embed.Optimizer(m, tx), model)
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
    train.objective(config, mesh),
    predict,
    batch,
    hosts.over_examples(mesh, ranked),
    train_step.options(config),
  )
