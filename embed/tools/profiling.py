"""Statistics of a sample of batches: what they ask of each table, and of each shard.

On the host, before training. The original's `profile_data_directory` of the embedding config.
"""

import dataclasses
import json
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from embed import inputs, structure
from embed.engine import bags as bags_lib
from embed.engine.stack import StackSpec
from embed.planning import Plan
from embed.tools import text


@dataclasses.dataclass
class TableProfile:
  """What a sample of batches looks up in one table, an entry of `Profile.tables`.

  Attributes:
    vocabulary_size: rows of the table.
    bags: int64 `[longest bag + 1]`, how many bags (or single ids) had that many ids.
    ids: int64 `[batches]`, ids in each batch.
    distinct: int64 `[batches]`, different ones among them.
    rows: int64 `[M]`, the rows that were looked up at all, ascending.
    counts: int64 `[M]`, how often.

  >>> movie = embed.TableConfig(vocabulary_size=100, dim=4, name="movie")
  >>> batches = [embed.Padded([[3, 7], [3, -1]]), embed.Padded([[5, 5], [-1, -1]])]
  >>> found = embed.profile(embed.FeatureConfig(movie), batches)
  >>> seen = found.tables["movie"]
  >>> seen.bags.tolist(), seen.rows.tolist(), seen.counts.tolist()
  ([1, 1, 2], [3, 5, 7], [2, 2, 1])
  >>> seen.mean_valency, seen.max_valency, seen.top_share(0.01)
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
    """Ids per bag, empty bags included."""
    return float(self.ids.sum() / max(self.bags.sum(), 1))

  @property
  def max_valency(self) -> int:
    """The ids of the longest bag."""
    return len(self.bags) - 1

  def top_share(self, share: float = 0.01) -> float:
    """The part of all ids that falls on the most popular rows.

    Args:
      share: how many these are, of the vocabulary; at least one row.
    """
    top = max(1, round(share * self.vocabulary_size))
    return float(np.sort(self.counts)[::-1][:top].sum() / max(self.counts.sum(), 1))


@dataclasses.dataclass
class StackProfile:
  """What a sample of batches asks of the shards of a stack, an entry of `Profile.stacks`.

  Attributes:
    tables: the tables that it holds.
    pairs: int64 `[batches]`, the most distinct rows that a device asked of a shard. A capacity of
      as many exchanges every batch of the sample in one round.
    shards: int64 `[shards]`, distinct rows that were asked of each, added up over devices and
      batches.

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
    """The load of the busiest shard over the mean; 1 is even."""
    return float(self.shards.max() / self.shards.mean()) if self.shards.any() else 1.0


@dataclasses.dataclass
class Profile:
  """Statistics of a sample of batches, made by `embed.profile`. Printing it shows them.

  Attributes:
    tables: `{table name: TableProfile}`.
    stacks: `{stack name: StackProfile}`, empty where no plan was given.

  >>> movie = embed.TableConfig(vocabulary_size=100, dim=4, name="movie")
  >>> batches = [embed.Padded([[3, 7], [3, -1]]), embed.Padded([[5, 5], [-1, -1]])]
  >>> found = embed.profile(embed.FeatureConfig(movie), batches)
  >>> print(found)
  table  rows  ids/bag  longest  ids/batch  distinct  rows seen      top 1%
  movie   100     1.25        2          2         2          3  40% of ids
  """

  tables: dict[str, TableProfile]
  stacks: dict[str, StackProfile]

  def save(self, path: str | Path) -> None:
    """Writes a NumPy archive; `load` reads it, and `python -m embed inspect` prints it.

    Args:
      path: of the file; it gets ".npz" if it has no ending.

    >>> import pathlib, tempfile
    >>> movie = embed.TableConfig(vocabulary_size=100, dim=4, name="movie")
    >>> batches = [embed.Padded([[3, 7], [3, -1]]), embed.Padded([[5, 5], [-1, -1]])]
    >>> found = embed.profile(embed.FeatureConfig(movie), batches)
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "profile.npz"
    >>> found.save(path)
    >>> embed.Profile.load(path).tables["movie"].ids.tolist()
    [3, 2]
    """
    given: dict[str, Any] = {f"table/{name}": table for name, table in self.tables.items()}
    given |= {f"stack/{name}": stack for name, stack in self.stacks.items()}
    arrays: dict[str, Any] = {}
    for prefix, entry in given.items():
      for field in dataclasses.fields(entry):
        value = getattr(entry, field.name)
        arrays[f"{prefix}/{field.name}"] = json.dumps(value) if field.name == "tables" else value
    np.savez_compressed(path, **arrays)

  @classmethod
  def load(cls, path: str | Path) -> "Profile":
    """Reads what `save` wrote.

    Args:
      path: of the file.

    Raises:
      ValueError: for any other file.
    """
    try:
      with np.load(path) as archive:
        return cls._of(dict(archive))
    except (IndexError, KeyError, TypeError, ValueError, zipfile.BadZipFile):
      raise ValueError(f"{path} was not written by embed.Profile.save.") from None

  @classmethod
  def _of(cls, arrays: Mapping[str, np.ndarray]) -> "Profile":
    found: dict[str, dict[str, dict[str, Any]]] = {"table": {}, "stack": {}}
    for key, value in arrays.items():
      kind, rest = key.split("/", 1)
      name, field = rest.rsplit("/", 1)
      found[kind].setdefault(name, {})[field] = value
    for table in found["table"].values():
      table["vocabulary_size"] = int(table["vocabulary_size"])
    for stack in found["stack"].values():
      stack["tables"] = tuple(json.loads(str(stack["tables"])))
    return cls(
      {name: TableProfile(**fields) for name, fields in found["table"].items()},
      {name: StackProfile(**fields) for name, fields in found["stack"].items()},
    )

  def plot(self, path: str | Path | None = None) -> Any:
    """A figure: ids per bag, popularity of rows, distinct rows per batch, load per shard.

    Popularity is the share of all ids that falls on the r-th most popular row, against r, on
    logarithmic axes: a straight line is a power law, and its slope the skew. Where it ends is the
    number of rows seen. Load is that of each shard over the mean, where the profile has a plan.

    Args:
      path: where to write the figure as well, in the format of its ending.

    Returns:
      The `matplotlib.figure.Figure`, which a notebook shows.

    Raises:
      ImportError: Matplotlib is not installed.

    >>> found = embed.profile(embed.FeatureConfig(embed.TableConfig(9, 2)), [np.array([1, 2, 2])])
    >>> [axes.get_title() for axes in found.plot().axes]
    ['Ids per bag', 'Popularity of rows', 'Distinct rows per batch']
    """
    try:
      from matplotlib.figure import Figure
    except ImportError:
      raise ImportError(
        "Figures are drawn by Matplotlib: pip install 'sparse-embed[recipes]', or matplotlib."
      ) from None
    panels = [_draw_bags, _draw_popularity, _draw_distinct] + [_draw_load] * bool(self.stacks)
    shape = (2, 2) if self.stacks else (1, 3)
    figure = Figure(figsize=(4.6 * shape[1] + 1.4, 3.6 * shape[0]), layout="constrained")
    for draw, axes in zip(panels, figure.subplots(*shape).flat, strict=True):
      draw(self, axes)
      axes.grid(alpha=0.3)
      axes.spines[["top", "right"]].set_visible(False)
    _legend(figure, self.tables, figure.axes[0], loc="outside right upper")
    if path is not None:
      figure.savefig(path, dpi=120)
    return figure

  def __repr__(self) -> str:
    header = ("table", "rows", "ids/bag", "longest", "ids/batch", "distinct", "rows seen", "top 1%")
    lines: list[tuple[str, ...]] = [header]
    for name, t in self.tables.items():
      lines.append(
        (
          name,
          f"{t.vocabulary_size}",
          f"{t.mean_valency:.2f}",
          f"{t.max_valency}",
          f"{t.ids.mean():.0f}",
          f"{t.distinct.mean():.0f}",
          f"{len(t.rows)}",
          f"{t.top_share():.0%} of ids",
        )
      )
    found = text.aligned(lines)
    if self.stacks:
      loads = [("stored in", "most rows of a pair", "busiest shard / mean")]
      loads += [(n, f"{s.pairs.max()}", f"{s.imbalance:.2f}") for n, s in self.stacks.items()]
      found += "\n\n" + text.aligned(loads)
    return found


# --- the panels of the figure --------------------------------------------------------------------

_NAMED = 20  # lines beyond these have no name in a legend


def _style(names: Mapping[str, Any], i: int) -> dict[str, Any]:
  """The look of the i-th table or stack, the same in every panel."""
  style = {"color": f"C{i % 10}", "linestyle": ("-", "--", ":")[i // 10 % 3], "linewidth": 1.2}
  return style | ({"label": list(names)[i]} if i < _NAMED else {})


def _legend(where: Any, names: Mapping[str, Any], axes: Any, **place: Any) -> None:
  title = f"and {len(names) - _NAMED} more" if len(names) > _NAMED else None
  handles, labels = axes.get_legend_handles_labels()
  where.legend(handles, labels, title=title, fontsize="small", frameon=False, **place)


def _draw_bags(profile: Profile, axes: Any) -> None:
  for i, table in enumerate(profile.tables.values()):
    share = np.where(table.bags > 0, table.bags / max(table.bags.sum(), 1), np.nan)
    axes.plot(share, marker="o", markersize=4, **_style(profile.tables, i))
  axes.set(title="Ids per bag", xlabel="ids in a bag", ylabel="share of bags", ylim=(0, None))
  axes.xaxis.get_major_locator().set_params(integer=True)


def _draw_popularity(profile: Profile, axes: Any) -> None:
  for i, table in enumerate(profile.tables.values()):
    counts = np.sort(table.counts)[::-1]
    share = counts / max(counts.sum(), 1)
    # A few hundred points draw the line of millions of rows.
    rank = np.unique(np.geomspace(1, max(len(share), 1), 300).astype(int))[: len(share)]
    axes.loglog(rank, share[rank - 1], **_style(profile.tables, i))
  axes.set(title="Popularity of rows", xlabel="rank of a row", ylabel="share of the table's ids")


def _draw_distinct(profile: Profile, axes: Any) -> None:
  for i, table in enumerate(profile.tables.values()):
    rows = np.where(table.distinct > 0, table.distinct, np.nan)
    axes.plot(rows, marker=".", **_style(profile.tables, i))
  axes.set(title="Distinct rows per batch", xlabel="batch", ylabel="rows", yscale="log")
  axes.xaxis.get_major_locator().set_params(integer=True)


def _draw_load(profile: Profile, axes: Any) -> None:
  for i, stack in enumerate(profile.stacks.values()):
    load = stack.shards / (stack.shards.mean() or 1)
    axes.plot(load, marker="o", markersize=3, **_style(profile.stacks, i))
  axes.axhline(1, color="black", linewidth=0.8, alpha=0.5)
  axes.set(title="Load per shard", xlabel="shard", ylabel="rows asked of it / mean", ylim=(0, None))
  axes.xaxis.get_major_locator().set_params(integer=True)
  _legend(axes, profile.stacks, axes)


def profile(features: Any, batches: Iterable[Any], plan: Plan | None = None) -> Profile:
  """Measures what a sample of batches looks up.

  Args:
    features: the feature config, or None where the plan has it.
    batches: inputs of whole batches, each in the structure of the feature config, on the host; a
      dict may hold a subset.
    plan: for the load of its shards as well. `plan.adopt(profile)` then sizes buffers by it.

  Returns:
    A `Profile`. It holds two numbers for every row that was looked up.

  Raises:
    ValueError: for no batch at all, and for the inputs that `embed.validate` refuses.

  >>> movie = embed.TableConfig(vocabulary_size=100, dim=4, name="movie")
  >>> batches = [embed.Padded([[3, 7], [3, -1]]), embed.Padded([[5, 5], [-1, -1]])]
  >>> found = embed.profile(embed.FeatureConfig(movie), batches).tables["movie"]
  >>> found.mean_valency, found.distinct.tolist(), found.rows.tolist(), found.counts.tolist()
  (1.25, [2, 1], [3, 5, 7], [2, 2, 1])
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
    seen = _bags(features, batch, names)
    for name, counts in tables.items():
      counts.add(seen.get(name, []))
    for name, stack in stacks.items():
      loads[name].append(_load(stack, seen))
  if not next(iter(tables.values())).ids:
    raise ValueError("embed.profile needs at least one batch.")
  return Profile(
    {name: counts.done(sizes[name]) for name, counts in tables.items()},
    {
      name: StackProfile(
        stack.tables, np.array([x.max() for x in loads[name]]), np.sum(loads[name], axis=(0, 1))
      )
      for name, stack in stacks.items()
    },
  )


@dataclasses.dataclass
class _Bags:
  """The ids of one feature: int64 `[N]`, the bag of each, and the shape of the batch of bags.

  `loose`: ragged without max_valency, whose ids are not exchanged with their bags.
  """

  ids: np.ndarray
  bag: np.ndarray
  shape: tuple[int, ...]
  loose: bool


def _bags(features: Any, batch: Any, names: Mapping[int, str]) -> dict[str, list[_Bags]]:
  """A batch's ids by table."""
  by_table: dict[str, list[_Bags]] = {}
  for x in inputs.read(features, batch):
    table = x.feature.table
    bags, _ = bags_lib.from_input(x.parts, x.form, table.vocabulary_size)
    ids = np.asarray(bags.ids, np.int64).reshape(-1)
    bag, valid = np.asarray(bags.bag_indices(), np.int64), ids < table.vocabulary_size
    entry = _Bags(ids[valid], bag[valid], bags.batch, bags.is_ragged)
    by_table.setdefault(names[id(table)], []).append(entry)
  return by_table


class _TableCounts:
  """The counts of a table so far."""

  def __init__(self) -> None:
    self.bags = np.zeros(1, np.int64)
    self.ids: list[int] = []
    self.distinct: list[int] = []
    self.rows = self.counts = np.zeros(0, np.int64)

  def add(self, bags: list[_Bags]) -> None:
    """Adds a batch."""
    for entry in bags:
      number = int(np.prod(entry.shape))
      valencies = np.bincount(np.bincount(entry.bag, minlength=number))
      longer = max(len(self.bags), len(valencies))
      self.bags = np.pad(self.bags, (0, longer - len(self.bags)))
      self.bags[: len(valencies)] += valencies
    ids = np.concatenate([np.zeros(0, np.int64), *(entry.ids for entry in bags)])
    rows, counts = np.unique(ids, return_counts=True)
    self.ids.append(len(ids))
    self.distinct.append(len(rows))
    merged, place = np.unique(np.concatenate([self.rows, rows]), return_inverse=True)
    every = np.concatenate([self.counts, counts])
    self.rows, self.counts = merged, np.zeros(len(merged), np.int64)
    np.add.at(self.counts, place, every)

  def done(self, vocabulary_size: int) -> TableProfile:
    ids, distinct = np.array(self.ids, np.int64), np.array(self.distinct, np.int64)
    return TableProfile(vocabulary_size, self.bags, ids, distinct, self.rows, self.counts)


def _load(stack: StackSpec, seen: Mapping[str, list[_Bags]]) -> np.ndarray:
  """The distinct rows that each device asked of each shard in a batch, int64 `[devices, shards]`.

  Devices that hold other columns of the same rows ask together, and count as one.
  """
  layout = stack.layout
  groups, shards = stack.placement.lookup_groups(), layout.shards
  keys = [np.zeros(0, np.int64)]
  for number, name in enumerate(stack.tables):
    for entry in seen.get(name, []):
      if entry.loose or not entry.ids.size:
        continue
      batch = entry.shape[0] if entry.shape else 1
      inner = int(np.prod(entry.shape[1:]))
      each = -(-batch // len(groups))  # the batch is padded to all devices
      group = groups[entry.bag // inner // each]
      shard, place = (np.asarray(x, np.int64) for x in layout.locate(number, entry.ids))
      keys.append((group * shards + shard) * layout.rows + place)
  pair = np.unique(np.concatenate(keys)) // layout.rows
  return np.bincount(pair, minlength=(max(groups) + 1) * shards).reshape(-1, shards)
