"""`Vocabulary`: positions in a list of tokens as ids."""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from embed.transforms import hashing
from embed.transforms.columns import MAX_SIZE, Column, fill_missing, set_integers


@dataclasses.dataclass(frozen=True)
class Vocabulary(Column):
  """Looks tokens up in a list; the id of a token is its position.

  The counterpart of `tf.feature_column.categorical_column_with_vocabulary_list`, which drops
  unknown keys by default; here they raise an error.

  Args:
    tokens: strings (or their UTF-8), or integers. They are part of a pickle, so that workers and
      servers need no file. `tokens[id]` turns an id back into its token.
    num_oov_buckets: ids after the tokens, for unknown keys:
      `len(tokens) + XXH64(key) % num_oov_buckets`.
    default_value: instead, one id for all unknown keys; -1 makes them padding. With neither, they
      raise an error.

  Raises:
    ValueError: naming the argument, or a token that is repeated or padding; in a call, naming an
      unknown key.

  >>> genre = Vocabulary(["drama", "comedy"], num_oov_buckets=2)
  >>> genre.vocabulary_size
  4
  >>> genre([["comedy", "drama"], ["western"]]).values.tolist()
  [[1, 0], [3, -1]]
  """

  tokens: Sequence[Any] = dataclasses.field(repr=False)
  num_oov_buckets: int = 0
  default_value: int | None = None

  def __post_init__(self):
    super().__post_init__()
    if isinstance(self.tokens, (str, bytes, os.PathLike)):
      raise ValueError(
        "Argument `tokens` is a list. For a file with one token per line, write "
        f"Vocabulary.from_file({self.tokens!r})."
      )
    keys = hashing.to_keys(hashing.to_array(list(self.tokens)))
    if not keys.size:
      raise ValueError("Argument `tokens` is empty; a vocabulary has at least one token.")
    hashing.is_padding(keys)  # raises for integers below -1
    object.__setattr__(self, "tokens", tuple(keys.tolist()))
    _check_tokens(self.tokens, "Token {}".format)
    set_integers(self, num_oov_buckets=(0, MAX_SIZE - len(self.tokens)))
    set_integers(self, default_value=(-1, self.vocabulary_size - 1))
    if self.num_oov_buckets and self.default_value is not None:
      raise ValueError("Give `num_oov_buckets` or `default_value`, not both.")

  @classmethod
  def from_file(
    cls, path: str | os.PathLike[str], *, dtype: type[str] | type[int] = str, **arguments: Any
  ) -> "Vocabulary":
    """Reads tokens from the lines of a file in UTF-8; the first one is id 0.

    The counterpart of `tf.feature_column.categorical_column_with_vocabulary_file`.

    Args:
      path: the file. A byte order mark, newlines, and carriage returns before them are not part of
        tokens; the file may end in a newline.
      dtype: `int` for tokens that are decimal integers.
      **arguments: of `Vocabulary` and `Column`.

    Raises:
      ValueError: naming the file and the line of a token that is empty, repeated, invalid UTF-8 or
        not an integer.
    """
    with open(path, "rb") as file:
      lines = file.read().removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").split(b"\n")
    place = lambda index: f"{path}, line {index + 1}"
    tokens: list[str | int] = []
    for line in lines:
      try:
        tokens.append(dtype(line.removesuffix(b"\r").decode()))
      except ValueError as error:
        raise ValueError(f"{place(len(tokens))}: {error}.") from None
    _check_tokens(tokens, place)
    return cls(tokens, **arguments)

  @property
  def vocabulary_size(self) -> int:
    return len(self.tokens) + self.num_oov_buckets

  @functools.cached_property
  def _position_of(self) -> dict[str | int, int]:
    return {token: i for i, token in enumerate(self.tokens)}

  def __getstate__(self) -> dict[str, Any]:  # without the dict of positions
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

  def ids(self, values: np.ndarray) -> np.ndarray:
    keys = hashing.to_keys(values)
    padding = hashing.is_padding(keys)
    if (keys.dtype == object) != isinstance(self.tokens[0], str) and not padding.all():
      raise ValueError(
        f"the tokens are like {self.tokens[0]!r}, the values like {keys[~padding].tolist()[0]!r}. "
        "Convert the values with .astype(str) or .astype('int64'); from_file(path, dtype=int) "
        "reads tokens as integers."
      )
    positions = map(self._position_of.get, keys.tolist(), itertools.repeat(-1))
    ids = np.fromiter(positions, np.int32, len(keys))
    unknown = (ids < 0) & ~padding
    if self.num_oov_buckets:
      hashed = hashing.hashes(keys[unknown], 0)
      ids[unknown] = len(self.tokens) + hashing.buckets(hashed, self.num_oov_buckets)
    else:
      problem = f"is not among the {len(self.tokens)} tokens: give num_oov_buckets,"
      fill_missing(ids, unknown, keys, self.default_value, problem)
    return ids


def _check_tokens(tokens: Sequence[str | int], place: Callable[[int], str]) -> None:
  """Raises ValueError for a token that is padding or repeated; `place` names it by its index."""
  first: dict[str | int, int] = {}
  for i, token in enumerate(tokens):
    if token in ("", -1):
      raise ValueError(f"{place(i)}: {token!r} is padding, as None is, and cannot be a token.")
    if first.setdefault(token, i) != i:
      raise ValueError(f"{place(i)}: {token!r} is a repetition of {place(first[token])}.")
