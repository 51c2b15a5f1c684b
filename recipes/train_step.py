"""The compiled training step, pipelined or not."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx

import embed


def make_train_step(loss_fn: Callable[[Any, Any], jax.Array]) -> Callable[..., jax.Array]:
  """Returns the compiled `(model, optimizer, batch) -> loss`, which trains both in place."""

  # Donation lets the tables be updated in their own memory; without it a step copies every table.
  @nnx.jit(donate_argnames=("model", "optimizer"))
  def train_step(model, optimizer, batch):
    loss, grads = embed.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss

  return train_step


def make_pipelined_step(loss_fn: Callable[[Any, Any], jax.Array]) -> Callable[..., Any]:
  """Returns the compiled `(model, optimizer, ahead, batch, next_batch) -> (loss, ahead)`.

  It trains on `batch`, whose lookups are `ahead` (None: not made yet), and looks up `next_batch`
  (None: there is none) without this step's update; see `embed.look_ahead`.
  """

  @nnx.jit(donate_argnames=("model", "optimizer"))
  def train_step(model, optimizer, ahead, batch, next_batch):
    loss, grads = embed.value_and_grad(loss_fn, ahead=ahead)(model, batch)
    ahead = None if next_batch is None else embed.look_ahead(loss_fn)(model, next_batch)
    optimizer.update(model, grads)
    return loss, ahead

  return train_step


class Steps:
  """Takes one step after another, pipelined or not."""

  def __init__(self, loss_fn: Callable, batches: Iterator[Any], pipelined: bool):
    make = make_pipelined_step if pipelined else make_train_step
    self._step, self._batches, self._pipelined = make(loss_fn), batches, pipelined
    self._pending: Any = None  # the batch that was looked up ahead
    self._ahead: embed.Ahead | None = None

  def take(self, state: Mapping[str, Any], pause: bool) -> jax.Array:
    """Trains on the next batch; returns its loss. At a pause nothing is left pending."""
    args = state["model"], state["optimizer"]
    if not self._pipelined:
      return self._step(*args, next(self._batches))
    batch = next(self._batches) if self._ahead is None else self._pending
    self._pending = None if pause else next(self._batches)
    loss, self._ahead = self._step(*args, self._ahead, batch, self._pending)
    return loss
