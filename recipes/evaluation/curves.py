"""Curves of finished runs over their steps: a figure for any number of runs, models and metrics."""

import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import Any, Protocol

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from .. import style

_WIDTH = 6.0  # inches: readable on a page, and on a phone
_PANEL, _TITLE, _ENTRY, _LINE = 2.3, 0.3, 0.04, 0.157  # heights in inches
_WRAP, _WRAP_TITLE = 70, 54  # characters in a line of the legend and of a title

_STYLE = style.SETTINGS | {"grid.color": style.GREY, "grid.alpha": 0.3}


class Curves(Protocol):
  """A run, as far as it is drawn."""

  @property
  def selected(self) -> str: ...

  def curve(self, name: str) -> tuple[list[int], list[float]]: ...


_Pairs = Sequence[tuple[str, Sequence[Curves]]]  # labels of runs, and the runs


def draw(data_sets: Sequence[tuple[str, _Pairs]]) -> Figure | None:
  """Returns a figure over steps: for each data set the loss and the metrics that select.

  A metric that no run of a data set has logged gets no panel, a data set without any no place.

  Args:
    data_sets: the title of each, and its runs by the label they share.

  Returns:
    The figure, as high as what it shows, or None where there is nothing to show.
  """
  blocks = [(title, pairs, _logged(pairs)) for title, pairs in data_sets]
  blocks = [block for block in blocks if block[2]]
  if not blocks:
    return None
  heights = [
    0.2
    + _TITLE * len(_wrapped(title, _WRAP_TITLE))
    + _PANEL * math.ceil(len(panels) / 2)
    + _legend_height(pairs)
    for title, pairs, panels in blocks
  ]
  with rc_context(_STYLE):
    layout = ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08)
    figure = Figure(figsize=(_WIDTH, sum(heights)), layout=layout)
    places = figure.subfigures(len(blocks), 1, height_ratios=heights, squeeze=False)[:, 0]
    for place, (title, pairs, panels) in zip(places, blocks, strict=True):
      place.suptitle("\n".join(_wrapped(title, _WRAP_TITLE)), x=0.01, ha="left", weight="bold")
      _draw_panels(place, pairs, panels)
  return figure


def _draw_panels(place: Any, pairs: _Pairs, panels: Sequence[str]) -> None:
  """Draws the panels of one data set, two in a row and a last one alone, above their legend."""
  mosaic = [list(panels[i : i + 2]) for i in range(0, len(panels), 2)]
  mosaic[-1] *= 2 // len(mosaic[-1])
  axes = place.subplot_mosaic(mosaic)
  handles = {}
  for i, (label, group) in enumerate(pairs):
    for run, name in itertools.product(group, panels):
      steps, values = run.curve(name)
      if steps:
        few = len(steps) <= 30
        (handles[label],) = axes[name].plot(
          steps, values, color=f"C{i % 10}", linestyle=("-", "--", ":")[i // 10 % 3], alpha=0.85,
          linewidth=1.4, marker="o" if few else None, markersize=3,
        )  # fmt: skip
  for name, axis in axes.items():
    axis.set_title("training loss" if name == "loss" else name, loc="left", fontsize="medium")
    axis.set(xlabel="steps")
    axis.set_xlim(left=0)
    axis.xaxis.get_major_locator().set_params(nbins=5, integer=True)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.grid()
  labels = ["\n".join(_wrapped(label, _WRAP)) for label in handles]
  place.legend(
    handles.values(), labels, loc="outside lower left", ncols=_columns(pairs), fontsize="small",
    labelspacing=0.3,
  )  # fmt: skip


def _logged(pairs: _Pairs) -> list[str]:
  """The loss and the selected metrics, as far as a run has logged them."""
  runs = [run for _, group in pairs for run in group]
  wanted = dict.fromkeys(["loss", *(run.selected for run in runs)])
  return [name for name in wanted if any(run.curve(name)[0] for run in runs)]


def _columns(pairs: _Pairs) -> int:
  longest = max(len(label) for label, _ in pairs)
  return min(len(pairs), max(1, _WRAP // (longest + 8)))


def _legend_height(pairs: _Pairs) -> float:
  lines = sum(len(_wrapped(label, _WRAP)) for label, _ in pairs)
  return _LINE * math.ceil(lines / _columns(pairs)) + _ENTRY * math.ceil(
    len(pairs) / _columns(pairs)
  )


def _wrapped(label: str, width: int) -> list[str]:
  return textwrap.wrap(label, width) or [""]
