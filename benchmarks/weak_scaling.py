"""Weak scaling on paper: what a chip exchanges per step, with 8, 64 and 512 chips.

Nothing is run. MLPerf's DLRM-DCNv2 is compiled ahead of time by the TPU compiler with a fixed batch
per chip, and the bytes of its exchanges are read out of the compiled program. Beside them stands
the least that any exchange of rows has to move: with n chips, b examples a chip and u distinct rows
among a chip's ids, each row there and back once and each id once,

  u (n - 1) / n * (4 + 2 * 4 dim) bytes,   u = sum over tables V (1 - (1 - 1/V)^(b L))

for ids drawn uniformly, which is the most distinct rows a batch can be expected to hold; clicks
repeat popular ids, so that real batches hold fewer. "to send" counts what leaves a chip; an
all-reduce of dense gradients has to send twice their size, less a share. A flat line of bytes is
what weak scaling asks for; how long a step takes, no compiler says.

  python benchmarks/weak_scaling.py --json docs/results/weak_scaling.json

Needs libtpu (the `tpu` extra), no TPU, and some minutes a topology; `--reports FILE` reads what
`recipes.aot --json` has written instead.
"""

import argparse
import json
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONFIG = runpy.run_path(str(ROOT / "configs/dlrm/criteo_1tb.py"))["get_config"]()
MIB = 1 << 20


def compiled(topology: str, chips: int, per_chip: int, timeout: float) -> dict[str, Any]:
  """The report of `recipes.aot` for one topology."""
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "aot.json"
    command = [
      sys.executable, "-m", "recipes.aot", "dlrm", "--config=configs/dlrm/criteo_1tb.py",
      f"--config.batch_size={per_chip * chips}", f"--devices={topology}", f"--json={path}",
      f"--timeout={timeout}",
    ]  # fmt: skip
    subprocess.run(command, check=False, stdout=sys.stderr, cwd=ROOT)
    return json.loads(path.read_text())[topology]


def distinct_rows(per_chip: int) -> float:
  """u: the distinct rows expected among the ids of one chip."""
  return sum(
    size * (1 - (1 - 1 / size) ** (per_chip * valency))
    for size, valency in zip(CONFIG["vocabulary_sizes"], CONFIG["valencies"], strict=True)
  )


def line(report: dict[str, Any], per_chip: int) -> dict[str, Any]:
  """What one topology exchanges per chip and step, in bytes."""
  n = report["devices"]
  if report["problems"] or report["batch_size"] != per_chip * n:
    raise SystemExit(f"{report['topology']}: {report['problems'] or 'another batch size'}")
  sent = {"ids": 0, "rows": 0, "dense and control": 0}
  for c in report["collectives"]:
    if c["count"] is not None:
      rows = "rows" if set(c["dtypes"]) == {"f32"} else "ids"
      kind = rows if c["op"] == "all-to-all" else "dense and control"
      sent[kind] += c["count"] * c["sent"]
  others, u = (n - 1) / n, distinct_rows(per_chip)
  least = {"ids": u * others * 4, "rows": u * others * 2 * 4 * CONFIG["dim"]}
  return {
    "topology": report["topology"],
    "chips": n,
    "batch_size": report["batch_size"],
    "ids_per_chip": per_chip * sum(CONFIG["valencies"]),
    "distinct_rows_per_chip": u,
    "sent_bytes": sent,
    "least_bytes": least,
    "rows_over_least": sent["rows"] / least["rows"],
    "extra_rounds_bytes": sum(
      c["instructions"] * c["sent"] for c in report["collectives"] if c["count"] is None
    ),
    "needed_bytes": report["memory"]["needed"],
    "compile_seconds": report["compile_seconds"],
    "versions": report["versions"],
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--topologies", nargs="+", default=["v5p:2x2x2", "v5p:4x4x4", "v5p:8x8x8"])
  parser.add_argument("--per_chip", type=int, default=1_024, help="examples of a chip")
  parser.add_argument("--timeout", type=float, default=1_200, help="seconds for a topology")
  parser.add_argument(
    "--reports", type=Path, nargs="*", default=[], help="files of recipes.aot --json"
  )
  parser.add_argument("--json", type=Path, help="write the figures there")
  args = parser.parse_args()

  found = {name: r for path in args.reports for name, r in json.loads(path.read_text()).items()}
  print(f"{args.per_chip:,} examples a chip; MiB that a chip sends per step\n")
  print(f"{'':12s} {'chips':>6s} {'ids':>8s} {'rows':>8s} {'least':>8s} {'ratio':>6s} "
        f"{'dense':>8s} {'memory':>9s}")  # fmt: skip
  lines = []
  for topology in args.topologies:
    chips = 1
    for side in topology.partition(":")[2].split("x"):
      chips *= int(side)
    report = found.get(topology) or compiled(topology, chips, args.per_chip, args.timeout)
    lines.append(line(report, args.per_chip))
    x, mib = lines[-1], lambda value: f"{value / MIB:8.1f}"
    print(
      f"{topology:12s} {x['chips']:6d} {mib(x['sent_bytes']['ids'])} "
      f"{mib(x['sent_bytes']['rows'])} {mib(x['least_bytes']['rows'])} "
      f"{x['rows_over_least']:6.2f} {mib(x['sent_bytes']['dense and control'])} "
      f"{x['needed_bytes'] / MIB:9,.0f}",
      flush=True,
    )
  if args.json:
    results = {"settings": {"per_chip": args.per_chip}, "results": lines}
    args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
  main()
