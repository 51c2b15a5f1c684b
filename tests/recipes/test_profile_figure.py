"""The figure of a profile."""

import numpy as np
from meshes import make_mesh
from stored_tables import two_tables

import embed
from recipes import profile_figure


def lines(axes):
  """The points of each line that has a name, without gaps."""
  found = {}
  for line in axes.get_lines():
    x, y = (np.asarray(values, float) for values in line.get_data())
    if not line.get_label().startswith("_"):
      found[line.get_label()] = list(zip(x[~np.isnan(y)], y[~np.isnan(y)], strict=True))
  return found


def test_panels(tmp_path):
  """Each panel has what the profile has."""
  features = two_tables()
  plan = embed.Plan.uniform(features, None, make_mesh(shape=(2,)), "data", "mod")
  batches = [
    {"watched": embed.Padded([[3, 7, 3], [11, -1, -1]]), "user": np.arange(2)},
    {"watched": embed.Padded([[3, -1, -1], [3, -1, -1]])},
  ]
  profile = embed.profile(features, batches, plan)
  figure = profile_figure.draw(profile, tmp_path / "sample.png")
  assert (tmp_path / "sample.png").read_bytes().startswith(b"\x89PNG")
  bags, popularity, distinct, load = map(lines, figure.axes)
  assert bags == {"movie": [(1, 0.75), (3, 0.25)], "user": [(1, 1.0)]}
  assert popularity["movie"] == [(1, 4 / 6), (2, 1 / 6), (3, 1 / 6)]
  assert distinct == {"movie": [(0, 3), (1, 1)], "user": [(0, 2)]}
  (shards,) = load.values()
  # Shard 0 is asked for row 0 of user; shard 1 for 3, 7 and 11 of movie and 1 of user, and in the
  # second batch by each device for 3.
  assert shards == [(0, 1 / 3.5), (1, 6 / 3.5)]
  assert [text.get_text() for text in figure.legends[0].get_texts()] == ["movie", "user"]
  assert len(profile_figure.draw(embed.profile(features, batches)).axes) == 3


def test_a_plot_of_many_tables_names_some():
  tables = {f"t{i:02d}": embed.TableConfig(4, 2, name=f"t{i:02d}") for i in range(22)}
  features = {name: embed.FeatureConfig(table) for name, table in tables.items()}
  figure = profile_figure.draw(embed.profile(features, [dict.fromkeys(features, np.array([1, 2]))]))
  (legend,) = figure.legends
  assert len(legend.get_texts()) == 20
  assert legend.get_title().get_text() == "and 2 more"
