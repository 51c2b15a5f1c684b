"""Writes what three programs, each as a user of a peer writes it, make of made-up rows.

    KERAS_BACKEND=jax python tests/parity/make_programs.py  # with all peers

`programs.npz` has their rows, the loss of each step, and the weights and the optimizers' states
before the first step, half-way and after the last one; `programs.weights.h5` is Keras's file of
half-way. `test_programs.py` has the same programs as the pages of docs/moving say to write them.
"""

import pathlib

import keras
import keras_rs
import numpy as np
import torch
import torchrec
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

HERE = pathlib.Path(__file__).parent
USERS, MOVIES, ROWS, BATCH, EPOCHS = 40, 30, 320, 32, 4


def made_up():
  """Columns of ROWS rows; bags of 1 to 4 movies, padded with movie 0."""
  draw = np.random.default_rng(0)
  columns = {"user": draw.integers(USERS, size=ROWS), "movie": draw.integers(MOVIES, size=ROWS)}
  for name in ("watched", "liked"):
    lengths = draw.integers(1, 5, size=ROWS)
    ids = draw.integers(MOVIES, size=(ROWS, 4)) * (np.arange(4) < lengths[:, None])
    columns |= {name: ids, f"{name}_lengths": lengths}
  columns["stars"] = draw.integers(1, 6, size=ROWS).astype(np.float32)
  columns["clicked"] = (draw.random(ROWS) < 0.4).astype(np.float32)
  return columns


def batches(columns):
  for first in range(0, ROWS, BATCH):
    yield {name: torch.tensor(x[first : first + BATCH]) for name, x in columns.items()}


def numbers(where, model, *optimizers):
  arrays = {f"{where}/{key}": x.numpy().copy() for key, x in model.state_dict().items()}
  for which, optimizer in enumerate(optimizers):
    for key, state in optimizer.state_dict()["state"].items():
      path = f"{where}/optimizer{which}/{key}"
      arrays |= {f"{path}/{k}": np.array(np.asarray(x)) for k, x in state.items()}
  return arrays


class Factors(nn.Module):
  def __init__(self):
    super().__init__()
    self.over = nn.Linear(8, 1)
    self.user = nn.Embedding(USERS, 8, sparse=True)
    self.movie = nn.Embedding(MOVIES, 8, sparse=True)
    self.popular = nn.Embedding(MOVIES, 1, sparse=True)

  def forward(self, user, movie):
    return (self.over(self.user(user) * self.movie(movie)) + self.popular(movie))[:, 0]


def run_torch(columns):
  torch.manual_seed(0)
  model = Factors()
  tables = [*model.user.parameters(), *model.movie.parameters(), *model.popular.parameters()]
  sparse = torch.optim.SparseAdam(tables, lr=0.02)
  dense = torch.optim.Adam(model.over.parameters(), lr=0.01)
  losses, errors, arrays = [], [], numbers("start", model)
  for epoch in range(EPOCHS):
    for batch in batches(columns):
      sparse.zero_grad()
      dense.zero_grad()
      loss = nn.functional.mse_loss(model(batch["user"], batch["movie"]), batch["stars"])
      loss.backward()
      sparse.step()
      dense.step()
      losses.append(loss.item())
    with torch.no_grad():
      errors.append(np.mean([(model(b["user"], b["movie"]) - b["stars"]).abs().mean() for b in
                             batches(columns)]))  # fmt: skip
    if epoch == EPOCHS // 2 - 1:
      arrays |= numbers("half", model, sparse, dense)
  return arrays | numbers("end", model) | {"losses": losses, "errors": errors}


class Clicks(nn.Module):
  def __init__(self):
    super().__init__()
    movies = ["watched", "liked"]
    self.bags = EmbeddingBagCollection(tables=[
      EmbeddingBagConfig(name="movies", num_embeddings=MOVIES, embedding_dim=8,
                         feature_names=movies, pooling=PoolingType.MEAN),
      EmbeddingBagConfig(name="users", num_embeddings=USERS, embedding_dim=8,
                         feature_names=["user"], pooling=PoolingType.SUM),
    ])  # fmt: skip
    self.over = nn.Sequential(nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 1))

  def forward(self, jagged):
    return self.over(self.bags(jagged).values())[:, 0]


def jagged(batch):
  names = ["watched", "liked"]
  ids = [batch[k][torch.arange(4) < batch[f"{k}_lengths"][:, None]] for k in names]
  lengths = [*(batch[f"{k}_lengths"] for k in names), torch.ones(BATCH, dtype=torch.int64)]
  return KeyedJaggedTensor([*names, "user"], torch.cat([*ids, batch["user"]]),
                           lengths=torch.cat(lengths))  # fmt: skip


def run_torchrec(columns):
  torch.manual_seed(0)
  model = Clicks()
  apply_optimizer_in_backward(RowWiseAdagrad, model.bags.parameters(), {"lr": 0.1})
  in_backward = [p._in_backward_optimizers[0] for p in model.bags.parameters()]
  dense = torch.optim.SGD(model.over.parameters(), lr=0.1)
  losses, arrays = [], numbers("start", model)
  for epoch in range(EPOCHS):
    for batch in batches(columns):
      dense.zero_grad()
      logits = model(jagged(batch))
      loss = nn.functional.binary_cross_entropy_with_logits(logits, batch["clicked"])
      loss.backward()  # steps the tables
      dense.step()
      losses.append(loss.item())
    if epoch == EPOCHS // 2 - 1:
      arrays |= numbers("half", model, *in_backward)
  return arrays | numbers("end", model) | {"losses": losses}


class EachLoss(keras.callbacks.Callback):
  def __init__(self):
    super().__init__()
    self.losses = []

  def on_train_batch_begin(self, batch, logs=None):
    self.model.reset_metrics()

  def on_train_batch_end(self, batch, logs=None):
    self.losses.append(logs["loss"])


def run_keras(columns):
  keras.utils.set_random_seed(0)
  rate = keras.optimizers.schedules.CosineDecay(0.2, EPOCHS * ROWS // BATCH)
  adagrad = keras.optimizers.Adagrad(rate)
  table, feature = keras_rs.layers.TableConfig, keras_rs.layers.FeatureConfig
  movies = table("movies", MOVIES, 8, optimizer=adagrad, combiner="mean")
  users = table("users", USERS, 8, optimizer=adagrad, combiner="sum")
  features = {name: feature(name, movies, (BATCH, 4), (BATCH, 8)) for name in ("liked", "watched")}
  features["user"] = feature("user", users, (BATCH, 1), (BATCH, 8))
  ids = {k: keras.Input(f.input_shape[1:], BATCH, "int32", name=k) for k, f in features.items()}
  real = {k: keras.Input(f.input_shape[1:], BATCH, name=f"{k}_real") for k, f in features.items()}
  act = keras_rs.layers.DistributedEmbedding(features)(ids, real)
  x = keras.layers.Concatenate()([act["liked"], act["watched"], act["user"]])
  x = keras.layers.Dense(8, activation="relu", name="hidden")(x)
  model = keras.Model(ids | {f"{k}_real": x for k, x in real.items()},
                      keras.layers.Dense(1, name="over")(x))  # fmt: skip
  model.compile(adagrad, keras.losses.BinaryCrossentropy(from_logits=True))
  x = {k: columns[k].reshape(ROWS, -1) for k in features} | {"user_real": np.ones((ROWS, 1))}
  for k in ("liked", "watched"):
    x[f"{k}_real"] = np.arange(4) < columns[f"{k}_lengths"][:, None]
  weights = lambda where: {f"{where}/{v.path}": np.array(v) for v in model.weights}
  arrays, each = weights("start"), EachLoss()
  fit = lambda: model.fit(x, columns["clicked"][:, None], BATCH, EPOCHS // 2, shuffle=False,
                          callbacks=[each], verbose=0)  # fmt: skip
  fit()
  model.save_weights(HERE / "programs.weights.h5")
  arrays |= weights("half")
  fit()
  return arrays | weights("end") | {"losses": each.losses}


def main():
  columns = made_up()
  arrays = {f"columns/{name}": x for name, x in columns.items()}
  for run in (run_torch, run_torchrec, run_keras):
    peer = run.__name__.removeprefix("run_")
    arrays |= {f"{peer}/{key}": np.asarray(x) for key, x in run(columns).items()}
    print(peer, arrays[f"{peer}/losses"][[0, -1]])
  versions = {"torch": torch.__version__, "torchrec": torchrec.__version__,
              "keras": keras.__version__, "keras_rs": keras_rs.__version__}  # fmt: skip
  np.savez_compressed(HERE / "programs.npz", **arrays, **versions)
  print({key: x.shape for key, x in arrays.items()}, versions)


if __name__ == "__main__":
  main()
