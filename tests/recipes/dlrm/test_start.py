"""A run that starts as its logistic regression: the same logits, fitted once, never worse."""

import functools

import numpy as np
import pytest
from cases import each
from small_tables import completed, write_csv

from recipes import baselines as command
from recipes import mesh as mesh_lib
from recipes.dlrm import baselines, data, train

COLUMNS = {
  "clicked": "label",
  "city": {"kind": "category", "min_count": 1},
  "tags": {"kind": "bag", "min_count": 1, "max_length": 3},
  "price": "number",
}


@pytest.fixture(scope="module")
def configured(tmp_path_factory):
  """Returns the config of a run on a small table, with changes."""
  folder, draw, rows = tmp_path_factory.mktemp("start"), np.random.default_rng(0), []
  for _ in range(400):
    city, tags = draw.integers(7), draw.integers(9, size=draw.integers(4))
    clicked = int(draw.random() < 0.1 + 0.1 * city)
    rows.append((clicked, f"c{city}" if city else "", "|".join(map(str, tags)), draw.normal()))
  path = write_csv(folder / "rows.csv", COLUMNS, rows)
  return lambda cache=folder, **changes: completed(
    "dlrm", cache, **{"files": str(path), "columns": COLUMNS, "epochs": 1, "dim": 3} | changes
  )


def test_a_bag_counts_as_its_combiner_says():
  """Columns are the city's two ids, the tags' three, and the price."""
  columns = {
    "ids": np.array([[1, 0, 2, -1, -1], [-1, 1, 1, 0, 1], [0, -1, -1, -1, -1]], np.int32),
    "dense": np.array([[0.5], [-2.0], [0.0]], np.float32),
    "label": np.array([1, 0, 0], np.uint8),
  }
  bag = {"name": "tags", "vocabulary_size": 3, "valency": 4}
  for combiner, two, four in (("sum", 1, 1), ("mean", 1 / 2, 1 / 4), ("sqrtn", 2**-0.5, 1 / 2)):
    features = [{"name": "city", "vocabulary_size": 2}, bag | {"combiner": combiner}]
    found = data.ClickData(columns, {"features": features})
    matrix, _, _ = baselines._part(found, slice(0, 3))
    wanted = [[0, 1, two, 0, two, 0.5], [0, 0, four, 3 * four, 0, -2], [1, 0, 0, 0, 0, 0]]
    np.testing.assert_allclose(matrix.toarray(), wanted, rtol=1e-6)


@pytest.mark.ci
@pytest.mark.parametrize("model", ["dcnv2", "dlrm"])
def test_logits_are_those_of_the_regression(model, configured):
  """On eight devices, over which the rows are split."""
  mesh, config = mesh_lib.start(), configured(model=model)
  loaded = data.load(config)
  config = train.decide(config, loaded, mesh)
  made, _ = train.make_state(config, loaded, mesh)
  train.start_linear(made, loaded, config, mesh)
  _, scores = baselines.regression(loaded, config)
  for split in ("valid", "test"):
    for name, value in train.evaluator(loaded, config, mesh)(made, split).items():
      assert value == pytest.approx(scores[f"{split}_{name}"], abs=1e-5)


@pytest.mark.ci
def test_a_run_is_not_worse_on_validation_and_fits_once(configured, tmp_path, monkeypatch):
  fits, fit = [], baselines.logistic_regression
  counted = lambda *args, **kwargs: fits.append(1) or fit(*args, **kwargs)
  monkeypatch.setattr(baselines, "logistic_regression", counted)
  of = functools.partial(configured, tmp_path / "cache", learning_rate=1.0, warmup_steps=0)
  train.run(of(), str(tmp_path / "run"))
  result = command.fit(tmp_path / "run")
  assert result["tested_step"] == 0
  linear = result["baselines"]["logistic regression"]
  for name, value in result["metrics"].items():
    assert value == pytest.approx(linear[name], abs=1e-5)
  monkeypatch.delattr(train, "start_linear")  # which a resumed run does not call
  assert train.run(of(epochs=2), str(tmp_path / "run"))["steps"] == 2 * result["steps"]
  assert len(fits) == 1


def test_which_runs_start_so(configured):
  loaded = data.load(configured())
  cases = [
    ({}, {}, True),
    ({"start": "random"}, {}, False),
    ({"linear": False}, {}, False),
    ({"init_from": "runs/other"}, {}, False),
    ({"baseline": {"max_rows": 100}}, {}, False),
    ({}, {"features": [{"name": "city", "vocabulary_size": 8, "table": "place"}]}, False),
    ({}, {"splits": loaded.splits | {"valid": (0, 0)}}, False),
  ]

  def check(settings, meta, wanted):
    of = data.ClickData(loaded.columns, loaded.meta | meta)
    assert train.starts_linear(configured(**settings), of) == wanted

  each(cases, check)
