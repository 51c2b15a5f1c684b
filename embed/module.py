"""`SparseEmbed`: features over shared tables, as a Flax NNX module."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import errors as flax_errors
from flax import nnx

from embed import config as config_lib
from embed import initializers, ragged, sharding, update
from embed import lookup as lookup_lib
from embed.grads import RowGrads
from embed.optimizers import RowOptimizer, Slot

Path = config_lib.Path
Residual = dict[str, lookup_lib.Occurrences]


class Table(nnx.Variable):
  """The rows of a table. Not an `nnx.Param`: no dense optimizer ever sees it."""


class SlotVariable(nnx.Variable):
  """An optimizer's state per row of a table."""


class Report(nnx.Variable):
  """What happened in the lookups so far: `{"dropped_ids": int32 scalar}`, counted since the start.

  A dropped id is one that was given and could not be looked up: `>= vocabulary_size`, beyond a
  `max_valency`, or outside a `dense_shape`. Eager calls raise for these instead. Like all NNX state
  it comes out of `nnx.jit` and the other nnx transformations with the module as an argument; plain
  `jax.jit`, with the module closed over or as a pytree, counts nothing.
  """


class _Spec(NamedTuple):
  """What a `SparseEmbed` is, decided at construction and never traced."""

  features: Any
  tables: dict[str, config_lib.TableConfig]
  optimizers: dict[str, RowOptimizer | None]


class _Static:
  """Holds a value as static metadata, compared by identity: a config need not be hashable."""

  def __init__(self, value: Any):
    self.value = value

  def __deepcopy__(self, memo):
    return self


def _resolve(name: str, table: config_lib.TableConfig, default: Any) -> RowOptimizer | None:
  """A table's own optimizer, or the default: completely, and without writing to the config."""
  optimizer = default if table.optimizer is None else table.optimizer
  if optimizer is not None and not isinstance(optimizer, RowOptimizer):
    hint = "embed.adam(1e-3)"
    if hasattr(optimizer, "update") and hasattr(optimizer, "init"):
      hint = "embed.from_optax(tx), which runs an optax transformation on rows"
    raise ValueError(
      f"Table {name!r}: {type(optimizer)} is an unsupported optimizer class. Write {hint}; the "
      "others are embed.sgd, adagrad, rowwise_adagrad, adagrad_momentum, ftrl, momentum, rmsprop, "
      "proximal_adagrad, lion, custom_optimizer and frozen."
    )
  return optimizer


class SparseEmbed(nnx.Module):
  """Embedding lookups of many features over shared tables, with an optimizer for each table.

  Args:
    features: a `FeatureConfig`, or any nesting of dicts, lists, tuples and named tuples of them.
    optimizer: of the tables that have none of their own, such as `embed.adagrad(0.05)`. None
      leaves those tables without slots: they can be looked up, and training them raises.
    rngs: draws one key per table, from its stream `params`.
    axis: the mesh axis that rows are split over, in the Variables' metadata.

  Raises:
    ValueError: for two tables of one name, an unsupported optimizer, or an initializer that
      returns another shape.

  >>> import embed
  >>> movie = embed.TableConfig(vocabulary_size=100, dim=4, combiner="sum", name="movie")
  >>> features = {"watched": embed.FeatureConfig(movie)}
  >>> layer = embed.SparseEmbed(features, embed.adagrad(0.1), rngs=nnx.Rngs(0))
  >>> layer({"watched": embed.Padded([[3, 7], [5, -1]])})["watched"].shape
  (2, 4)
  """

  def __init__(
    self,
    features: Any,
    optimizer: RowOptimizer | None = None,
    *,
    rngs: nnx.Rngs,
    axis: str | None = "data",
  ):
    tables = config_lib.name_tables(features)
    optimizers = {name: _resolve(name, table, optimizer) for name, table in tables.items()}
    self._spec = _Static(_Spec(features, tables, optimizers))
    self._path: str | None = None  # set by `value_and_grad` on the copy it differentiates
    self.report = Report({"dropped_ids": jnp.int32(0)})
    self.arrays = nnx.Dict(
      {
        name: nnx.Dict(_make_arrays(name, table, optimizers[name], rngs, axis))
        for name, table in tables.items()
      }
    )

  @property
  def spec(self) -> _Spec:
    """The feature config, the tables by name and their optimizers by name."""
    return self._spec.value

  # --- lookup ------------------------------------------------------------------------------------

  def __call__(self, features: Any, weights: Any = None) -> Any:
    """Activations of a batch, in the structure given.

    Args:
      features: inputs in the structure of the feature config; a dict may hold any subset. Each is
        a dense integer array, `Padded`, `Ragged` or `Sparse`.
      weights: the parallel structure, or None; an entry may be None. They are constants: no
        gradient comes back to them.

    Returns:
      The same structure of arrays of the table's dtype: `[..., dim]` for a dense array or bags,
      `[batch, max_sequence_length, dim]` for sequences. Empty bags and padding give zeros.

    Raises:
      ValueError, TypeError: as `embed.validate`, in eager calls. Under jit ids out of range are
        dropped and counted in `report`; types, dtypes and shapes are always checked.
    """
    return self.lookup(features, weights)[0]

  def lookup(self, features: Any, weights: Any = None) -> tuple[Any, Residual]:
    """As `__call__`, and the residual that `apply_gradients` needs, a pytree.

    The pair is for custom loops: differentiate the loss with respect to the activations, then
    hand their gradients to `apply_gradients`.
    """
    if self._path is not None and hasattr(self, "__captures__"):
      raise ValueError(
        "SparseEmbed was called inside nnx.capture, inside the loss that embed.value_and_grad "
        "differentiates. Run nnx.capture on a forward pass of its own."
      )
    flat = ragged.flatten(self.spec.features, features, weights)
    activations: dict[Path, jax.Array] = {}
    residual: Residual = {}
    dropped = []
    for path, (feature, x, w) in flat.items():
      name = config_lib.feature_name(path, feature)
      ragged.check(name, feature, x, w)
      table, table_name = feature.table, self._table_name(feature)
      bags = ragged.to_bags(name, feature, x, w)
      occ = lookup_lib.occurrences(bags, table.combiner, table.vocabulary_size)
      rows = self.arrays[table_name]["parameters"][...]
      act = _lookup(rows, occ, bags.shape, table.quantization_config)
      activations[path] = lookup_lib.mark(act, occ, self._owner(table_name))
      residual["/".join(path)] = occ
      dropped.append(bags.dropped)
    self._count_dropped(dropped)
    return config_lib.pack(self.spec.features, features, activations), residual

  def attend(self, query: jax.Array, table_name: str, candidates: Any = None) -> jax.Array:
    """Scores of queries against rows: the table used as an output layer (tied weights).

    Args:
      query: float `[..., dim]`.
      table_name: the table to score against.
      candidates: integer ids, `[K]` for all queries or `[..., K]` per query; negative ids are
        padding and score 0. None scores against every row.

    Returns:
      `[..., K]`, or `[..., vocabulary_size]`. Inside `embed.value_and_grad` gradients reach the
      query and the rows: only the candidates, or every row of the table.

    Raises:
      ValueError: for an unknown table, a query of another size, or ids out of range (eagerly).
    """
    table = self._table(table_name)
    if query.shape[-1] != table.dim:
      raise ValueError(
        f"attend: the query has size {query.shape[-1]}, table {table_name!r} has dim {table.dim}."
      )
    rows, owner = self.arrays[table_name]["parameters"][...], self._owner(table_name)
    if candidates is None:
      every = jnp.arange(table.vocabulary_size, dtype=jnp.int32)[:, None]
      rows = lookup_lib.mark(rows, lookup_lib.Occurrences(every, None, None), owner)
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
    bags = ragged.to_bags(name, feature, candidates)
    occ = lookup_lib.occurrences(bags, "sum", table.vocabulary_size)
    act = _lookup(rows, occ, bags.shape, None)
    act = lookup_lib.mark(act, occ, owner).reshape(*shape, table.dim)
    self._count_dropped([bags.dropped])
    if len(shape) == 1:
      return jnp.einsum("...d,kd->...k", query, act)
    return jnp.einsum("...d,...kd->...k", query, act)

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
        `step` where a schedule needs it.
      TypeError: where the kind of a container differs.
    """
    if not isinstance(residual, Mapping):
      raise ValueError(
        "apply_gradients takes the residual that `activations, residual = layer.lookup(...)` "
        f"returned. Got {type(residual)}."
      )
    if activation_grads is None:
      raise ValueError(
        "apply_gradients: activation_grads is None. Give the structure of the activations; an "
        "entry may be None for a zero gradient."
      )
    given = dict(config_lib.match(self.spec.features, activation_grads, "activation_grads"))
    pieces: dict[str, list[update.Piece]] = {name: [] for name in self.spec.tables}
    for path, feature in config_lib.flatten_features(self.spec.features):
      occ, grads = residual.get("/".join(path)), given.get(path)
      name = config_lib.feature_name(path, feature)
      if occ is not None and path not in given:
        raise ValueError(
          f"No gradient given for {name!r}, which was looked up. Give None for a zero gradient."
        )
      if occ is None:
        if grads is not None:
          raise ValueError(f"Gradient given for {name!r}, which was not looked up.")
        continue
      pieces[self._table_name(feature)].append(_piece(name, grads, occ, feature.table.dim))
    rows = {
      name: RowGrads.pending(
        pieces[name], table.vocabulary_size, table.dim, self._accumulates(name)
      )
      for name, table in self.spec.tables.items()
    }
    self.apply_row_gradients({name: r for name, r in rows.items() if r.pieces}, step)

  def apply_row_gradients(self, rows: Mapping[str, RowGrads], step: Any = None) -> None:
    """Steps each named table once from its `RowGrads`, in place; `apply_gradients` ends here.

    A table that is not named, or whose `RowGrads` is empty, does not move, unless its optimizer
    moves every row at every step.
    """
    for name in rows:
      self._table(name)
    for name, optimizer in self.spec.optimizers.items():
      if name not in rows and (optimizer is None or optimizer.lazy):
        continue
      if optimizer is None:
        raise ValueError(
          f"Table {name!r} has no optimizer, so it cannot be trained. Give one in its TableConfig "
          "or to SparseEmbed, or freeze it with optimizer=embed.frozen()."
        )
      if step is None and callable(optimizer.learning_rate):
        raise ValueError(f"Table {name!r} has a learning rate schedule: pass step=...")
      rate = jnp.asarray(optimizer.learning_rate_at(step), jnp.float32)
      given = rows.get(name)
      arrays = self.arrays[name]
      slots = {key: arrays[key][...] for key in self._slot_names(name)}
      table, slots = _step(
        arrays["parameters"][...],
        slots,
        given.pieces if given is not None else (),
        rate,
        optimizer=optimizer,
        distinct_ids=given is not None and given.kind == "summed",
      )
      for key, value in {"parameters": table, **slots}.items():
        arrays[key].set_value(value)

  # --- state -------------------------------------------------------------------------------------

  @property
  def tables(self) -> dict[str, jax.Array]:
    """`{table name: array [vocabulary_size, dim]}`, rows in order.

    They are the module's own arrays: a step that donates the module deletes them. Copy to keep.
    Inside a loss under `embed.value_and_grad` this raises: no gradient would come back. `attend`
    scores against a table there.
    """
    return {name: arrays["parameters"] for name, arrays in self.variables.items()}

  @property
  def variables(self) -> dict[str, dict[str, jax.Array]]:
    """`{table name: {"parameters": [vocabulary_size, dim], slot: [vocabulary_size, ...]}}`."""
    return {
      name: {
        key: self._read(name, self.arrays[name][key].get_value())
        for key in ("parameters", *self._slot_names(name))
      }
      for name in self.spec.tables
    }

  def load_tables(self, tables: Mapping[str, Any]) -> None:
    """Replaces the rows of the named tables; slots stay as they are.

    Raises:
      ValueError: for an unknown table or another shape than `[vocabulary_size, dim]`.
    """
    for name, value in tables.items():
      table = self._table(name)
      if np.shape(value) != (table.vocabulary_size, table.dim):
        raise ValueError(
          f"Table {name!r} has shape {(table.vocabulary_size, table.dim)}, got {np.shape(value)}."
        )
    for name, value in tables.items():
      # A copy: a donated step must not delete the caller's array.
      rows = jnp.array(value, dtype=self._table(name).dtype, copy=True)
      self.arrays[name]["parameters"].set_value(rows)

  # --- small parts -------------------------------------------------------------------------------

  def _table(self, name: str) -> config_lib.TableConfig:
    if name not in self.spec.tables:
      raise ValueError(f"There is no table {name!r}; the tables are {sorted(self.spec.tables)}.")
    return self.spec.tables[name]

  def _table_name(self, feature: config_lib.FeatureConfig) -> str:
    return next(name for name, table in self.spec.tables.items() if table is feature.table)

  def _read(self, name: str, value: Any) -> Any:
    abstract = isinstance(value, jax.ShapeDtypeStruct)  # under nnx.eval_shape
    return value if abstract else lookup_lib.read(value, self._owner(name))

  def _slot_names(self, name: str) -> list[str]:
    optimizer = self.spec.optimizers[name]
    return [] if optimizer is None else list(optimizer.slots(self.spec.tables[name].dim))

  def _accumulates(self, name: str) -> bool:
    optimizer = self.spec.optimizers[name]
    return optimizer is None or optimizer.use_gradient_accumulation

  def _owner(self, name: str) -> lookup_lib.Owner:
    size = self.spec.tables[name].vocabulary_size
    return lookup_lib.Owner(self._path, name, size, self._accumulates(name))

  def _count_dropped(self, dropped: list[jax.Array]) -> None:
    if not dropped:
      return
    try:
      total = self.report["dropped_ids"] + functools.reduce(jnp.add, dropped)
      self.report.set_value({"dropped_ids": total})
    except flax_errors.TraceContextError:
      if self._path is not None:
        raise ValueError(
          "SparseEmbed was called under jax.checkpoint, jax.vmap, jax.lax.scan or another JAX "
          "transformation that closes over the model, inside a loss of embed.value_and_grad. "
          "Write nnx.remat, nnx.jit or nnx.cond and pass the model as an argument; look up "
          "outside of scan and vmap."
        ) from None
      # Inference with the model closed over: there is no state to count in.


_compiled_lookup = jax.jit(lookup_lib.lookup, static_argnums=(2, 3))
_compiled_step = jax.jit(update.step, static_argnames=("optimizer", "distinct_ids"))


def _lookup(rows: jax.Array, *args: Any) -> jax.Array:
  """Compiled once for all eager calls; within somebody's jit, a part of it."""
  f = lookup_lib.lookup if isinstance(rows, jax.core.Tracer) else _compiled_lookup
  return f(rows, *args)


def _step(table: jax.Array, *args: Any, **kwargs: Any) -> update.State:
  f = update.step if isinstance(table, jax.core.Tracer) else _compiled_step
  return f(table, *args, **kwargs)


def _make_arrays(name, table, optimizer, rngs, axis) -> dict[str, nnx.Variable]:
  """The Variables of a table: "parameters" and its slots, each with its place on a mesh."""
  shape = (table.vocabulary_size, table.dim)
  key = rngs.params()
  make = table.initializer or initializers.truncated_normal_rows
  rows = make(key, shape, table.dtype)
  if np.shape(rows) != shape:
    raise ValueError(f"Table {name!r}: its initializer returned {np.shape(rows)}, not {shape}.")
  # A user's initializer may return an array that is kept elsewhere; a donated step deletes ours.
  rows = jnp.array(rows, table.dtype, copy=table.initializer is not None)
  arrays: dict[str, nnx.Variable] = {"parameters": Table(rows, **sharding.row_sharding(axis, 2))}
  inits = dict(optimizer.slot_init) if optimizer is not None else {}
  slots = optimizer.slots(table.dim) if optimizer is not None else {}
  for i, (slot_name, slot) in enumerate(slots.items()):
    value = _make_slot(slot, shape, inits.get(slot_name), jax.random.fold_in(key, i))
    arrays[slot_name] = SlotVariable(value, **sharding.row_sharding(axis, value.ndim))
  return arrays


def _make_slot(slot: Slot, shape, init, key) -> jax.Array:
  shape = shape[:1] if slot.per_row else shape
  if init is not None:
    return jnp.array(init(key, shape, slot.dtype), slot.dtype, copy=True)
  return jnp.full(shape, slot.initial, slot.dtype)


def _piece(name: str, grads: Any, occ: lookup_lib.Occurrences, dim: int) -> update.Piece:
  """A feature's activation gradient, checked against what was looked up; None is zero."""
  if grads is not None and not isinstance(grads, (jax.Array, np.ndarray)):
    raise ValueError(f"Gradient of {name!r}: found a non-array type {type(grads)}.")
  shape = (*occ.batch, dim)
  if grads is None:
    grads = jnp.zeros(shape, jnp.float32)
  if grads.shape != shape:
    raise ValueError(f"Gradient of {name!r} has shape {grads.shape}; its activations have {shape}.")
  return update.Piece(jnp.asarray(grads), occ)
