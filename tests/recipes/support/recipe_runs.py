"""Configs of recipes on small data, their keys, and what a run leaves in its folder."""

import contextlib
import importlib
import json

import ml_collections
import numpy as np
import pytest
from small_data import (
  draw_sequences,
  write_criteo,
  write_criteo_days,
  write_gowalla,
  write_movielens,
  write_movielens100k,
  write_sequences,
)  # fmt: skip

from recipes import config as config_lib
from recipes.two_tower.data import RetrievalData

RESULT = {  # the keys of a result
  "recipe", "config", "seed", "steps", "tested_step", "seconds", "metrics", "baselines", "device",
  "versions", "data", "data_sha256",
}  # fmt: skip
# Read without steps, by dlrm and dcnv2, or by sequence models alone, which have their own tests.
_CONDITIONAL = {"epochs", "linear", "residual", "init"}
_WRITERS = {
  "gowalla": write_gowalla,
  "movielens100k": write_movielens100k,
  "movielens1m": write_movielens,
}


def load(name, mode="smoke"):
  """Returns the completed config `recipe.config`, as "dlrm.synthetic"."""
  module = importlib.import_module(f"configs.{name}")
  return config_lib.complete(name.partition(".")[0], module.get_config(mode))


def _leaves(config, prefix=""):
  for key, value in config._fields.items():  # without reading it
    if isinstance(value, ml_collections.ConfigDict):
      yield from _leaves(value, f"{prefix}{key}.")
    else:
      yield f"{prefix}{key}", config, key


@contextlib.contextmanager
def recorded_reads():
  """Yields a function of a config, which returns the settings that nothing has read meanwhile.

  A group is told by its keys, since a run makes copies of its config.
  """
  read: set[tuple[frozenset[str], str]] = set()
  get, to_dict = ml_collections.ConfigDict.__getitem__, ml_collections.ConfigDict.to_dict

  def recording(self, key):
    read.add((frozenset(self._fields), key))
    return get(self, key)

  def without_recording(self, *args, **kwargs):  # writing a config down is not reading it
    before = set(read)
    found = to_dict(self, *args, **kwargs)
    read.clear()
    read.update(before)
    return found

  unread = lambda config: {
    path
    for path, owner, key in _leaves(config)
    if (frozenset(owner._fields), key) not in read and path not in _CONDITIONAL
  }
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(ml_collections.ConfigDict, "__getitem__", recording)
    patch.setattr(ml_collections.ConfigDict, "to_dict", without_recording)
    yield unread


def dlrm_smoke(name, folder, **changes):
  """Returns a config of the click models in smoke mode, on data written below a folder."""
  config = load(f"dlrm.{name}")
  changes["cache_dir"] = str(folder / "cache")
  if name == "movielens1m":
    changes["data_dir"] = str(write_movielens(folder / "raw"))
  if name == "criteo_kaggle":
    changes["data_dir"] = str(write_criteo(folder / "raw" / "train.txt").parent)
  if name == "criteo_1tb":
    changes["data_dir"] = str(write_criteo_days(folder / "raw"))
  config.update_from_flattened_dict(changes)
  return config


def sequence_smoke(name, folder, **changes):
  """Returns a config of the sequence models in smoke mode, on data written below a folder."""
  config = load(f"sequence.{name}")
  changes = {"cache_dir": str(folder / "cache")} | changes
  if config.dataset == "file":
    write_sequences(folder / "raw" / config.data_file, draw_sequences(), config.layout)
    changes = {"data_dir": str(folder / "raw")} | changes
  config.update_from_flattened_dict(changes)
  return config


def two_tower_smoke(name, folder, **changes):
  """Returns a config of the two towers in smoke mode, on data written below a folder."""
  config = load(f"two_tower.{name}")
  changes["cache_dir"] = str(folder / "cache")
  if name in _WRITERS and "data_dir" not in changes:
    changes["data_dir"] = str(_WRITERS[name](folder / f"{name}-raw"))
  config.update_from_flattened_dict(changes)
  return config


def write_run(
  folder, *, recipe="two_tower", seed=0, recall=0.2, seconds=10.0, popular=0.0416, **config
):
  """Writes the result and the metrics of a run; returns its folder."""
  folder.mkdir(parents=True)
  config = {
    "dataset": "gowalla",
    "batch_size": 100,
    "select": "valid_ndcg@10",
    "seed": seed,
  } | config
  result = {
    "recipe": recipe, "config": config, "seed": seed, "steps": 40, "tested_step": 40,
    "seconds": seconds,
    "metrics": {"valid_recall@10": 0.5, "test_recall@10": recall, "test_mrr": 0.25},
    "baselines": {"popularity": {"test_recall@10": popular, "test_mrr": 0.125}},
    "device": {"kind": "cpu", "count": 1, "host_cores": 2, "platform": "cpu"},
    "versions": {"jax": "0.10", "flax": "0.12", "sparse-embed": "0.1"},
    "data_sha256": {"train.txt": "ab" * 32},
  }  # fmt: skip
  lines = [
    {"step": 10, "loss": 3.0, "examples_per_second": 500.0},
    {"step": 20, "loss": 2.0, "examples_per_second": 250.0},
    {"step": 20, "valid_ndcg@10": 0.3},
    {"step": 40, "loss": 1.0, "examples_per_second": 1000.0},
    {"step": 40, "valid_ndcg@10": 0.4},
  ]
  (folder / "result.json").write_text(json.dumps(result))
  (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  return str(folder)


def lists_of(train, valid, test, *, num_items=1000, ordered=True):
  """Returns retrieval data of lists of items of each user, in this order."""
  splits, columns, start = {}, {"user": [], "item": [], "place": []}, 0
  for name, lists in (("train", train), ("valid", valid), ("test", test)):
    lengths = [len(items) for items in lists]
    columns["user"].append(np.repeat(np.arange(len(lists)), lengths))
    columns["item"].append(np.concatenate([np.array(items, int) for items in lists]))
    columns["place"].append(np.concatenate([np.arange(length) for length in lengths]))
    columns[f"{name}_offsets"] = start + np.cumsum([0, *lengths])
    splits[name], start = (start, start + sum(lengths)), start + sum(lengths)
  joined = lambda x: np.concatenate(x).astype(np.int32) if isinstance(x, list) else x
  columns = {name: joined(parts) for name, parts in columns.items()}
  none: dict = {"user": (), "item": ()}
  return RetrievalData(columns, splits, len(train), num_items, none, ordered)
