"""The programs of `make_programs.py`, written by the pages of docs/moving alone.

Each starts with the peer's weights and makes its steps; half-way the state is what the importers
read of the peer's.
"""

import functools
import itertools
import pathlib

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import embed

pytestmark = pytest.mark.ci
HERE = pathlib.Path(__file__).parent
BATCH = 32


@functools.cache
def stored():
  with np.load(HERE / "programs.npz") as file:
    return dict(file)


def part(prefix):
  return {k.removeprefix(prefix): x for k, x in stored().items() if k.startswith(prefix)}


def close(actual, expected):
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def state_of(where, number):
  """An optimizer's `state_dict()`."""
  state = {}
  for key, x in part(f"{where}/optimizer{number}/").items():
    state.setdefault(int(key.split("/")[0]), {})[key.split("/")[1]] = x
  return {"state": state, "param_groups": [{"params": list(state)}]}


def load_torch(linear, weights, name):
  """The kernel of nnx is torch's weight, transposed."""
  linear.kernel[...], linear.bias[...] = weights[f"{name}.weight"].T, weights[f"{name}.bias"]


class Model(nnx.Module):
  """The tables of features, whose activations go through dense layers as `score` says."""

  def __init__(self, features, sizes, score):
    rngs = nnx.Rngs(0)
    self.embed = embed.SparseEmbed(features, rngs=rngs)
    pairs = itertools.pairwise(sizes)
    self.layers = nnx.List([nnx.Linear(m, n, rngs=rngs) for m, n in pairs])
    self.score = score

  def __call__(self, batch):
    ids = {k: x for k, x in batch.items() if k != "label"}
    bags = {k: embed.Padded(x) for k, x in ids.items() if np.ndim(x) == 2}  # not lookups each
    return self.score(self, self.embed(ids | bags))[:, 0]


def torch_factors():
  tables = {name: f"{name}.weight" for name in ("user", "movie", "popular")}
  adam = embed.adam(embed.bias_corrected(0.02), epsilon=1e-8, sum_inside_sqrt=False)
  start = part("torch/start/")
  configs = [embed.TableConfig(*start[x].shape, name=k, optimizer=adam) for k, x in tables.items()]
  score = lambda self, act: self.layers[0](act["user"] * act["movie"]) + act["popular"]
  model = Model({c.name: embed.FeatureConfig(c) for c in configs}, [8, 1], score)
  model.embed.load_variables(embed.importers.from_torch(start, tables=tables))
  load_torch(model.layers[0], start, "over")
  columns = part("columns/")
  rows = {k: columns[k] for k in ("user", "movie")} | {"popular": columns["movie"]}
  loss_fn = lambda model, batch: jnp.mean((model(batch) - batch["label"]) ** 2)
  half = embed.importers.from_torch(
    part("torch/half/"),
    state_of("torch/half", 0),  # of SparseAdam, which has the tables alone
    tables=tables,
    parameters=list(tables.values()),
    slots=["momenta", "velocities"],
  )
  end = embed.importers.from_torch(part("torch/end/"), tables=tables)
  return model, optax.adam(0.01), loss_fn, rows | {"label": columns["stars"]}, half, end


def click_loss(model, batch):
  return optax.sigmoid_binary_cross_entropy(model(batch), batch["label"]).mean()


def clicks(order, optimizer):
  """Two tables, one of them of two features; their columns in the peer's order."""
  movies = embed.TableConfig(30, 8, combiner="mean", name="movies", optimizer=optimizer)
  users = embed.TableConfig(40, 8, combiner="sum", name="users", optimizer=optimizer)
  of = {"liked": movies, "watched": movies, "user": users}

  def score(self, act):
    hidden = self.layers[0](jnp.concatenate([act[name] for name in order], axis=1))
    return self.layers[1](nnx.relu(hidden))

  model = Model({k: embed.FeatureConfig(table) for k, table in of.items()}, [24, 8, 1], score)
  columns = part("columns/")
  real = lambda k: np.arange(4) < columns[f"{k}_lengths"][:, None]
  rows = {k: np.where(real(k), columns[k], -1) for k in ("liked", "watched")}
  return model, rows | {"user": columns["user"], "label": columns["clicked"]}


def torchrec_clicks():
  adagrad = embed.rowwise_adagrad(0.1, 0.0, epsilon=1e-10)
  model, rows = clicks(["watched", "liked", "user"], adagrad)
  model.embed.load_variables(embed.importers.from_torch(part("torchrec/start/")))
  for layer, name in zip(model.layers, ("over.0", "over.2"), strict=True):
    load_torch(layer, part("torchrec/start/"), name)
  half: dict[str, dict[str, np.ndarray]] = {}
  for number, table in enumerate(("movies", "users")):  # an optimizer for each parameter
    key, state = f"bags.embedding_bags.{table}.weight", state_of("torchrec/half", number)
    half |= embed.importers.from_torch(
      part("torchrec/half/"), state, tables={table: key}, parameters=[key]
    )
  end = embed.importers.from_torch(part("torchrec/end/"))
  return model, optax.sgd(0.1), click_loss, rows, half, end


def keras_clicks():
  schedule = optax.cosine_decay_schedule(0.2, 40)
  adagrad = embed.adagrad(schedule, 0.1 + 1e-7)
  model, rows = clicks(["liked", "watched", "user"], adagrad)
  tables = lambda where: {
    name: {"parameters": stored()[f"keras/{where}/distributed_embedding/{name}/embeddings"]}
    for name in ("movies", "users")
  }
  model.embed.load_variables(tables("start"))
  for layer, name in zip(model.layers, ("hidden", "over"), strict=True):
    weights = part(f"keras/start/{name}/")
    layer.kernel[...], layer.bias[...] = weights["kernel"], weights["bias"]
  slots = {name: ["accumulators"] for name in ("movies", "users")}
  half = embed.importers.from_keras(HERE / "programs.weights.h5", slots=slots)
  for variables in half.values():
    variables["accumulators"] += 1e-7
  return model, optax.adagrad(schedule), click_loss, rows, half, tables("end")


def agree(model, variables):
  for table, by_key in variables.items():
    for key, expected in by_key.items():
      close(model.embed.variables[table][key], expected)


@pytest.mark.weekly
@pytest.mark.parametrize("program", [torch_factors, torchrec_clicks, keras_clicks])
def test_a_program_trains_as_the_peers(program):
  if program is keras_clicks:
    pytest.importorskip("h5py")
  model, tx, loss_fn, rows, half, end = program()
  assert all("parameters" in x and len(x) > 1 for x in half.values())
  optimizer = embed.Optimizer(model, tx)

  def train_step(model, optimizer, batch):
    loss, grads = embed.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss

  step = embed.jit_step(train_step, model, optimizer)
  error_of = nnx.jit(lambda model, batch: jnp.abs(model(batch) - batch["label"]).mean())
  batches = [{k: x[i : i + BATCH] for k, x in rows.items()} for i in range(0, 320, BATCH)]
  losses, errors = [], []
  for epoch in range(4):
    losses += [float(step(batch)) for batch in batches]
    errors.append(np.mean([error_of(model, batch) for batch in batches]))
    if epoch == 1:
      agree(model, half)
  agree(model, end)
  peer = program.__name__.partition("_")[0]
  np.testing.assert_allclose(losses, stored()[f"{peer}/losses"], rtol=1e-5)
  if peer == "torch":
    np.testing.assert_allclose(errors, stored()["torch/errors"], rtol=1e-5)
