"""Preemption: a machine that is about to be taken away sends SIGTERM, and the run saves and ends.

Slurm, Kubernetes and the clouds send the signal some seconds, 30 as a rule, before SIGKILL.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import jax
from jax.experimental import multihost_utils

from .errors import Preempted


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
  """Handles SIGTERM within, where a handler may be set: the main thread of a process that is alone.

  Of several processes each has JAX's handler, by which one that is told tells all.
  """
  alone = jax.process_count() == 1 and threading.current_thread() is threading.main_thread()
  if not alone:
    yield
    return
  previous = signal.signal(signal.SIGTERM, handler)
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)


def raised() -> contextlib.AbstractContextManager[None]:
  """Raises `Preempted` within at SIGTERM, for work of which nothing has to be saved."""

  def handler(number: int, frame: FrameType | None) -> None:
    raise Preempted

  return _handled_by(handler)


class Notice:
  """Remembers a SIGTERM until the run asks for it, between two steps; a context manager."""

  def __init__(self) -> None:
    self._stack = contextlib.ExitStack()
    self._received = False

  def __enter__(self) -> "Notice":
    self._stack.enter_context(_handled_by(self._receive))
    return self

  def __exit__(self, *unused: object) -> None:
    self._stack.close()

  def _receive(self, number: int, frame: FrameType | None) -> None:
    self._received = True

  def is_due(self, step: int) -> bool:
    """Returns whether to save and end: the same in every process.

    Every process asks before every step. JAX lets all of them go on to the same step.

    Args:
      step: the number of steps taken, from the same one in every process.
    """
    if jax.process_count() == 1:
      return self._received
    return multihost_utils.reached_preemption_sync_point(step)
