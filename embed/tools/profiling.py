"""Statistics of a sample of batches: the ids of each table, and the load of each shard.

They are computed on the host, before training. TensorFlow's embedding config collects its own
during training, in `profile_data_directory`.
"""

import dataclasses
import json
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embed import inputs, planning, structure
from embed.engine import bags as bags_lib
from embed.engine.mesh import Placement
from embed.engine.stack import StackSpec
from embed.planning import Plan


@dataclasses.dataclass
class TableProfile:
  """Statistics of the lookups in one table, an entry of `Profile.tables`.

  Attributes:
    vocabulary_size: number of rows of the table.
    bags: int64 `[longest bag + 1]`, `bags[n]` is the number of bags (or single ids) with n ids.
    ids: int64 `[batches]`, the number of ids in each batch.
    distinct: int64 `[batches]`, the number of distinct ids in each batch.
    rows: int64 `[M]`, the rows that were looked up, ascending.
    counts: int64 `[M]`, the number of lookups of each of these rows.

  >>> movie = embed.TableConfig(vocabulary_size=100, dim=4, name="movie")
  >>> batches = [embed.Padded([[3, 7], [3, -1]]), embed.Padded([[5, 5], [-1, -1]])]
  >>> profile = embed.profile(embed.FeatureConfig(movie), batches)
  >>> table = profile.tables["movie"]
  >>> table.bags.tolist(), table.rows.tolist(), table.counts.tolist()
  ([1, 1, 2], [3, 5, 7], [2, 2, 1])
  >>> table.mean_valency, table.max_valency, table.top_share(0.01)
  (1.25, 2, 0.4)
  """

  vocabulary_size: int
  bags: np.ndarray
  ids: np.ndarray
  distinct: np.ndarray
  rows: np.ndarray
  counts: np.ndarray

  @property
  def mean_valency(self) -> float:
    """Mean number of ids per bag, empty bags included."""
    return float(self.ids.sum() / max(self.bags.sum(), 1))

  @property
  def max_valency(self) -> int:
    """Number of ids in the longest bag."""
    return len(self.bags) - 1

  def top_share(self, share: float = 0.01) -> float:
    """Returns the fraction of all ids that are among the most popular rows.

    Args:
      share: the fraction of the vocabulary that counts as most popular; at least one row.
    """
    num_rows = max(1, round(share * self.vocabulary_size))
    return float(np.sort(self.counts)[::-1][:num_rows].sum() / max(self.counts.sum(), 1))


@dataclasses.dataclass
class StackProfile:
  """Load of the shards of a stack, an entry of `Profile.stacks`.

  Attributes:
    tables: the tables that the stack holds.
    pairs: int64 `[batches]`, the largest number of distinct rows that one device requested from one
      shard. With a capacity of their maximum, each batch of the sample is exchanged in one round.
    shards: int64 `[shards]`, the number of distinct rows requested from each shard, summed over
      devices and batches.

  >>> movie = embed.TableConfig(vocabulary_size=1000, dim=4, name="movie")
  >>> features, mesh = embed.FeatureConfig(movie), jax.sharding.AbstractMesh((8,), ("data",))
  >>> batch = np.arange(64) * 8  # multiples of 8 are all on the first of 8 shards
  >>> plan = embed.plan(features, mesh, batch, embed.sgd(0.1), hbm_bytes=16 << 30)
  >>> plan["movie"].strategy = "mod"
  >>> embed.profile(features, [batch], plan).stacks["movie"].imbalance
  8.0
  """

  tables: tuple[str, ...]
  pairs: np.ndarray
  shards: np.ndarray

  @property
  def imbalance(self) -> float:
    """The load of the busiest shard divided by the mean; 1 if the load is even."""
    return float(self.shards.max() / self.shards.mean()) if self.shards.any() else 1.0


@dataclasses.dataclass
class Profile:
  """Statistics of a sample of batches, made by `embed.profile`; `print` shows them as a table.

  Attributes:
    tables: `{table name: TableProfile}`.
    stacks: `{stack name: StackProfile}`, empty without a plan.

  >>> movie = embed.TableConfig(vocabulary_size=100, dim=4, name="movie")
  >>> batches = [embed.Padded([[3, 7], [3, -1]]), embed.Padded([[5, 5], [-1, -1]])]
  >>> print(embed.profile(embed.FeatureConfig(movie), batches))
  table  rows  ids/bag  longest  ids/batch  distinct  rows seen      top 1%
  movie   100     1.25        2          2         2          3  40% of ids
  """

  tables: dict[str, TableProfile]
  stacks: dict[str, StackProfile]

  def save(self, path: str | Path) -> None:
    """Writes a NumPy archive; `load` reads it, and `python -m embed inspect` prints it.

    Args:
      path: the file; ".npz" is appended if it has no such ending.

    >>> import pathlib, tempfile
    >>> movie = embed.TableConfig(vocabulary_size=100, dim=4, name="movie")
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "profile.npz"
    >>> embed.profile(embed.FeatureConfig(movie), [embed.Padded([[3, 7], [3, -1]])]).save(path)
    >>> embed.Profile.load(path).tables["movie"].ids.tolist()
    [3]
    """
    entries: dict[str, Mapping[str, Any]] = {"table": self.tables, "stack": self.stacks}
    arrays: dict[str, Any] = {
      f"{kind}/{name}/{field}": json.dumps(value) if field == "tables" else value
      for kind, named in entries.items()
      for name, entry in named.items()
      for field, value in vars(entry).items()
    }
    np.savez_compressed(path, **arrays)

  @classmethod
  def load(cls, path: str | Path) -> "Profile":
    """Reads a profile that `save` wrote.

    Args:
      path: the file.

    Raises:
      ValueError: if the file is not a profile.
    """
    read: dict[str, Callable[[Any], Any]] = {
      "vocabulary_size": int,
      "tables": lambda text: tuple(json.loads(str(text))),
    }
    entries: dict[str, dict[str, dict[str, Any]]] = {"table": {}, "stack": {}}
    try:
      with np.load(path) as archive:
        for key, value in archive.items():
          kind, rest = key.split("/", 1)
          name, field = rest.rsplit("/", 1)
          entries[kind].setdefault(name, {})[field] = read.get(field, lambda x: x)(value)
      return cls(
        {name: TableProfile(**fields) for name, fields in entries["table"].items()},
        {name: StackProfile(**fields) for name, fields in entries["stack"].items()},
      )
    except (IndexError, KeyError, TypeError, ValueError, zipfile.BadZipFile):
      raise ValueError(f"{path} was not written by embed.Profile.save.") from None

  def __repr__(self) -> str:
    header = ("table", "rows", "ids/bag", "longest", "ids/batch", "distinct", "rows seen", "top 1%")
    lines: list[Sequence[str]] = [header]
    for name, t in self.tables.items():
      of_bags = f"{t.vocabulary_size}", f"{t.mean_valency:.2f}", f"{t.max_valency}"
      of_batches = f"{t.ids.mean():.0f}", f"{t.distinct.mean():.0f}", f"{len(t.rows)}"
      lines.append((name, *of_bags, *of_batches, f"{t.top_share():.0%} of ids"))
    tables = planning.aligned(lines)
    if not self.stacks:
      return tables
    loads = [("stored in", "most rows of a pair", "busiest shard / mean")]
    loads += [(n, f"{s.pairs.max()}", f"{s.imbalance:.2f}") for n, s in self.stacks.items()]
    return tables + "\n\n" + planning.aligned(loads)


def profile(features: Any, batches: Iterable[Any], plan: Plan | None = None) -> Profile:
  """Counts the lookups of a sample of batches.

  Args:
    features: the feature config; None takes the plan's.
    batches: inputs of whole batches, each in the structure of the feature config, on the host; a
      dict may hold a subset.
    plan: adds the load of its shards. `plan.adopt(profile)` then sizes the exchange buffers by it.

  Returns:
    A `Profile`. It holds two numbers for every row that was looked up.

  Raises:
    ValueError: if there is no batch, and for inputs that `embed.validate` refuses.

  >>> movie = embed.TableConfig(vocabulary_size=100, dim=4, name="movie")
  >>> batches = [embed.Padded([[3, 7], [3, -1]]), embed.Padded([[5, 5], [-1, -1]])]
  >>> table = embed.profile(embed.FeatureConfig(movie), batches).tables["movie"]
  >>> table.bags.tolist(), table.distinct.tolist(), table.rows.tolist(), table.counts.tolist()
  ([1, 1, 2], [2, 1], [3, 5, 7], [2, 2, 1])
  >>> table.mean_valency, table.max_valency, table.top_share(0.01)
  (1.25, 2, 0.4)
  """
  if plan is not None:
    plan = plan if features is None else plan.with_features(features, None)
    features = plan.features
  configs = structure.name_tables(features)
  names = {id(table): name for name, table in configs.items()}
  sizes = {name: table.vocabulary_size for name, table in configs.items()}
  stacks = {} if plan is None else {n: s for n, s in plan.stacks().items() if s.is_split}
  tables = {name: _TableCounts() for name in sizes}
  loads: dict[str, list[np.ndarray]] = {name: [] for name in stacks}
  for batch in batches:
    ids = _ids_by_table(features, batch, names)
    for name, counts in tables.items():
      counts.add(ids.get(name, []))
    for name, stack in stacks.items():
      loads[name].append(_requested_rows(stack, ids))
  if not next(iter(tables.values())).ids:
    raise ValueError("embed.profile needs at least one batch.")
  return Profile(
    {name: counts.to_profile(sizes[name]) for name, counts in tables.items()},
    {
      name: StackProfile(
        stack.tables, np.array([x.max() for x in loads[name]]), np.sum(loads[name], axis=(0, 1))
      )
      for name, stack in stacks.items()
    },
  )


@dataclasses.dataclass
class _FeatureIds:
  """The valid ids of one feature in a batch.

  Ids without a static bag length, of a `Ragged` without max_valency, are not exchanged with their
  bags.
  """

  ids: np.ndarray  # int64 [N]
  bag: np.ndarray  # int64 [N], the bag of each id
  batch_shape: tuple[int, ...]
  has_static_length: bool


def _ids_by_table(
  features: Any, batch: Any, names: Mapping[int, str]
) -> dict[str, list[_FeatureIds]]:
  """The ids of a batch by table; `names` are by the identity of the table configs."""
  by_table: dict[str, list[_FeatureIds]] = {}
  for x in inputs.read(features, inputs.with_stand_ins(features, batch)):
    table = x.feature.table
    bags, _ = bags_lib.from_input(x.parts, x.form, table.vocabulary_size)
    ids = np.asarray(bags.ids, np.int64).reshape(-1)
    bag = np.asarray(bags.bag_indices(), np.int64)
    valid = bags_lib.is_row(ids, table.vocabulary_size)
    entry = _FeatureIds(ids[valid], bag[valid], bags.batch, not bags.is_ragged)
    by_table.setdefault(names[id(table)], []).append(entry)
  return by_table


class _TableCounts:
  """Statistics of a table over the batches added so far."""

  def __init__(self) -> None:
    self.bags = np.zeros(1, np.int64)
    self.ids: list[int] = []
    self.distinct: list[int] = []
    self.rows = self.counts = np.zeros(0, np.int64)

  def add(self, features: list[_FeatureIds]) -> None:
    """Adds the ids of all features of a batch."""
    for entry in features:
      num_bags = int(np.prod(entry.batch_shape))
      valencies = np.bincount(np.bincount(entry.bag, minlength=num_bags))
      longer = max(len(self.bags), len(valencies))
      self.bags = np.pad(self.bags, (0, longer - len(self.bags)))
      self.bags[: len(valencies)] += valencies
    ids = np.concatenate([np.zeros(0, np.int64), *(entry.ids for entry in features)])
    rows, counts = np.unique(ids, return_counts=True)
    self.ids.append(len(ids))
    self.distinct.append(len(rows))
    merged, position = np.unique(np.concatenate([self.rows, rows]), return_inverse=True)
    all_counts = np.concatenate([self.counts, counts])
    self.rows, self.counts = merged, np.zeros(len(merged), np.int64)
    np.add.at(self.counts, position, all_counts)

  def to_profile(self, vocabulary_size: int) -> TableProfile:
    """The statistics of all batches."""
    ids, distinct = np.array(self.ids, np.int64), np.array(self.distinct, np.int64)
    return TableProfile(vocabulary_size, self.bags, ids, distinct, self.rows, self.counts)


def _lookup_groups(placement: Placement) -> np.ndarray:
  """int64 `[devices]`: which group of devices looks up each part of a batch together.

  The devices of a group hold different columns of the same rows.
  """
  if placement.mesh is None:
    return np.zeros(1, np.int64)
  axes, size_of = placement.axes, placement.mesh.shape
  index = np.indices([size_of[name] for name in axes]).reshape(len(axes), -1)
  group_axes = [i for i, name in enumerate(axes) if name not in placement.column_axes]
  sizes = [size_of[axes[i]] for i in group_axes]
  return np.ravel_multi_index(tuple(index[group_axes]), sizes) if group_axes else index[0] * 0


def _requested_rows(stack: StackSpec, by_table: Mapping[str, list[_FeatureIds]]) -> np.ndarray:
  """The distinct rows that each device requests from each shard, int64 `[devices, shards]`.

  Devices that hold other columns of the same rows request them together, and count as one.
  """
  layout = stack.layout
  devices, shards = _lookup_groups(stack.placement), layout.shards
  keys = [np.zeros(0, np.int64)]
  for table_index, name in enumerate(stack.tables):
    for entry in by_table.get(name, []):
      if not entry.has_static_length or not entry.ids.size:
        continue
      batch_size = entry.batch_shape[0] if entry.batch_shape else 1
      bags_per_example = int(np.prod(entry.batch_shape[1:]))
      per_device = -(-batch_size // len(devices))  # the batch is padded to all devices
      device = devices[entry.bag // bags_per_example // per_device]
      shard, row = (np.asarray(x, np.int64) for x in layout.locate(table_index, entry.ids))
      keys.append((device * shards + shard) * layout.shard_rows + row)
  pair = np.unique(np.concatenate(keys)) // layout.shard_rows
  return np.bincount(pair, minlength=(max(devices) + 1) * shards).reshape(-1, shards)
