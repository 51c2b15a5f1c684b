"""Processes that are killed, and disks that are full, while files are written."""

import contextlib
import os
import resource
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


@contextlib.contextmanager
def full_disk(size):
  """Writing a byte after the first `size` bytes of a file raises OSError."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
