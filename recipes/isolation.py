"""Tasks in a process of their own, whose end is not the run's: a native library may crash there.

The process computes on the CPU, because the run holds the accelerators.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

from .errors import UserError


class Outcome(NamedTuple):
  """The JSON value of a task, or why there is none."""

  value: Any = None
  failure: str | None = None


def outcomes(tasks: Mapping[str, Callable[[], Any]]) -> Iterator[Outcome]:
  """Yields the outcomes of the tasks, in their order; never raises an error of a task.

  One process runs them all. Where it dies, another one goes on with the task after.

  Args:
    tasks: functions of modules, or `functools.partial`s of such with arguments that can be pickled.
  """
  left = list(tasks.values())
  while left:
    try:
      payload = pickle.dumps(left)
    except Exception as error:
      yield from (Outcome(failure=f"it cannot be sent to another process: {error}") for _ in left)
      return
    process, answers = _start(payload)
    try:
      for line in answers:
        if not line.endswith(b"\n"):
          break
        left.pop(0)
        yield Outcome(**json.loads(line))
      status = process.wait()
      if left:
        left.pop(0)
        yield Outcome(failure=_ended(status))
    finally:
      answers.close()
      process.kill()
      process.wait()


def _start(payload: bytes) -> tuple[subprocess.Popen, BinaryIO]:
  reading, writing = os.pipe()
  path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
  with tempfile.TemporaryFile() as asked:
    asked.write(payload)
    asked.seek(0)
    process = subprocess.Popen(
      [sys.executable, "-m", __name__, str(writing)],
      stdin=asked,
      pass_fds=(writing,),
      env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
    )
  os.close(writing)
  return process, os.fdopen(reading, "rb")


def _ended(status: int) -> str:
  if status >= 0:
    return f"its process ended with status {status}"
  name = signal.Signals(-status).name
  why = ", probably because memory ran out" if name == "SIGKILL" else ""
  return f"its process was ended by {name}{why}"


def _main() -> None:
  # Ctrl-C reaches all processes of a terminal; the run ends this one.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  with os.fdopen(int(sys.argv[1]), "w") as answers:
    for task in pickle.load(sys.stdin.buffer):
      try:
        answer = json.dumps({"value": task()}, allow_nan=False)
      except Exception as error:
        if not isinstance(error, UserError):
          traceback.print_exc()
        answer = json.dumps({"failure": f"{type(error).__name__}: {error}"})
      answers.write(answer + "\n")
      answers.flush()


if __name__ == "__main__":
  _main()
