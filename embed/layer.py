"""`SparseEmbed`: features over shared tables, as a Flax NNX module."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import errors as flax_errors
from flax import nnx

from embed import config as config_lib
from embed import gradients as grads
from embed import inputs as ragged
from embed import planning, structure
from embed.engine import combining, exchange
from embed.engine import jax_internals as internals
from embed.engine import lookup as lookup_lib
from embed.engine import mesh as sharding
from embed.engine.exchange import Call
from embed.engine.layout import Layout
from embed.engine.lookup import Occurrences, Reads
from embed.engine.stack import Arrays, Load, Moment, Sent, Stack, read_all, store_all
from embed.gradients import RowGrads
from embed.optimizers import RowOptimizer

Path = structure.Path


_UNTRAINED = (
  "Table {!r} is looked up under JAX's own differentiation, as in nnx.value_and_grad: its rows get "
  "no gradient, and nothing trains them. Write embed.value_and_grad and embed.Optimizer, or give "
  "the table optimizer=embed.frozen() to keep it fixed."
)


class Apart(NamedTuple):
  """The bags of a feature whose rows were looked up one by one, for `combining.combine`."""

  rows: jax.Array  # [..., L, D]
  ids: jax.Array  # int32 [..., L]
  weights: jax.Array | None  # float32 [..., L]
  learned: jax.Array | None  # float32 [num_weights], as they were at the lookup


@jax.tree_util.register_pytree_node_class
class Residual:
  """What `SparseEmbed.lookup` read, for `apply_gradients`: a pytree, with nothing in it for users.

  It holds ids and, on a mesh, the route of the exchange; of the features whose rows were combined
  after the lookup, the rows.
  """

  def __init__(
    self,
    reads: dict[str, Reads],
    paths: dict[str, tuple[Path, ...]],
    apart: dict[Path, Apart],
  ):
    self.reads, self.paths, self.apart = reads, paths, apart

  def tree_flatten(self):
    names = tuple(sorted(self.reads))
    paths = tuple((name, self.paths[name]) for name in names)
    reads, apart = tuple(self.reads[name] for name in names), tuple(self.apart.values())
    return (reads, apart), (paths, tuple(self.apart))

  @classmethod
  def tree_unflatten(cls, static, leaves) -> "Residual":
    (paths, apart), (all_reads, all_apart) = static, leaves
    reads = dict(zip(dict(paths), all_reads, strict=True))
    return cls(reads, dict(paths), dict(zip(apart, all_apart, strict=True)))


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
    if _is_copied(before, value) and internals.is_called_by(internals.TRANSFORMATIONS):
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


class CombinerWeights(nnx.Param):
  """The learned weights of an `embed.CustomCombiner`, trained at its own rate.

  An `nnx.Param` type, float32 `[num_weights]`, so `embed.value_and_grad` gives their gradient among
  the dense ones. `sparse_embed.combiner_weights` has them by table name.

  >>> average = embed.CustomCombiner(
  ...   lambda valency, vectors, weights: weights @ vectors,
  ...   max_valency=2, num_weights=2, initializer=jax.nn.initializers.constant(0.5))
  >>> table = embed.TableConfig(4, 2, combiner=average, name="movie")
  >>> layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  >>> layer.combiner_weights["movie"][...].tolist()
  [0.5, 0.5]
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


class _Spec(NamedTuple):
  """What a `SparseEmbed` is, decided at construction and never traced."""

  features: Any
  tables: dict[str, config_lib.TableConfig]
  optimizers: dict[str, RowOptimizer | None]
  stacks: dict[str, Stack]


class _Static:
  """Holds a layer's `_Spec` as static metadata: layers of the same configs, which compare by
  identity, and equal stacks run the same compiled programs."""

  def __init__(self, value: _Spec):
    self.value = value

  def __eq__(self, other: object) -> bool:
    return self is other or (isinstance(other, _Static) and self.value == other.value)

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
    stacks = plan.stacks()
    spec = _Spec(plan.features, plan.tables, plan.optimizers, stacks)
    self._spec = _Static(spec)
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
        name: _combiner_weights(table.combiner, jax.random.fold_in(keys[name], 2**31 - 1))
        for name, table in plan.tables.items()
        if isinstance(table.combiner, config_lib.CustomCombiner) and table.combiner.num_weights
      }
    )
    self.arrays = nnx.Dict(
      {
        name: nnx.Dict(_variables(stack, stack.make({t: keys[t] for t in stack.tables}), axis))
        for name, stack in stacks.items()
      }
    )

  @property
  def spec(self) -> _Spec:
    """What was decided at construction, by attribute.

    `features` is the feature config; `tables` the `TableConfig` by table name; `optimizers` the
    `RowOptimizer` (or None) by table name, the default filled in. Its `stacks` say how tables are
    stored, and are internal.
    """
    return self._spec.value

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
    return self._look_up(features, weights)[0]  # nnx.tabulate wraps public methods

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
    return self._look_up(features, weights)

  def _look_up(self, features: Any, weights: Any) -> tuple[Any, Residual]:
    flat = ragged.flatten(self.spec.features, features, weights)
    activations: dict[Path, jax.Array] = {}
    apart: dict[Path, Apart] = {}
    read: dict[str, Reads] = {}
    paths: dict[str, tuple[Path, ...]] = {}
    loads, dropped = [], []
    groups: dict[str, list[tuple[Path, config_lib.FeatureConfig]]] = {}
    for path, (feature, x, w) in flat.items():
      ragged.check(structure.feature_name(path, feature), feature, x, w)
      stack_name = self._stack_of(self._table_name(feature)).name
      groups.setdefault(stack_name, []).append((path, feature))
    for stack_name, members in groups.items():
      inputs = [(f, *flat[path][1:], structure.feature_name(path, f)) for path, f in members]
      tables = [self._table_name(feature) for _, feature in members]
      acts, reads, load, lost, bags = self._read(self.spec.stacks[stack_name], inputs, tables)
      activations.update({path: act for (path, _), act in zip(members, acts, strict=True)})
      for (path, _), act, table, bag in zip(members, acts, tables, bags, strict=True):
        if bag is not None:
          apart[path] = self._apart(table, act, *bag)
          activations[path] = self._combine(table, apart[path])
      read[stack_name], paths[stack_name] = reads, tuple(path for path, _ in members)
      loads.append(load)
      dropped.append(lost)
    self._count(dropped, loads)
    packed = structure.pack(self.spec.features, features, activations)
    return packed, Residual(read, paths, apart)

  def _apart(self, table: str, rows: jax.Array, ids: jax.Array, weights: Any) -> Apart:
    rows, ids, weights = self._stack_of(table).beside((rows, ids, weights))
    own = self.combiner_weights
    return Apart(rows, ids, weights, own[table][...] if table in own else None)

  def _combine(self, table: str, bags: Apart) -> jax.Array:
    """Rows that were looked up one by one, combined."""
    combine = lambda bags: combining.combine(self._table(table), *bags)
    stack = self._stack_of(table)
    if stack.placement is None:
      return combine(bags)
    return stack.beside(stack.placement.prepare(combine, bags, like=bags.rows))

  def _read(self, stack: Stack, inputs, tables: list[str], combiner: str | None = None):
    """Activations of the features of a stack, marked; what was read, the load, and ids dropped.

    And of each feature None, or the ids and weights of the bags that are still to be combined.
    """
    placement = stack.placement
    values = [(x if placement is None else _whole_splits(placement, x), w) for _, x, w, _ in inputs]
    prepare = functools.partial(_prepare, [(f, name) for f, _, _, name in inputs], combiner)
    if placement is None:
      for _, x, _, name in inputs:
        sharding.check_whole(name, x)
    prepared = prepare(values) if placement is None else placement.prepare(prepare, values)
    parts, lost, bags = prepared
    table, rows = self._rows(stack)
    acts, reads, load = sharding.settled(_look_up(rows, parts, stack, tuple(tables)))
    if placement is not None and sharding.is_explicit((rows, self.report.get_value())):
      acts = [placement.typed(act) for act in acts]
    return self._mark(acts, reads, table), reads, load, lost, bags

  def _rows(self, stack: Stack) -> tuple[jax.Array, jax.Array]:
    """The stored rows of a stack: to mark lookups with, and to look them up in."""
    table = self.arrays[stack.name]["parameters"].get_value()
    return table, lookup_lib.read(table, "lookup")

  def _mark(self, activations: Sequence[jax.Array], reads: Reads, table: jax.Array):
    """Activations with what they were looked up in on record, for `value_and_grad`."""
    optimizers = [self.spec.optimizers[name] for name in reads.tables]
    trains = any(optimizer is None or optimizer.equation is not None for optimizer in optimizers)
    if trains and internals.is_differentiating():
      warnings.warn(_UNTRAINED.format(reads.tables[0]), stacklevel=5)
    return lookup_lib.mark(activations, reads, table, lookup_lib.Layer(self, trains))

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
    table = self._table(table_name)
    if query.shape[-1] != table.dim:
      raise ValueError(
        f"attend: the query has size {query.shape[-1]}, table {table_name!r} has dim {table.dim}."
      )
    stack = self._stack_of(table_name)
    if candidates is None:
      stored, rows = self._rows(stack)
      rows = stack.whole(rows, table_name)
      every = jnp.arange(table.vocabulary_size, dtype=jnp.int32)[:, None]
      reads = Reads((Occurrences(every, None, None),), (table_name,))
      (rows,) = self._mark([rows], reads, stored)
      return jnp.einsum("...d,vd->...v", query, rows)
    name = f"candidates of {table_name}"
    feature = config_lib.FeatureConfig(table)
    shape = np.shape(candidates)
    if not shape or len(shape) not in (1, query.ndim):
      raise ValueError(
        f"attend: candidates must be [K], or [..., K] beside the query {query.shape}. "
        f"Got shape {shape}."
      )
    ragged.check(name, feature, candidates)
    (act,), _, load, lost, _ = self._read(
      stack, [(feature, candidates, None, name)], [table_name], combiner="sum"
    )
    self._count([lost], [load])
    if len(shape) == 1:
      return jnp.einsum("...d,kd->...k", query, stack.everywhere(act))
    return jnp.einsum("...d,...kd->...k", query, act.reshape(*shape, table.dim))

  # --- update ------------------------------------------------------------------------------------

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
    given = dict(structure.match(self.spec.features, activation_grads, "activation_grads"))
    looked_up = {path for paths in residual.paths.values() for path in paths}
    features_of = dict(structure.flatten_features(self.spec.features))
    for path, feature in features_of.items():
      name = structure.feature_name(path, feature)
      if path in looked_up and path not in given:
        raise ValueError(
          f"No gradient given for {name!r}, which was looked up. Give None for a zero gradient."
        )
      if path not in looked_up and given.get(path) is not None:
        raise ValueError(f"Gradient given for {name!r}, which was not looked up.")
    sent: dict[str, list[Sent]] = {}
    learned: dict[str, list[jax.Array]] = {}
    for path in residual.apart:
      table = self._table_name(features_of[path])
      if table in self.combiner_weights:
        self._combiner_rate(table)  # says what is wrong before anything is trained
    for stack_name, reads in residual.reads.items():
      calls = []
      for path, occ in zip(residual.paths[stack_name], reads.parts, strict=True):
        feature, bags = features_of[path], residual.apart.get(path)
        name = structure.feature_name(path, feature)
        batch = occ.batch if bags is None else bags.ids.shape[:-1]
        grad = _checked(name, given[path], (*batch, feature.table.dim))
        if bags is not None:
          table = self._table_name(feature)
          grad, of_learned = self._uncombine(table, bags, grad)
          if of_learned is not None:
            learned.setdefault(table, []).append(of_learned)
        calls.append(grad)
      sent[stack_name] = [Call(tuple(calls), reads)]
    self._apply(sent, step)
    for table, parts in learned.items():
      self._descend(table, functools.reduce(jnp.add, parts))

  def _uncombine(self, table: str, bags: Apart, grad: jax.Array) -> tuple[jax.Array, Any]:
    """The gradients of rows, and of the learned weights, from that of the combined ones."""

    def back(bags: Apart, grad: jax.Array):
      combine = lambda rows, learned: self._combine(
        table, bags._replace(rows=rows, learned=learned)
      )
      out, vjp = jax.vjp(combine, bags.rows, bags.learned)
      return vjp(grad.astype(out.dtype))

    stack = self._stack_of(table)
    eager = not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((bags, grad)))
    back = jax.jit(back) if stack.placement is not None and eager else back
    return back(bags, stack.beside(grad))

  def _combiner_rate(self, table: str) -> float:
    """The rate of a table's learned weights."""
    combiner = self._table(table).combiner
    assert isinstance(combiner, config_lib.CustomCombiner)
    rate = combiner.combiner_weights_learning_rate
    if rate is None:
      raise ValueError(
        f"Table {table!r}: the weights of its combiner are trained by the dense optimizer, since "
        "combiner_weights_learning_rate is None. Use embed.value_and_grad and embed.Optimizer, or "
        "give a rate."
      )
    return rate

  def _descend(self, table: str, grad: jax.Array) -> None:
    """Trains the learned weights of a table's combiner."""
    variable = self.combiner_weights[table]
    with changing("An update of a combiner's weights"):
      variable.set_value(variable[...] - self._combiner_rate(table) * grad)

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
    for name in rows:
      self._table(name)
    sent: dict[str, list[Sent]] = {}
    for stack in self.spec.stacks.values():
      for name in stack.tables:
        if name in rows:
          sent.setdefault(stack.name, []).extend(grads.sent_to(stack, name, rows[name]))
    self._apply(sent, step)

  def _apply(self, sent: Mapping[str, Sequence[Sent]], step: Any) -> None:
    """Steps each stack once, or, where something is missing, none."""
    moving = [stack for stack in self.spec.stacks.values() if self._trains(stack, sent, step)]
    for stack in moving:
      variables, mine = self.arrays[stack.name], tuple(sent.get(stack.name, ()))
      arrays = {k: lookup_lib.read(v.get_value(), "update") for k, v in variables.items()}
      new = _step(arrays, mine, stack.at(step), stack)
      with changing("An update of tables"):
        for key, value in new.items():
          variables[key].set_value(sharding.with_types_of(value, arrays[key]))

  def _trains(self, stack: Stack, sent: Mapping[str, Sequence[Sent]], step: Any) -> bool:
    """Whether a stack moves; raises for what is missing."""
    optimizer = stack.optimizer
    if stack.name not in sent and (optimizer is None or optimizer.lazy):
      return False
    if optimizer is None:
      raise ValueError(
        f"Table {stack.names[0]!r} has no optimizer, so it cannot be trained. Give one in its "
        "TableConfig or to SparseEmbed, or freeze it with optimizer=embed.frozen()."
      )
    if optimizer.equation is None:
      return False
    if step is None and optimizer.has_schedule:
      raise ValueError(
        f"Table {stack.names[0]!r} has a schedule, of its learning rate or gradient multiplier: "
        "pass step=..."
      )
    if step is None and stack.rounds:
      raise ValueError(
        f"Table {stack.names[0]!r} rounds its {stack.config.dtype} rows at random, by the number "
        "of the step: pass step=..., or set stochastic_rounding=False in its TableConfig."
      )
    return True

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
    return self._read_variables()

  def _read_variables(self, compact: bool = False) -> dict[str, dict[str, Any]]:
    """`variables`, or `compact`: see `views`."""
    stacks = tuple(self.spec.stacks.values())
    arrays = [{k: v.get_value() for k, v in self.arrays[s.name].items()} for s in stacks]
    leaves = jax.tree.leaves(arrays)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):  # under nnx.eval_shape
      return self._shapes(compact)
    arrays = jax.tree.map(lambda x: lookup_lib.read(x, "tables"), arrays)
    found = read_all(stacks, arrays, compact)
    keys = lambda name: ("parameters", *self._stack_of(name).slots)  # jit has sorted them
    return {n: {k: found[n][k] for k in keys(n)} for n in self.spec.tables}

  @property
  def variable_shapes(self) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """`variables` as `jax.ShapeDtypeStruct`, shardings included, without computing anything.

    >>> movie = embed.TableConfig(100, 4, optimizer=embed.adam(1e-3), name="movie")
    >>> layer = embed.SparseEmbed(embed.FeatureConfig(movie), rngs=nnx.Rngs(0))
    >>> sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layer.variable_shapes))  # bytes
    4800
    """
    return self._shapes()

  def _shapes(self, compact: bool = False) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    arrays = lambda stack: {k: v.get_value() for k, v in self.arrays[stack.name].items()}
    shapes = {
      name: stack.shapes(arrays(stack), name, compact)
      for stack in self.spec.stacks.values()
      for name in stack.tables
    }
    return {name: shapes[name] for name in self.spec.tables}

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
    shapes = self.variable_shapes
    for name, replaced in variables.items():
      self._table(name)
      for key, value in replaced.items():
        _check_shape(name, key, np.shape(value), shapes[name])
    stacks = tuple(self.spec.stacks.values())
    given = [
      {
        key: {t: variables[t][key] for t in stack.tables if key in variables.get(t, {})}
        for key in ("parameters", *stack.slots)
      }
      for stack in stacks
    ]
    arrays = [{k: v.get_value() for k, v in self.arrays[s.name].items()} for s in stacks]
    new = store_all(stacks, arrays, given)
    with changing("Loading tables"):
      for stack, stored in zip(stacks, new, strict=True):
        for key, value in stored.items():
          self.arrays[stack.name][key].set_value(value)

  # --- small parts -------------------------------------------------------------------------------

  def _table(self, name: str) -> config_lib.TableConfig:
    if name not in self.spec.tables:
      raise ValueError(f"There is no table {name!r}; the tables are {sorted(self.spec.tables)}.")
    return self.spec.tables[name]

  def _table_name(self, feature: config_lib.FeatureConfig) -> str:
    return next(name for name, table in self.spec.tables.items() if table is feature.table)

  def _stack_of(self, table: str) -> Stack:
    return next(stack for stack in self.spec.stacks.values() if table in stack.tables)

  def _count(self, dropped: list[jax.Array], loads: list[Load | None]) -> None:
    if not dropped:
      return
    try:
      before = self.report.get_value()
      counted = {"dropped_ids": functools.reduce(jnp.add, dropped), **_loads(loads)}
      report = {key: sharding.with_types_of(counted[key], before[key]) for key in before}
      report["dropped_ids"] += before["dropped_ids"]
      self.report.set_value(report)
      is_lost = internals.is_batched(report) and not internals.is_batched(before)
      if is_lost and internals.is_called_by(internals.VMAP):
        raise ValueError(
          "SparseEmbed was called under nnx.vmap, which has no place for the counts in its report. "
          "Look up the whole batch at once, outside, and pass the activations in."
        )
    except flax_errors.TraceContextError:
      pass  # a model that a function closes over, as under jax.jit: no state comes out of it


def _whole_splits(placement: sharding.Placement, x: Any) -> Any:
  """An input whose row splits, if it has any, every device has whole."""
  if not isinstance(x, ragged.Ragged):
    return x
  return dataclasses.replace(x, row_splits=placement.replicate(x.row_splits))


def _prepare(features, combiner: str | None, values):
  """The occurrences of some features, how many ids were dropped on the way, and the bags that are
  to be combined after the lookup: ids and weights, or None."""
  parts: list[Occurrences] = []
  dropped: list[jax.Array] = []
  apart: list[tuple[jax.Array, jax.Array | None] | None] = []
  for (feature, name), (x, w) in zip(features, values, strict=True):
    table, size = feature.table, feature.table.vocabulary_size
    bags = ragged.to_bags(name, feature, x, w)
    custom = isinstance(table.combiner, config_lib.CustomCombiner)
    wanted = custom or (feature.differentiate_weights and w is not None)
    if wanted and combiner is None and ragged.combines(name, feature, x, w):
      bags = ragged.in_places(bags, size, _places(name, feature, x, bags))
      parts.append(Occurrences(bags.ids[..., None], None, None))
      weights = (
        bags.weights if feature.differentiate_weights else jax.lax.stop_gradient(bags.weights)
      )
      apart.append((bags.ids, weights))
    else:
      how = combiner or ("sum" if custom else table.combiner)  # a sequence has bags of one id
      parts.append(lookup_lib.occurrences(bags, how, size))
      apart.append(None)
    dropped.append(bags.dropped)
  return tuple(parts), functools.reduce(jnp.add, dropped), tuple(apart)


def _places(name: str, feature: config_lib.FeatureConfig, x: Any, bags: ragged.Bags) -> int | None:
  """The places of a bag that is combined after the lookup; None for those that it has."""
  if isinstance(feature.table.combiner, config_lib.CustomCombiner):
    return feature.table.combiner.max_valency
  if bags.segments is None:
    return None
  if isinstance(x, ragged.Sparse):
    return min(x.dense_shape[-1], max(bags.ids.shape[0], 1))
  raise ValueError(
    f"Feature {name!r}: differentiate_weights needs bags of known length. Give "
    "embed.Ragged(..., max_valency=...), or embed.to_padded(...)."
  )


def _combiner_weights(combiner: config_lib.CustomCombiner, key: jax.Array) -> nnx.Param:
  """The learned weights of a combiner."""
  assert combiner.initializer is not None
  shape = (combiner.num_weights,)
  value = combiner.initializer(key, shape, jnp.float32)
  if np.shape(value) != shape:
    raise ValueError(f"A combiner's initializer returned {np.shape(value)}, not {shape}.")
  ordinary = combiner.combiner_weights_learning_rate is None
  return (nnx.Param if ordinary else CombinerWeights)(jnp.asarray(value, jnp.float32))


def _loads(loads: list[Load | None]) -> dict[str, jax.Array]:
  """The report of the fullest exchange of a call."""
  some = [load for load in loads if load is not None]
  if not some:
    return {"exchange_rounds": jnp.int32(0), "buffer_fill": jnp.float32(0)}
  rounds = [exchange.rounds(load.most[0], load.capacity) for load in some]
  fill = [load.most[0].astype(jnp.float32) / load.capacity for load in some]
  most = lambda values: functools.reduce(jnp.maximum, values)
  return {"exchange_rounds": most(rounds), "buffer_fill": most(fill)}


# Compiled once for each shape, also where `value_and_grad` runs a loss eagerly: a lookup that was
# traced into the loss would have its loops compiled again at every step.


@functools.partial(jax.jit, static_argnums=(2, 3))
def _look_up(rows: jax.Array, parts: Any, stack: Stack, tables: tuple[str, ...]):
  return stack.look_up(rows, parts, tables)


def _step(arrays: Arrays, sent: tuple[Sent, ...], moment: Moment, stack: Stack) -> Arrays:
  if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((arrays, sent))):
    return stack.step(arrays, sent, moment)
  return sharding.settled(_compiled_step(arrays, sent, moment, stack))


@functools.partial(jax.jit, static_argnums=3)
def _compiled_step(arrays, sent, moment, stack):
  return stack.step(arrays, sent, moment)


def _variables(stack: Stack, arrays: Arrays, axis: Any) -> dict[str, nnx.Variable]:
  """The Variables of a stack, each with its place on a mesh."""
  of = lambda x: sharding.metadata(stack.placement, sharding.as_names(axis), x.ndim)
  make = lambda key: Table if key == "parameters" else SlotVariable
  return {key: make(key)(value, **of(value)) for key, value in arrays.items()}


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


def store_on_one_device(layer: SparseEmbed) -> None:
  """Stores each table of a layer in one array without a mesh or slots, rows in order; in place."""
  spec, rows = layer.spec, layer.tables
  stacks = {
    name: Stack(name, {name: table}, None, Layout((table.vocabulary_size,)))
    for name, table in spec.tables.items()
  }
  layer._spec = _Static(spec._replace(optimizers=dict.fromkeys(spec.tables), stacks=stacks))
  layer.arrays = nnx.Dict({t: nnx.Dict({"parameters": Table(rows[t])}) for t in spec.tables})
