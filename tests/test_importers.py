"""Tables of other libraries: by hand, in arrays of their layout, and their own files where they
are installed. `tests/parity` has what their libraries wrote."""

import json
import struct

import cases
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import embed
from embed import importers


def layer_of(optimizer, **table):
  tables = [
    embed.TableConfig(*shape, name=name, optimizer=optimizer, **table)
    for name, shape in {"a": (5, 2), "b": (3, 2)}.items()
  ]
  return embed.SparseEmbed({t.name: embed.FeatureConfig(t) for t in tables}, rngs=nnx.Rngs(0))


def numbers(*shape, first=0):
  return first + np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def check(layer, variables):
  """The layer takes them, and has them."""
  layer.load_variables(variables)
  for table, by_key in variables.items():
    for key, x in by_key.items():
      np.testing.assert_array_equal(layer.variables[table][key], x)


@pytest.mark.programs(25, "loads a layer of two tables and reads it")
def test_torch_adam():
  weights = {"body.a.weight": numbers(5, 2), "head": numbers(1, 2), "body.b.weight": numbers(3, 2)}
  state = {
    0: {"step": np.float32(7), "exp_avg": numbers(5, 2, first=1), "exp_avg_sq": numbers(5, 2)},
    2: {"step": np.float32(7), "exp_avg": numbers(3, 2, first=2), "exp_avg_sq": numbers(3, 2)},
  }
  tables = {"a": "body.a.weight", "b": "body.b.weight"}
  optimizer = {"state": state, "param_groups": [{"params": [0, 1, 2], "lr": 0.1}]}
  read = importers.from_torch(weights, optimizer, tables=tables)
  check(layer_of(embed.adam(bias_correction=True)), read)
  assert read["b"]["momenta"][0].tolist() == [2, 3]
  assert read["a"]["steps"].tolist() == [7] * 5
  without = importers.from_torch(weights, optimizer, tables=tables, slots=("momenta", "velocities"))
  assert list(without["a"]) == ["parameters", "momenta", "velocities"]
  only_tables = importers.from_torch(weights, tables=tables)
  assert [list(only_tables[name]) for name in "ab"] == [["parameters"]] * 2


def test_torch_parameters_in_the_order_of_the_optimizer():
  weights = {"buffer": numbers(2), "a": numbers(5, 2), "b": numbers(3, 2)}
  state = {"state": {1: {"sum": numbers(3, 2, first=9)}}, "param_groups": [{"params": [0, 1]}]}
  tables = {"a": "a", "b": "b"}
  read = importers.from_torch(weights, state, tables=tables, parameters=["a", "b"])
  assert read["b"]["accumulators"][0].tolist() == [9, 10]
  assert "accumulators" not in read["a"]


def test_torchrec():
  weights = {
    "ebc.embedding_bags.a.weight": numbers(5, 2),
    "over.0.weight": numbers(4, 4),
    "ebc.embedding_bags.b.weight": numbers(3, 2),
  }
  state = {
    f"ebc.embedding_bags.{t}.weight": {f"{t}.momentum1": numbers(n, 1)}
    for t, n in (("a", 5), ("b", 3))
  }
  read = importers.from_torch(weights, {"state": state})
  np.testing.assert_array_equal(read["a"]["parameters"], numbers(5, 2))
  assert read["b"]["accumulators"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("optimizer", [embed.rowwise_adagrad(), embed.adagrad()])
def test_fbgemm(optimizer):
  """Two tables behind one another in flat arrays, with the state of a row or of an element."""
  state_sizes = [5, 3] if optimizer.name == "rowwise_adagrad" else [10, 6]
  state = {"weights_host": numbers(16), "momentum1_host": numbers(sum(state_sizes), first=1)}
  for name, first in (("weights", 10), ("momentum1", state_sizes[0])):
    state |= {f"{name}_placements": np.array([3, 3]), f"{name}_offsets": np.array([0, first])}
    state |= {f"{name}_dev": np.zeros(0), f"{name}_uvm": np.zeros(0)}
  read = importers.from_fbgemm(state, {"a": (5, 2), "b": (3, 2)})
  assert {key: x.shape for key, x in read["b"].items()} == {
    "parameters": (3, 2), "accumulators": (3,) if state_sizes[1] == 3 else (3, 2)
  }  # fmt: skip
  assert read["b"]["parameters"][0].tolist() == [10, 11]
  assert read["b"]["accumulators"].ravel()[0] == 1 + state_sizes[0]
  with pytest.raises(ValueError, match="weights has 16 elements"):
    importers.from_fbgemm(state, {"a": (5, 2), "b": (4, 2)})


def test_tables_that_are_not_there():
  with pytest.raises(ValueError, match=r"Write tables=.* 'user.weight'"):
    importers.from_torch({"user.weight": numbers(5, 2), "bias": numbers(2)})
  with pytest.raises(ValueError, match=r"no parameter 'usr': 'user'"):
    importers.from_torch({"user": numbers(5, 2)}, tables={"a": "usr"})
  with pytest.raises(ValueError, match=r"no table 'c': 'a', 'b'"):
    importers.to_parquet(layer_of(embed.sgd()), "unwritten", "c")


def test_keras(tmp_path):
  h5py = pytest.importorskip("h5py")
  path, block = tmp_path / "model.weights.h5", "layers/distributed_embedding/_default/embed_reduce"
  with h5py.File(path, "w") as file:
    for i, (name, rows) in enumerate({"a": 5, "b": 3}.items()):
      layer = file.create_group(f"{block}_{i}/vars")
      layer.attrs["name"], layer["0"] = name, numbers(rows, 2)
    file["layers/dense/vars/0"] = numbers(2, 1)
    file["optimizer/vars/0"], file["optimizer/vars/1"] = 12, 0.1
    for i, rows in enumerate((5, 5, 3, 3)):  # more than nine: "10" is behind "9"
      file[f"optimizer/vars/{9 + i}"] = numbers(rows, 2, first=i)
  names = ("momenta", "velocities")
  read = importers.from_keras(path, slots={"a": names, "b": names})
  check(layer_of(embed.adam()), read)
  assert [read[t][n][0, 0] for t in "ab" for n in names] == [0, 1, 2, 3]
  assert list(importers.from_keras(path)["a"]) == ["parameters"]
  with pytest.raises(ValueError, match=r"2 arrays of the optimizer .*Leave 'a' out"):
    importers.from_keras(path, slots={"a": ["accumulators"]})
  with pytest.raises(ValueError, match=r"no table 'c'"):
    importers.from_keras(path, slots={"c": names})


def test_safetensors_there_and_back(tmp_path):
  layer = layer_of(embed.adam(bias_correction=True), dtype=jnp.bfloat16)
  layer.load_variables({"b": {"parameters": numbers(3, 2), "steps": np.array([1, 2, 3], np.int32)}})
  importers.to_safetensors(layer, tmp_path / "x.safetensors")
  read = importers.from_safetensors(tmp_path / "x.safetensors")
  variables = layer.variables
  assert set(read) == set(variables)
  for table, by_key in variables.items():
    assert set(read[table]) == set(by_key)
    for key, x in by_key.items():
      np.testing.assert_array_equal(read[table][key], x)
      assert read[table][key].dtype == x.dtype


def test_safetensors_of_others(tmp_path):
  header = {"user.weight": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}
  for dtype, what in (("F32", None), ("F8_E4M3", "is F8_E4M3")):
    header["user.weight"]["dtype"] = dtype
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    data = np.array([1, 2], np.float32).tobytes()
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(text)) + text + data)
    if what is None:
      read = importers.from_safetensors(tmp_path / "x")
      assert read["user.weight"]["parameters"].tolist() == [[1, 2]]
    else:
      with pytest.raises(ValueError, match=what):
        importers.from_safetensors(tmp_path / "x")


def test_parquet(tmp_path):
  parquet = pytest.importorskip("pyarrow.parquet")
  layer = layer_of(embed.rowwise_adagrad(), dtype=jnp.bfloat16)
  importers.to_parquet(layer, tmp_path / "a.parquet", "a")
  read = parquet.read_table(tmp_path / "a.parquet").to_pydict()
  assert read["id"] == [0, 1, 2, 3, 4]
  np.testing.assert_array_equal(read["parameters"], np.asarray(layer.tables["a"], np.float32))
  np.testing.assert_allclose(read["accumulators"], [0.1] * 5)


# --- wrong uses -----------------------------------------------------------------------------------


def test_a_state_that_cannot_be_told_apart_raises():
  weights = {"user.weight": np.ones((3, 2)), "movie.weight": np.ones((3, 2))}
  tables = {name: f"{name}.weight" for name in ("user", "movie")}
  movie_alone = {
    "state": {0: {"exp_avg": np.ones((3, 2)), "exp_avg_sq": np.ones((3, 2)), "step": 1.0}},
    "param_groups": [{"params": [0]}],
  }
  with pytest.raises(ValueError, match=r"1 parameters, and there are 2 names.*parameters="):
    embed.importers.from_torch(weights, movie_alone, tables=tables)
  read = embed.importers.from_torch(
    weights, movie_alone, tables=tables, parameters=["movie.weight"]
  )
  assert [*read["user"]] == ["parameters"]
  assert [*read["movie"]] == ["parameters", "momenta", "velocities", "steps"]
  with pytest.raises(ValueError, match=r"has nothing of 'user\.weight'"):
    embed.importers.from_torch(
      weights, movie_alone, tables={"user": "user.weight"}, parameters=["movie.weight"]
    )


def test_a_state_without_a_slot_here_raises():
  state = {0: {"exp_avg": np.ones((3, 2)), "max_exp_avg_sq": np.ones((3, 2))}}
  adam = {"state": state, "param_groups": [{"params": [0]}]}
  read = lambda **given: embed.importers.from_torch(
    {"t": np.ones((3, 2))}, adam, tables={"t": "t"}, **given
  )
  with pytest.raises(ValueError, match="has a slot for 'max_exp_avg_sq'"):
    read()
  assert [*read(slots=["momenta"])["t"]] == ["parameters", "momenta"]
  state[0] = {"exp_avg": np.ones((4, 2))}
  with pytest.raises(ValueError, match="its table"):
    read()


def test_what_cannot_be_read_is_named(tmp_path):
  weights = {f"{x}.embedding_bags.t.weight": np.ones((2, 2)) for x in "ab"}
  with pytest.raises(ValueError, match="several tables have one name"):
    embed.importers.from_torch(weights)

  def read(content):
    (tmp_path / "x").write_bytes(content)
    embed.importers.from_safetensors(tmp_path / "x")

  others = (b"abc", b"\x89HDF\r\n\x1a\n" + b"x" * 64, b"\x02" + b"\0" * 9)
  cases.refused([(content, "is no file of safetensors") for content in others], read)
