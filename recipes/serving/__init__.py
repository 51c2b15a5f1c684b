"""Predictions by a model that `recipes.export` has written, for rows as they are.

    model = serving.load("served")
    model.predict(rows)             # dlrm: probabilities, float64 [N]
    model.recommend(rows, top=10)   # two_tower, sequence: `Recommended`
    model.similar(["i3"], "item")   # those like it, by the cosine of their vectors
    model.vectors("user")           # raw ids and vectors, for a vector store

`rows` are a dict of columns, a list of dicts, or a table of Arrow or pandas, with the columns of
the training file in any order; other columns are ignored. `python -m recipes.predict` does the same
with files.

**Clicks.** Every declared feature needs its column. A category outside the vocabulary has one of
the `oov` rows of its table, or no vector with `oov=0`. A missing category has no vector, a missing
number is the mean of training.

**Recommendations.** A row needs one of: the user, a feature of the user, or a `history`, raw ids of
items in the order of time, as a list or separated by `|`. A value in the row takes the place of the
one that training has stored of the user, whose history is all of their interactions. Items that
training has not seen are left out of it. A row without any known value has the most popular items,
and blank scores. Items in the history are not recommended if `config.exclude_seen` was True in
training. Where fewer than `top` items are left, the rest is blank. A score is a dot product of
vectors, and compares items of one row.

**Lists.** Columns `allow` and `deny` hold the only items to recommend to a row, and items not to,
written as a history. `recommend(rows, allow=[...], deny=[...])` takes those of all rows; both hold.
Unknown ids are left out, so that an allow-list of nothing else has no results. An empty text is no
list. The most popular items and unseen ones obey the lists as well.

Needs sparse-embed with its extra `serving`. The run, its data and its checkpoint are not read.
"""

from .models import ClickModel, Recommended, Recommender, load

__all__ = ["ClickModel", "Recommended", "Recommender", "load"]
