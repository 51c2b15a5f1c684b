"""A trace of a few training steps, for TensorBoard or XProf: where a step spends its time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from .. import hosts
from ..errors import UserError
from . import settings

FOLDER = "profile"  # in the workdir


def check(config) -> tuple[int, int] | None:
  """Returns the first and the last step to trace, counted from 1; None traces nothing.

  Raises:
    UserError: `config.profile_steps` is neither empty nor two steps of the run in order.
  """
  steps = tuple(settings.value(config, "profile_steps"))
  if not steps:
    return None
  whole = all(isinstance(step, int) and not isinstance(step, bool) for step in steps)
  if not whole or len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
    raise UserError(
      f"profile_steps is {steps}: write the first and the last step to trace, as (10, 15), or ()"
    )
  if config.steps and steps[0] > config.steps:
    raise UserError(
      f"profile_steps is {steps}, and the run has {config.steps} steps: choose earlier ones"
    )
  return steps[0], steps[1]


class Profile:
  """Writes a trace of steps `first` to `last` of a run.

  Args:
    folder: of the trace.
    steps: the first and the last step, counted from 1, as `check` returns them; None traces
      nothing. In a run of several processes, the main one traces itself.
  """

  def __init__(self, folder: Path, steps: tuple[int, int] | None):
    self._folder, self._steps = folder, steps if hosts.is_main() else None
    self._is_running = False

  @contextmanager
  def step(self, number: int) -> Iterator[list[Any]]:
    """Traces step `number` if it is one of those wanted.

    Yields a list for the arrays that the step computes: the trace ends when the last of them is
    there, since steps run while Python goes on.
    """
    results: list[Any] = []
    if self._steps is None or not self._steps[0] <= number <= self._steps[1]:
      yield results
      return
    if not self._is_running:
      jax.profiler.start_trace(self._folder)
      self._is_running = True
    with jax.profiler.StepTraceAnnotation("train", step_num=number):
      yield results
    if number == self._steps[1]:
      jax.block_until_ready(results)
      self.close()

  def close(self) -> None:
    """Writes the trace if the run ends before its last step."""
    if self._is_running:
      self._is_running = False
      jax.profiler.stop_trace()
      hosts.say(f"profile: tensorboard --logdir={self._folder}")
