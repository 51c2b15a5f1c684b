"""Columns with a dynamic vocabulary: raw ids in the data, rows while training."""

import csv

import numpy as np
import pytest
from sklearn.metrics import log_loss

import embed
import embed.checkpoint
from recipes import config as config_lib
from recipes import export, serving
from recipes import mesh as mesh_lib
from recipes.dlrm import data, train

DYNAMIC = {"kind": "category", "vocabulary": "dynamic"}
COLUMNS = {
  "clicked": "label",
  "user": DYNAMIC | {"capacity": 64},
  "tags": DYNAMIC | {"kind": "bag", "capacity": 16, "eviction": "lru"},
  "part": "split",
}
SMALL = {"batch_size": 32, "dim": 4, "steps": 6}


def write(path, rows=60, first=0):
  """Writes rows of 30 users from `first` on, who click or do not; every fourth row is a test."""
  draw = np.random.default_rng(first)
  with open(path, "w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    for i in range(rows):
      user = first + draw.integers(30)
      tags = "|".join(f"t{tag}" for tag in range(user % 3))
      clicked = int(draw.random() < 0.2 + 0.6 * (user % 2))
      writer.writerow([clicked, f"u{user}", tags, ("train", "train", "valid", "test")[i % 4]])
  return path


def config_of(file, folder, **changes):
  table = {"files": str(file), "columns": COLUMNS, "cache_dir": str(folder / "cache")}
  return config_lib.complete("dlrm", table | SMALL | changes)


def halves(texts):
  return embed.transforms.RawIds()(np.array(texts, object))


@pytest.mark.programs(20, "ids are hashed eagerly, one operation after another")
def test_prepared_rows_hold_raw_ids(tmp_path):
  file = tmp_path / "rows.csv"
  file.write_text(
    "clicked,user,tags,part\n"
    "1,ann,a|b,train\n0,bob,,train\n0,,b,valid\n1,ann,c,valid\n0,x,a,test\n1,y,a,test\n"
  )
  loaded = data.load(config_of(file, tmp_path, batch_size=2))
  assert [feature.columns for feature in loaded.features] == [2, 4]
  batch = next(iter(data.eval_batches(loaded, "valid", 2)))["features"]
  empty, ann, b, c = halves(["", "ann", "b", "c"])
  np.testing.assert_array_equal(batch["user"], [empty, ann])
  none = np.full(2, 2**32 - 1)
  expected = [[b, none], [c, none]]
  np.testing.assert_array_equal(batch["tags"].values, expected)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run on one device: its folder, its rows and its result."""
  folder = tmp_path_factory.mktemp("dynamic")
  file = write(folder / "first.csv")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(mesh_lib, "start", lambda: None)
    result = train.run(config_of(file, folder), str(folder / "run"))
  with open(file, newline="") as stream:
    return folder, list(csv.DictReader(stream)), result


@pytest.mark.ci
def test_a_run_is_exported(run, tmp_path):
  folder, rows, result = run
  served = serving.load(export.export(folder / "run", tmp_path / "out", platforms=("cpu",)))
  rows = [row for row in rows if row["part"] == "test"]
  scores = served.predict(rows)
  loss = log_loss([int(row["clicked"]) for row in rows], scores)
  assert abs(loss - result["metrics"]["test_logloss"]) < 1e-6
  strangers = [{"user": user, "tags": "t0"} for user in ("new", "newer", "")]
  assert np.ptp(served.predict(strangers)) == 0  # no row, no vector
