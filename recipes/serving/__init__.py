"""Predictions by a model that `recipes.export` has written, for rows as they are.

    model = serving.load("served")
    model.predict(rows)             # dlrm: probabilities, float64 [N], or of `model.names` [N, S]
    model.score(rows)               # the same, and counts of unknown and missing values: `Scored`
    model.recommend(rows, top=10)   # two_tower, sequence: `Recommended`

`rows` are a dict of columns, a list of dicts, or a table of Arrow or pandas, with the columns of
the training file in any order; other columns are ignored. `python -m recipes.predict` does the same
with files.

**Clicks.** Every declared feature needs its column, and the user and the item where they are
declared. A category outside the vocabulary is what the declaration says: with `oov` it has one of
these rows of its table, with `oov=0` no vector. A missing category has no vector, a missing number
is the mean of training, and a user or item that the table of its own lacks has no features.
Values that training has not seen and missing ones are counted by column. A history that training
has built of its log is a list column of its name, and one for each value beside it (`seen`,
`seen_genre`).

**Recommendations.** A row needs one of: the user, a feature of the user, or a `history`.

  A value in the row is used where there is one, and else what training has stored of the user. This
    holds for each feature of the user (two_tower), and for the history.
  A `history` holds raw ids of items in the order of time, separated by `|`, or is a list column. It
    replaces the stored one. Where training rows held several items, their column is the history.
    Items that training has not seen are left out of it, and counted.
  The stored history is all of a user's interactions, those that training held out included. Models
    with a limit see what they see in evaluation: two_tower `config.eval_history` items, evenly
    thinned out, sequence the last `config.max_length`.
  A user that training has not seen counts by features and history. A feature counts if its value
    has a vector, as an unknown category with `oov` rows has. A row with neither has the most
    popular items of all interactions, and blank scores.
  Items in the history are left out if `config.exclude_seen` was True in training.
  Where fewer than `top` items are left, the rest is blank. A score is a dot product of vectors, and
    compares items of one row.

**Bad rows**, as a text where a number should be, raise an error that names row and column; with
`on_bad_row="skip"` they keep their place and have blank scores.

Needs sparse-embed with its extra `serving`. The run, its data and its checkpoint are not read.
"""

from pathlib import Path

from . import folder as folder_lib
from .models import ClickModel, Recommended, Recommender, Scored

__all__ = ["ClickModel", "Recommended", "Recommender", "Scored", "load"]


def load(folder: str | Path) -> ClickModel | Recommender:
  """Opens a folder that `recipes.export` has written.

  Returns:
    A `ClickModel` of dlrm, a `Recommender` of two_tower and sequence.

  Raises:
    UserError: the folder is no export, or is of another version.
  """
  served = folder_lib.read(folder)
  return ClickModel(served) if served.about["recipe"] == "dlrm" else Recommender(served)
