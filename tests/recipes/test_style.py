"""`recipes.style`: colors that can be read and told apart, and settings that pictures take over."""

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from recipes import style


def luminance(color):
  """The relative luminance of WCAG 2."""
  rgb = np.array(to_rgb(color))
  linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
  return linear @ [0.2126, 0.7152, 0.0722]


@pytest.mark.parametrize("page", ["white", "black"])
def test_grey_text_is_readable(page):
  low, high = sorted([luminance(style.GREY), luminance(page)])
  assert (high + 0.05) / (low + 0.05) > 4.4


def test_colors_differ():
  assert len(set(style.COLORS)) == len(style.COLORS) == 8
  brightness = sorted(luminance(color) for color in style.COLORS)
  assert brightness[-1] > 4 * brightness[0]  # the ends are told apart in grey print too


def test_later_pictures_have_the_look():
  with matplotlib.rc_context():
    style.use()
    axes = Figure().subplots()
    axes.set(title="title", xlabel="label")
    assert axes.get_facecolor()[3] == axes.figure.get_facecolor()[3] == 0  # transparent
    assert axes.title.get_color() == axes.xaxis.label.get_color() == style.GREY
    assert not axes.spines["top"].get_visible()
  assert matplotlib.rcParams["text.color"] != style.GREY
