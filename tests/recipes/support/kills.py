"""Processes that are killed while files are written."""

import os
import signal
import sys

STEPS = ("open", "os.mkdir", "os.link", "os.symlink", "os.rename", "os.remove", "os.rmdir")


def kill_at(step, part=""):
  """Kills this process before it opens or changes a file for the given time; -1 never.

  Returns an iterator of the number of the next step.

  Args:
    step: the number of the step, from 0.
    part: of the paths of the files that count.
  """
  steps = iter(range(1 << 30))

  def hook(event, args):
    if event in STEPS and part in str(args[0]) and next(steps) == step:
      os.kill(os.getpid(), signal.SIGKILL)

  sys.addaudithook(hook)
  return steps
