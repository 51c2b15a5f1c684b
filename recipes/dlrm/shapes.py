"""The model, its optimizer and a batch as shapes alone, to compile without chips or data."""

import jax
from flax import nnx

from .. import hosts
from ..aot import compile as aot
from ..training import train_step
from . import data as data_lib
from . import train


def parts(config, mesh: jax.sharding.Mesh) -> aot.Parts:
  """Returns what `train.run` would train under `config` on the mesh."""
  hosts.check_batch_sizes(mesh, batch_size=config.batch_size)
  train_step.check(config, mesh)
  data = data_lib.describe(config)
  batch = data_lib.batch_shapes(data, config.batch_size)
  model, optimizer = nnx.eval_shape(lambda: train.make_state(config, data, mesh))
  options = train_step.options(config)
  return aot.Parts(
    model, optimizer, train.objective(config, data, mesh), train.predict, batch, options=options
  )
