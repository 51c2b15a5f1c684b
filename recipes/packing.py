"""Short sequences side by side in rows of one width.

Most people buy little: one row per person, padded to the longest, would be padding almost entirely.
Packed rows have one static shape, so a step is compiled once, and an attention mask keeps the
sequences of a row apart. Rows are packed once, when the data is prepared; an epoch shuffles them.
"""

from collections.abc import Sequence

import numpy as np


def place(lengths: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the row and the first column of each sequence: best fit, longest first.

  Args:
    lengths: int `[S]`, of 1 to `width`.
    width: of a row.

  Returns:
    `row` and `column`, int64 `[S]`. Rows are numbered from 0 without gaps.
  """
  row, column = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int64)
  by_room: list[list[int]] = [[] for _ in range(width + 1)]  # rows by the columns left in them
  rows = 0
  for sequence in np.argsort(-lengths, kind="stable").tolist():
    length = int(lengths[sequence])
    room = next((room for room in range(length, width) if by_room[room]), width)
    if room == width:
      target, rows = rows, rows + 1
    else:
      target = by_room[room].pop()
    row[sequence], column[sequence] = target, width - room
    by_room[room - length].append(target)
  return row, column


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
  """Returns `start, start + 1, ...`, `length` of them for each, one after the other."""
  before = np.cumsum(lengths) - lengths
  return np.arange(lengths.sum()) + np.repeat(starts - before, lengths)


def padded(
  values: np.ndarray, lengths: Sequence[int] | np.ndarray, width: int, fill: int = -1
) -> np.ndarray:
  """Returns flat values as int32 rows, `[len(lengths), width]`, filled up at the end."""
  rows = np.full((len(lengths), width), fill, np.int32)
  rows[np.arange(width) < np.asarray(lengths)[:, None]] = values
  return rows


def inference_batch(rows: np.ndarray, *, places: int, aligned: str) -> dict[str, np.ndarray]:
  """Returns rows of one sequence each, for the prediction of the next item.

  Args:
    rows: items int32 `[S, width]`, -1 after the sequence.
    places, aligned: see `positions`.

  Returns:
    `items`, the rows; `segments`, 0, or -1 for none; `positions`; and `last` `[S]`, the column of
    the last item, 0 where there is none.
  """
  counts = (rows >= 0).sum(axis=1)
  return {
    "items": rows,
    "segments": np.minimum(rows, 0),
    "positions": padded(positions(counts, places, aligned), counts, rows.shape[1], 0),
    "last": np.maximum(counts - 1, 0).astype(np.int32),
  }


def positions(lengths: np.ndarray, width: int, aligned: str) -> np.ndarray:
  """Returns the place of every item of every sequence among `width` places, one after the other.

  Args:
    lengths: int `[S]`, up to `width`.
    width: the number of places.
    aligned: "end" puts the last item at `width - 1` as left padding does, "start" the first at 0.
  """
  first = width - lengths if aligned == "end" else np.zeros_like(lengths)
  return ranges(first, lengths)
