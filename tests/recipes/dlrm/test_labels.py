"""Several labels: losses by hand, and a whole run to predictions."""

import csv
import functools
import io
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_tables import completed, write_csv

from recipes import evaluate, export, predict, serving
from recipes.dlrm import data, train
from recipes.evaluation.metrics import label_names
from recipes.tables import spec

NAN = float("nan")
LABELS = {"clicked": spec.Label(), "liked": spec.Label(weight=0.5)}
TARGETS = np.array([[1, 1], [0, NAN], [1, 0], [1, NAN]], np.float32)


class Fixed:
  """A model that returns an array."""

  def __init__(self, outputs):
    self.outputs = outputs

  def __call__(self, batch):
    return jnp.asarray(self.outputs)


def loss(outputs, batch, labels):
  return train.loss_fn(Fixed(outputs), batch, labels=labels)


def test_losses_by_hand():
  """A label's loss is a mean over the rows in which it counts, and the sum is by the weights."""
  outputs = np.zeros((4, 2), np.float32)
  outputs[0, 0], outputs[2, 1] = math.log(3), math.log(3)
  batch = {"label": TARGETS, "dense": np.zeros((4, 0), np.float32)}
  total, losses = jax.jit(functools.partial(loss, labels=LABELS))(outputs, batch)
  half = math.log(2)
  wanted = {
    "clicked_loss": (math.log(4 / 3) + 3 * half) / 4,
    "liked_loss": (half + math.log(4)) / 2,  # rows 0 and 2
  }
  assert losses == pytest.approx(wanted)
  clicked, liked = wanted.values()
  assert total == pytest.approx(clicked + 0.5 * liked)


def test_weights_of_rows_count_and_a_label_that_never_counts_has_no_loss():
  labels = {"a": spec.Label(), "b": spec.Label()}
  label, weight = np.array([[1, NAN], [0, NAN]], np.float32), np.array([3, 1], np.float32)
  batch = {"label": label, "weight": weight}
  outputs = np.array([[math.log(3), 9.0], [0.0, 9.0]], np.float32)
  differentiated = jax.value_and_grad(functools.partial(loss, labels=labels), has_aux=True)
  (total, losses), gradient = jax.jit(differentiated)(outputs, batch)
  assert losses["a_loss"] == pytest.approx((3 * math.log(4 / 3) + math.log(2)) / 4)
  assert losses["b_loss"] == 0
  assert total == losses["a_loss"]
  # d log(1 + e^x) / dx - label: 3/4 - 1 and 1/2 - 0, by the weights
  np.testing.assert_allclose(gradient, [[-3 / 16, 0], [1 / 8, 0]], rtol=1e-6)


# --- tables ---------------------------------------------------------------------------------------

HEADER = ("clicked", "liked", "city", "price", "part")
DECLARED = {
  "clicked": "label",
  "liked": {"kind": "label", "weight": 0.5},
  "city": {"kind": "category", "min_count": 1},
  "price": "number",
  "part": "split",
}
COLUMNS = spec.as_dicts(spec.parse(DECLARED))


def write_rows(path, rows=400):
  draw, lines = np.random.default_rng(0), []
  for row in range(rows):
    city = int(draw.integers(6))
    clicked = int(draw.random() < 0.2 + 0.1 * city)
    liked = int(draw.random() < 0.5) if clicked else ""
    part = ("train", "train", "valid", "test")[row % 4]
    price = f"{draw.normal():.2f}"
    lines.append((clicked, liked, f"c{city}", price, part))
  return write_csv(path, HEADER, lines)


def test_labels_may_be_missing(tmp_path):
  rows = [
    (1, 1, "a", 1, "train"),
    (0, "", "a", 2, "train"),
    (1, 0, "b", 3, "train"),
    ("", 0, "b", 4, "train"),
  ]
  path = write_csv(tmp_path / "rows.csv", HEADER, rows)
  config = completed(
    "dlrm", tmp_path / "cache", files=str(path), columns=COLUMNS, select="",
    split={"valid": 0.0, "test": 0.0},
  )  # fmt: skip
  loaded = data.load(config)
  np.testing.assert_array_equal(loaded.columns["label"], [[1, 1], [0, NAN], [1, 0], [NAN, 0]])
  assert list(loaded.labels) == ["clicked", "liked"]
  assert loaded.statistics["liked rate"] == pytest.approx(1 / 3)


@pytest.mark.weekly
def test_a_whole_run_with_two_labels(tmp_path):
  """From the table to a score for each label, and the same metrics wherever they are computed."""
  path = write_rows(tmp_path / "rows.csv")
  config = completed(
    "dlrm", tmp_path / "cache", files=str(path), columns=COLUMNS, batch_size=40, epochs=8
  )
  workdir = tmp_path / "run"
  result = train.run(config, str(workdir))
  names = label_names(data.load(config).labels, has_users=False)
  assert {name for name in result["metrics"] if name.startswith("test_")} == {
    f"test_{name}" for name in names
  }
  assert all(math.isfinite(value) for value in result["metrics"].values())
  served = export.export(workdir, tmp_path / "served", platforms=("cpu",))
  out, file = io.StringIO(), tmp_path / "test.csv"
  lines = path.read_text().splitlines()
  file.write_text("\n".join([lines[0], *lines[4::4]]) + "\n")  # the rows that test
  predict.predict(str(served), str(file), out)
  rows = list(csv.DictReader(io.StringIO(out.getvalue())))
  assert list(rows[0])[len(HEADER) :] == ["score_clicked", "score_liked"]
  model = serving.load(served)
  assert model.predict([{"city": "c1", "price": 1.0}]).shape == (1, 2)
  measured = evaluate.evaluate_files(workdir, str(file))["metrics"]
  assert measured == pytest.approx(
    {name: result["metrics"][f"test_{name}"] for name in names}, abs=2e-4
  )
