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
    profile: the result of `embed.profile`.
    path: a file to write the figure to as well, in the format of its ending.

  Returns:
    The figure, which a notebook shows.

  >>> features = embed.FeatureConfig(embed.TableConfig(9, 2))
  >>> figure = draw(embed.profile(features, [np.array([1, 2, 2])]))
  >>> [axes.get_title() for axes in figure.axes]
  ['Ids per bag', 'Popularity of rows', 'Distinct rows per batch']
  """
  panels = [_draw_bags, _draw_popularity, _draw_distinct] + [_draw_load] * bool(profile.stacks)
  shape = (2, 2) if profile.stacks else (1, 3)
  figure = Figure(figsize=(4.6 * shape[1] + 1.4, 3.6 * shape[0]), layout="constrained")
  for panel, axes in zip(panels, figure.subplots(*shape).flat, strict=True):
    panel(profile, axes)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
  _legend(figure, profile.tables, figure.axes[0], loc="outside right upper")
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
    # 300 points are enough for the line of millions of rows.
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
  axes.set(title="Load per shard", xlabel="shard", ylabel="rows requested / mean", ylim=(0, None))
  axes.xaxis.get_major_locator().set_params(integer=True)
  _legend(axes, profile.stacks, axes)
