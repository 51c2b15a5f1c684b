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

Needs libtpu (the `tpu` extra), no TPU, and some minutes a topology.
"""

import math
from typing import Any

import common
from aot import compile as aot
from aot import report as report_lib
from common import MIB

TOPOLOGIES = ("v5p:2x2x2", "v5p:4x4x4", "v5p:8x8x8")
PER_CHIP = 1_024  # examples of a chip


def distinct_rows(config: Any) -> float:
  """u: the distinct rows expected among the ids of one chip."""
  return sum(
    size * (1 - (1 - 1 / size) ** (PER_CHIP * valency))
    for size, valency in zip(config.vocabulary_sizes, config.valencies, strict=True)
  )


def line(topology: str) -> dict[str, Any]:
  """What one topology exchanges per chip and step, in bytes."""
  n = math.prod(map(int, topology.partition(":")[2].split("x")))
  config = common.load("dlrm/criteo_1tb", [f"batch_size={PER_CHIP * n}"])
  report = report_lib.inspect(topology, "dlrm", config)
  if report["problems"]:
    raise SystemExit(f"{topology}: {report['problems']}")
  sent = {"ids": 0, "rows": 0, "dense and control": 0}
  for c in report["collectives"]:
    if c["count"] is not None:
      rows = "rows" if set(c["dtypes"]) == {"f32"} else "ids"
      kind = rows if c["op"] == "all-to-all" else "dense and control"
      sent[kind] += c["count"] * c["sent"]
  others, u = (n - 1) / n, distinct_rows(config)
  least = {"ids": u * others * 4, "rows": u * others * 2 * 4 * config.dim}
  return {
    "topology": topology,
    "chips": n,
    "batch_size": report["batch_size"],
    "ids_per_chip": PER_CHIP * sum(config.valencies),
    "distinct_rows_per_chip": u,
    "sent_bytes": sent,
    "least_bytes": least,
    "rows_over_least": sent["rows"] / least["rows"],
    "extra_rounds_bytes": sum(
      c["instructions"] * c["sent"] for c in report["collectives"] if c["count"] is None
    ),
    "needed_bytes": report["memory"]["needed"],
    "compile_seconds": report["compile_seconds"],
  }


def main() -> None:
  args = common.parser(__doc__).parse_args()
  aot.without_devices()
  print(f"{PER_CHIP:,} examples a chip; MiB that a chip sends per step\n")
  print(f"{'':12s} {'chips':>6s} {'ids':>8s} {'rows':>8s} {'least':>8s} {'ratio':>6s} "
        f"{'dense':>8s} {'memory':>9s}")  # fmt: skip
  lines = []
  for topology in TOPOLOGIES:
    lines.append(line(topology))
    x, mib = lines[-1], lambda value: f"{value / MIB:8.1f}"
    print(
      f"{topology:12s} {x['chips']:6d} {mib(x['sent_bytes']['ids'])} "
      f"{mib(x['sent_bytes']['rows'])} {mib(x['least_bytes']['rows'])} "
      f"{x['rows_over_least']:6.2f} {mib(x['sent_bytes']['dense and control'])} "
      f"{x['needed_bytes'] / MIB:9,.0f}",
      flush=True,
    )
  common.write(args.json, {"settings": {"per_chip": PER_CHIP}, "results": lines})


if __name__ == "__main__":
  main()
