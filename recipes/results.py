"""The metrics of runs: which values are better, and tables of them."""

import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from embed.planning import aligned

from .errors import UserError


def gain(metric: str, value: float) -> float:
  """Returns a number that is larger the better the value of a metric is.

  Losses and normalized entropies are best small, a calibration is best at 1, all else is best
  large.

  Args:
    metric: its name, with or without a split, as "valid_auc".
    value: of the metric.

  >>> gain("test_logloss", 0.5), gain("calibration", 0.75), gain("ndcg@10", 0.2)
  (-0.5, -0.25, 0.2)
  """
  metric = metric.rpartition("_")[2]
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
  """Returns a result as a table for a terminal: the metrics of the run and of its baselines."""
  run = "/".join(filter(None, [result["recipe"], result["config"].get("model")]))
  return (
    f"{rows({run: [result]})}\n"
    f"seed {result['seed']}, state of step {result['tested_step']} of {result['steps']}, "
    f"{result['seconds']:.0f} s on {result['device']['kind']} x {result['device']['count']}"
  )


def rows(groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
  """Returns a table of results by name and of their baselines, each baseline after its results.

  Of several results, such as of several seeds, it has the mean and the standard deviation (of
  n - 1) of each metric. They are of the test rows, or of the validation rows if nothing was tested.
  """
  every = [result["metrics"] for group in groups.values() for result in group]
  logged = dict.fromkeys(name for metrics in every for name in metrics)
  split = "test" if any(name.startswith("test_") for name in logged) else "valid"
  names = [name for name in logged if name.startswith(f"{split}_")]
  lines = [(split, *(name.removeprefix(f"{split}_") for name in names))]
  for label, group in groups.items():
    fits: dict[str, list[Mapping[str, float]]] = {}
    for result in group:
      for name, metrics in {label: result["metrics"], **result["baselines"]}.items():
        fits.setdefault(name, []).append(metrics)
    for name, of_seeds in fits.items():
      values = [[metrics[each] for metrics in of_seeds if each in metrics] for each in names]
      line = (name, *map(_cell, values))
      lines += [line] * (any(values) and line not in lines)  # a baseline of several runs once
  return aligned(lines)


def _cell(values: Sequence[float]) -> str:
  if not values:
    return ""
  mean = f"{statistics.fmean(values):.4f}"
  return mean if len(set(values)) == 1 else f"{mean} ± {statistics.stdev(values):.4f}"
