"""Preemption: a machine that is about to be taken away sends SIGTERM, and the run saves and ends.

Slurm, Kubernetes and the clouds send the signal some seconds, 30 as a rule, before SIGKILL.
"""

import signal
import threading
from types import FrameType

import jax
from jax.experimental import multihost_utils

from ..errors import Preempted


class Notice:
  """Handles SIGTERM in a run; a context manager.

  The handler is set where it may be: in the main thread of a process that is alone. Of several
  processes each has JAX's handler, by which the one that gets the signal tells all.

  Attributes:
    is_deferred: whether a signal is remembered until the run asks for it, between two steps; else
      it raises `Preempted` at once, for work of which nothing has to be saved.
  """

  def __init__(self) -> None:
    self.is_deferred, self._received = False, False

  def __enter__(self) -> "Notice":
    self._is_set = jax.process_count() == 1
    self._is_set &= threading.current_thread() is threading.main_thread()
    if self._is_set:
      self._previous = signal.signal(signal.SIGTERM, self._receive)
    return self

  def __exit__(self, *unused: object) -> None:
    if self._is_set:
      signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)

  def _receive(self, number: int, frame: FrameType | None) -> None:
    if not self.is_deferred:
      raise Preempted
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
