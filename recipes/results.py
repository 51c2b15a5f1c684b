"""The origin of a result, device and versions, and the table that shows it."""

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from typing import Any

import jax

import embed

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "scikit-learn")


def device() -> dict[str, Any]:
  """Returns what the run computed on."""
  first = jax.devices()[0]
  return {
    "platform": first.platform,
    "kind": first.device_kind,
    "count": jax.device_count(),
    "processes": jax.process_count(),
    "host": platform.machine(),
    "host_cores": os.cpu_count(),
  }


def versions() -> dict[str, str]:
  """Returns the versions that a number depends on."""
  installed = {name: importlib.metadata.version(name) for name in _PACKAGES}
  return {"python": platform.python_version(), "sparse-embed": embed.__version__} | installed


def report(result: Mapping[str, Any]) -> str:
  """Returns a result as a table for a terminal: the metrics of the run and of its baselines.

  They are of the test rows, or of those that validate if none are held out as a test.
  """
  split = "test" if any(name.startswith("test_") for name in result["metrics"]) else "valid"
  names = [name for name in result["metrics"] if name.startswith(f"{split}_")]
  titles = [name.removeprefix(f"{split}_") for name in names]
  width = max(map(len, titles), default=0) + 2
  lines = [f"{split:24}" + "".join(f"{title:>{width}}" for title in titles)]
  run = "/".join(filter(None, [result["recipe"], result["config"].get("model")]))
  for row, metrics in [(run, result["metrics"]), *result["baselines"].items()]:
    values = (f"{metrics[name]:>{width}.4f}" if name in metrics else " " * width for name in names)
    lines.append(f"{row:24}" + "".join(values))
  for name, failure in result.get("failed_baselines", {}).items():
    lines.append(f"{name:24}failed: {failure}")
  lines.append(
    f"seed {result['seed']}, state of step {result['tested_step']} of {result['steps']}, "
    f"{result['seconds']:.0f} s on {result['device']['kind']} x {result['device']['count']}"
  )
  return "\n".join(lines)
