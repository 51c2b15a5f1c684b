"""Host memory of a training run from a folder of Parquet files larger than the memory it may use.

    python benchmarks/table_memory.py --gigabytes=5 --folder=/tmp/table_memory

Draws a table of clicks (26 categories as 8 hexadecimal digits, 13 numbers, a label), trains the
dlrm recipe on it for a few steps, and prints rows, bytes, seconds and the peak of the memory that
belongs to the run's processes alone (RssAnon in /proc: without pages of files, which the system
takes back when it needs them). Linux only.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_ROWS = 250_000  # of a file
_CATEGORIES, _NUMBERS = 26, 13


def write_file(path: pathlib.Path, seed: int) -> int:
  """Writes a file of clicks, and returns its bytes."""
  draw = np.random.default_rng(seed)
  columns = {"label": pa.array(draw.integers(0, 2, _ROWS, dtype=np.int8))}
  for i in range(_NUMBERS):
    columns[f"I{i}"] = pa.array(draw.lognormal(2, 2, _ROWS).astype(np.float32))
  for i in range(_CATEGORIES):
    ids = np.minimum(draw.zipf(1.3, _ROWS), 50_000).astype(np.uint32) * np.uint32(2654435761)
    columns[f"C{i}"] = pa.array([f"{value:08x}" for value in ids.tolist()])
  pq.write_table(pa.table(columns), path, use_dictionary=False, compression="none")
  return path.stat().st_size


def anonymous(pid: int) -> int:
  """Returns the bytes of memory of a process and its children that no file backs."""
  total = 0
  try:
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
      if line.startswith("RssAnon"):
        total += int(line.split()[1]) << 10
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
      total += sum(anonymous(int(child)) for child in (task / "children").read_text().split())
  except (FileNotFoundError, ProcessLookupError):
    pass
  return total


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--gigabytes", type=float, default=5.0)
  parser.add_argument("--folder", type=pathlib.Path, required=True)
  parser.add_argument("--steps", type=int, default=200)
  args = parser.parse_args()
  table = args.folder / "table"
  table.mkdir(parents=True, exist_ok=True)
  size, files = 0, 0
  while size < args.gigabytes * 2**30:
    path = table / f"part-{files:05d}.parquet"
    size += path.stat().st_size if path.exists() else write_file(path, files)
    files += 1
  columns: dict[str, object] = {"label": "label"}
  columns |= {f"I{i}": {"kind": "number", "log": True} for i in range(_NUMBERS)}
  columns |= {f"C{i}": {"kind": "category", "min_count": 10} for i in range(_CATEGORIES)}
  settings = {
    "files": str(table), "columns": columns, "cache_dir": str(args.folder / "cache"),
    "batch_size": 4096, "steps": args.steps, "eval_every": args.steps, "baseline": {"max_rows": 0},
  }  # fmt: skip
  config = args.folder / "config.py"
  config.write_text(f"def get_config():\n  return {settings!r}\n")
  shutil.rmtree(args.folder / "run", ignore_errors=True)
  began = time.perf_counter()
  command = ["-m", "recipes.dlrm", f"--config={config}", f"--workdir={args.folder / 'run'}"]
  process = subprocess.Popen([sys.executable, *command])
  peak, prepared, at_steps = 0, 0.0, 0
  metrics = args.folder / "run" / "metrics.jsonl"
  while process.poll() is None:
    now = anonymous(process.pid)
    peak = max(peak, now)
    if metrics.exists():
      prepared = prepared or time.perf_counter() - began
      at_steps = max(at_steps, now)
    time.sleep(0.1)
  if process.returncode:
    sys.exit(process.returncode)
  print(json.dumps({
    "rows": files * _ROWS, "bytes": size, "host_cores": os.cpu_count(),
    "seconds_to_prepare": round(prepared), "seconds": round(time.perf_counter() - began),
    "peak_anonymous_bytes": peak, "peak_anonymous_bytes_while_training": at_steps,
  }, indent=2))  # fmt: skip


if __name__ == "__main__":
  main()
