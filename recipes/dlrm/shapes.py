"""The model, its optimizer and a batch as shapes alone, to compile without chips or data."""

import jax
from flax import nnx

import embed

from .. import aot, hosts, train_step
from ..errors import from_settings
from . import data as data_lib
from . import train


def parts(config, mesh: jax.sharding.Mesh) -> aot.Parts:
  """Returns what `train.run` would train under `config` on the mesh."""
  hosts.check_batch_sizes(mesh, batch_size=config.batch_size)
  train_step.check(config, mesh)
  data = data_lib.describe(config)
  batch = data_lib.batch_shapes(data, config.batch_size)
  with from_settings():
    model = nnx.eval_shape(lambda: train.build_model(config, data, mesh, lambda: batch["features"]))
    optimizer = nnx.eval_shape(lambda m: embed.Optimizer(m, train.dense_optimizer(config)), model)
  options = train_step.options(config)
  return aot.Parts(model, optimizer, train.OBJECTIVE, train.predict, batch, options=options)
