"""`SparseEmbed`: features over shared tables, as a Flax NNX module."""

import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import errors as flax_errors
from flax import nnx
from jax.sharding import PartitionSpec as P

from embed import combiners, gradients, planning, structure
from embed import config as config_lib
from embed.combiners import Uncombined
from embed.engine import exchange, jax_internals, route, storage, taps, update
from embed.engine import mesh as mesh_lib
from embed.engine.bags import Bags
from embed.engine.layout import Layout
from embed.engine.lookup import LookupRecord
from embed.engine.rows import ActivationGrads
from embed.engine.stack import Arrays, StackSpec
from embed.gradients import RowGrads
from embed.inputs import Input, check, read
from embed.row_optimizer import RowOptimizer

Path = structure.Path


_UNTRAINED = (
  "Table {!r} is looked up under JAX's own differentiation, as in nnx.value_and_grad: its rows get "
  "no gradient, and nothing trains them. Write embed.value_and_grad and embed.Optimizer, or give "
  "the table optimizer=embed.frozen() to keep it fixed."
)


@jax.tree_util.register_pytree_node_class
class Residual:
  """What `SparseEmbed.lookup` looked up, for `apply_gradients`: a pytree that users need not read.

  It holds ids and, on a mesh, the route of the exchange; of the features whose rows were combined
  after the lookup, the rows.
  """

  def __init__(
    self,
    records: dict[str, LookupRecord],
    paths: dict[str, tuple[Path, ...]],
    uncombined: dict[Path, Uncombined],
  ):
    self.records, self.paths, self.uncombined = records, paths, uncombined

  def tree_flatten(self):
    names = tuple(sorted(self.records))
    paths = tuple((name, self.paths[name]) for name in names)
    records = tuple(self.records[name] for name in names)
    return (records, tuple(self.uncombined.values())), (paths, tuple(self.uncombined))

  @classmethod
  def tree_unflatten(cls, static, leaves) -> "Residual":
    (paths, features), (records, uncombined) = static, leaves
    by_stack = dict(zip(dict(paths), records, strict=True))
    return cls(by_stack, dict(paths), dict(zip(features, uncombined, strict=True)))


_LARGE_COPY = 16 << 20  # bytes of a copy


def _is_copied(before: Any, after: Any) -> bool:
  """Whether a large array was replaced and is still alive: it was not donated."""
  arrays = (before, after)
  if any(not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer) for x in arrays):
    return False
  return before is not after and before.nbytes >= _LARGE_COPY and not before.is_deleted()


class Table(nnx.Variable):
  """The rows of a table. Not an `nnx.Param`: no dense optimizer ever sees it.

  An `nnx.Variable` type, for filters. What it holds is the storage, several tables in one array
  and in another order where that is cheaper; `SparseEmbed.tables` has the tables.

  >>> layer = embed.SparseEmbed(embed.FeatureConfig(embed.TableConfig(4, 2)), rngs=nnx.Rngs(0))
  >>> len(jax.tree.leaves(nnx.state(layer, embed.Table))), nnx.state(layer, nnx.Param)
  (1, State({}))
  """

  def set_raw_value(self, value: Any, **kwargs: Any) -> None:
    """Takes over an array, and tells if a Flax transformation made it as a copy."""
    before = self.get_raw_value()
    super().set_raw_value(value, **kwargs)
    if _is_copied(before, value) and jax_internals.is_called_by(jax_internals.TRANSFORMATIONS):
      warnings.warn(
        f"A table of {before.nbytes >> 20} MiB was copied: nnx.jit and Flax's other "
        "transformations return the models that they are given. Write nnx.jit(graph=False) for a "
        "function that does not train (graph_updates=False if the model shares a module), and "
        'nnx.jit(donate_argnames=("model", "optimizer")) for one that does.',
        stacklevel=2,
      )


class SlotVariable(nnx.Variable):
  """An optimizer's state per row of a table.

  An `nnx.Variable` type, for filters, that holds the storage as `Table` does;
  `SparseEmbed.variables` has the slots.

  >>> features = embed.FeatureConfig(embed.TableConfig(4, 2, optimizer=embed.adam(1e-3)))
  >>> layer = embed.SparseEmbed(features, rngs=nnx.Rngs(0))
  >>> len(jax.tree.leaves(nnx.state(layer, embed.SlotVariable)))  # momenta and velocities
  2
  """


class Report(nnx.Variable):
  """What happened in the lookups: an `nnx.Variable` that holds a dictionary of scalars.

  - `dropped_ids`, int32: counted since the start.
  - `exchange_rounds`, int32: the rounds that the exchange of ids and rows took in the last call, at
    most; 1 where buffers were large enough, 0 where nothing was exchanged, as without a mesh.
  - `buffer_fill`, float32: the share of a buffer that was used in the last call, at most; above 1
    there was more than one round. 0 without a mesh.

  A dropped id is one that was given and could not be looked up: `>= vocabulary_size`, beyond a
  `max_valency`, or outside a `dense_shape`. Eager calls raise for these instead. Like all NNX state
  it comes out of `nnx.jit` and the other nnx transformations with the module as an argument; plain
  `jax.jit`, with the module closed over or as a pytree, counts nothing.

  >>> layer = embed.SparseEmbed(embed.FeatureConfig(embed.TableConfig(4, 2)), rngs=nnx.Rngs(0))
  >>> look_up = nnx.jit(lambda layer, ids: layer(ids), graph=False)
  >>> activations = look_up(layer, np.array([3, 4, 5]))
  >>> int(layer.report["dropped_ids"])
  2
  """


class Spec(NamedTuple):
  """What a `SparseEmbed` is, decided at construction and never traced.

  `tables` and `optimizers` by table name, `stacks` by stack name. `table_of` has the table of each
  feature, `stack_of` the stack of each table.
  """

  features: Any
  tables: dict[str, config_lib.TableConfig]
  optimizers: dict[str, RowOptimizer | None]
  stacks: dict[str, StackSpec]
  table_of: dict[Path, str]
  stack_of: dict[str, StackSpec]


class StaticSpec:
  """Holds a layer's `Spec` as static metadata: layers of the same configs, which compare by
  identity, and equal stacks run the same compiled programs."""

  def __init__(self, value: Spec):
    self.value = value

  def __eq__(self, other: object) -> bool:
    return self is other or (isinstance(other, StaticSpec) and self.value == other.value)

  def __hash__(self) -> int:
    return hash(tuple(self.value.stacks.values()))

  def __deepcopy__(self, memo):
    return self


@contextlib.contextmanager
def changing(what: str) -> Iterator[None]:
  """Says what to write where a model has to change that a JAX transformation closes over."""
  try:
    yield
  except flax_errors.TraceContextError:
    raise ValueError(
      f"{what} changes the model, which jax.jit or another JAX transformation closes over, so that "
      "the change would be lost. Pass the model as an argument to nnx.jit: "
      "`step = nnx.jit(lambda model, batch: ...)`, then `step(model, batch)`."
    ) from None


class SparseEmbed(nnx.Module):
  """Embedding lookups of many features over shared tables, with an optimizer for each table.

  Args:
    features: a `FeatureConfig`, or any nesting of dicts, lists, tuples and named tuples of them.
    optimizer: of the tables that have none of their own, such as `embed.adagrad(0.05)`. None
      leaves those tables without slots: they can be looked up, and training them raises.
    rngs: draws one key per table, from its stream `params`.
    mesh: the devices that tables are spread over; None is the mesh of `jax.set_mesh`, and without
      that one device. Inputs may have any sharding; activations come out split over the batch.
      Outside of `jax.set_mesh` its axes count as Auto ones, so that the compiler shards the rest of
      the model.
    axis: the mesh axis, or axes, that tables and the batch are split over.
    sharding: how: "mod" (row r on shard r % n), "div" (consecutive rows), "column" or "replicated".
    plan: an `embed.plan` instead of these three, and of `features` and `optimizer`, which it has;
      other features of the same tables, or another optimizer, may be given beside it.

  Attributes:
    report: an `embed.Report`, the ids that were dropped and the load of the exchange.
    combiner_weights: `{table name: nnx.Variable}`, of the tables whose `embed.CustomCombiner`
      learns; see `embed.CombinerWeights`.

  Raises:
    ValueError: for two tables of one name, an unsupported optimizer, an unknown axis or sharding,
      or an initializer that returns another shape.

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
    spec = _spec(plan)
    self.static = StaticSpec(spec)
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
      {name: _variables(stack, plan.tables, keys, axis) for name, stack in spec.stacks.items()}
    )

  @property
  def spec(self) -> Spec:
    """What was decided at construction, by attribute.

    `features` is the feature config; `tables` the `TableConfig` by table name; `optimizers` the
    `RowOptimizer` (or None) by table name, the default filled in. Its `stacks` say how tables are
    stored, and are internal.
    """
    return self.static.value

  # --- lookup ------------------------------------------------------------------------------------

  def __call__(self, features: Any, weights: Any = None) -> Any:
    """Activations of a batch, in the structure given.

    Args:
      features: inputs in the structure of the feature config; a dict may hold any subset. Each is
        a dense integer array, `Padded`, `Ragged` or `Sparse`, of a batch size of its own.
      weights: the parallel structure, or None; an entry may be None. They are constants, no
        gradient comes back to them, unless the feature has `differentiate_weights`.

    Returns:
      Arrays of the table's dtype in the structure of `features`, `[..., dim]` for a dense array or
      bags, `[batch, max_sequence_length, dim]` for sequences. Empty bags and padding give zeros.

    Raises:
      ValueError: as `embed.validate`, in eager calls. Under jit ids out of range are dropped and
        counted in `report`; types, dtypes and shapes are always checked.
      TypeError: likewise.

    >>> movie = embed.TableConfig(100, 4, combiner="sum", name="movie")
    >>> features = {"watched": embed.FeatureConfig(movie), "next": embed.FeatureConfig(movie)}
    >>> layer = embed.SparseEmbed(features, rngs=nnx.Rngs(0))
    >>> layer({"watched": embed.Padded([[3, 7], [5, -1]])})["watched"].shape  # bags of ids
    (2, 4)
    >>> layer({"next": np.array([9, 9, 1])})["next"].shape  # one id each
    (3, 4)
    """
    return _look_up(self, features, weights)[0]  # nnx.tabulate wraps public methods

  def lookup(self, features: Any, weights: Any = None) -> tuple[Any, Residual]:
    """As `__call__`, and the residual that `apply_gradients` needs.

    The pair is for custom loops: differentiate the loss with respect to the activations, then
    hand their gradients to `apply_gradients`.

    Args:
      features: as of `__call__`.
      weights: as of `__call__`.

    Returns:
      `(activations, residual)`, the second an `embed.Residual`, a pytree.

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
    return _look_up(self, features, weights)

  def attend(self, query: jax.Array, table_name: str, candidates: Any = None) -> jax.Array:
    """Scores of queries against rows: the table used as an output layer (tied weights).

    Args:
      query: float `[..., dim]`.
      table_name: the table to score against.
      candidates: integer ids, `[K]` for all queries or `[..., K]` per query; negative ids are
        padding and score 0. None scores against every row.

    Returns:
      `[..., K]`, or `[..., vocabulary_size]`, the dot products. Inside `embed.value_and_grad`
      gradients reach the query and the rows, those of the candidates alone or all of the table.

    Raises:
      ValueError: for an unknown table, a query of another size, or ids out of range (eagerly).

    >>> movie = embed.TableConfig(3, 2, name="movie")
    >>> layer = embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0))
    >>> layer.load_tables({"movie": np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])})
    >>> query = jnp.array([[1.0, 3.0]])
    >>> layer.attend(query, "movie").tolist(), layer.attend(query, "movie", np.array([2])).tolist()
    ([[1.0, 3.0, 8.0]], [[8.0]])
    """
    table = _table(self, table_name)
    if query.shape[-1] != table.dim:
      raise ValueError(
        f"attend: the query has size {query.shape[-1]}, table {table_name!r} has dim {table.dim}."
      )
    stack = self.spec.stack_of[table_name]
    if candidates is None:
      stored = self.arrays[stack.name]["parameters"].get_value()
      rows = storage.read_whole(stack, taps.read_table(stored, "lookup"), table_name)
      every = Bags(jnp.arange(table.vocabulary_size, dtype=jnp.int32)[:, None])
      (rows,) = _tap(self, [rows], LookupRecord((every,), (table_name,)), stored)
      return jnp.einsum("...d,vd->...v", query, rows)
    shape = np.shape(candidates)
    if not shape or len(shape) not in (1, query.ndim):
      raise ValueError(
        f"attend: candidates must be [K], or [..., K] beside the query {query.shape}. "
        f"Got shape {shape}."
      )
    name, feature = f"candidates of {table_name}", config_lib.FeatureConfig(table)
    inputs = [check((), name, feature, candidates)]
    (act,), record, prepared = _look_up_stack(self, stack, inputs, (table_name,), combiner="sum")
    _count(self, [prepared.dropped], [record])
    if len(shape) == 1:
      return jnp.einsum("...d,kd->...k", query, stack.placement.put(act, P()))
    return jnp.einsum("...d,...kd->...k", query, act.reshape(*shape, table.dim))

  # --- update -----------------------------------------------------------------------------------

  def apply_gradients(self, activation_grads: Any, residual: Residual, step: Any = None) -> None:
    """Steps the tables' optimizers once, in place, from gradients of activations.

    Args:
      activation_grads: in the structure of the activations. None for a feature is a zero gradient
        for the rows it looked up, which is not the same as leaving it out: momentum moves them.
      residual: from the `lookup` that made the activations.
      step: the 0-based step for learning rate schedules, a Python int or traced.

    Raises:
      ValueError: for a feature that was looked up and is missing here, a gradient of another shape
        than its activations, one that is not an array, a table without optimizer, or a missing
        `step` where a schedule or stochastic rounding needs it.
      TypeError: where the kind of a container differs.

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
    grads, learned = _by_stack(self.spec, activation_grads, residual)
    step_stacks(self, grads, step)
    for table, grad in learned.items():
      step_combiner_weights(self, table, grad)

  def apply_row_gradients(self, rows: Mapping[str, RowGrads], step: Any = None) -> None:
    """Steps each named table once from its `RowGrads`, in place.

    A table that is not named, or whose `RowGrads` is empty, does not move, unless its optimizer
    moves every row at every step.

    Args:
      rows: `{table name: RowGrads}`. Ids `vocabulary_size` are unused entries.
      step: as of `apply_gradients`.

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
    grads: dict[str, list[update.StackGrads]] = {}
    for name in rows:
      _table(self, name)
    for name, stack in self.spec.stack_of.items():
      if name in rows:
        grads.setdefault(stack.name, []).extend(gradients.for_stack(stack, name, rows[name]))
    step_stacks(self, grads, step)

  # --- state -------------------------------------------------------------------------------------

  @property
  def tables(self) -> dict[str, jax.Array]:
    """The rows of each table in order, arrays `[vocabulary_size, dim]` by table name.

    They are the module's own arrays: a step that donates the module deletes them. Copy to keep.
    Inside a loss under `embed.value_and_grad` this raises ValueError: no gradient would come back.
    `attend` scores against a table there. On a mesh, a table whose rows do not divide by the shards
    may come whole on every device.
    """
    return {name: arrays["parameters"] for name, arrays in self.variables.items()}

  @property
  def variables(self) -> dict[str, dict[str, Any]]:
    """Rows and slots, by table name a dict of "parameters", `[vocabulary_size, dim]`, and slots.

    Slots are `[vocabulary_size, dim]` or `[vocabulary_size]`, named as in the docstrings of the
    optimizers. Otherwise as `tables`.

    >>> movie = embed.TableConfig(100, 4, optimizer=embed.rowwise_adagrad(0.1), name="movie")
    >>> layer = embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0))
    >>> {name: x.shape for name, x in layer.variables["movie"].items()}
    {'parameters': (100, 4), 'accumulators': (100,)}
    """
    return read_variables(self)

  @property
  def variable_shapes(self) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """`variables` as `jax.ShapeDtypeStruct`, shardings included, without computing anything.

    >>> movie = embed.TableConfig(100, 4, optimizer=embed.adam(1e-3), name="movie")
    >>> layer = embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0))
    >>> sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layer.variable_shapes))  # bytes
    4800
    """
    return variable_shapes(self)

  def load_tables(self, tables: Mapping[str, Any]) -> None:
    """Replaces the rows of the named tables; slots stay as they are.

    Args:
      tables: `{table name: [vocabulary_size, dim]}`, NumPy or JAX arrays, copied to where the table
        is. Other tables stay as they are.

    Raises:
      ValueError: for an unknown table or another shape than `[vocabulary_size, dim]`.

    >>> movie = embed.TableConfig(2, 2, name="movie")
    >>> layer = embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0))
    >>> layer.load_tables({"movie": np.array([[1.0, 2.0], [3.0, 4.0]])})
    >>> layer(np.array([1])).tolist()
    [[3.0, 4.0]]
    """
    self.load_variables({name: {"parameters": value} for name, value in tables.items()})

  def load_variables(self, variables: Mapping[str, Mapping[str, Any]]) -> None:
    """Replaces arrays of `variables`, tables or slots; the others stay as they are.

    Args:
      variables: `{table name: {"parameters" or slot name: array}}`, of the shapes in
        `variable_shapes`. `embed.import_variables` makes such.

    Raises:
      ValueError: before anything is replaced, for an unknown table or slot, or another shape.

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
      _table(self, name)
      for key, value in replaced.items():
        _check_shape(name, key, np.shape(value), shapes[name])
    stacks = tuple(self.spec.stacks.values())
    replacements = [
      {
        key: {t: variables[t][key] for t in stack.tables if key in variables.get(t, {})}
        for key in ("parameters", *stack.slots)
      }
      for stack in stacks
    ]
    new = storage.store_all(stacks, [_arrays(self, stack) for stack in stacks], replacements)
    with changing("Loading tables"):
      for stack, stored in zip(stacks, new, strict=True):
        for key, value in stored.items():
          self.arrays[stack.name][key].set_value(value)


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


def _variables(stack: StackSpec, tables, keys, axis: Any) -> nnx.Dict:
  """The Variables of a stack, each with its place on a mesh."""
  of = lambda x: mesh_lib.metadata(stack.placement, mesh_lib.as_names(axis), x.ndim)
  kind = lambda key: Table if key == "parameters" else SlotVariable
  arrays = storage.make(stack, tables, {name: keys[name] for name in stack.tables})
  return nnx.Dict({key: kind(key)(value, **of(value)) for key, value in arrays.items()})


def _table(layer: SparseEmbed, name: str) -> config_lib.TableConfig:
  tables = layer.spec.tables
  if name not in tables:
    raise ValueError(f"There is no table {name!r}; the tables are {sorted(tables)}.")
  return tables[name]


def _arrays(layer: SparseEmbed, stack: StackSpec) -> Arrays:
  return {key: variable.get_value() for key, variable in layer.arrays[stack.name].items()}


# --- lookup --------------------------------------------------------------------------------------


def _look_up(layer: SparseEmbed, features: Any, weights: Any) -> tuple[Any, Residual]:
  """Activations in the structure of the features, and the residual."""
  spec = layer.spec
  members: dict[str, list[Input]] = {}
  for x in read(spec.features, features, weights):
    members.setdefault(spec.stack_of[spec.table_of[x.path]].name, []).append(x)
  activations: dict[Path, jax.Array] = {}
  residual = Residual({}, {}, {})
  dropped: list[jax.Array] = []
  for stack_name, inputs in members.items():
    stack, tables = spec.stacks[stack_name], tuple(spec.table_of[x.path] for x in inputs)
    acts, record, prepared = _look_up_stack(layer, stack, inputs, tables)
    for x, table, act, later in zip(inputs, tables, acts, prepared.uncombined, strict=True):
      if later is not None:
        learned = layer.combiner_weights.get(table)
        looked_up = Uncombined(act, *later, None if learned is None else learned[...])
        residual.uncombined[x.path] = looked_up
        act = combiners.combine(spec.tables[table], stack, looked_up)
      activations[x.path] = act
    residual.records[stack_name] = record
    residual.paths[stack_name] = tuple(x.path for x in inputs)
    dropped.append(prepared.dropped)
  _count(layer, dropped, list(residual.records.values()))
  return structure.pack(spec.features, features, activations), residual


def _look_up_stack(
  layer: SparseEmbed,
  stack: StackSpec,
  inputs: Sequence[Input],
  tables: tuple[str, ...],
  combiner: str | None = None,
) -> tuple[list[jax.Array], LookupRecord, combiners.Prepared]:
  """Tapped activations of the features of a stack, what was looked up, and its bags."""
  placement = stack.placement
  arrays = [placement.accept(x.name, x.parts) for x in inputs]
  prepared = placement.prepare(functools.partial(combiners.prepare, inputs, combiner), arrays)
  stored = layer.arrays[stack.name]["parameters"].get_value()
  rows = taps.read_table(stored, "lookup")
  acts, record = mesh_lib.settled(_compiled_look_up(stack, rows, prepared.bags, tables))
  if mesh_lib.is_explicit((rows, layer.report.get_value())):
    acts = [placement.typed(act) for act in acts]
  return _tap(layer, acts, record, stored), record, prepared


# Compiled once for each shape, also where `value_and_grad` runs a loss eagerly: a lookup that was
# traced into the loss would have its loops compiled again at every step.
_compiled_look_up = jax.jit(exchange.look_up, static_argnums=(0, 3))


def _tap(
  layer: SparseEmbed, activations: Sequence[jax.Array], record: LookupRecord, stored: jax.Array
) -> list[jax.Array]:
  """Activations with the record of their lookup, for `value_and_grad`."""
  optimizers = [layer.spec.optimizers[name] for name in record.tables]
  trains = any(optimizer is None or optimizer.equation is not None for optimizer in optimizers)
  if trains and jax_internals.is_differentiating():
    warnings.warn(_UNTRAINED.format(record.tables[0]), stacklevel=5)
  return taps.tap(activations, record, stored, taps.Layer(layer, trains))


def _count(
  layer: SparseEmbed, dropped: Sequence[jax.Array], records: Sequence[LookupRecord]
) -> None:
  """Adds a call to the layer's report."""
  if not dropped:
    return
  routes = [record.route for record in records if record.route is not None]
  counted = {
    "dropped_ids": functools.reduce(jnp.add, dropped),
    "exchange_rounds": jnp.int32(0),
    "buffer_fill": jnp.float32(0),
  }
  for found in routes:
    most = found.max_rows_per_pair[0]
    of = {
      "exchange_rounds": route.rounds(most, found.capacity),
      "buffer_fill": most.astype(jnp.float32) / found.capacity,
    }
    counted |= {key: jnp.maximum(counted[key], value) for key, value in of.items()}
  try:
    before = layer.report.get_value()
    report = {key: mesh_lib.with_types_of(counted[key], before[key]) for key in before}
    report["dropped_ids"] += before["dropped_ids"]
    layer.report.set_value(report)
    is_lost = jax_internals.is_batched(report) and not jax_internals.is_batched(before)
    if is_lost and jax_internals.is_called_by(jax_internals.VMAP):
      raise ValueError(
        "SparseEmbed was called under nnx.vmap, which has no place for the counts in its report. "
        "Look up the whole batch at once, outside, and pass the activations in."
      )
  except flax_errors.TraceContextError:
    pass  # a model that a function closes over, as under jax.jit: no state comes out of it


# --- update --------------------------------------------------------------------------------------


def _by_stack(
  spec: Spec, activation_grads: Any, residual: Residual
) -> tuple[dict[str, list[update.StackGrads]], dict[str, jax.Array]]:
  """Gradients by stack, and those of combiners' learned weights by table, all checked."""
  by_path = dict(structure.match(spec.features, activation_grads, "activation_grads"))
  looked_up = {path for paths in residual.paths.values() for path in paths}
  features = dict(structure.flatten_features(spec.features))
  for path, feature in features.items():
    name = structure.feature_name(path, feature)
    if path in looked_up and path not in by_path:
      raise ValueError(
        f"No gradient given for {name!r}, which was looked up. Give None for a zero gradient."
      )
    if path not in looked_up and by_path.get(path) is not None:
      raise ValueError(f"Gradient given for {name!r}, which was not looked up.")
  for path, rows in residual.uncombined.items():
    if rows.learned is not None:  # says what is wrong before anything is trained
      combiners.learning_rate(spec.table_of[path], features[path].table)
  grads: dict[str, list[update.StackGrads]] = {}
  learned: dict[str, jax.Array] = {}
  for stack_name, record in residual.records.items():
    of_features = []
    for path, bags in zip(residual.paths[stack_name], record.bags, strict=True):
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


def step_combiner_weights(layer: SparseEmbed, table: str, grad: jax.Array) -> None:
  """Trains the learned weights of a table's combiner, at its own rate."""
  variable, rate = (
    layer.combiner_weights[table],
    combiners.learning_rate(table, _table(layer, table)),
  )
  with changing("An update of a combiner's weights"):
    variable.set_value(variable[...] - rate * grad)


def step_stacks(
  layer: SparseEmbed, grads: Mapping[str, Sequence[update.StackGrads]], step: Any
) -> None:
  """Steps each stack once, or, where something is missing, none."""
  moving = [stack for stack in layer.spec.stacks.values() if _moves(stack, grads, step)]
  for stack in moving:
    variables, of_stack = layer.arrays[stack.name], tuple(grads.get(stack.name, ()))
    arrays = {k: taps.read_table(x, "update") for k, x in _arrays(layer, stack).items()}
    scalars = update.StepScalars.at(stack, step)
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((arrays, of_stack)))
    run = update.step if traced else _compiled_step
    new = mesh_lib.settled(run(stack, arrays, of_stack, scalars))
    with changing("An update of tables"):
      for key, value in new.items():
        variables[key].set_value(mesh_lib.with_types_of(value, arrays[key]))


_compiled_step = jax.jit(update.step, static_argnums=0)


def _moves(stack: StackSpec, grads: Mapping[str, Any], step: Any) -> bool:
  """Whether a stack moves; raises for what is missing."""
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


# --- state ---------------------------------------------------------------------------------------


def read_variables(layer: SparseEmbed, compact: bool = False) -> dict[str, dict[str, Any]]:
  """`SparseEmbed.variables`, or its `compact` views: see `engine.storage`."""
  stacks = tuple(layer.spec.stacks.values())
  arrays = [_arrays(layer, stack) for stack in stacks]
  if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(arrays)):
    return variable_shapes(layer, compact)  # under nnx.eval_shape
  arrays = jax.tree.map(lambda x: taps.read_table(x, "tables"), arrays)
  tables = storage.read_all(stacks, arrays, compact)
  keys = lambda name: ("parameters", *layer.spec.stack_of[name].slots)  # jit has sorted them
  return {name: {key: tables[name][key] for key in keys(name)} for name in layer.spec.tables}


def variable_shapes(
  layer: SparseEmbed, compact: bool = False
) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
  """The shapes of `read_variables`."""
  of = lambda name, stack: storage.shapes(stack, _arrays(layer, stack), name, compact)
  return {name: of(name, layer.spec.stack_of[name]) for name in layer.spec.tables}


def store_apart(layer: SparseEmbed) -> None:
  """Stores each table of a layer in an array of its own, whole and without slots, for serving."""
  spec, rows = layer.spec, layer.tables
  stacks = {
    name: StackSpec(
      name, (name,), Layout((table.vocabulary_size,)), table.dim, table.dtype,
      quantization=table.quantization_config,
    )
    for name, table in spec.tables.items()
  }  # fmt: skip
  optimizers: dict[str, RowOptimizer | None] = dict.fromkeys(spec.tables)
  layer.static = StaticSpec(spec._replace(optimizers=optimizers, stacks=stacks, stack_of=stacks))
  layer.arrays = nnx.Dict({t: nnx.Dict({"parameters": Table(rows[t])}) for t in spec.tables})


def _check_shape(name: str, key: str, shape: tuple[int, ...], wanted: Mapping[str, Any]) -> None:
  """Raises ValueError unless `wanted`, what a table keeps, has such an array."""
  if key not in wanted:
    slots = [kept for kept in wanted if kept != "parameters"]
    raise ValueError(f"Table {name!r} has no slot {key!r}; its slots are {slots}.")
  if shape != wanted[key].shape:
    what = f"Table {name!r}" if key == "parameters" else f"Slot {key!r} of table {name!r}"
    raise ValueError(f"{what} has shape {wanted[key].shape}, got {shape}.")


def _checked(name: str, grads: Any, shape: tuple[int, ...]) -> jax.Array:
  """A feature's activation gradient, checked against what was looked up; None is zero."""
  if grads is None:
    return jnp.zeros(shape, jnp.float32)
  if not isinstance(grads, (jax.Array, np.ndarray)):
    raise ValueError(f"Gradient of {name!r}: found a non-array type {type(grads)}.")
  if grads.shape != shape:
    raise ValueError(f"Gradient of {name!r} has shape {grads.shape}; its activations have {shape}.")
  return jnp.asarray(grads)
