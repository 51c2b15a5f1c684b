"""The look of the project's pictures: no background, and colors for light and for dark pages.

    from embed.recipes import style

    style.use()  # from here on, for all pictures

A notebook imports it by this name, under which it is installed.
"""

from typing import Any

import matplotlib

GREY = "#777777"  # readable on white and on black

# Okabe and Ito's colors ("Color Universal Design", 2008), told apart by everybody.
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, RED, YELLOW = "#56B4E9", "#D55E00", "#F0E442"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW, GREY)

_GREY_PARTS = ("text.", "axes.label", "axes.edge", "axes.title", "xtick.", "ytick.")
SETTINGS: dict[Any, Any] = {f"{part}color": GREY for part in _GREY_PARTS} | {
  "figure.facecolor": "none", "axes.facecolor": "none", "legend.frameon": False,
  "axes.spines.top": False, "axes.spines.right": False, "font.size": 10,
  "text.parse_math": False,  # names of files and settings may hold dollars, and are no formulas
}  # fmt: skip


def use() -> None:
  """Draws every later picture of the process in this look."""
  matplotlib.rcParams.update(SETTINGS)
