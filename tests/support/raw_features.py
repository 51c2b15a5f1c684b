"""Hashes and ids of raw features, written for the tests without the library."""

import xxhash

import embed


def xxh64(word):
  data = word.to_bytes(8, "little") if isinstance(word, int) else word.encode()
  return xxhash.xxh64_intdigest(data)


def bags(column):
  """Ids of any kind as lists without padding."""
  if not isinstance(column, embed.Padded):
    column = embed.to_padded(column)
  return [[i for i in bag if i >= 0] for bag in column.values.tolist()]
