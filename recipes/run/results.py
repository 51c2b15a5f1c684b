"""The table that compares a run with its baselines, and notes on it."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from embed.planning import aligned

_NEUTRAL = ("popularity", "share", "outcome")
_MAX_AUC = 0.99  # clicks are not so predictable
_TO_TRY = {  # by the baseline that is better
  "logistic regression": "config.model=wide_deep, which is small, more config.epochs, "
  "or a lower config.table.learning_rate",
  "constant rate": "a lower config.table.learning_rate and config.learning_rate, or a higher "
  "min_count of columns with many rare values",
}


def gain(metric: str, value: float) -> float:
  """Returns a number that is larger the better the value of a metric is.

  Log losses and normalised entropies are to be small, a calibration is to be 1, and all else large.
  A popularity and a count are neither good nor bad: NaN.

  Args:
    metric: its name, with or without a split and a slice, as "valid_auc[gender=F]".

  >>> gain("test_logloss", 0.5), gain("calibration[gender=F]", 0.75), gain("ndcg@10", 0.2)
  (-0.5, -0.25, 0.2)
  """
  metric = metric.partition("[")[0].partition("@")[0].rpartition("_")[2]
  if metric in _NEUTRAL:
    return math.nan
  if metric == "calibration":
    return -abs(value - 1)
  return -value if metric.endswith("loss") or metric == "ne" else value


def scalars(split: str, metrics: Mapping[str, Any]) -> dict[str, float]:
  """Returns the metrics of a split by their names in a result, without arrays."""
  return {f"{split}_{name}": float(x) for name, x in metrics.items() if not np.ndim(x)}


def notes(
  result: Mapping[str, Any], telling: Callable[[], tuple[str, float]] | None = None
) -> list[str]:
  """Returns lines about a result: a baseline is better, or a click model too good to be true.

  Args:
    result: the content of result.json.
    telling: returns the column that tells most of the label, and its AUC; takes seconds.
  """
  split, lines, better, to_try = _split(result), [], [], dict[str, None]()
  select = result["config"].get("select") or next(iter(result["metrics"]), "")
  for metric in dict.fromkeys([select.partition("_")[2], "logloss"]):
    name = f"{split}_{metric}"
    scores = {
      row: metrics[name]
      for row, metrics in result["baselines"].items()
      if row != "best possible" and name in metrics
    }
    best = max(scores, key=lambda row: gain(metric, scores[row]), default=None)
    own = result["metrics"].get(name)
    if best and own is not None and gain(metric, scores[best]) > gain(metric, own):
      better.append(f"{best} by {split} {metric} ({scores[best]:.4f}, the model {own:.4f})")
      to_try |= {f"try {_TO_TRY[best]}": None} if best in _TO_TRY else {}
  if better:
    lines.append(f"a baseline is better than the model: {'; '.join([*better, *to_try])}")
  for name, auc in result["metrics"].items():
    if not (name.startswith(split) and name.endswith("auc") and auc > _MAX_AUC):
      continue
    metric = name.removeprefix(f"{split}_")
    line = f"{split} {metric} is {auc:.4f}: some column probably holds what the label says"
    if telling is not None and metric == "auc":
      column, alone = telling()
      line += f"; {column!r} alone has {alone:.4f}"
    lines.append(f"{line}. Leave out columns that are known only after the click, and train again")
  return lines


def _split(result: Mapping[str, Any]) -> str:
  return "test" if any(name.startswith("test_") for name in result["metrics"]) else "valid"


def report(result: Mapping[str, Any]) -> str:
  """Returns a result as a table for a terminal: the metrics of the run and of its baselines.

  They are of the test rows, or of those that validate if none are held out as a test.
  """
  split = _split(result)
  names = [name for name in result["metrics"] if name.startswith(f"{split}_")]
  rows = [(split, *(name.removeprefix(f"{split}_") for name in names))]
  run = "/".join(filter(None, [result["recipe"], result["config"].get("model")]))
  fitted = [(row, metrics) for row, metrics in result["baselines"].items() if metrics]
  for row, metrics in [(run, result["metrics"]), *fitted]:
    rows.append((row, *(f"{metrics[name]:.4f}" if name in metrics else "" for name in names)))
  lines = [aligned(rows)]
  lines += result["notes"] if "notes" in result else notes(result)
  lines.append(
    f"seed {result['seed']}, state of step {result['tested_step']} of {result['steps']}, "
    f"{result['seconds']:.0f} s on {result['device']['kind']} x {result['device']['count']}"
  )
  return "\n".join(lines)
