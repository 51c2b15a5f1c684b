"""The model, its optimizer and batches as shapes alone, to compile without chips."""

import jax
from flax import nnx

import embed

from .. import aot, hosts, optimizers, train_step
from ..errors import from_settings
from ..tables.settings import steps_of_data
from . import data as data_lib
from . import model as model_lib
from . import train


def parts(config, mesh: jax.sharding.Mesh) -> aot.Parts:
  """Returns what `train.run` would train under `config` on the mesh; loads the data."""
  train.check(config, mesh)
  data = data_lib.load(config)
  units = train_step.units(config, mesh)
  config = steps_of_data(config, len(data.packed["items"]), units, smallest_batch=8)
  batch = data_lib.batch_shapes(data, config)
  inputs = lambda: {model_lib.ITEM: batch["items"]}
  with from_settings():
    model = nnx.eval_shape(lambda: train.build_model(config, data.num_items, mesh, inputs))
    tx = optimizers.dense_optimizer(config)
    optimizer = nnx.eval_shape(lambda m: embed.Optimizer(m, tx), model)
  shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
  batches = data_lib.histories(data, "test", config)  # the last is the widest
  ranked = jax.tree.map(shape, batches[len(batches) - 1])
  recommend = train.make_recommend(
    data.num_items, max(config.ks), mesh, exclude_seen=config.exclude_seen
  )
  return aot.Parts(
    model,
    optimizer,
    train.objective(config, data.num_items),
    recommend,
    batch,
    hosts.over_examples(mesh, ranked),
    train_step.options(config),
  )
