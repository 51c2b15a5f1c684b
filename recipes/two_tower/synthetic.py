"""A catalogue with known groups, so that the best score anybody can reach is known.

An item belongs to one group, in which popularity follows a power law. A user likes the groups to
different degrees, and draws items without repetition by `p(item | user)`, the user's taste for the
item's group times the item's share of it. Ranking by that probability itself is the bound.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from .. import files
from ..evaluation import baselines
from ..tables import splitting
from ..training.features import Feature
from . import table

_CHUNK = 256
_ZIPF = 0.8  # the exponent of the popularity of items
_BEST_KS = (10, 20, 50, 100)


def settings(config) -> dict[str, Any]:
  """Returns everything the prepared columns depend on."""
  return {
    "format": 2,
    "users": config.num_users,
    "items": config.num_items,
    "groups": config.num_groups,
    "mean_items": config.mean_items,
  }


def build(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
  """Writes the columns; users have their favourite group, one in four wrong, items their tags."""
  users, items, groups = settings["users"], settings["items"], settings["groups"]
  draw = np.random.default_rng(0)
  group = np.concatenate([np.arange(groups), draw.integers(0, groups, items - groups)])
  share = draw.permutation(np.arange(1.0, items + 1) ** -_ZIPF)
  share /= np.bincount(group, share)[group]
  taste = draw.gamma(0.3, size=(users, groups)) + 1e-3
  taste /= taste.sum(axis=1, keepdims=True)
  count = np.clip(draw.geometric(1 / settings["mean_items"], users) + 9, 10, items // 2)
  probability = lambda start, stop: taste[start:stop][:, group] * share  # [stop - start, items]

  drawn = []
  with files.progress("drawing users", users, "user") as bar:
    for start in range(0, users, _CHUNK):
      # The order of Gumbel-perturbed logs is the order of draws without repetition.
      keys = np.log(probability(start, start + _CHUNK))
      order = np.argsort(-(keys + draw.gumbel(size=keys.shape)), axis=1)
      drawn += [row[:size] for row, size in zip(order, count[start:], strict=False)]
      bar.update(len(order))
  user, item = np.repeat(np.arange(users), count), np.concatenate(drawn)
  split = splitting.per_user(user, 0.1, 0)
  favourite = np.where(
    draw.random(users) < 0.75, taste.argmax(axis=1), draw.integers(0, groups, users)
  )
  # One to three tags of each item: the first is its group, the others any.
  tags = draw.integers(0, groups, (items, 3))
  tags[:, 0] = group
  tags[np.arange(3) > draw.integers(0, 3, (items, 1))] = -1
  meta = table.write(
    folder,
    (user, item, split),
    {"user": users, "item": items},
    {
      "user": {Feature("favourite", groups): favourite},
      "item": {Feature("tags", groups, valency=3): tags},
    },
    seed=0,
  )
  had, tested = (
    baselines.ones(user[part], item[part], (users, items)) for part in (split < 2, split == 2)
  )
  best = baselines.ranking(probability, tested, had, [k for k in _BEST_KS if k <= items])
  digest = hashlib.sha256(np.stack([user, item, split]).astype(np.int64).tobytes()).hexdigest()
  return meta | {
    "best": {f"test_{name}": value for name, value in best.items()},
    "sha256": {"generated": digest},
  }
