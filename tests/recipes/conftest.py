"""One trained run of each recipe and its export, for all that is done with a run that has ended."""

import dataclasses
import functools
import importlib
import json
import os
import shutil
from pathlib import Path

import filelock
import pytest
from served_models import CLICKS, LOG, write_clicks, write_log

from recipes import export, serving
from recipes import mesh as mesh_lib
from recipes import run as run_lib

_TABLES = {"optimizer": "adam", "init_scale": 0.3}  # slots are not zero, and scores differ
_EVERY = {"epochs": 1, "log_every": 2, "warmup_steps": 2, "table": _TABLES}
_TABLE = {
  "dlrm": {
    "columns": CLICKS,
    "format": {"missing": ("NA", "none")},
    "dim": 8,
    "dcnv2": {"cross_layers": 1, "deep": (8,)},
    "batch_size": 32,
    "steps": 8,
    "eval_every": 4,
    "select": "",
    "baseline": {"inverse_penalties": (0.1,)},
  },
  "two_tower": {
    "columns": LOG,
    "dim": 8,
    "hidden": (16,),
    "history": 4,
    "eval_history": 16,
    "negatives": {"number": 8},
    "batch_size": 32,
    "steps": 6,
    "eval_every": 3,
    "select": "valid_ndcg@5",
    "ks": (5,),
    "baseline": {"ease_l2": 1.0},
  },
  "sequence": {
    "columns": LOG,
    "dim": 8,
    "blocks": 1,
    "max_length": 16,
    "negatives": {"number": 8},
    "exclude_seen": False,
    "batch_size": 16,
    "steps": 6,
    "eval_every": 3,
    "select": "valid_ndcg@5",
    "ks": (5,),
    "baseline": {"ease_l2": 1.0},
  },
}


@dataclasses.dataclass(frozen=True)
class Trained:
  """A run that one device has trained in a few steps, and its export; nobody writes in them.

  Attributes:
    folder: of all of it; the workdir of the run is `run` in it.
    table: what `train.run` was given.
  """

  recipe: str
  folder: Path
  table: dict

  @property
  def file(self):
    return self.folder / "table.csv"

  @property
  def workdir(self):
    return self.folder / "run"

  @property
  def served(self):
    return self.folder / "served"

  @functools.cached_property
  def result(self):
    return json.loads((self.workdir / "result.json").read_text())

  @functools.cached_property
  def config(self):
    """The config with what the data have decided."""
    return run_lib.opened(self.workdir).config

  @functools.cached_property
  def data(self):
    return run_lib.opened(self.workdir).load()

  @functools.cached_property
  def model(self):
    """The tested state on one device."""
    return run_lib.opened(self.workdir).model(self.data)

  @functools.cached_property
  def answering(self):
    """The loaded export."""
    return serving.load(self.served)

  @property
  def rows(self):
    """The rows of the table as texts by column."""
    header, *lines = self.file.read_text().splitlines()
    return [dict(zip(header.split(","), line.split(","), strict=True)) for line in lines]

  def copy(self, folder, **changes):
    """Copies the workdir, with other values in config.json and result.json; returns the copy."""
    copy, known = shutil.copytree(self.workdir, folder / "run"), set()
    for name in ("config.json", "result.json"):
      values = json.loads((copy / name).read_text())
      known |= set(values)
      values |= {key: value for key, value in changes.items() if key in values}
      (copy / name).write_text(json.dumps(values))
    assert set(changes) <= known
    return copy

  def train(self, workdir, **changes):
    """Trains on the same table; returns the result."""
    train = importlib.import_module(f"recipes.{self.recipe}.train")
    return train.run(self.table | changes, str(workdir))


def _train(trained):
  if trained.recipe == "dlrm":
    write_clicks(trained.file, rows=200)
  else:
    write_log(trained.file, users=50, items=12)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(mesh_lib, "start", lambda: None)
    trained.train(trained.workdir)
    export.export(trained.workdir, trained.served, platforms=("cpu",))
  (trained.folder / "done").touch()


def _once(recipe, tmp_path_factory):
  """Yields the run, which the first process that asks for it trains for all of them."""
  root = tmp_path_factory.getbasetemp()
  root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
  folder = root / f"trained_{recipe}"
  table = {"files": str(folder / "table.csv"), "cache_dir": str(folder / "cache")} | _EVERY
  trained = Trained(recipe, folder, table | _TABLE[recipe])
  folder.mkdir(exist_ok=True)
  with filelock.FileLock(root / f"{recipe}.lock"):
    if not (folder / "done").exists():
      _train(trained)
  yield trained


@pytest.fixture(scope="session")
def clicks(tmp_path_factory):
  """A run of dlrm."""
  yield from _once("dlrm", tmp_path_factory)


@pytest.fixture(scope="session")
def towers(tmp_path_factory):
  """A run of two_tower."""
  yield from _once("two_tower", tmp_path_factory)


@pytest.fixture(scope="session")
def sequences(tmp_path_factory):
  """A run of sequence."""
  yield from _once("sequence", tmp_path_factory)


@pytest.fixture
def trained(request):
  """One of the three, by the name of its fixture."""
  return request.getfixturevalue(request.param)
