"""Time and host memory of preparing your own table, larger than the memory that it may take.

    python benchmarks/own_table.py --rows=2500000 --folder=/tmp/own_table
    python benchmarks/own_table.py --rows=13750000 --folder=/tmp/own_table    5 GB of Parquet
    python benchmarks/own_table.py --rows=2500000 --text --folder=/tmp/own_table
    python benchmarks/own_table.py --log --rows=20000000 --folder=/tmp/own_table

Draws a table of clicks (26 categories as 8 hexadecimal digits, 13 numbers, a label), or a log of
users, items and times, and prepares it in a process of its own. Prints rows, bytes, seconds and the
peak of the memory that belongs to the process alone (RssAnon in /proc: without pages of files,
which the system takes back when it needs them). Linux only.
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
import pyarrow.csv
import pyarrow.parquet as pq

_ROWS = 250_000  # of a file
_CATEGORIES, _NUMBERS = 26, 13
_USERS, _ITEMS = 500_000, 200_000
_PREPARE = """
import json, sys, time
from recipes import config as config_lib
from recipes.{recipe} import data
config = config_lib.complete("{recipe}", json.load(open(sys.argv[1])))
began = time.perf_counter()
data.load(config)
print(json.dumps(time.perf_counter() - began))
"""


def clicks(draw: np.random.Generator) -> dict[str, pa.Array]:
  columns = {"label": pa.array(draw.integers(0, 2, _ROWS, dtype=np.int8))}
  for i in range(_NUMBERS):
    columns[f"I{i}"] = pa.array(draw.lognormal(2, 2, _ROWS).astype(np.float32))
  for i in range(_CATEGORIES):
    ids = np.minimum(draw.zipf(1.3, _ROWS), 50_000).astype(np.uint32) * np.uint32(2654435761)
    columns[f"C{i}"] = pa.array([f"{value:08x}" for value in ids.tolist()])
  return columns


def log(draw: np.random.Generator) -> dict[str, pa.Array]:
  item = np.minimum(draw.zipf(1.2, _ROWS), _ITEMS)
  return {
    "user": pa.array(draw.integers(0, _USERS, _ROWS)),
    "item": pa.array(item),
    "time": pa.array(draw.integers(1_700_000_000, 1_720_000_000, _ROWS)),
  }


def anonymous(pid: int) -> int:
  """Returns the bytes of memory of a process that no file backs."""
  try:
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
      if line.startswith("RssAnon"):
        return int(line.split()[1]) << 10
  except (FileNotFoundError, ProcessLookupError):
    pass
  return 0


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--rows", type=int, default=2_500_000)
  parser.add_argument("--log", action="store_true", help="a log as a ranking, in place of clicks")
  parser.add_argument("--text", action="store_true", help="CSV in place of Parquet")
  parser.add_argument("--folder", type=pathlib.Path, required=True)
  args = parser.parse_args()
  suffix = "csv" if args.text else "parquet"
  table = args.folder / f"{'log' if args.log else 'clicks'}_{suffix}_{args.rows}"
  table.mkdir(parents=True, exist_ok=True)
  paths = [table / f"part-{i:05d}.{suffix}" for i in range(-(-args.rows // _ROWS))]
  for i, path in enumerate(paths):
    if not path.exists():
      drawn = pa.table((log if args.log else clicks)(np.random.default_rng(i)))
      if args.text:
        pyarrow.csv.write_csv(drawn, path)
      else:
        pq.write_table(drawn, path, use_dictionary=False, compression="none")
  columns: dict[str, object] = {"label": "label"}
  columns |= {f"I{i}": {"kind": "number", "log": True} for i in range(_NUMBERS)}
  columns |= {f"C{i}": {"kind": "category", "min_count": 10} for i in range(_CATEGORIES)}
  if args.log:
    columns = {"user": "user", "item": "item", "time": "time"}
  cache = args.folder / "cache"
  shutil.rmtree(cache, ignore_errors=True)
  config = args.folder / "config.json"
  config.write_text(json.dumps({"files": str(table), "columns": columns, "cache_dir": str(cache)}))
  code = _PREPARE.format(recipe="two_tower" if args.log else "dlrm")
  process = subprocess.Popen([sys.executable, "-c", code, config], stdout=subprocess.PIPE)
  peak = 0
  while process.poll() is None:
    peak = max(peak, anonymous(process.pid))
    time.sleep(0.05)
  if process.returncode or process.stdout is None:
    sys.exit(process.returncode)
  print(json.dumps({
    "rows": len(paths) * _ROWS, "bytes": sum(path.stat().st_size for path in paths),
    "host_cores": os.cpu_count(), "seconds": round(json.loads(process.stdout.read()), 1),
    "peak_anonymous_bytes": peak,
  }, indent=2))  # fmt: skip


if __name__ == "__main__":
  main()
