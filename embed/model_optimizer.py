"""`Optimizer` steps a whole model, and `jit_step` compiles the step around it."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from embed.gradients import Grads, Owner, Rows
from embed.layer import SparseEmbed, moving, row_keys, sparse_embeds, step_stacks
from embed.optimizers import RowOptimizer

_HOLDING_BACK = ("MultiStepsState", "ApplyEvery", "ConditionallyMaskState", "ApplyIfFiniteState")


class Optimizer(nnx.Module):
  """Applies `embed.Grads`: optax to every `nnx.Param`, each table's own optimizer to its rows.

  `step` counts updates from 0 and drives the tables' schedules. `dense` is the `nnx.Optimizer` that
  runs optax. Slots are in the model. `embed.checkpoint` saves all of these.

  Args:
    model: the module to train.
    tx: an optax transformation for the dense parameters. One that holds updates back, such as
      `optax.MultiSteps`, raises ValueError, since the tables would step at every call.
  """

  def __init__(self, model: nnx.Module, tx: optax.GradientTransformation):
    if isinstance(tx, RowOptimizer):
      raise TypeError(
        "embed.Optimizer takes an optax transformation for the dense parameters, such as "
        f"optax.adam(1e-3), got embed.{tx.name}. Give that to embed.TableConfig or SparseEmbed."
      )
    self.dense = nnx.Optimizer(model, tx, wrt=nnx.Param)
    _refuse_holding_back(self.dense.opt_state)

  @property
  def step(self) -> nnx.Variable:
    """The number of updates so far, an `nnx.Variable` that holds an unsigned scalar."""
    return self.dense.step

  @jax.named_scope("update")
  def update(self, model: nnx.Module, grads: Grads, **kwargs: Any) -> None:
    """Updates dense parameters and tables once, or raises before anything has changed.

    Args:
      model: the module given at construction.
      grads: from `embed.value_and_grad`, with an entry for every table; they may be clipped,
        scaled or accumulated. Anything but `embed.Grads` raises TypeError.
      **kwargs: arguments for the optax transformation, such as `value=loss`.
    """
    if not isinstance(grads, Grads):
      raise TypeError(
        f"embed.Optimizer.update takes embed.Grads, got {type(grads)}: the tables would not be "
        "trained. Write `loss, grads = embed.value_and_grad(loss_fn)(model, ...)` instead of "
        "nnx.value_and_grad or jax.value_and_grad."
      )
    tables = row_keys(model)
    if not isinstance(grads.rows, Rows) or set(tables) != set(grads.rows):
      raise ValueError(
        f"The gradients hold rows of {sorted(grads.rows)}, but the model's tables are "
        f"{sorted(tables)}. Take them with embed.value_and_grad of this model, and change them by "
        "grads.map."
      )
    rows = grads.rows.checked()
    step = jnp.asarray(self.step[...], jnp.int32)
    steps = [
      (layer, _by_stack(layer, path, rows), step) for path, layer in sparse_embeds(model).items()
    ]
    for of_layer in steps:
      moving(*of_layer)  # raises before any layer has stepped
    # Optax's arithmetic relies on standard dtype promotion.
    with jax.numpy_dtype_promotion("standard"):
      self.dense.update(model, grads.dense, **kwargs)
    for of_layer in steps:
      step_stacks(*of_layer)


def _by_stack(layer: SparseEmbed, path: Any, rows: Rows) -> dict[str, Any]:
  """A layer's gradients by stack, except for stacks with neither ids nor an optimizer."""
  grads = {}
  for name, stack in layer.spec.stacks.items():
    owner = Owner(path, name)
    if rows.stacks.get(owner) != stack:
      raise ValueError(
        f"The row gradients of table {stack.tables[0]!r} are of another model, or of one with "
        "another config. Take them with embed.value_and_grad of this model."
      )
    if rows.grads[owner] or stack.optimizer is not None:
      grads[name] = rows.grads[owner]
  return grads


def _refuse_holding_back(state: Any) -> None:
  name_of = lambda x: type(x).__name__
  parts = jax.tree.leaves(state, is_leaf=lambda x: name_of(x) in _HOLDING_BACK)
  for name in set(map(name_of, parts)) & {*_HOLDING_BACK}:
    raise ValueError(
      f"embed.Optimizer steps tables at every update, and optax's {name.removesuffix('State')} "
      "would hold the dense parameters back. Instead, sum the gradients of microbatches with "
      "embed.accumulate, or decide on the host whether to call update."
    )


def jit_step(step: Callable[..., Any], *modules: nnx.Module) -> Callable[..., Any]:
  """Compiles a training step and binds it to the modules that it trains.

  Modules are flattened once, whereas `nnx.jit` flattens them at every call; they are donated, so
  that tables are updated in place.

  Args:
    step: `f(*modules, *args, **kwargs)`, which may return any tree of arrays.
    *modules: the model, its optimizer, and any other module that the step changes. The compiled
      step sees new values of their Variables, as from a restored checkpoint, but neither a
      submodule that is replaced nor a later `model.eval()`.

  Returns:
    `f(*args, **kwargs)`, which changes the modules in place. Its arguments must not hold modules.

  >>> table = embed.TableConfig(vocabulary_size=10, dim=2, optimizer=embed.sgd(0.1), name="t")
  >>> model = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  >>> optimizer = embed.Optimizer(model, optax.adam(1e-3))
  >>> def train_step(model, optimizer, ids):
  ...   loss, grads = embed.value_and_grad(lambda m, ids: (m(ids) ** 2).sum())(model, ids)
  ...   optimizer.update(model, grads)
  ...   return loss
  >>> step = embed.jit_step(train_step, model, optimizer)
  >>> loss = step(jnp.array([3, 3]))
  """
  bound = nnx.jit_partial(step, *modules, donate_argnums=0, graph_updates=False)
  variables = [x for _, x in nnx.iter_graph(modules) if isinstance(x, nnx.Variable)]
  returned: list[Any] = []  # the values that the last step returned: none is shared

  @functools.wraps(step)
  def compiled(*args: Any, **kwargs: Any) -> Any:
    values = [x.get_raw_value() for x in variables]
    if not returned or any(map(operator.is_not, values, returned)):
      _unshare(variables)
    del values
    returned.clear()  # a table that was replaced must not stay in memory during the step
    out = bound(*args, **kwargs)
    returned.extend(x.get_raw_value() for x in variables)
    return out

  return compiled


def _unshare(variables: Sequence[nnx.Variable]) -> None:
  """Copies arrays that several Variables share, such as parameters and their initial average.

  XLA accepts a donated array only once.
  """
  held: set[int] = set()
  for variable in variables:
    value = variable.get_raw_value()
    ids = set(map(id, jax.tree.leaves(value)))
    if held & ids:
      variable.set_raw_value(jax.tree.map(jnp.copy, value))
    held |= ids
