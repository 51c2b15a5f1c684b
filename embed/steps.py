"""What a `SparseEmbed` does in a lookup and in an update, for all of its stacks."""

import dataclasses
import functools
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from embed import combiners, structure
from embed.combiners import Uncombined
from embed.config import TableConfig
from embed.engine import bags as bags_lib
from embed.engine import exchange, jax_internals, route, row_step, taps, update, xla
from embed.engine import mesh as mesh_lib
from embed.engine.grads import ActivationGrads
from embed.engine.lookup import LookupRecord
from embed.engine.stack import Arrays, StackSpec
from embed.inputs import Input, read
from embed.kernels import cpu as cpu_kernels
from embed.optimizers import RowOptimizer
from embed.structure import Path
from embed.variables import changing, warn_of_constant, warn_of_step

_UNTRAINED = (
  "Table {!r} is looked up under JAX's own differentiation, as in nnx.value_and_grad: its rows get "
  "no gradient, and nothing trains them. Write embed.value_and_grad and embed.Optimizer, or give "
  "the table optimizer=embed.frozen() to keep it fixed."
)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Spec:
  """What a `SparseEmbed` is, decided at construction and never traced.

  Static metadata of the layer: layers with the same config objects and equal stacks share their
  compiled programs.

  Attributes:
    features: the feature config.
    tables: the `TableConfig` of each table by name.
    optimizers: the `RowOptimizer` of each table by name, the layer's where a table has none, or
      None.
    stacks: how tables are stored, by stack name; internal.
    table_of: the table of each feature.
    stack_of: the stack of each table.
  """

  features: Any
  tables: dict[str, TableConfig]
  optimizers: dict[str, RowOptimizer | None]
  stacks: dict[str, StackSpec]
  table_of: dict[Path, str]
  stack_of: dict[str, StackSpec]

  def __eq__(self, other: object) -> bool:  # compiled functions ask at every call: mostly of itself
    return self is other or (isinstance(other, Spec) and vars(self) == vars(other))

  def __hash__(self) -> int:
    return hash(tuple(self.stacks.values()))

  def __repr__(self) -> str:  # in every printed model
    return f"Spec(tables={list(self.tables)})"

  def __deepcopy__(self, memo) -> "Spec":  # copied configs would be others
    return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Residual:
  """What `SparseEmbed.lookup` looked up, for `apply_gradients`: a pytree that users need not read.

  It holds ids, which may be the arrays of the batch, and, on a mesh, the route of the exchange; of
  the features whose rows were combined after the lookup, the rows.
  """

  records: dict[str, LookupRecord]  # by stack name
  uncombined: dict[Path, Uncombined]
  # The features of each record, in the order of the stacks' names.
  paths: tuple[tuple[Path, ...], ...] = dataclasses.field(metadata={"static": True})
  spec: Spec = dataclasses.field(metadata={"static": True})  # of the layer


def table_config(layer: Any, name: str) -> TableConfig:
  tables = layer.spec.tables
  if name not in tables:
    raise ValueError(f"There is no table {name!r}; the tables are {sorted(tables)}.")
  return tables[name]


def stored_arrays(layer: Any, stack: StackSpec) -> Arrays:
  return {key: variable.get_value() for key, variable in layer.arrays[stack.name].items()}


# --- lookup --------------------------------------------------------------------------------------


@mesh_lib.explained()
def look_up(layer: Any, features: Any, weights: Any) -> tuple[Any, Residual]:
  """Activations in the structure of the features, and the residual."""
  spec = layer.spec
  members: dict[str, list[Input]] = {}
  for x in read(spec.features, features, weights):
    members.setdefault(spec.stack_of[spec.table_of[x.path]].name, []).append(x)
  activations: dict[Path, jax.Array] = {}
  records: dict[str, LookupRecord] = {}
  uncombined: dict[Path, Uncombined] = {}
  dropped: list[jax.Array] = []
  for stack_name, inputs in members.items():
    stack, tables = spec.stacks[stack_name], tuple(spec.table_of[x.path] for x in inputs)
    acts, record, prepared = look_up_stack(layer, stack, inputs, tables)
    for x, table, act, later in zip(inputs, tables, acts, prepared.uncombined, strict=True):
      if later is not None:
        learned = layer.combiner_weights.get(table)
        looked_up = Uncombined(act, *later, None if learned is None else learned[...])
        uncombined[x.path] = looked_up
        act = combiners.combine(spec.tables[table], stack, looked_up)
      activations[x.path] = act
    records[stack_name] = record
    dropped.append(prepared.dropped)
  add_to_report(layer, dropped, list(records.values()))
  paths = tuple(tuple(x.path for x in members[name]) for name in sorted(records))
  residual = Residual(records, uncombined, paths, spec)
  return structure.pack(spec.features, features, activations), residual


@jax.named_scope("lookup")
def look_up_stack(
  layer: Any,
  stack: StackSpec,
  inputs: Sequence[Input],
  tables: tuple[str, ...],
  combiner: str | None = None,
) -> tuple[list[jax.Array], LookupRecord, combiners.Prepared]:
  """Tapped activations of the features of a stack, what was looked up, and its bags."""
  placement = stack.placement
  arrays = [mesh_lib.accept(placement, x.name, x.parts) for x in inputs]
  count = cpu_kernels.count_beyond if placement.is_local else bags_lib.count_beyond
  prepare = functools.partial(combiners.prepare, inputs, combiner, count=count)
  prepared = placement.prepare(prepare, arrays)
  stored = layer.arrays[stack.name]["parameters"].get_value()
  warn_of_constant(stored, prepared.bags)
  rows = taps.read_tables(stored, "lookup")  # marked; the tap below gets the table itself
  acts, record = mesh_lib.settled(compiled_look_up(stack, rows, prepared.bags, tables))
  acts = before_update(layer, acts, placement.is_local and cpu_kernels.looks_up(stack))
  if mesh_lib.is_explicit((rows, layer.report.get_value())):
    acts = [placement.typed(act) for act in acts]
  return tap(layer, stack, acts, record, stored), record, prepared


def before_update(layer: Any, outputs: Any, by_kernel: bool = False) -> Any:
  """Returns arrays that were computed from a layer's tables, which its next update comes after."""
  report = layer.report.get_value()
  outputs, token = xla.with_token(outputs, report["dropped_ids"], by_kernel)
  _set_report(layer, {**report, "dropped_ids": token})
  return outputs


# Compiled once for each shape, also where `value_and_grad` runs a loss eagerly: a lookup that was
# traced into the loss would have its loops compiled again at every step.
compiled_look_up = jax.jit(exchange.look_up, static_argnums=(0, 3))


def tap(
  layer: Any,
  stack: StackSpec,
  activations: Sequence[jax.Array],
  record: LookupRecord,
  stored: jax.Array,
) -> list[jax.Array]:
  """Activations with the record of their lookup, for `value_and_grad`."""
  trains = stack.optimizer is None or stack.optimizer.equation is not None
  if trains and jax_internals.is_differentiating():
    warnings.warn(_UNTRAINED.format(record.tables[0]), stacklevel=6)
  return taps.tap(activations, record, stored, taps.Layer(weakref.ref(layer), trains))


def add_to_report(
  layer: Any, dropped: Sequence[jax.Array], records: Sequence[LookupRecord]
) -> None:
  """Adds a call to the layer's report."""
  if not dropped:
    return
  routes = [record.route for record in records if record.route is not None]
  counted = {"dropped_ids": functools.reduce(jnp.add, dropped)}
  if not all(stack.placement.is_local for stack in layer.spec.stacks.values()):
    counted |= {"exchange_rounds": jnp.int32(0), "buffer_fill": jnp.float32(0)}
  for used in routes:
    most = used.max_rows_per_pair[0]
    of = {
      "exchange_rounds": route.rounds(most, used.capacity),
      "buffer_fill": most.astype(jnp.float32) / used.capacity,
    }
    counted |= {key: jnp.maximum(counted[key], value) for key, value in of.items()}
  before = layer.report.get_value()
  counted = {key: mesh_lib.with_types_of(value, before[key]) for key, value in counted.items()}
  counted["dropped_ids"] = _saturated_sum(before["dropped_ids"], counted["dropped_ids"])
  _set_report(layer, {**before, **counted})


def _saturated_sum(total: jax.Array, count: jax.Array) -> jax.Array:
  """An int32 sum that stays at the largest int32; a negative total is a sum that wrapped around."""
  new = total + count
  return jnp.where((total < 0) | (new < total), bags_lib.UNUSED, new)


def _set_report(layer: Any, report: dict[str, jax.Array]) -> None:
  before = layer.report.get_value()
  try:
    layer.report.set_value(report)
    is_lost = jax_internals.is_batched(report) and not jax_internals.is_batched(before)
    if is_lost and jax_internals.is_called_by(jax_internals.VMAP):
      raise ValueError(
        "SparseEmbed was called under nnx.vmap, which has no place for the counts in its report. "
        "Look up the whole batch at once, outside, and pass the activations in."
      )
  except jax_internals.TraceContextError:
    pass  # a model that a function closes over, as under jax.jit: no state comes out of it


# --- update --------------------------------------------------------------------------------------


def by_stack(
  spec: Spec, activation_grads: Any, residual: Residual
) -> tuple[dict[str, list[update.StackGrads]], dict[str, jax.Array]]:
  """Gradients by stack, and those of combiners' learned weights by table, all checked."""
  if residual.spec != spec:
    raise ValueError(
      "The residual is of another layer, or of one with another config, whose rows would be "
      "trained here. Give the residual of this layer's lookup."
    )
  matched = structure.match(spec.features, activation_grads, "activation_grads")
  by_path = {path: grad for path, _, grad in matched}
  looked_up = {path for paths in residual.paths for path in paths}
  features = dict(structure.flatten_features(spec.features))
  for path, feature in features.items():
    name = structure.feature_name(path, feature)
    if path in looked_up and path not in by_path:
      raise ValueError(
        f"No gradient given for {name!r}, which was looked up. Give None for a zero gradient."
      )
    if path not in looked_up and by_path.get(path) is not None:
      raise ValueError(f"Gradient given for {name!r}, which was not looked up.")
  for path, later in residual.uncombined.items():
    if later.learned is not None:  # says what is wrong before anything is trained
      combiners.learning_rate(spec.table_of[path], features[path].table)
  grads: dict[str, list[update.StackGrads]] = {}
  learned: dict[str, jax.Array] = {}
  for (stack_name, record), paths in zip(
    sorted(residual.records.items()), residual.paths, strict=True
  ):
    of_features = []
    for path, bags in zip(paths, record.bags, strict=True):
      feature, rows = features[path], residual.uncombined.get(path)
      batch = bags.batch if rows is None else rows.ids.shape[:-1]
      name = structure.feature_name(path, feature)
      grad = _checked(name, by_path[path], (*batch, feature.table.dim))
      if rows is not None:
        stack, table = spec.stacks[stack_name], spec.table_of[path]
        grad, of_learned = combiners.split_gradient(feature.table, stack, rows, grad)
        if of_learned is not None:
          learned[table] = learned[table] + of_learned if table in learned else of_learned
      of_features.append(grad)
    grads[stack_name] = [ActivationGrads(tuple(of_features), record)]
  return grads, learned


def step_combiner_weights(layer: Any, table: str, grad: jax.Array) -> None:
  """Trains the learned weights of a table's combiner, at its own rate."""
  variable, rate = (
    layer.combiner_weights[table],
    combiners.learning_rate(table, table_config(layer, table)),
  )
  with changing("An update of a combiner's weights"):
    variable.set_value(variable[...] - rate * grad)


def moving(layer: Any, grads: Mapping[str, Any], step: Any) -> list[StackSpec]:
  """The stacks of a layer that a step moves; raises ValueError for what one of them lacks."""
  return [stack for stack in layer.spec.stacks.values() if _must_step(stack, grads, step)]


def step_stacks(layer: Any, grads: Mapping[str, Sequence[update.StackGrads]], step: Any) -> None:
  """Steps each stack once, or, where something is missing, none."""
  for stack in moving(layer, grads, step):
    variables, of_stack = layer.arrays[stack.name], tuple(grads.get(stack.name, ()))
    arrays = taps.read_tables(stored_arrays(layer, stack), "update")
    scalars = row_step.StepScalars.at(stack, step).after(layer.report.get_value()["dropped_ids"])
    new = mesh_lib.settled(compiled_step(stack, arrays, of_stack, scalars))
    warn_of_step(arrays["parameters"], new["parameters"])
    with changing("An update of tables"):
      for key, value in new.items():
        variables[key].set_value(mesh_lib.with_types_of(value, arrays[key]))


compiled_step = jax.jit(update.step, static_argnums=0)


def _must_step(stack: StackSpec, grads: Mapping[str, Any], step: Any) -> bool:
  """Whether a stack steps; raises ValueError for what is missing."""
  optimizer = stack.optimizer
  if stack.name not in grads and (optimizer is None or optimizer.lazy):
    return False
  if optimizer is None:
    raise ValueError(
      f"Table {stack.tables[0]!r} has no optimizer, so it cannot be trained. Give one in its "
      "TableConfig or to SparseEmbed, or freeze it with optimizer=embed.frozen()."
    )
  if optimizer.equation is None:
    return False
  if step is None and optimizer.has_schedule:
    raise ValueError(
      f"Table {stack.tables[0]!r} has a schedule, of its learning rate or gradient multiplier: "
      "pass step=..."
    )
  if step is None and stack.uses_stochastic_rounding:
    raise ValueError(
      f"Table {stack.tables[0]!r} rounds its {stack.dtype} rows at random, by the number "
      "of the step: pass step=..., or set stochastic_rounding=False in its TableConfig."
    )
  return True


def _checked(name: str, grads: Any, shape: tuple[int, ...]) -> jax.Array:
  """A feature's activation gradient, checked against what was looked up; None is zero."""
  if grads is None:
    return jnp.zeros(shape, jnp.float32)
  if not isinstance(grads, (jax.Array, np.ndarray)):
    raise ValueError(f"Gradient of {name!r}: found a non-array type {type(grads)}.")
  if jnp.issubdtype(grads.dtype, jnp.complexfloating):
    raise ValueError(f"Gradient of {name!r} is {grads.dtype}; rows are real. Give its real part.")
  if grads.shape != shape:
    raise ValueError(f"Gradient of {name!r} has shape {grads.shape}; its activations have {shape}.")
  return jnp.asarray(grads)
