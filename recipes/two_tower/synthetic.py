"""A catalogue with known groups, so that the best score anybody can reach is known.

An item belongs to one group, in which popularity follows a power law. A user likes the groups to
different degrees, and draws items without repetition by `p(item | user)`, the user's taste for the
item's group times the item's share of it. Ranking by that probability itself is the bound.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from .. import files
from ..evaluation import baselines
from ..tables import splitting
from ..tables.values import SPLITS
from ..training.features import Feature
from . import table

_CHUNK = 256
_BEST_KS = (10, 20, 50, 100)


def settings(config) -> dict[str, Any]:
  """Returns everything the prepared columns depend on."""
  return {
    "format": 1,
    "users": config.num_users,
    "items": config.num_items,
    "groups": config.num_groups,
    "mean_items": config.mean_items,
    "zipf_exponent": config.zipf_exponent,
    "seed": config.data_seed,
  }


def build(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
  """Writes the columns; users have their favourite group, one in four wrong, items their tags."""
  users, items, groups = settings["users"], settings["items"], settings["groups"]
  draw = np.random.default_rng(settings["seed"])
  group = np.concatenate([np.arange(groups), draw.integers(0, groups, items - groups)])
  share = draw.permutation(np.arange(1.0, items + 1) ** -settings["zipf_exponent"])
  share /= np.bincount(group, share)[group]
  taste = draw.gamma(0.3, size=(users, groups)) + 1e-3
  taste /= taste.sum(axis=1, keepdims=True)
  count = np.clip(draw.geometric(1 / settings["mean_items"], users) + 9, 10, items // 2)

  user_parts, item_parts = [], []
  with files.progress("drawing users", users, "user") as bar:
    for start in range(0, users, _CHUNK):
      probability = taste[start : start + _CHUNK][:, group] * share
      # The order of Gumbel-perturbed logs is the order of draws without repetition.
      keys = np.log(probability) + draw.gumbel(size=probability.shape)
      order = np.argsort(-keys, axis=1)
      for row, size in enumerate(count[start : start + _CHUNK]):
        user_parts.append(np.full(size, start + row))
        item_parts.append(order[row, :size])
      bar.update(len(probability))
  user, item = np.concatenate(user_parts), np.concatenate(item_parts)
  split = splitting.per_user(user, 0.1, settings["seed"])
  pairs = {name: (user[split == i], item[split == i]) for i, name in enumerate(SPLITS)}
  favourite = np.where(
    draw.random(users) < 0.75, taste.argmax(axis=1), draw.integers(0, groups, users)
  )
  digest = hashlib.sha256(np.stack([user, item, split]).astype(np.int64).tobytes()).hexdigest()
  meta = table.write(
    folder,
    pairs,
    (users, items),
    {
      "user": [(Feature("favourite", groups), favourite.astype(np.int32))],
      "item": [(Feature("tags", groups, valency=3), _tags(draw, group, groups))],
    },
    {"generated": digest},
    seed=settings["seed"],
  )
  return meta | {"best": _best(taste, share, group, pairs)}


def _tags(draw: np.random.Generator, group: np.ndarray, groups: int) -> np.ndarray:
  """Draws one to three tags for each item: the first is its group, the others any."""
  tags = draw.integers(0, groups, (len(group), 3)).astype(np.int32)
  tags[:, 0] = group
  tags[np.arange(3) > draw.integers(0, 3, (len(group), 1))] = -1
  return tags


def _best(taste, share, group, pairs) -> dict[str, float]:
  """Returns the metrics of ranking by the probabilities that the items were drawn from."""
  shape = (len(taste), len(share))
  matrix = {
    name: scipy.sparse.csr_matrix((np.ones(len(user)), (user, item)), shape)
    for name, (user, item) in pairs.items()
  }
  metrics = baselines.ranking(
    lambda start, stop: taste[start:stop][:, group] * share,
    matrix["test"],
    matrix["train"] + matrix["valid"],
    [k for k in _BEST_KS if k <= shape[1]],
  )
  return {f"test_{name}": value for name, value in metrics.items()}
