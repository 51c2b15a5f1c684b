"""The model, its optimizer and batches as shapes alone, to compile without chips."""

import jax
from flax import nnx

from .. import hosts
from ..aot import compile as aot
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
  shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
  batches = data_lib.histories(data, "test", config)  # the last is the widest
  ranked = jax.tree.map(shape, batches[len(batches) - 1])
  recommend = train.make_recommend(
    data.num_items, max(config.ks), mesh, exclude_seen=config.exclude_seen
  )
  return aot.Parts(
    model,
    optimizer,
    train.objective(config, data, mesh),
    recommend,
    batch,
    hosts.over_examples(mesh, ranked),
    train_step.options(config),
  )
