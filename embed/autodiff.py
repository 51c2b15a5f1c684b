"""`value_and_grad` and `look_ahead`: a loss traced once, then run with a tap at every lookup.

The traced loss is a program whose inputs are the parameters and the tables of the model.
`engine.taps` finds the model's lookups in it, and runs it with a tap at each of them.
Differentiating with respect to the parameters and the taps gives dense gradients and the gradients
of all activations; the records of the lookups are outputs of the program.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from embed.engine import jax_internals, mesh, taps
from embed.engine.grads import ActivationGrads
from embed.engine.stack import StackSpec
from embed.engine.taps import Feed, Lookup, Owner, Source
from embed.gradients import Grads, Rows
from embed.layer import SparseEmbed, before_update
from embed.variables import SlotVariable, Table, changing

_STORED = nnx.Any(Table, SlotVariable)


# --- the model around it -------------------------------------------------------------------------


def sparse_embeds(model: Any) -> dict[str, SparseEmbed]:
  """Every `SparseEmbed` of a model by its path, "a/b"; a shared layer has its first path."""
  layers: dict[str, SparseEmbed] = {}
  for path, module in nnx.iter_modules(model):
    if isinstance(module, SparseEmbed):
      name = "/".join(map(str, path))
      if name in layers:
        raise ValueError(
          f"Two SparseEmbed layers of the model have the path {name!r}. Rename one of the keys "
          'that have a "/" in them.'
        )
      layers[name] = module
  return layers


def row_keys(model: Any) -> dict[str, tuple[SparseEmbed, str]]:
  """The module and table of each key of `Grads.rows` and of checkpoints."""
  keys: dict[str, tuple[SparseEmbed, str]] = {}
  paths: dict[str, str] = {}
  for path, module in sparse_embeds(model).items():
    for name in module.spec.tables:
      key = Owner(path, name).key
      if key in keys:
        raise ValueError(
          f"Two tables of the model have the key {key!r} of gradients and checkpoints: table "
          f"{keys[key][1]!r} of the layer at {paths[key]!r}, and table {name!r} of the layer at "
          f"{path!r}. Rename one of the tables, in its TableConfig."
        )
      keys[key], paths[key] = (module, name), path
  return keys


def _has_node(arg: Any) -> bool:
  is_node = lambda value: isinstance(value, nnx.Pytree)
  return any(map(is_node, jax.tree.leaves(arg, is_leaf=is_node)))


def _refuse_sharing(layers: dict[str, SparseEmbed], nodes: dict[Any, Any]) -> None:
  """Raises ValueError if the loss gets a layer twice: one of two copies would not be trained."""
  own = {id(layer) for layer in layers.values()}
  for name, node in nodes.items():
    for _, module in nnx.iter_modules(node):
      if id(module) in own:
        raise ValueError(
          f"Argument {name!r} of the loss holds a SparseEmbed of the model, whose row gradients "
          "from there would be lost. Use the one inside the model."
        )


class _Split(NamedTuple):
  """An NNX object split into a graph, states, and its tables and slots as a list."""

  graphdef: Any
  states: tuple[Any, ...]
  stored: list[tuple[Any, nnx.Variable]]  # (path, Variable)

  @classmethod
  def of(cls, node: Any, *filters: Any) -> "_Split":
    graphdef, stored, *states = nnx.split(node, _STORED, *filters, ...)
    return cls(graphdef, tuple(states), list(nnx.to_flat_state(stored)))

  @property
  def arrays(self) -> list[jax.Array]:
    return [variable.get_value() for _, variable in self.stored]

  def merge(self, arrays: Sequence[jax.Array], *states: Any) -> Any:
    """A copy of the object with other arrays, and with `states` in place of the first states."""
    pairs = zip(self.stored, arrays, strict=True)
    stored = nnx.from_flat_state([(path, v.replace(array)) for (path, v), array in pairs])
    return nnx.merge(self.graphdef, stored, *states, *self.states[len(states) :], copy=True)

  def sources(self, layers: dict[str, SparseEmbed]) -> list[Source]:
    """The source of each array. `layers` are the model's by path; other objects pass none."""
    of_layers = {
      (path, stack, name): Source(Owner(path, stack), name)
      for path, layer in layers.items()
      for stack in layer.spec.stacks
      for name in layer.arrays[stack]
    }
    # An array in no layer, such as an average of a table that a module keeps, is an ordinary one.
    return [of_layers.get(_array_key(path), Source(None, "")) for path, _ in self.stored]


def _array_key(path: tuple[Any, ...]) -> tuple[str, str, str]:
  """The layer's path, the stack and the name of an array, from its path in the model's state."""
  names = list(map(str, path))
  return "/".join(names[:-3]), "".join(names[-2:-1]), names[-1]


class _Loss:
  """A loss traced for a model and arguments, as a program of the model's parameters."""

  def __init__(self, loss_fn: Callable[..., Any], has_aux: bool, model: Any, args, kwargs):
    if not isinstance(model, nnx.Module):
      raise TypeError(
        "The loss is differentiated with respect to its first argument, which must be an "
        f"nnx.Module. Got {type(model)}."
      )
    inputs = dict(enumerate(args)) | kwargs
    nodes = {i: arg for i, arg in inputs.items() if _has_node(arg)}
    self.model, self.nodes, self.layers = model, nodes, sparse_embeds(model)
    _refuse_sharing(self.layers, nodes)
    self.stacks = {
      Owner(path, stack.name): stack
      for path, layer in self.layers.items()
      for stack in layer.spec.stacks.values()
    }
    whole = _Split.of(model, nnx.Param)
    split_nodes = {i: _Split.of(arg) for i, arg in nodes.items()}
    self.params, self.stored = whole.states[0], whole.arrays
    self.stored_of_nodes = {i: split.arrays for i, split in split_nodes.items()}
    inputs = {i: x for i, x in inputs.items() if i not in nodes}
    spread = any(not stack.placement.is_local for stack in self.stacks.values())
    typed = mesh.current_mesh() is not None or mesh.is_explicit((self.params, self.stored))
    if spread and not typed:  # the model is on Auto axes
      inputs = mesh.without_types(inputs)

    def pure(params, stored, stored_of_nodes):
      copy = whole.merge(stored, params)
      merged = {i: split.merge(stored_of_nodes[i]) for i, split in split_nodes.items()}
      given = inputs | merged
      out = loss_fn(copy, *(given[i] for i in range(len(args))), **{k: given[k] for k in kwargs})
      loss, aux = _checked(out, has_aux)
      changed = nnx.state(copy, nnx.Not(nnx.Any(nnx.Param, _STORED)))
      after = [v.get_value() for _, v in nnx.to_flat_state(nnx.state(copy, _STORED))]
      return loss, aux, changed, {i: nnx.state(arg) for i, arg in merged.items()}, after

    trace = jax.make_jaxpr(pure, return_shape=True)
    closed, self._shapes = trace(*self._inputs(self.params))
    of_nodes = [source for split in split_nodes.values() for source in split.sources({})]
    self._find_lookups(closed, whole.sources(self.layers), of_nodes)

  def _inputs(self, params: Any) -> tuple[Any, ...]:
    return params, self.stored, self.stored_of_nodes

  def _find_lookups(self, closed: Any, own: list[Source], of_nodes: list[Source]) -> None:
    """Finds the lookups; raises ValueError for a use of a table that would lose a gradient."""
    params = [None] * len(jax.tree.leaves(self.params))
    self.program = taps.Program(closed, [*params, *own, *of_nodes], self.stacks)
    self.lookups = self.program.lookups
    if own:
      for source, after in zip(own, self.program.outputs[-len(own) :], strict=True):
        if source != after:
          raise self.program.error(source, taps.CHANGED)
    _warn_about_outside_layers(self.program.outside, self.layers)

  def run(self, params: Any, feeds: list[Feed]) -> tuple[Any, list[Lookup]]:
    """Returns `(loss, aux, state of the model, state of other nodes)`, and the lookups."""
    out, lookups = self.program.run(jax.tree.leaves(self._inputs(params)), feeds)
    out = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in out]  # no literals
    return jax.tree.unflatten(jax.tree.structure(self._shapes), out)[:-1], lookups

  def specs(self, lookups: Sequence[Any]) -> tuple[Any, ...]:
    """The static spec of each lookup's layer; equal for copies of a layer or of its config."""
    return tuple(self.layers[made.owner.path].spec for made in lookups)

  def update(self, changed: Any, node_states: dict[Any, Any]) -> None:
    """Writes the state that the loss changed back into the model and the other nodes."""
    with changing("embed.value_and_grad, which keeps what the loss changes,"):
      nnx.update(self.model, changed)
      for i, node in self.nodes.items():
        nnx.update(node, node_states[i])


def _warn_about_outside_layers(eqns: Sequence[Any], layers: dict[str, SparseEmbed]) -> None:
  """Warns of lookups in layers that the loss does not get as an argument."""
  names: dict[Any, list[str]] = {}
  for eqn in eqns:
    names.setdefault(eqn.params["layer"], []).extend(taps.record_of(eqn).tables)
  for layer, tables in names.items():
    table = ", ".join(map(repr, dict.fromkeys(tables)))
    if any(layer.ref() is module for module in layers.values()):
      raise ValueError(
        f"The loss looks up table {table} in the model around it, not in the one that it gets as "
        "its first argument, so no gradient would come back. Use the argument."
      )
    if layer.trains:
      warnings.warn(
        f"The loss looks up table {table} in a SparseEmbed that is not in its first argument: the "
        "rows are constants here and get no gradient. Use the layer in the model that the loss "
        "gets. To keep the layer fixed, give its tables optimizer=embed.frozen(), or pass it to "
        "the loss as another argument.",
        stacklevel=6,
      )


def _checked(out: Any, has_aux: bool) -> tuple[jax.Array, Any]:
  """The loss and aux that a loss function returned."""
  if isinstance(out, tuple) != has_aux:
    wanted = "(loss, aux)" if has_aux else "a scalar; for (loss, aux) pass has_aux=True"
    raise TypeError(f"With has_aux={has_aux} the loss must return {wanted}. Got {type(out)}.")
  loss, aux = out if has_aux else (out, None)
  dtype = jnp.result_type(loss)
  if jnp.shape(loss) or not jnp.issubdtype(dtype, jnp.floating):
    raise TypeError(f"The loss must be a float scalar, got shape {jnp.shape(loss)} of {dtype}.")
  return loss, aux


def value_and_grad(
  loss_fn: Callable[..., Any], has_aux: bool = False, *, ahead: "Ahead | None" = None
) -> Callable[..., Any]:
  """The value of a loss and its gradients: of every `nnx.Param`, and of the rows of tables.

  Args:
    loss_fn: `f(model, *args)` returning a scalar, or `(scalar, aux)`. Its model is traced, as
      under jit: `aux` must consist of arrays, and Python code cannot branch on what the model
      returns. Arguments are values: outside of jit, an id out of range raises.
    has_aux: whether `loss_fn` returns `(scalar, aux)`.
    ahead: the lookups of this call, if `look_ahead` has made them already.

  Returns:
    `f(model, *args)` returning `(loss, Grads)`, or `((loss, aux), Grads)`. Changes that the loss
    makes to the model's other state (batch statistics, random counters, `report`) are kept; changes
    to any `nnx.Param` and to Python attributes are not. If `ahead` was made for other ids than
    this call has, the loss is NaN and all gradients are 0.

  Raises:
    ValueError: when called, if the gradient of a lookup would be lost (under scan, vmap, ...), if
      the loss reads, replaces or updates rows other than by a lookup, if it looks up in the model
      outside instead of its first argument, or if `ahead` was made for another loss or model, or
      for inputs of another shape.
    TypeError: if the first argument is not an `nnx.Module`, or the loss is not a float scalar.

  Warns:
    UserWarning: if the loss looks up in a layer that it does not get as an argument: the rows of
      that layer are constants.

  >>> table = embed.TableConfig(vocabulary_size=10, dim=2, optimizer=embed.sgd(0.1), name="t")
  >>> layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  >>> loss, grads = embed.value_and_grad(lambda m, ids: m(ids).sum())(layer, jnp.array([3, 3]))
  >>> grads.rows["t"].ids.tolist(), grads.rows["t"].values.tolist()
  ([3, 10], [[2.0, 2.0], [0.0, 0.0]])
  """

  @mesh.explained()
  @functools.wraps(loss_fn)
  def wrapped(model: nnx.Module, *args: Any, **kwargs: Any) -> Any:
    traced = _Loss(loss_fn, has_aux, model, args, kwargs)
    stacks, lookups = traced.stacks, traced.lookups
    early = [None] * len(lookups) if ahead is None else ahead._of(traced)  # noqa: SLF001
    zeros = [[stacks[x.owner].placement.zeros(act) for act in x.activations or ()] for x in lookups]

    def tapped(params, zeros, early):
      feeds = [
        Feed(tap, None if ready is None else ready.activations)
        for tap, ready in zip(zeros, early, strict=True)
      ]
      (loss, *rest), made = traced.run(params, feeds)
      if ahead is not None:
        loss = jnp.where(_same_ids(stacks, made, early), loss, jnp.nan)
        made = early
      return loss, (rest, [x.record for x in made])

    differentiate = jax.value_and_grad(tapped, argnums=(0, 1), has_aux=True)
    value, (dense, cotangents) = differentiate(traced.params, zeros, early)
    loss, ((aux, *states), records) = value
    traced.update(*states)
    if traced.program.rereads:
      for layer in traced.layers.values():
        dense, cotangents = before_update(layer, (dense, cotangents))
    grads = Grads(dense, _rows(stacks, lookups, cotangents, records))
    return ((loss, aux), grads) if has_aux else (loss, grads)

  return wrapped


def _rows(stacks: dict[Owner, StackSpec], lookups, cotangents, records) -> Rows:
  """The row gradients of a model, from the activation gradients of all lookups."""
  by_stack: dict[Owner, list[ActivationGrads]] = {owner: [] for owner in stacks}
  for lookup, grads, record in zip(lookups, cotangents, records, strict=True):
    if record.used:
      by_stack[lookup.owner].append(ActivationGrads(tuple(grads), record))
  return Rows(by_stack, stacks)


# --- lookups ahead of their step -----------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ahead:
  """The lookups of a loss, made ahead of its step by `look_ahead`. A pytree.

  It passes through `nnx.jit`, and `value_and_grad(..., ahead=...)` takes it.
  """

  lookups: tuple[Lookup, ...]
  specs: tuple[Any, ...] = dataclasses.field(metadata={"static": True})  # of each one's layer

  def _of(self, traced: _Loss) -> list[Lookup]:
    """The lookups; raises ValueError if they do not fit the loss that gets them."""
    shapes = lambda tree: jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)
    lookups, specs = list(self.lookups), traced.specs(traced.lookups)
    if shapes(lookups) != shapes(traced.lookups) or self.specs != specs:
      raise ValueError(
        "`ahead` is of another loss or model, or of inputs of another shape. Write "
        "embed.look_ahead(loss_fn)(model, *args) with the loss and the arguments of the step that "
        "it is for; a last batch of another size needs a look ahead of its own."
      )
    return lookups


def _same_ids(stacks: dict[Owner, StackSpec], made: list[Lookup], early: list[Lookup]) -> jax.Array:
  """Whether lookups have the same ids as the lookups made ahead: a bool scalar."""
  same = jnp.bool_(True)
  for now, ahead in zip(made, early, strict=True):
    stack, record = stacks[now.owner], now.record
    for table, bags, bags_ahead in zip(record.tables, record.bags, ahead.record.bags, strict=True):
      same &= bags.equal(bags_ahead, stack.size(table))
  return same


def look_ahead(loss_fn: Callable[..., Any], has_aux: bool = False) -> Callable[..., Ahead]:
  """Makes the lookups of a loss ahead of the step that needs them, to overlap with another step.

  A step of pipelined training computes the gradients of this batch, looks up the next batch, and
  updates. The lookup does not depend on the gradients, so the two can run at the same time, and
  dense work hides the exchange of rows between devices. The lookup sees the tables without this
  step's update: the activations of step t are computed after the updates 0 .. t - 2. All updates
  are applied, once each, in order, to the newest tables (TensorFlow's
  `pipeline_execution_with_tensor_core`).

  The first look ahead overlaps with nothing, and the last step has nothing to look up ahead; a step
  without `ahead` is an ordinary step. Before a checkpoint or an evaluation, take a step that does
  not look ahead, and start again after it: then nothing is pending.

  Args:
    loss_fn: the loss, as for `value_and_grad`.
    has_aux: whether `loss_fn` returns `(scalar, aux)`.

  Returns:
    `f(model, *args)` returning the `Ahead` for `value_and_grad(loss_fn, ahead=...)(model, *args)`.
    It does not change the model. Under jit, only what the lookups need is computed. The step uses
    the ids and the user's weights of the look ahead, which holds the arrays of the batch: do not
    donate it to a step that gets the batch as well. If a lookup depends on random state, look ahead
    once for each step, after the step before it has drawn. Give a step the `Ahead` of its own
    model: models made of the same config objects are not told apart.

  Raises:
    ValueError: as `value_and_grad`, and for lookups in a branch of a conditional.

  >>> table = embed.TableConfig(vocabulary_size=10, dim=2, optimizer=embed.sgd(0.1), name="t")
  >>> model = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  >>> optimizer = embed.Optimizer(model, optax.sgd(0.1))
  >>> loss_fn = lambda model, ids: jnp.sum(model(ids) ** 2)
  >>> @nnx.jit(donate_argnames=("model", "optimizer"))
  ... def train_step(model, optimizer, ahead, ids, next_ids):
  ...   loss, grads = embed.value_and_grad(loss_fn, ahead=ahead)(model, ids)
  ...   ahead = embed.look_ahead(loss_fn)(model, next_ids)  # before the update
  ...   optimizer.update(model, grads)
  ...   return loss, ahead
  >>> batches = jnp.array([[3, 3], [3, 4], [5, 5]])
  >>> ahead = embed.look_ahead(loss_fn)(model, batches[0])
  >>> for ids, next_ids in zip(batches[:-1], batches[1:]):
  ...   loss, ahead = train_step(model, optimizer, ahead, ids, next_ids)
  >>> loss, grads = embed.value_and_grad(loss_fn, ahead=ahead)(model, batches[-1])
  >>> optimizer.update(model, grads)
  """

  @mesh.explained()
  @functools.wraps(loss_fn)
  def wrapped(model: nnx.Module, *args: Any, **kwargs: Any) -> Ahead:
    traced = _Loss(loss_fn, has_aux, model, args, kwargs)
    run = lambda params: traced.run(params, [Feed(None)] * len(traced.lookups))[1]
    lookups = run(traced.params)
    ordered = []
    for made in lookups:
      activations = before_update(traced.layers[made.owner.path], made.activations)
      if not jax_internals.is_traced(activations):  # the table itself may be among them
        activations = list(map(jnp.copy, activations))
      ordered.append(dataclasses.replace(made, activations=activations))
    return Ahead(tuple(ordered), traced.specs(ordered))

  return wrapped
