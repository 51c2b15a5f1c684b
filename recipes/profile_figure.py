"""A figure of `embed.profile`: ids per bag, popularity, distinct rows, and load per shard."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from embed import Profile


def draw(profile: Profile, path: str | Path | None = None) -> Figure:
  """Draws ids per bag, popularity of rows, distinct rows per batch, and load per shard.

  Popularity is the fraction of all ids that are the r-th most popular row, against r, on
  logarithmic axes: a straight line is a power law, and its slope the skew. The line ends at the
  number of rows that were looked up. The load of each shard, divided by the mean, is drawn if the
  profile was made with a plan.

  Args:
    path: a file to write the figure to as well, in the format of its ending.

  >>> features = embed.FeatureConfig(embed.TableConfig(9, 2))
  >>> figure = draw(embed.profile(features, [np.array([1, 2, 2])]))
  >>> [axes.get_title() for axes in figure.axes]
  ['Ids per bag', 'Popularity of rows', 'Distinct rows per batch']
  """
  tables, stacks = profile.tables, profile.stacks
  shape = (2, 2) if stacks else (1, 3)
  figure = Figure(figsize=(4.6 * shape[1] + 1.4, 3.6 * shape[0]), layout="constrained")
  bags, popularity, distinct, *loads = figure.subplots(*shape).flat
  positive = lambda x: np.where(x > 0, x, np.nan)
  for i, table in enumerate(tables.values()):
    style = _style(tables, i)
    bags.plot(positive(table.bags / max(table.bags.sum(), 1)), marker="o", markersize=4, **style)
    distinct.plot(positive(table.distinct), marker=".", **style)
    share = np.sort(table.counts)[::-1] / max(table.counts.sum(), 1)
    # 300 points are enough for the line of millions of rows.
    rank = np.unique(np.geomspace(1, max(len(share), 1), 300).astype(int))[: len(share)]
    popularity.loglog(rank, share[rank - 1], **style)
  bags.set(title="Ids per bag", xlabel="ids in a bag", ylabel="share of bags", ylim=(0, None))
  popularity.set(
    title="Popularity of rows", xlabel="rank of a row", ylabel="share of the table's ids"
  )
  distinct.set(title="Distinct rows per batch", xlabel="batch", ylabel="rows", yscale="log")
  for axes in loads:
    for i, stack in enumerate(stacks.values()):
      load = stack.shards / (stack.shards.mean() or 1)
      axes.plot(load, marker="o", markersize=3, **_style(stacks, i))
    axes.axhline(1, color="black", linewidth=0.8, alpha=0.5)
    axes.set(title="Load per shard", xlabel="shard", ylabel="rows requested / mean", ylim=(0, None))
    _legend(axes, stacks, axes)
  for axes in figure.axes:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
  for axes in (bags, distinct, *loads):
    axes.xaxis.get_major_locator().set_params(integer=True)
  _legend(figure, tables, bags, loc="outside right upper")
  if path is not None:
    figure.savefig(path, dpi=120)
  return figure


_NAMED = 20  # the most lines that a legend names


def _style(names: Mapping[str, Any], i: int) -> dict[str, Any]:
  """The line style of the i-th table or stack, the same in every panel."""
  style = {"color": f"C{i % 10}", "linestyle": ("-", "--", ":")[i // 10 % 3], "linewidth": 1.2}
  return style | ({"label": list(names)[i]} if i < _NAMED else {})


def _legend(target: Any, names: Mapping[str, Any], axes: Any, **location: Any) -> None:
  """Adds a legend of the lines of `axes` to a figure or to axes."""
  title = f"and {len(names) - _NAMED} more" if len(names) > _NAMED else None
  handles, labels = axes.get_legend_handles_labels()
  target.legend(handles, labels, title=title, fontsize="small", frameon=False, **location)
