"""The metrics of runs: which values are better, and a table of them."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from embed.planning import aligned

from .errors import UserError

_NEUTRAL = ("popularity", "share")


def gain(metric: str, value: float) -> float:
  """Returns a number that is larger the better the value of a metric is.

  Losses and normalized entropies are best small, a calibration is best at 1, all else is best
  large. A popularity and a share are neither good nor bad: NaN.

  Args:
    metric: its name, with or without a split and a slice, as "valid_auc[gender=F]".
    value: of the metric.

  >>> gain("test_logloss", 0.5), gain("calibration[gender=F]", 0.75), gain("ndcg@10", 0.2)
  (-0.5, -0.25, 0.2)
  """
  metric = metric.partition("[")[0].partition("@")[0].rpartition("_")[2]
  if metric in _NEUTRAL:
    return math.nan
  if metric == "calibration":
    return -abs(value - 1)
  return -value if metric.endswith("loss") or metric == "ne" else value


def check_select(select: str, metrics: Collection[str]) -> None:
  """Raises UserError unless validation has the metric that selects; "" selects nothing."""
  if select and select not in metrics:
    instead = f"choose one of {sorted(metrics)}, or" if metrics else "no rows validate:"
    raise UserError(
      f"config.select is {select!r}: {instead} pass --config.select= to test the last state"
    )


def scalars(split: str, metrics: Mapping[str, float]) -> dict[str, float]:
  """Returns the metrics of a split by their names in a result."""
  return {f"{split}_{name}": float(x) for name, x in metrics.items()}


def table(result: Mapping[str, Any]) -> str:
  """Returns a result as a table for a terminal: the metrics of the run and of its baselines.

  They are of the test rows, or of the validation rows if the run was not tested.
  """
  split = "test" if any(name.startswith("test_") for name in result["metrics"]) else "valid"
  names = [name for name in result["metrics"] if name.startswith(f"{split}_")]
  rows = [(split, *(name.removeprefix(f"{split}_") for name in names))]
  run = "/".join(filter(None, [result["recipe"], result["config"].get("model")]))
  fitted = [(row, metrics) for row, metrics in result["baselines"].items() if metrics]
  for row, metrics in [(run, result["metrics"]), *fitted]:
    rows.append((row, *(f"{metrics[name]:.4f}" if name in metrics else "" for name in names)))
  return (
    f"{aligned(rows)}\n"
    f"seed {result['seed']}, state of step {result['tested_step']} of {result['steps']}, "
    f"{result['seconds']:.0f} s on {result['device']['kind']} x {result['device']['count']}"
  )
