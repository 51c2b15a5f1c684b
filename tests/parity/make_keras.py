"""Writes what keras-rs makes of the problem in tests/support/parity_problem.py.

    KERAS_BACKEND=jax python tests/parity/make_keras.py  # with keras and keras-rs installed

Off SparseCores `DistributedEmbedding` has dense gradients and the optimizer of the whole model, so
that Adam moves all rows. Bags are padded with id 0 at weight 0.
"""

import pathlib
import sys

import keras
import keras_rs
import numpy as np

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "support"))
import parity_problem as problem  # noqa: E402

OPTIMIZERS = {
  "sgd": lambda: keras.optimizers.SGD(0.1),
  "adagrad": lambda: keras.optimizers.Adagrad(0.1),
  "adam": lambda: keras.optimizers.Adam(0.01),
  "ftrl": lambda: keras.optimizers.Ftrl(0.1),
  "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
  "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
  "lion": lambda: keras.optimizers.Lion(0.01),
}


def run(name, kind):
  shape = (problem.BATCH, problem.VALENCY)
  table = keras_rs.layers.TableConfig(
    "movie", problem.V, problem.D, optimizer=OPTIMIZERS[name](), combiner=problem.combiner(kind)
  )
  feature = keras_rs.layers.FeatureConfig("watched", table, shape, (problem.BATCH, problem.D))
  ids = keras.Input(shape[1:], batch_size=shape[0], dtype="int32")
  weights = keras.Input(shape[1:], batch_size=shape[0])
  act = keras_rs.layers.DistributedEmbedding({"watched": feature})(
    {"watched": ids}, {"watched": weights}
  )["watched"]
  model = keras.Model([ids, weights], act)
  model.compile(OPTIMIZERS[name](), loss=lambda c, act: keras.ops.sum(c * act))
  model.set_weights([problem.table()])
  for step in problem.steps(kind):
    real = step.ids >= 0
    weights = real if step.weights is None else real * step.weights
    model.train_on_batch([np.maximum(step.ids, 0), weights.astype(np.float32)], step.cotangents)
  (result,) = model.get_weights()
  return np.asarray(result)


def main():
  arrays = {f"{name}/{kind}": run(name, kind) for name in OPTIMIZERS for kind in problem.KINDS}
  versions = {"keras": keras.__version__, "keras_rs": keras_rs.__version__}
  np.savez_compressed(HERE / "keras.npz", **arrays, **versions)
  print(len(arrays), versions)


if __name__ == "__main__":
  main()
