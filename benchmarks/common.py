"""Options that the benchmarks share, configs by name, and what they write."""

import argparse
import ast
import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `recipes`, `configs` and `embed` are those of the checkout

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
MIB = 1 << 20
_PACKAGES = (
  "jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "flax", "numpy", "torch", "fbgemm-gpu-cpu",
  "fbgemm-gpu",
)  # fmt: skip


def parser(about: str | None) -> argparse.ArgumentParser:
  """Returns the parser of a benchmark, whose `--help` shows its docstring as it is."""
  formatter = argparse.RawDescriptionHelpFormatter
  made = argparse.ArgumentParser(description=about, formatter_class=formatter)
  made.add_argument("--json", type=Path, help="write the figures there")
  return made


def versions() -> dict[str, str]:
  """Returns the versions that figures depend on, of the packages that are installed."""
  found = {"python": platform.python_version()}
  for package in _PACKAGES:
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      found[package] = "not installed"
  return found


def said(*command: str) -> str:
  """Returns what a command prints; "" if there is no such command, or it fails."""
  with contextlib.suppress(OSError, subprocess.CalledProcessError):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
  return ""


def about() -> dict[str, Any]:
  """Returns the command, the day, the machine and the versions."""
  info = Path("/proc/cpuinfo")  # Linux
  lines = info.read_text().splitlines() if info.exists() else []
  names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
  return {
    "command": " ".join(["python", *sys.argv]),
    "date": time.strftime("%Y-%m-%d"),
    "cpu": names[0] if names else platform.processor(),
    "cores": CORES,
    "versions": versions(),
  }


def write(path: Path | None, results: dict[str, Any]) -> None:
  """Writes results to `--json`, if it is given, after what they are about."""
  if path is not None:
    path.write_text(json.dumps(about() | results, indent=1) + "\n")


def load(name: str, changes: Sequence[str] = ()) -> Any:
  """Returns the config `<recipe>/<config>[:mode]` with changes `name=value`."""
  from recipes import config as config_lib  # needs the extra `recipes`

  name, _, mode = name.partition(":")
  module = importlib.import_module(f"configs.{name.replace('/', '.')}")
  config = config_lib.complete(name.partition("/")[0], module.get_config(mode))
  for name, text in (change.split("=", 1) for change in changes):
    try:
      value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
      value = text
    config.update_from_flattened_dict({name: value})
  return config
