"""A chart of `step.py`'s figures: milliseconds of a step, for each optimizer and contender.

  python benchmarks/chart.py docs/results/step.json docs/images/speed.svg

Every contender has its bar, slower or faster, and one without the optimizer says so. A transparent
background and a mid grey suit light and dark pages.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context

if TYPE_CHECKING:
  from matplotlib.figure import Figure

GREY = "#777777"
CONTENDERS = {  # names in the file: on the chart, colour
  "ours": ("SparseEmbed", "#2f7ce0"),
  "fbgemm": ("FBGEMM CPU", "#cf6a12"),
  "torch": ("torch, sparse gradients", "#2e9e5b"),
  "dense jax": ("JAX, dense gradients", GREY),
}
NOTE = (
  "The same ids in every step, shared machine: both favour SparseEmbed.\n"
  "With fresh ids on a quiet machine FBGEMM was ahead on row-wise\n"
  "Adagrad and about level on sgd and Adagrad (no file of it yet)."
)
STYLE: dict[Any, Any] = {
  f"{part}color": GREY for part in ("text.", "axes.label", "axes.edge", "xtick.", "ytick.", "grid.")
} | {
  "figure.facecolor": "none", "axes.facecolor": "none", "legend.frameon": False, "font.size": 10,
  "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
  "grid.alpha": 0.3, "svg.fonttype": "none", "svg.hashsalt": "step",
  "font.family": ["sans-serif"], "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
}  # fmt: skip


def short(milliseconds: float) -> str:
  """Three digits."""
  return f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:.0f}"


def draw(results: Mapping[str, Mapping[str, Any]]) -> "Figure":
  """Returns horizontal bars on a logarithmic axis, a group for each optimizer."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(5.2, 5.6), layout="constrained")
  axis = figure.subplots()
  for i, measured in enumerate(results.values()):
    for j, (contender, (label, color)) in enumerate(CONTENDERS.items()):
      y, best = i * (len(CONTENDERS) + 1) + j, measured[contender].get("best_ms")
      if best is None:
        axis.text(1.06, y, f"{label}: no such optimizer", va="center", fontsize=8, style="italic")
        continue
      axis.barh(y, best, height=0.85, color=color, label=label)
      axis.text(best * 1.06, y, short(best), va="center", fontsize=9)
  axis.set(xscale="log", xlim=(1, 400), xlabel="milliseconds a step, best of many (logarithmic)")
  axis.set_xticks([1, 10, 100], ["1", "10", "100"])
  middle = (len(CONTENDERS) - 1) / 2
  axis.set_yticks(
    [i * (len(CONTENDERS) + 1) + middle for i in range(len(results))],
    [name.replace("_", "\n") for name in results],
  )
  axis.tick_params(axis="y", length=0)
  axis.invert_yaxis()
  axis.grid(axis="x")
  axis.set_axisbelow(True)
  handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
  figure.legend(handles.values(), handles, loc="outside upper left", ncols=2, fontsize=9)
  figure.supxlabel(NOTE, fontsize=8.5, x=0.01, ha="left", linespacing=1.4)
  return figure


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("results", type=Path, nargs="?", default="docs/results/step.json")
  parser.add_argument("out", type=Path, nargs="?", default="docs/images/speed.svg")
  arguments = parser.parse_args()
  results = json.loads(arguments.results.read_text())["results"]
  with rc_context(STYLE):
    draw(results).savefig(arguments.out, metadata={"Date": None})


if __name__ == "__main__":
  main()
