"""`SparseEmbed`: lookups of features in shared tables, as a Flax NNX module."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import errors, nnx
from jax.sharding import PartitionSpec as P

from embed import config as config_lib
from embed import dynamic_vocabulary, planning, structure
from embed.config import TableConfig
from embed.dynamic_vocabulary import DynamicTable
from embed.engine import admission, exchange, update, xla
from embed.engine import bags as bags_lib
from embed.engine import mesh as mesh_lib
from embed.engine.bags import Bags, LookupRecord
from embed.engine.grads import ActivationGrads
from embed.engine.stack import Arrays, Layout, StackSpec
from embed.gradients import Owner
from embed.inputs import Input, RawInput, check, matched, read, read_raw, to_bags
from embed.optimizers import RowOptimizer
from embed.storage import tables as stored_tables
from embed.structure import Path
from embed.variables import (
  LOSSES,
  Report,
  Table,
  Tape,
  check_array,
  make_variables,
  refuse_in_loss,
  replace,
)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Spec:
  """The static part of a `SparseEmbed`: layers with equal specs share their compiled programs.

  `SparseEmbed` documents `features`, `tables` and `optimizers`; the rest is internal: the stacks by
  name, the table of each feature, and the stack of each table.
  """

  features: Any
  tables: dict[str, TableConfig]
  optimizers: dict[str, RowOptimizer | None]
  stacks: dict[str, StackSpec]
  table_of: dict[Path, str]
  stack_of: dict[str, StackSpec]

  @classmethod
  def of(cls, plan: planning.Plan) -> "Spec":
    """Makes a spec from the decisions of a plan."""
    names, stacks = {id(table): name for name, table in plan.tables.items()}, plan.stacks()
    flat = structure.flatten_features(plan.features)
    table_of = {path: names[id(feature.table)] for path, feature in flat}
    stack_of = {table: stack for stack in stacks.values() for table in stack.tables}
    return cls(plan.features, plan.tables, plan.optimizers, stacks, table_of, stack_of)

  def __eq__(self, other: object) -> bool:  # compared at every compiled call, mostly with itself
    return self is other or (isinstance(other, Spec) and vars(self) == vars(other))

  def __hash__(self) -> int:
    return hash(tuple(self.stacks.values()))

  def __repr__(self) -> str:  # in every printed model
    return f"Spec(tables={list(self.tables)})"

  def __deepcopy__(self, memo) -> "Spec":  # copied configs would be unequal
    return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Residual:
  """The ids that `SparseEmbed.lookup` looked up, for `apply_gradients`: a pytree.

  It may hold arrays of the batch and, on a mesh, the route of the exchange.
  """

  records: dict[str, LookupRecord]  # by stack name
  # The features of each record, in the order of the stacks' names.
  paths: tuple[tuple[Path, ...], ...] = dataclasses.field(metadata={"static": True})
  spec: Spec = dataclasses.field(metadata={"static": True})  # of the layer


class SparseEmbed(nnx.Module):
  """Embedding lookups of many features in shared tables, with an optimizer for each table.

  Args:
    features: a `FeatureConfig`, or any nesting of dicts, lists, tuples and named tuples of them.
    optimizer: the optimizer of tables that have none of their own, such as `embed.adagrad(0.05)`.
      None leaves those tables without slots: they can be looked up, but training them raises.
    rngs: draws one key per table, from its stream `params`.
    mesh: the devices that tables are spread over. None is the mesh of `jax.set_mesh`, or one device
      if there is none. Inputs may have any sharding. Activations are split along the batch if its
      size is a multiple of the number of devices, and replicated otherwise.
      Outside `jax.set_mesh`, the axes of the mesh count as Auto axes, so that the compiler shards
      the rest of the model.
    axis: the mesh axis, or axes, that tables and the batch are split over.
    sharding: "mod" (row r on shard r % n), "div" (consecutive rows) or "replicated".
    plan: from `embed.plan`, in place of `mesh`, `axis` and `sharding`. `optimizer` and `features`
      may then be left out; `features` must have the plan's tables.

  Attributes:
    spec: fixed at construction: `features`, the feature config; `tables`, the `TableConfig` of each
      table by name; and `optimizers`, the `RowOptimizer` of each table by name, or None.
    report: an `embed.Report`: the number of dropped ids and the load of the exchange.

  Raises:
    ValueError: for two tables with the same name, an unsupported optimizer, an unknown axis or
      sharding, or an initializer that returns the wrong shape.

  >>> movie = embed.TableConfig(vocabulary_size=100, dim=4, combiner="sum", name="movie")
  >>> features = {"watched": embed.FeatureConfig(movie), "next": embed.FeatureConfig(movie)}
  >>> layer = embed.SparseEmbed(features, embed.adagrad(0.1), rngs=nnx.Rngs(0))
  >>> batch = {"watched": embed.Padded([[3, 7], [5, -1]]), "next": np.array([9, 1])}
  >>> {name: x.shape for name, x in layer(batch).items()}
  {'watched': (2, 4), 'next': (2, 4)}
  >>> layer.tables["movie"].shape
  (100, 4)
  """

  tape: Tape | None  # set inside a loss that `value_and_grad` differentiates; None: constant

  def __init__(
    self,
    features: Any = None,
    optimizer: RowOptimizer | None = None,
    *,
    rngs: nnx.Rngs,
    mesh: Any = None,
    axis: str | Sequence[str] | None = "data",
    sharding: str = "mod",
    plan: planning.Plan | None = None,
  ):
    if plan is None:
      if features is None:
        raise ValueError("SparseEmbed takes a feature config, or a plan.")
      plan = planning.Plan.uniform(features, optimizer, mesh, axis, sharding)
    elif (mesh, axis, sharding) != (None, "data", "mod"):
      raise ValueError(
        "A plan has its mesh, axes and strategies already: leave mesh, axis and sharding out, or "
        'change the plan, as in plan["movie"].strategy = "div".'
      )
    elif features is not None or optimizer is not None:
      plan = plan.with_features(plan.features if features is None else features, optimizer)
    self.spec = Spec.of(plan)
    self.report = Report(
      {
        "dropped_ids": jnp.int32(0),
        "exchange_rounds": jnp.int32(0),
        "buffer_fill": jnp.float32(0),
      }
    )
    keys = {name: rngs.params() for name in plan.tables}
    self.vocabularies = nnx.Dict(
      {
        name: dynamic_vocabulary.make_variables(
          table.vocabulary, self.spec.stack_of[name].placement, keys[name]
        )
        for name, table in plan.tables.items()
        if table.vocabulary is not None
      }
    )
    self.arrays = nnx.Dict(
      {
        name: make_variables(stack, plan.tables, keys, axis)
        for name, stack in self.spec.stacks.items()
      }
    )

  # --- lookup ------------------------------------------------------------------------------------

  def __call__(self, features: Any, weights: Any = None) -> Any:
    """Looks up a batch and returns activations in the structure of its features.

    Args:
      features: inputs in the structure of the feature config; a dict may hold any subset. Each is a
        dense integer array, `Padded`, `Ragged` or `Sparse`. Batch sizes may differ.
      weights: weights of the ids in the same structure, or None; an entry may be None. They are
        constants and get no gradient.

    Returns:
      float32 activations in the structure of `features`: `[..., dim]` for a dense array or bags,
      `[batch, max_sequence_length, dim]` for sequences. Empty bags and padding give zeros.

    Raises:
      ValueError: as in `embed.validate`, in eager calls. Under jit, ids out of range are dropped
        and counted in `report`; types, dtypes and shapes are always checked.
      TypeError: as in `embed.validate`.
    """
    return self._look_up(features, weights)[0]  # nnx.tabulate wraps public methods

  def lookup(self, features: Any, weights: Any = None) -> tuple[Any, Residual]:
    """Looks up a batch as `__call__` does, and also returns what `apply_gradients` needs.

    For custom training loops: differentiate the loss with respect to the activations, then pass
    their gradients to `apply_gradients`.

    Returns:
      `(activations, residual)`. The residual is an `embed.Residual`, a pytree.
    """
    return self._look_up(features, weights)

  def attend(self, query: jax.Array, table_name: str, candidates: Any = None) -> jax.Array:
    """Scores queries against rows: the table serves as an output layer (tied weights).

    Inside `embed.value_and_grad`, gradients reach the query and the rows of the candidates, or of
    the whole table.

    Args:
      query: floats `[..., dim]`.
      table_name: the table to score against.
      candidates: integer ids, `[K]` for all queries or `[..., K]` per query; negative ids are
        padding and score 0. None scores against every row.

    Returns:
      The dot products, float32 `[..., K]` or `[..., vocabulary_size]`.

    Raises:
      ValueError: for an unknown table, a query of another size, or ids out of range in eager calls.
    """
    table = table_config(self, table_name)
    if query.shape[-1] != table.dim:
      raise ValueError(
        f"attend: the query has size {query.shape[-1]}, table {table_name!r} has dim {table.dim}."
      )
    stack = self.spec.stack_of[table_name]
    if candidates is None:
      stored = stored_arrays(self, stack)["parameters"]
      rows = stored_tables.read_whole(stack, stored, table_name).astype(jnp.float32)
      every = Bags(jnp.arange(table.vocabulary_size, dtype=jnp.int32)[:, None])
      (rows,) = self._tap([rows], LookupRecord((every,), (table_name,)))
      return jnp.einsum("...d,vd->...v", query, rows)
    shape = np.shape(candidates)
    if not shape or shape[:-1] not in ((), query.shape[:-1]):
      raise ValueError(
        f"attend: candidates must be [K], or [..., K] beside the query {query.shape}. "
        f"Got shape {shape}."
      )
    name, feature = f"candidates of {table_name}", config_lib.FeatureConfig(table)
    inputs = [check((), name, feature, candidates)]
    (act,), record, dropped = self._look_up_stack(stack, inputs, (table_name,), combiner="sum")
    self._add_to_report([dropped], [record])
    if len(shape) == 1:
      return jnp.einsum("...d,kd->...k", query, stack.placement.put(act, P()))
    return jnp.einsum("...d,...kd->...k", query, act.reshape(*shape, table.dim))

  def _look_up(self, features: Any, weights: Any) -> tuple[Any, Residual]:
    """Activations in the structure of the features, and the residual."""
    spec = self.spec
    members: dict[str, list[Input]] = {}
    for x in read(spec.features, features, weights):
      members.setdefault(spec.stack_of[spec.table_of[x.path]].name, []).append(x)
    activations: dict[Path, jax.Array] = {}
    records: dict[str, LookupRecord] = {}
    dropped: list[jax.Array] = []
    for stack_name, inputs in members.items():
      stack, tables = spec.stacks[stack_name], tuple(spec.table_of[x.path] for x in inputs)
      acts, records[stack_name], lost = self._look_up_stack(stack, inputs, tables)
      activations |= {x.path: act for x, act in zip(inputs, acts, strict=True)}
      dropped.append(lost)
    self._add_to_report(dropped, list(records.values()))
    paths = tuple(tuple(x.path for x in members[name]) for name in sorted(records))
    residual = Residual(records, paths, spec)
    return structure.pack(spec.features, features, activations), residual

  @jax.named_scope("lookup")
  def _look_up_stack(
    self,
    stack: StackSpec,
    inputs: Sequence[Input],
    tables: tuple[str, ...],
    combiner: str | None = None,
  ) -> tuple[Sequence[jax.Array], LookupRecord, jax.Array]:
    """Tapped activations of a stack's features, the lookup's record, and the dropped ids' count."""
    placement = stack.placement
    arrays = [mesh_lib.check_inputs(placement, x.name, x.parts) for x in inputs]
    bags, dropped = placement.prepare(functools.partial(to_bags, inputs, combiner), arrays)
    stored = stored_arrays(self, stack)["parameters"]
    acts, record = mesh_lib.settled(compiled_look_up(stack, stored, bags, tables))
    acts = before_update(self, acts)
    if mesh_lib.is_explicit((stored, self.report.get_value())):
      acts = [placement.typed(act) for act in acts]
    return self._tap(acts, record), record, dropped

  def _tap(self, activations: Sequence[jax.Array], record: LookupRecord) -> Sequence[jax.Array]:
    """Adds taps to activations, inside a loss that `value_and_grad` differentiates."""
    if not LOSSES.get():
      return activations
    if not hasattr(self, "tape"):
      optimizers = [self.spec.optimizers[table] for table in record.tables]
      if all(optimizer is not None and optimizer.equation is None for optimizer in optimizers):
        return activations  # frozen
      raise ValueError(
        f"The loss looks up table {record.tables[0]!r} in a SparseEmbed that is not in its first "
        "argument, so that no gradient would come back. Use the layer in the model that the loss "
        "gets. To keep the layer fixed, pass it to the loss as another argument, or give its "
        "tables optimizer=embed.frozen()."
      )
    if self.tape is None:
      return activations
    LOSSES.set((*LOSSES.get()[:-1], LOSSES.get()[-1] + 1))
    return self.tape.add(activations, record)

  def _add_to_report(self, dropped: Sequence[jax.Array], records: Sequence[LookupRecord]) -> None:
    """Adds a call to the layer's report."""
    if not dropped:
      return
    routes = [record.route for record in records if record.route is not None]
    counted = {"dropped_ids": functools.reduce(jnp.add, dropped)}
    if not all(stack.placement.is_local for stack in self.spec.stacks.values()):
      counted |= {"exchange_rounds": jnp.int32(0), "buffer_fill": jnp.float32(0)}
    for used in routes:
      most = used.max_rows_per_pair[0]
      of = {
        "exchange_rounds": exchange.rounds_for(most, used.capacity),
        "buffer_fill": most.astype(jnp.float32) / used.capacity,
      }
      counted |= {key: jnp.maximum(counted[key], value) for key, value in of.items()}
    before = self.report.get_value()
    counted = {key: mesh_lib.like(value, before[key]) for key, value in counted.items()}
    counted["dropped_ids"] = _saturated_sum(before["dropped_ids"], counted["dropped_ids"])
    _set_report(self, {**before, **counted})

  # --- raw ids -----------------------------------------------------------------------------------

  def admit(self, features: Any, *, ahead: bool = False) -> Any:
    """Assigns rows to the raw ids of a batch, in tables with a `DynamicVocabulary`.

    Call it in training, before the loss. An id without a row may take the row of another id, as the
    eviction policy decides; the row and its slots then start from initial values, which depend on
    the seed, the table and the raw id alone. One call is one batch: rows that the batch uses are
    not taken during the call.

    Args:
      features: the batch, in the structure of the feature config. Raw ids are 64-bit integers in
        NumPy or lists, or uint32 pairs (see `embed.raw_ids`). Features of other tables may be
        included, and are returned unchanged.
      ahead: whether the previous batch's update is still to come; its rows are not taken either.

    Returns:
      The batch with int32 rows in place of raw ids, for lookups. An id that got no row becomes -1,
      which is padding.

    Raises:
      ValueError: naming the feature, for ids that are not raw ids, or were truncated to 32 bits.
    """
    return self._with_rows(features, lambda table, inputs: table.admit(inputs, bool(ahead)))

  def translate(self, features: Any) -> Any:
    """Finds the rows of a batch's raw ids without changing anything, for evaluation and serving.

    Takes and returns what `admit` does. An id without a row becomes -1, which gives zeros.
    """
    return self._with_rows(features, DynamicTable.translate)

  def _with_rows(
    self, features: Any, find: Callable[[DynamicTable, Sequence[RawInput]], Mapping[Path, Any]]
  ) -> Any:
    """A batch with the inputs that `find` returns for dynamic tables, and all others unchanged."""
    flat: dict[Path, Any] = {}
    raw: dict[str, list[RawInput]] = {}
    for path, feature, x, _ in matched(self.spec.features, features):
      if feature.table.vocabulary is None:
        flat[path] = x
      else:
        raw.setdefault(self.spec.table_of[path], []).append(read_raw(path, feature, x))
    for name, inputs in raw.items():
      flat |= find(dynamic_table(self, name), inputs)
    return structure.pack(self.spec.features, features, flat)

  @property
  def vocabulary_report(self) -> dict[str, dict[str, jax.Array]]:
    """Counts of the last `admit`, by the name of each table with a `DynamicVocabulary`.

    - `ids`, `hits`, `turned_away`: the occurrences of all ids, of ids that already had a row, and
      of ids that got none.
    - `admissions`, `evictions`: ids that were given rows, and ids that lost theirs.
    - `hit_rate`: float32, the share of hits; `fill`: float32, the share of rows with an owner.
    """
    return {name: dynamic_table(self, name).report() for name in self.vocabularies}

  # --- update -----------------------------------------------------------------------------------

  def apply_gradients(self, activation_grads: Any, residual: Residual, step: Any = None) -> None:
    """Steps the tables' optimizers once, in place, from gradients of activations.

    Args:
      activation_grads: gradients in the structure of the activations. None for a feature is a zero
        gradient for the rows that it looked up, and momentum still moves those rows.
      residual: the residual of the `lookup` that made the activations.
      step: the 0-based step, a Python int or traced, for schedules and stochastic rounding.

    Raises:
      ValueError: for a feature that was looked up and has no entry, a gradient of another shape or
        kind, a table without an optimizer, or a missing `step` where a schedule or stochastic
        rounding needs it.
      TypeError: if a container is of another kind than in the config.
    """
    if not isinstance(residual, Residual):
      raise ValueError(
        "apply_gradients takes the residual that `activations, residual = layer.lookup(...)` "
        f"returned. Got {type(residual)}."
      )
    refuse_in_loss("Rows are updated")
    step_stacks(self, by_stack(self.spec, activation_grads, residual), step)

  # --- state -------------------------------------------------------------------------------------

  @property
  def tables(self) -> dict[str, jax.Array]:
    """The rows of each table in order, arrays `[vocabulary_size, dim]` by table name.

    The arrays may be the module's own, and a step that donates the module deletes them: copy them
    to keep them. Inside a loss under `embed.value_and_grad` this raises ValueError; use `attend`
    there. On a mesh, a table whose rows do not divide evenly may be whole on every device.
    """
    return {name: arrays["parameters"] for name, arrays in self.variables.items()}

  @property
  def variables(self) -> dict[str, dict[str, Any]]:
    """Rows and slots, as a dict of arrays by "parameters" or slot name for each table.

    "parameters" is `[vocabulary_size, dim]`; slots, which the docstrings of the optimizers name,
    are `[vocabulary_size, dim]` or `[vocabulary_size]`. A table with a `DynamicVocabulary` also has
    "raw_ids" and scores. The remarks on the arrays of `tables` apply here too.
    """
    refuse_in_loss("Tables are read")
    stacks = tuple(self.spec.stacks.values())
    arrays = [stored_arrays(self, stack) for stack in stacks]
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(arrays)):
      return self.variable_shapes  # under nnx.eval_shape
    tables = stored_tables.read_all(stacks, arrays)
    keys = lambda name: ("parameters", *self.spec.stack_of[name].slots)  # jit has sorted them
    of = lambda name: {key: tables[name][key] for key in keys(name)} | owned(self, name)
    return {name: of(name) for name in self.spec.tables}

  @property
  def variable_shapes(self) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """The shapes of `variables` as `jax.ShapeDtypeStruct`, without any computation."""

    def of(name, stack):
      shapes = stored_tables.shapes(stack, stored_arrays(self, stack), name)
      vocabulary = self.spec.tables[name].vocabulary
      if vocabulary is None:
        return shapes
      return shapes | admission.owner_shapes(vocabulary, stack.placement)

    return {name: of(name, self.spec.stack_of[name]) for name in self.spec.tables}

  def load_tables(self, tables: Mapping[str, Any]) -> None:
    """Replaces the rows of the named tables; slots and other tables stay as they are.

    Args:
      tables: `{table name: [vocabulary_size, dim]}`, NumPy or JAX arrays, which are copied.

    Raises:
      ValueError: as in `load_variables`.
    """
    self.load_variables({name: {"parameters": value} for name, value in tables.items()})

  def load_variables(self, variables: Mapping[str, Mapping[str, Any]]) -> None:
    """Replaces the named tables and slots; all others stay as they are.

    Args:
      variables: `{table name: {"parameters" or slot name: array}}`, with the shapes of
        `variable_shapes`. `embed.import_variables` makes such a dict.

    Raises:
      ValueError: before anything is replaced, for an unknown table or slot, another shape, or
        values that are not real numbers.
    """
    refuse_in_loss("Tables are replaced")
    shapes = self.variable_shapes
    for name, replaced in variables.items():
      table_config(self, name)
      for key, value in replaced.items():
        check_array(name, key, value, shapes[name])
    stacks = tuple(self.spec.stacks.values())
    replacements = [
      {
        key: {t: variables[t][key] for t in stack.tables if key in variables.get(t, {})}
        for key in ("parameters", *stack.slots)
      }
      for stack in stacks
    ]
    arrays = [stored_arrays(self, stack) for stack in stacks]
    new = stored_tables.store_all(stacks, arrays, replacements)
    for stack, stored in zip(stacks, new, strict=True):
      replace(self.arrays[stack.name], stored)
    for name in self.vocabularies:
      if given := {key: x for key, x in variables.get(name, {}).items() if key in admission.OWNERS}:
        dynamic_table(self, name).set_owners(owned(self, name) | given)


# --- the layers of a model ------------------------------------------------------------------------


def sparse_embeds(model: Any) -> dict[str, SparseEmbed]:
  """Every `SparseEmbed` of a model by path, such as "a/b"; a shared layer is at its first path."""
  layers: dict[str, SparseEmbed] = {}
  for path, layer in layers_of(model):
    name = "/".join(map(str, path))
    if name in layers:
      raise ValueError(
        f"Two SparseEmbed layers of the model have the path {name!r}. Rename one of the keys "
        'that have a "/" in them.'
      )
    layers[name] = layer
  return layers


def layers_of(node: Any) -> Iterator[tuple[tuple[Any, ...], SparseEmbed]]:
  """Every `SparseEmbed` of an NNX object, with its path."""
  return ((path, x) for path, x in nnx.iter_modules(node) if isinstance(x, SparseEmbed))


def row_keys(model: Any) -> dict[str, tuple[SparseEmbed, str]]:
  """The layer and the table name for each key of `Grads.rows` and of checkpoints."""
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


# --- for the methods above, and for other modules -------------------------------------------------


def table_config(layer: SparseEmbed, name: str) -> TableConfig:
  tables = layer.spec.tables
  if name not in tables:
    raise ValueError(f"There is no table {name!r}; the tables are {sorted(tables)}.")
  return tables[name]


def dynamic_table(layer: SparseEmbed, name: str) -> DynamicTable:
  """A table with a `DynamicVocabulary`; raises ValueError if there is none of this name."""
  table, stack = table_config(layer, name), layer.spec.stack_of[name]
  if table.vocabulary is None:
    raise ValueError(
      f"Table {name!r} has no DynamicVocabulary: its ids are its rows, which `tables` has and "
      "`load_tables` replaces."
    )
  return DynamicTable(name, table, stack, layer.vocabularies[name], layer.arrays[stack.name])


def stored_arrays(layer: SparseEmbed, stack: StackSpec) -> Arrays:
  """The rows and slots of a stack, by name."""
  variables = layer.arrays[stack.name]  # iterating would also give what nnx.tabulate keeps there
  return {key: variables[key].get_value() for key in ("parameters", *stack.slots)}


def _saturated_sum(total: jax.Array, count: jax.Array) -> jax.Array:
  """An int32 sum that saturates at the largest int32; a negative total has already overflowed."""
  new = total + count
  return jnp.where((total < 0) | (new < total), bags_lib.UNUSED, new)


def before_update(layer: SparseEmbed, outputs: Any) -> Any:
  """Makes a layer's next update wait for arrays computed from its tables; returns the arrays.

  `dropped_ids` is the token that orders them; see `engine.xla`.
  """
  report = layer.report.get_value()
  outputs, token = xla.with_token(outputs, report["dropped_ids"])
  _set_report(layer, {**report, "dropped_ids": token})
  return outputs


def _set_report(layer: SparseEmbed, report: dict[str, jax.Array]) -> None:
  # Suppressed if a traced function, as under jax.jit, closes over the model: it returns no state.
  with contextlib.suppress(errors.TraceContextError):
    layer.report.set_value(report)


# Compiled once for each shape, also where `value_and_grad` runs a loss eagerly: a lookup that was
# traced into the loss would have its loops compiled again at every step.
compiled_look_up = jax.jit(exchange.look_up, static_argnums=(0, 3))


# --- update --------------------------------------------------------------------------------------


def by_stack(
  spec: Spec, activation_grads: Any, residual: Residual
) -> dict[str, list[update.StackGrads]]:
  """Checks the gradients of activations, and groups them by stack."""
  if residual.spec != spec:
    raise ValueError(
      "The residual is of another layer, or of one with another config, whose rows would be "
      "trained here. Give the residual of this layer's lookup."
    )
  matched = structure.match(spec.features, activation_grads, "activation_grads")
  given = {path: grad for path, _, grad in matched}
  features = dict(structure.flatten_features(spec.features))
  name_of = lambda path: structure.feature_name(path, features[path])
  grads: dict[str, list[update.StackGrads]] = {}
  records = sorted(residual.records.items())
  for (stack_name, record), paths in zip(records, residual.paths, strict=True):
    of_features = []
    for path, bags in zip(paths, record.bags, strict=True):
      if path not in given:
        raise ValueError(
          f"No gradient given for {name_of(path)!r}, which was looked up. Give None for a zero "
          "gradient."
        )
      shape = (*bags.batch, features[path].table.dim)
      of_features.append(_checked(name_of(path), given.pop(path), shape))
    grads[stack_name] = [ActivationGrads(tuple(of_features), record)]
  for path, grad in given.items():
    if grad is not None:
      raise ValueError(f"Gradient given for {name_of(path)!r}, which was not looked up.")
  return grads


def moving(layer: SparseEmbed, grads: Mapping[str, Any], step: Any) -> list[StackSpec]:
  """The stacks of a layer that a step trains; raises ValueError if one lacks what it needs."""
  found = []
  for stack in layer.spec.stacks.values():
    if stack.name not in grads:
      continue
    if stack.optimizer is None:
      raise ValueError(
        f"Table {stack.tables[0]!r} has no optimizer, so it cannot be trained. Give one in its "
        "TableConfig or to SparseEmbed, or freeze it with optimizer=embed.frozen()."
      )
    if stack.optimizer.equation is None:
      continue
    if step is None and stack.optimizer.has_schedule:
      raise ValueError(f"Table {stack.tables[0]!r} has a schedule: pass step=...")
    if step is None and stack.uses_stochastic_rounding:
      raise ValueError(
        f"Table {stack.tables[0]!r} rounds its {stack.dtype} rows at random, by the number of the "
        "step: pass step=..., or set stochastic_rounding=False in its TableConfig."
      )
    found.append(stack)
  return found


def step_stacks(
  layer: SparseEmbed, grads: Mapping[str, Sequence[update.StackGrads]], step: Any
) -> None:
  """Steps each stack once with its gradients, or raises before any has stepped."""
  for stack in moving(layer, grads, step):
    variables, of_stack = layer.arrays[stack.name], tuple(grads.get(stack.name, ()))
    arrays = stored_arrays(layer, stack)
    scalars = update.StepScalars.at(stack, step)
    scalars = scalars.after(layer.report.get_value()["dropped_ids"])
    new = mesh_lib.settled(compiled_step(stack, arrays, of_stack, scalars))
    for key, value in new.items():
      variables[key].set_value(mesh_lib.like(value, arrays[key]))


compiled_step = jax.jit(update.step, static_argnums=0)


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


# --- state ---------------------------------------------------------------------------------------


def owned(layer: SparseEmbed, name: str) -> dict[str, Any]:
  """The arrays of the owners of a table's rows, by name; empty if its ids are its rows."""
  is_dynamic = layer.spec.tables[name].vocabulary is not None
  return dynamic_table(layer, name).owners() if is_dynamic else {}


def store_apart(layer: SparseEmbed) -> None:
  """Stores each table as a layer on one device does, in its own array without slots, for export."""
  spec, rows = layer.spec, layer.tables
  stacks = {
    name: StackSpec(name, (name,), Layout((table.vocabulary_size,)), table.dim, table.dtype)
    for name, table in spec.tables.items()
  }
  optimizers: dict[str, RowOptimizer | None] = dict.fromkeys(spec.tables)
  for name in layer.vocabularies:
    dynamic_table(layer, name).store_apart()
  layer.spec = dataclasses.replace(spec, optimizers=optimizers, stacks=stacks, stack_of=stacks)
  layer.arrays = nnx.Dict({t: nnx.Dict({"parameters": Table(rows[t])}) for t in spec.tables})
