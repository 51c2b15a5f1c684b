"""Listens of users, day after day, drawn from known probabilities: sequences with many targets.

The log has the columns of MLPerf's `recommendation_v4`: users play items of artists and albums, and
like or skip them; the label is whether an item is played out. How likely that is depends on the
item, on the user's taste for its artist's genre, and on how the user took that genre last, the less
the longer ago that is: a model needs ids, actions and times. The labels are drawn from these
probabilities, so the best score that anybody can reach is known.

A sequence is up to `past` events of a user, the oldest first, and up to `targets` events of the
same day that follow. Each of these is there twice: as a target, without its action, and then as an
event with it, which later targets may see. Sequences are in the order of their first target, and
share a row of `width` columns where there is room; no row spans two days. The last day tests, the
one before it validates. R is rows, L columns of a row, S sequences of a row, T targets of a row:

  tokens   int32 [R, L, 7]  ids of `TOKENS`, then `segments`, which of the row's sequences it is,
                            -1 for none; `positions`, events before the first target at the end;
                            `times`, seconds after the first target; `actions`, -1 of targets
  contexts int32 [R, S, 8]  ids of `CONTEXTS` at the first target, -1 where there is no sequence
  targets  int32 [R, T, 2]  `where`, the column of a target, and `clock`, its second of the week
  label    uint8 [R, T]     and `weight` float32 [R, T], 0 where there is no target
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit

import embed

from .. import arrays, files
from ..datasets import Prepared
from ..errors import UserError
from ..evaluation.metrics import click_metrics
from ..packing import ranges
from .criteo1tb import splitmix64

TOKENS = ("item", "artist", "album")
CONTEXTS = (
  "user", "user_x_artist", "user_x_album", "user_x_hour", "item_x_hour", "artist_x_hour",
  "user_x_organic", "user_x_artist_x_hour",
)  # fmt: skip
PLACES = ("segments", "positions", "times", "actions")
PLAYED, LIKED, SKIPPED = 1, 2, 4  # bits of an action
ACTIONS = 8
_GENRES, _HOUR, _DAY = 8, 3600, 86_400
_MOST_BYTES = 1 << 38


def settings(config) -> dict[str, Any]:
  """Returns everything the prepared columns depend on.

  Raises:
    UserError: a number makes no sense, or the columns would take more than 256 GB.
  """
  longest = config.past + 2 * config.targets - 1
  if min(config.targets, config.sequences, config.num_days - 2) < 1 or config.past < 0:
    raise UserError("targets and sequences must be 1 or more, days 3 or more, past 0 or more")
  if config.width and config.width < longest:
    raise UserError(
      f"config.width is {config.width}, and a sequence has up to {longest}, of past="
      f"{config.past} and targets={config.targets}: write {longest} or more, or 0"
    )
  rows = (
    _sizes(config)["user"] * config.num_days * config.events / (config.targets * config.sequences)
  )
  if (size := rows * _width(config) * 4 * (len(TOKENS) + len(PLACES))) > _MOST_BYTES:
    raise UserError(
      f"these sequences would take {size / 1e9:,.0f} GB: draw fewer users or days, or take a "
      "config's mode nano. Compiling ahead of time needs no sequences"
    )
  of_config = ("num_days", "events", "past", "targets", "sequences", "data_seed")
  sizes = {name: int(size) for name, size in _sizes(config).items()}
  chosen = {name: config[name] for name in of_config}
  return {"format": 1, "sizes": sizes, "width": _width(config), **chosen}


def _sizes(config) -> dict[str, int]:
  names = (*TOKENS, *CONTEXTS)
  if len(config.vocabulary_sizes) != len(names):
    raise UserError(
      f"vocabulary_sizes has {len(config.vocabulary_sizes)} numbers: write one each for "
      f"{', '.join(names)}"
    )
  return dict(zip(names, config.vocabulary_sizes, strict=True))


def _width(config) -> int:
  return config.width or config.sequences * (config.past + 2 * config.targets - 1)


def _features(sizes: Mapping[str, int]) -> list[dict[str, Any]]:
  return [{"name": name, "vocabulary_size": size} for name, size in sizes.items()]


def describe(config) -> Prepared:
  """Returns the columns without rows, and the features: all that a model has to know."""
  targets = config.targets * config.sequences
  columns = {
    "tokens": np.zeros((0, _width(config), len(TOKENS) + len(PLACES)), np.int32),
    "contexts": np.zeros((0, config.sequences, len(CONTEXTS)), np.int32),
    "targets": np.zeros((0, targets, 2), np.int32),
    "label": np.zeros((0, targets), np.uint8),
    "weight": np.zeros((0, targets), np.float32),
  }
  return Prepared(columns, {"splits": {}, "features": _features(_sizes(config)), "sha256": {}})


def build(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
  """Draws the log and writes the columns."""
  log = _draw(settings)
  users, when = log["user"], log["time"]
  day = when // _DAY
  # Targets: runs of events of one user and day, cut after every `targets`.
  starts = np.flatnonzero(np.diff(users * settings["num_days"] + day, prepend=-1))
  counts = np.diff(starts, append=len(users))
  cuts = -(-counts // settings["targets"])
  first = np.repeat(starts, cuts) + ranges(np.zeros_like(cuts), cuts) * settings["targets"]
  number = np.minimum(settings["targets"], np.repeat(starts + counts, cuts) - first)
  order = np.argsort(when[first], kind="stable")
  first, number = first[order], number[order]
  before = np.minimum(settings["past"], first - np.searchsorted(users, users[first]))

  lengths = before + 2 * number - 1
  width, most = settings["width"], settings["sequences"]
  row, column, segment = _place(lengths, day[first], width, most)
  rows = int(row[-1]) + 1
  written = {
    name: arrays.column(folder, name, shape, dtype)
    for name, shape, dtype in (
      ("tokens", (rows, width, len(TOKENS) + len(PLACES)), np.int32),
      ("contexts", (rows, most, len(CONTEXTS)), np.int32),
      ("targets", (rows, most * settings["targets"], 2), np.int32),
      ("label", (rows, most * settings["targets"]), np.uint8),
      ("weight", (rows, most * settings["targets"]), np.float32),
    )
  }
  written["tokens"][:], written["contexts"][:] = -1, -1
  sequence, place = np.repeat(np.arange(len(first)), lengths), ranges(0 * lengths, lengths)
  after = place - before[sequence]  # of the first target
  event = first[sequence] + np.where(after < 0, after, after // 2)
  is_target = (after >= 0) & (after % 2 == 0)
  at = column[sequence] + place
  written["tokens"][row[sequence], at] = np.stack([
    *(log[name][event] for name in TOKENS),
    segment[sequence],
    settings["past"] + event - first[sequence],
    when[event] - when[first][sequence],
    np.where(is_target, -1, log["action"][event]),
  ], axis=-1)  # fmt: skip
  contexts = [_context(name, log, first, settings["sizes"][name]) for name in CONTEXTS]
  written["contexts"][row, segment] = np.stack(contexts, axis=-1)
  event, where = event[is_target], row[sequence][is_target]
  slot = (segment[sequence] * settings["targets"] + after // 2)[is_target]
  label = log["action"][event] & PLAYED
  written["targets"][where, slot] = np.stack([at[is_target], when[event] % (7 * _DAY)], axis=-1)
  written["label"][where, slot], written["weight"][where, slot] = label, 1

  ends = [int(np.searchsorted(day[first], settings["num_days"] - left)) for left in (2, 1)]
  ends = [int(row[end]) for end in ends] + [rows]
  splits = dict(zip(("train", "valid", "test"), zip([0, *ends], ends, strict=False), strict=True))
  tested = where >= ends[1]
  best = click_metrics(log["logit"][event][tested], label[tested])
  digest = hashlib.sha256(written["tokens"].tobytes() + written["label"].tobytes())
  return {
    "splits": splits,
    "features": _features(settings["sizes"]),
    "sha256": {"generated": digest.hexdigest()},
    "best": {f"test_{name}": value for name, value in best.items()},
  }


def _draw(settings: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Returns the log, a column each, by user and then by time; `logit` is of the label."""
  sizes, draw = settings["sizes"], np.random.default_rng((settings["data_seed"], 0))
  users, items = sizes["user"], sizes["item"]
  popularity = np.cumsum(np.arange(1, items + 1, dtype=np.float64) ** -0.8)
  quality, taste = draw.normal(0, 0.5, items), draw.normal(0, 0.7, (users, _GENRES))
  mood, since = np.zeros((users, _GENRES)), np.zeros((users, _GENRES))
  hashed, parts = splitmix64(np.arange(items, dtype=np.uint64)), []
  of_item = {name: (hashed % np.uint64(sizes[name])).astype(np.int64) for name in TOKENS[1:]}
  with files.progress("drawing days", settings["num_days"], "day") as bar:
    for day in range(settings["num_days"]):
      number, wakes = draw.poisson(settings["events"], users), draw.integers(0, 20 * _HOUR, users)
      for nth in range(number.max()):
        user = np.flatnonzero(number > nth)
        when = day * _DAY + wakes[user] + nth * 4 * _HOUR // number[user]
        item = np.searchsorted(popularity, draw.random(len(user)) * popularity[-1])
        genre = of_item["artist"][item] % _GENRES
        left = np.exp((since[user, genre] - when) / _DAY)  # of the last reaction
        logit = 0.4 + quality[item] + taste[user, genre] + 1.5 * mood[user, genre] * left
        played = draw.random(len(user)) < expit(logit)
        liked = played & (draw.random(len(user)) < 0.05)
        mood[user, genre], since[user, genre] = np.where(played, 1, -1), when
        action = np.where(played, PLAYED, SKIPPED) + np.where(liked, LIKED, 0)
        organic = draw.integers(0, 2, len(user))
        parts.append((user, when, item, action, organic, logit))
      bar.update(1)
  names = ("user", "time", "item", "action", "organic", "logit")
  log = {
    name: np.concatenate(part) for name, part in zip(names, zip(*parts, strict=True), strict=True)
  }
  order = np.lexsort((log["time"], log["user"]))
  log = {name: column[order] for name, column in log.items()}
  log |= {name: column[log["item"]] for name, column in of_item.items()}
  return log | {"hour": log["time"] % _DAY // _HOUR}


def _context(name: str, log: Mapping[str, np.ndarray], at: np.ndarray, size: int) -> np.ndarray:
  """Returns the user, or the hash of several columns of the log, as ids below `size`."""
  if name == "user":
    return log["user"][at]
  mixed = np.zeros(len(at), np.uint64)
  for part in name.split("_x_"):
    mixed = splitmix64(mixed + log[part][at].astype(np.uint64))
  return (mixed % np.uint64(size)).astype(np.int64)


def _place(
  lengths: np.ndarray, days: np.ndarray, width: int, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns the row, the first column and the number within its row of each sequence, in order.

  A row ends where the next sequence does not fit, at `most` sequences, and with the day.
  """
  places, row, used, number, today = np.empty((3, len(lengths)), np.int64), -1, width, most, -1
  for i, (length, day) in enumerate(zip(lengths.tolist(), days.tolist(), strict=True)):
    if used + length > width or number == most or day != today:
      row, used, number, today = row + 1, 0, 0, day
    places[:, i] = row, used, number
    used, number = used + length, number + 1
  return places[0], places[1], places[2]


def inputs(
  batch: dict[str, np.ndarray], *, configs: Mapping[str, embed.FeatureConfig]
) -> dict[str, Any]:
  """Returns a batch of B rows as `HSTURanker` and the loss take it.

  `features` are int32 `[B, L]` or `[B, S]`; `PLACES` `[B, L]`; `where` and `clock` `[B, T]`;
  `label`, `weight` and a `mask` of rows are of every target, `[B T]`.
  """
  tokens = dict(zip((*TOKENS, *PLACES), np.moveaxis(batch["tokens"], -1, 0), strict=True))
  contexts = dict(zip(CONTEXTS, np.moveaxis(batch["contexts"], -1, 0), strict=True))
  ids = {name: np.ascontiguousarray((tokens | contexts)[name]) for name in (*TOKENS, *CONTEXTS)}
  embed.validate(configs, ids)
  where, clock = np.moveaxis(batch["targets"], -1, 0)
  made = {
    "features": ids,
    **{name: np.ascontiguousarray(tokens[name]) for name in PLACES},
    "where": np.ascontiguousarray(where),
    "clock": np.ascontiguousarray(clock),
    "label": batch["label"].astype(np.float32).ravel(),
    "weight": batch["weight"].ravel(),
  }
  if "mask" in batch:
    made["mask"] = np.repeat(batch["mask"], batch["label"].shape[1])
  return made
