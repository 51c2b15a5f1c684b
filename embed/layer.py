"""`SparseEmbed`: features over shared tables, as a Flax NNX module."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from embed import combiners, gradients, planning, structure
from embed import config as config_lib
from embed.engine import taps
from embed.engine.bags import Bags
from embed.engine.layout import Layout
from embed.engine.lookup import LookupRecord, quantize
from embed.engine.stack import StackSpec
from embed.gradients import RowGrads
from embed.inputs import check
from embed.optimizers import RowOptimizer
from embed.steps import (
  Residual,
  Spec,
  add_to_report,
  by_stack,
  look_up,
  look_up_stack,
  step_combiner_weights,
  step_stacks,
  stored_arrays,
  table_config,
  tap,
)
from embed.storage import placing
from embed.storage import tables as stored_tables
from embed.variables import Report, Table, changing, make_variables, replace


class SparseEmbed(nnx.Module):
  """Embedding lookups of many features over shared tables, with an optimizer for each table.

  Args:
    features: a `FeatureConfig`, or any nesting of dicts, lists, tuples and named tuples of them.
    optimizer: the optimizer of tables that have none of their own, such as `embed.adagrad(0.05)`.
      None leaves those tables without slots: they can be looked up, and training them raises.
    rngs: draws one key per table, from its stream `params`.
    mesh: the devices that tables are spread over. None is the mesh of `jax.set_mesh`, or one device
      if there is none. Inputs may have any sharding; activations come out split over the batch.
      Outside of `jax.set_mesh` the axes of the mesh count as Auto axes, so that the compiler shards
      the rest of the model.
    axis: the mesh axis, or axes, that tables and the batch are split over.
    sharding: the strategy: "mod" (row r on shard r % n), "div" (consecutive rows), "column" or
      "replicated".
    plan: an `embed.plan`, which replaces `mesh`, `axis` and `sharding`. It has `features` and
      `optimizer` too; pass them as well to use other features of the same tables, or another
      optimizer.

  Attributes:
    spec: the configuration, fixed at construction: `features`, the feature config; `tables`, the
      `TableConfig` of each table by name; and `optimizers`, the `RowOptimizer` of each table by
      name, the layer's where a table has none, or None.
    report: an `embed.Report`: the number of dropped ids and the load of the exchange.
    combiner_weights: `{table name: nnx.Variable}` for each table whose `embed.CustomCombiner`
      learns; see `embed.CombinerWeights`.

  Raises:
    ValueError: for two tables of one name, an unsupported optimizer, an unknown axis or sharding,
      an initializer that returns another shape, or with Flax's hijax Variables.

  >>> movie = embed.TableConfig(vocabulary_size=100, dim=4, combiner="sum", name="movie")
  >>> features = {"watched": embed.FeatureConfig(movie)}
  >>> layer = embed.SparseEmbed(features, embed.adagrad(0.1), rngs=nnx.Rngs(0))
  >>> layer({"watched": embed.Padded([[3, 7], [5, -1]])})["watched"].shape
  (2, 4)
  >>> layer.tables["movie"].shape, layer.spec.optimizers["movie"] == embed.adagrad(0.1)
  ((100, 4), True)
  """

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
    if nnx.var_defaults().hijax:
      raise ValueError(
        "SparseEmbed does not work with Flax's experimental hijax Variables, whose reads are no "
        "inputs of a traced loss. Unset FLAX_HIJAX_VARIABLE or write nnx.var_defaults(hijax=False)."
      )
    if plan is None:
      if features is None:
        raise ValueError("SparseEmbed takes a feature config, or a plan.")
      plan = planning.Plan.uniform(features, optimizer, mesh, axis, sharding)
    else:
      if (mesh is not None and mesh is not plan.mesh) or axis != "data" or sharding != "mod":
        raise ValueError(
          "A plan has its mesh, axes and strategies already: leave mesh, axis and sharding out, or "
          'change the plan, as in plan["movie"].strategy = "div".'
        )
      if features is not None or optimizer is not None:
        plan = plan.with_features(plan.features if features is None else features, optimizer)
    self.spec = _spec(plan)
    self.report = Report(
      {
        "dropped_ids": jnp.int32(0),
        "exchange_rounds": jnp.int32(0),
        "buffer_fill": jnp.float32(0),
      }
    )
    keys = {name: rngs.params() for name in plan.tables}
    self.combiner_weights = nnx.Dict(
      {
        name: combiners.make_weights(table.combiner, jax.random.fold_in(keys[name], 2**31 - 1))
        for name, table in plan.tables.items()
        if isinstance(table.combiner, config_lib.CustomCombiner) and table.combiner.num_weights
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
    """Activations of a batch, in the structure of its features.

    Args:
      features: inputs in the structure of the feature config; a dict may hold any subset. Each is
        a dense integer array, `Padded`, `Ragged` or `Sparse`. Batch sizes may differ.
      weights: weights of the ids in the same structure, or None; an entry may be None. They are
        constants and get no gradient, unless the feature has `differentiate_weights`.

    Returns:
      Arrays of the table's dtype in the structure of `features`, `[..., dim]` for a dense array or
      bags, `[batch, max_sequence_length, dim]` for sequences. Empty bags and padding give zeros.

    Raises:
      ValueError: as `embed.validate`, in eager calls. Under jit, ids out of range are dropped and
        counted in `report`; types, dtypes and shapes are always checked.
      TypeError: as `embed.validate`.

    >>> movie = embed.TableConfig(100, 4, combiner="sum", name="movie")
    >>> features = {"watched": embed.FeatureConfig(movie), "next": embed.FeatureConfig(movie)}
    >>> layer = embed.SparseEmbed(features, rngs=nnx.Rngs(0))
    >>> layer({"watched": embed.Padded([[3, 7], [5, -1]])})["watched"].shape  # bags of ids
    (2, 4)
    >>> layer({"next": np.array([9, 9, 1])})["next"].shape  # one id each
    (3, 4)
    """
    return look_up(self, features, weights)[0]  # nnx.tabulate wraps public methods

  def lookup(self, features: Any, weights: Any = None) -> tuple[Any, Residual]:
    """Looks up a batch as `__call__` does, and keeps what `apply_gradients` needs.

    For custom training loops: differentiate the loss with respect to the activations, then pass
    their gradients to `apply_gradients`.

    Args:
      features: inputs, as for `__call__`.
      weights: weights, as for `__call__`.

    Returns:
      `(activations, residual)`. The residual is an `embed.Residual`, a pytree.

    Raises:
      ValueError: as `__call__`.
      TypeError: as `__call__`.

    >>> movie = embed.TableConfig(
    ...   100, 4, optimizer=embed.sgd(0.5), initializer=jax.nn.initializers.ones, name="movie")
    >>> layer = embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0))
    >>> activations, residual = layer.lookup(np.array([3]))
    >>> layer.apply_gradients(jax.grad(lambda x: x.sum())(activations), residual)
    >>> layer.tables["movie"][3].tolist()
    [0.5, 0.5, 0.5, 0.5]
    """
    return look_up(self, features, weights)

  def attend(self, query: jax.Array, table_name: str, candidates: Any = None) -> jax.Array:
    """Scores of queries against rows: the table serves as an output layer (tied weights).

    Rows are quantized as in a lookup, if the table has a `quantization_config`.

    Args:
      query: floats `[..., dim]`.
      table_name: the table to score against.
      candidates: integer ids, `[K]` for all queries or `[..., K]` per query; negative ids are
        padding and score 0. None scores against every row.

    Returns:
      The dot products, `[..., K]` or `[..., vocabulary_size]`. Inside `embed.value_and_grad`
      gradients reach the query and the rows: the rows of the candidates, or all rows of the table.

    Raises:
      ValueError: for an unknown table, a query of another size, or ids out of range (eagerly).

    >>> movie = embed.TableConfig(3, 2, name="movie")
    >>> layer = embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0))
    >>> layer.load_tables({"movie": np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])})
    >>> query = jnp.array([[1.0, 3.0]])
    >>> layer.attend(query, "movie").tolist(), layer.attend(query, "movie", np.array([2])).tolist()
    ([[1.0, 3.0, 8.0]], [[8.0]])
    """
    table = table_config(self, table_name)
    if query.shape[-1] != table.dim:
      raise ValueError(
        f"attend: the query has size {query.shape[-1]}, table {table_name!r} has dim {table.dim}."
      )
    stack = self.spec.stack_of[table_name]
    if candidates is None:
      stored = self.arrays[stack.name]["parameters"].get_value()
      rows = stored_tables.read_whole(stack, taps.read_tables(stored, "lookup"), table_name)
      every = Bags(jnp.arange(table.vocabulary_size, dtype=jnp.int32)[:, None])
      if table.quantization_config is not None:  # as `look_up_stack` does
        rows = quantize(rows, table.quantization_config).astype(rows.dtype)
      (rows,) = tap(self, stack, [rows], LookupRecord((every,), (table_name,)), stored)
      return jnp.einsum("...d,vd->...v", query, rows)
    shape = np.shape(candidates)
    if not shape or len(shape) not in (1, query.ndim):
      raise ValueError(
        f"attend: candidates must be [K], or [..., K] beside the query {query.shape}. "
        f"Got shape {shape}."
      )
    name, feature = f"candidates of {table_name}", config_lib.FeatureConfig(table)
    inputs = [check((), name, feature, candidates)]
    (act,), record, prepared = look_up_stack(self, stack, inputs, (table_name,), combiner="sum")
    add_to_report(self, [prepared.dropped], [record])
    if len(shape) == 1:
      return jnp.einsum("...d,kd->...k", query, stack.placement.put(act, P()))
    return jnp.einsum("...d,...kd->...k", query, act.reshape(*shape, table.dim))

  # --- update -----------------------------------------------------------------------------------

  def apply_gradients(self, activation_grads: Any, residual: Residual, step: Any = None) -> None:
    """Steps the tables' optimizers once, in place, from gradients of activations.

    Args:
      activation_grads: gradients in the structure of the activations. None for a feature is a zero
        gradient for the rows that it looked up, and momentum still moves those rows.
      residual: the residual of the `lookup` that made the activations.
      step: the 0-based step for learning rate schedules, a Python int or traced.

    Raises:
      ValueError: for a feature that was looked up and has no entry, a gradient whose shape is not
        the shape of the activations, a gradient that is not an array, a table without optimizer,
        or a missing `step` where a schedule or stochastic rounding needs it.
      TypeError: if the kind of a container differs.

    >>> movie = embed.TableConfig(
    ...   100, 4, optimizer=embed.sgd(0.5), initializer=jax.nn.initializers.ones, name="movie")
    >>> layer = embed.SparseEmbed({"next": embed.FeatureConfig(movie)}, rngs=nnx.Rngs(0))
    >>> activations, residual = layer.lookup({"next": np.array([3])})
    >>> layer.apply_gradients({"next": jnp.ones((1, 4))}, residual)
    >>> layer.tables["movie"][3].tolist()
    [0.5, 0.5, 0.5, 0.5]
    """
    if not isinstance(residual, Residual):
      raise ValueError(
        "apply_gradients takes the residual that `activations, residual = layer.lookup(...)` "
        f"returned. Got {type(residual)}."
      )
    if activation_grads is None:
      raise ValueError(
        "apply_gradients: activation_grads is None. Give the structure of the activations; an "
        "entry may be None for a zero gradient."
      )
    grads, learned = by_stack(self.spec, activation_grads, residual)
    step_stacks(self, grads, step)
    for table, grad in learned.items():
      step_combiner_weights(self, table, grad)

  def apply_row_gradients(self, rows: Mapping[str, RowGrads], step: Any = None) -> None:
    """Steps each named table once from its `RowGrads`, in place.

    A table without an entry, or with an empty one, does not move, unless its optimizer moves every
    row at every step.

    Args:
      rows: `{table name: RowGrads}`. Entries with id `vocabulary_size` are unused.
      step: the step, as for `apply_gradients`.

    Raises:
      ValueError: for an unknown table, other columns than `dim`, an id beyond the table (eagerly),
        a table without optimizer, or a missing `step` where a schedule or stochastic rounding needs
        it.

    >>> zeros = jax.nn.initializers.zeros
    >>> movie = embed.TableConfig(4, 2, optimizer=embed.sgd(0.5), initializer=zeros, name="movie")
    >>> layer = embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0))
    >>> layer.apply_row_gradients({"movie": embed.RowGrads(jnp.array([1, 1]), jnp.ones((2, 2)))})
    >>> layer.tables["movie"].tolist()
    [[0.0, 0.0], [-1.0, -1.0], [0.0, 0.0], [0.0, 0.0]]
    """
    for name in rows:
      table_config(self, name)
    step_stacks(self, gradients.by_stack(self.spec.stack_of, rows), step)

  # --- state -------------------------------------------------------------------------------------

  @property
  def tables(self) -> dict[str, jax.Array]:
    """The rows of each table in order, arrays `[vocabulary_size, dim]` by table name.

    The arrays may be the module's own, and a step that donates the module deletes them: copy them
    to keep them. Inside a loss under `embed.value_and_grad` this raises ValueError, because no
    gradient would come back; use `attend` to score against a table there. On a mesh, a table whose
    rows do not divide by the shards may be whole on every device.
    """
    return {name: arrays["parameters"] for name, arrays in self.variables.items()}

  @property
  def variables(self) -> dict[str, dict[str, Any]]:
    """Rows and slots, by table name a dict of arrays by "parameters" or the name of a slot.

    "parameters" is `[vocabulary_size, dim]`; slots are `[vocabulary_size, dim]` or
    `[vocabulary_size]`, and the docstrings of the optimizers name them. The remarks on the arrays
    of `tables` apply here too.

    >>> movie = embed.TableConfig(100, 4, optimizer=embed.rowwise_adagrad(0.1), name="movie")
    >>> layer = embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0))
    >>> {name: x.shape for name, x in layer.variables["movie"].items()}
    {'parameters': (100, 4), 'accumulators': (100,)}
    """
    return read_variables(self)

  @property
  def variable_shapes(self) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """The shapes, dtypes and shardings of `variables`, without any computation.

    Each is a `jax.ShapeDtypeStruct`.

    >>> movie = embed.TableConfig(100, 4, optimizer=embed.adam(1e-3), name="movie")
    >>> layer = embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0))
    >>> sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layer.variable_shapes))  # bytes
    4800
    """
    return variable_shapes(self)

  def load_tables(self, tables: Mapping[str, Any]) -> None:
    """Replaces the rows of the named tables; slots stay as they are.

    Args:
      tables: `{table name: [vocabulary_size, dim]}`, NumPy or JAX arrays, which are copied. Other
        tables stay as they are.

    Raises:
      ValueError: as `load_variables`.

    >>> movie = embed.TableConfig(2, 2, name="movie")
    >>> layer = embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0))
    >>> layer.load_tables({"movie": np.array([[1.0, 2.0], [3.0, 4.0]])})
    >>> layer(np.array([1])).tolist()
    [[3.0, 4.0]]
    """
    self.load_variables({name: {"parameters": value} for name, value in tables.items()})

  def load_variables(self, variables: Mapping[str, Mapping[str, Any]]) -> None:
    """Replaces the named tables and slots; all others stay as they are.

    Args:
      variables: `{table name: {"parameters" or slot name: array}}`, with the shapes of
        `variable_shapes`. `embed.import_variables` makes such a dict.

    Raises:
      ValueError: before anything is replaced, for an unknown table or slot, another shape, or
        values that are no real numbers.

    >>> movie = embed.TableConfig(2, 1, optimizer=embed.adagrad(0.1), name="movie")
    >>> layer = embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0))
    >>> layer.load_variables({"movie": {"accumulators": np.array([[1.0], [2.0]])}})
    >>> layer.variables["movie"]["accumulators"].tolist()
    [[1.0], [2.0]]
    >>> layer.load_variables({"movie": {"accumulator": np.array([[1.0], [2.0]])}})
    Traceback (most recent call last):
    ValueError: Table 'movie' has no slot 'accumulator'; its slots are ['accumulators'].
    """
    shapes = variable_shapes(self)
    for name, replaced in variables.items():
      table_config(self, name)
      for key, value in replaced.items():
        _check(name, key, value, shapes[name])
    stacks = tuple(self.spec.stacks.values())
    replacements = [
      {
        key: {t: variables[t][key] for t in stack.tables if key in variables.get(t, {})}
        for key in ("parameters", *stack.slots)
      }
      for stack in stacks
    ]
    new = stored_tables.store_all(
      stacks, [stored_arrays(self, stack) for stack in stacks], replacements
    )
    with changing("Loading tables"):
      for stack, stored in zip(stacks, new, strict=True):
        replace(self.arrays[stack.name], stored)


def _spec(plan: planning.Plan) -> Spec:
  names = {id(table): name for name, table in plan.tables.items()}
  flat = structure.flatten_features(plan.features)
  stacks = plan.stacks()
  return Spec(
    plan.features,
    plan.tables,
    plan.optimizers,
    stacks,
    {path: names[id(feature.table)] for path, feature in flat},
    {table: stack for stack in stacks.values() for table in stack.tables},
  )


# --- state ---------------------------------------------------------------------------------------


def read_variables(layer: SparseEmbed, compact: bool = False) -> dict[str, dict[str, Any]]:
  """`SparseEmbed.variables`, or its `compact` views: see `storage.tables`."""
  stacks = tuple(layer.spec.stacks.values())
  arrays = [stored_arrays(layer, stack) for stack in stacks]
  if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(arrays)):
    return variable_shapes(layer, compact)  # under nnx.eval_shape
  tables = stored_tables.read_all(stacks, taps.read_tables(arrays, "tables"), compact)
  keys = lambda name: ("parameters", *layer.spec.stack_of[name].slots)  # jit has sorted them
  return {name: {key: tables[name][key] for key in keys(name)} for name in layer.spec.tables}


def variable_shapes(
  layer: SparseEmbed, compact: bool = False
) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
  """The shapes of `read_variables`."""
  of = lambda name, stack: stored_tables.shapes(stack, stored_arrays(layer, stack), name, compact)
  return {name: of(name, layer.spec.stack_of[name]) for name in layer.spec.tables}


def store_apart(layer: SparseEmbed) -> None:
  """Stores each table of a layer as on one device, in its own array without slots, for export."""
  spec, rows = layer.spec, layer.tables
  stacks = {
    name: StackSpec(
      name, (name,), Layout((table.vocabulary_size,)), table.dim, table.dtype,
      quantization=table.quantization_config,
    )
    for name, table in spec.tables.items()
  }  # fmt: skip
  optimizers: dict[str, RowOptimizer | None] = dict.fromkeys(spec.tables)
  layer.spec = dataclasses.replace(spec, optimizers=optimizers, stacks=stacks, stack_of=stacks)
  layer.arrays = nnx.Dict({t: nnx.Dict({"parameters": Table(rows[t])}) for t in spec.tables})


def _check(name: str, key: str, value: Any, wanted: Mapping[str, Any]) -> None:
  """Raises ValueError unless a value fits the array of this name among `wanted`, of a table."""
  if key not in wanted:
    slots = [kept for kept in wanted if kept != "parameters"]
    raise ValueError(f"Table {name!r} has no slot {key!r}; its slots are {slots}.")
  what = f"Table {name!r}" if key == "parameters" else f"Slot {key!r} of table {name!r}"
  shape, dtype = np.shape(value), wanted[key].dtype
  if shape != wanted[key].shape:
    raise ValueError(f"{what} has shape {wanted[key].shape}, got {shape}.")
  if not placing.converts(value, dtype):
    raise ValueError(f"{what} has dtype {dtype}, got {placing.dtype_of(value)}: give real numbers.")
