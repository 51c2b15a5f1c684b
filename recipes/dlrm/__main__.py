"""Command line of the recipe; `--helpfull` lists the flags."""

import functools
import sys
from pathlib import Path

from .. import errors, main

_AOT = main.flags.DEFINE_list(
  "aot",
  [],
  "TPU topologies, as v5p:4x4x4: instead of training, compile the step for them and report memory "
  "and exchanges. Needs libtpu, but no TPU and, for most configs, no data.",
)
_AOT_JSON = main.flags.DEFINE_string(
  "aot_json", None, "--aot's report; default: <workdir>/aot.json."
)
_AOT_TIMEOUT = main.flags.DEFINE_float(
  "aot_timeout", 1200.0, "Seconds that --aot may take a topology."
)


def _run(config, workdir: str) -> None:
  if not _AOT.value:
    main.train("dlrm", config, workdir)
    return
  with errors.importing():
    from .. import aot
    from . import shapes

  path = Path(_AOT_JSON.value or Path(workdir) / "aot.json")
  parts = functools.partial(shapes.parts, config)
  sys.exit(aot.main(__package__, _AOT.value, parts, path, timeout=_AOT_TIMEOUT.value))


_program = main.program("dlrm", _run)

if __name__ == "__main__":
  _program()
