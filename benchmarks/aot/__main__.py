"""Compiles a recipe's training step for TPUs or GPUs without having any, and reports on it.

    python -m benchmarks.aot dlrm/criteo_1tb --devices v5p:4x4x4 h100:8 --json=aot.json

The step is the one that training compiles; model and optimizer are shapes. Nothing runs, so the
report has no times of a step. The status is 1 if a report names a problem. Needs the extra `tpu`
or `cuda`, and no device.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

from . import report as report_lib
from .compile import without_devices


def main() -> int:
  parser = common.parser(__doc__)
  parser.prog = f"python -m {__package__}"
  parser.add_argument("config", help="<recipe>/<config>[:mode], as in configs/")
  parser.add_argument("--set", nargs="*", default=[], help="settings of the config, name=value")
  parser.add_argument("--devices", nargs="+", required=True, help="v5p:4x4x4, v6e:16x16, h100:8x8")
  args = parser.parse_args()
  without_devices()
  reports = {}
  for topology in args.devices:
    print(f"compiling for {topology} ...", file=sys.stderr, flush=True)
    config = common.load(args.config, args.set)
    report = report_lib.inspect(topology, args.config.partition("/")[0], config)
    reports[topology] = {"topology": topology, "versions": common.versions()} | report
    print(report_lib.text(reports[topology]), flush=True)
    if args.json:  # after each, since the compiler may end the process
      args.json.write_text(json.dumps(reports, indent=1) + "\n")
  return int(any(report["problems"] for report in reports.values()))


if __name__ == "__main__":
  sys.exit(main())
