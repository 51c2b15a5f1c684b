"""A chart of `step.py`'s grid: ours against the fastest peer, a dot for each point of the grid.

    python docs/chart.py docs/results/step_grid.json docs/images/speed.svg

A dot is our best time divided by the best time of the fastest peer with such an optimizer. Every
point has its dot, won or lost; the columns count the points that are won by the best time and by
the median. A transparent background and a mid grey suit light and dark pages.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from figures import ratios
from matplotlib import rc_context

if TYPE_CHECKING:
  from matplotlib.figure import Figure

GREY, AHEAD, BEHIND = "#777777", "#2f7ce0", "#cf6a12"
STYLE: dict[Any, Any] = {
  f"{part}color": GREY for part in ("text.", "axes.label", "axes.edge", "xtick.", "ytick.", "grid.")
} | {
  "figure.facecolor": "none", "axes.facecolor": "none", "legend.frameon": False, "font.size": 10,
  "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
  "grid.alpha": 0.3, "svg.fonttype": "none", "svg.hashsalt": "step",
  "font.family": ["sans-serif"], "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
}  # fmt: skip


def draw(points: Sequence[Any]) -> "Figure":
  """Returns a row of dots for each optimizer, on a logarithmic axis."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(5.2, 3.6), layout="constrained")
  axis = figure.subplots()
  names = list(points[0]["results"])
  for i, name in enumerate(names):
    values = ratios(points, name, "best_ms")
    # Spread, so that dots of one value do not hide each other.
    heights = [i + 0.5 * (k / max(len(values) - 1, 1) - 0.5) for k in range(len(values))]
    colors = [AHEAD if value <= 1 else BEHIND for value in values]
    axis.scatter(values, heights, c=colors, s=22, linewidths=0, zorder=3)
    medians = ratios(points, name, "median_ms")
    ahead, usually = (sum(value <= 1 for value in some) for some in (values, medians))
    axis.text(5.9, i, str(ahead), va="center", ha="right", fontsize=9)
    axis.text(11.5, i, str(usually), va="center", ha="right", fontsize=9)
  axis.axvline(1, color=GREY, linewidth=1)
  least = min(value for name in names for value in ratios(points, name, "best_ms"))
  axis.set(xscale="log", xlim=(0.85 * min(least, 0.1), 12), ylim=(len(names) - 0.4, -1.3))
  axis.set_xticks([0.1, 0.2, 0.5, 1, 2, 4], ["0.1", "0.2", "0.5", "1", "2", "4"])
  axis.minorticks_off()
  axis.set_xlabel("our best time / best time of the fastest peer (logarithmic)")
  axis.set_yticks(range(len(names)), [name.replace("_", "\n") for name in names])
  axis.tick_params(axis="y", length=0)
  axis.grid(axis="x")
  axis.set_axisbelow(True)
  axis.text(0.95, -0.72, "ours faster", ha="right", fontsize=9, color=AHEAD)
  axis.text(1.05, -0.72, "peer faster", ha="left", fontsize=9, color=BEHIND)
  axis.text(6.4, -0.72, "best", ha="right", fontsize=9)
  axis.text(11.9, -0.72, "median", ha="right", fontsize=9)
  axis.text(11.9, -1.15, f"ours ahead, of {len(points)}, by", ha="right", fontsize=9)
  return figure


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("results", type=Path, nargs="?", default="docs/results/step_grid.json")
  parser.add_argument("out", type=Path, nargs="?", default="docs/images/speed.svg")
  arguments = parser.parse_args()
  points = json.loads(arguments.results.read_text())["points"]
  with rc_context(STYLE):
    draw(points).savefig(arguments.out, metadata={"Date": None})


if __name__ == "__main__":
  main()
