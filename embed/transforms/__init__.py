"""Raw features to ids on the host, in NumPy: the counterpart of TensorFlow's feature columns.

`Transforms` turns a batch of strings and numbers into inputs of `SparseEmbed`. It and its columns
are small frozen objects that pickle and touch no device: the same object maps a Grain data set, in
worker processes too, and prepares the requests of a server.

**Kinds.** A column holds the values of one raw feature for a batch. A NumPy array, or a list of
scalars, has one value per output and gives a dense int32 array of its shape. Bags are a list of
lists (or of arrays; None is an empty bag), which gives `embed.Padded`; or they are `embed.Padded`,
`embed.Ragged` or `embed.Sparse` of strings or numbers, and keep their kind.

**Padding.** The empty string, None and -1 are padding, as `''` and -1 are in TensorFlow, and become
-1. Id 0 is an ordinary id. Other negative keys raise an error: taken as padding, signed 64-bit
hashes would lose half of their values; give them as `x.view(np.uint64)`. Nothing is dropped
silently: a value without an id raises an error, unless `default_value` gives it one.

**Hashes** are XXH64 (https://github.com/Cyan4973/xxHash) of the UTF-8 of a string, of bytes as they
are, and of the 8 little-endian bytes of an integer of any dtype; they are the same in every process
and version. 42 and "42" are different keys, which TensorFlow hashes alike: convert with
`.astype(str)` if a feature comes as both. TensorFlow uses another hash function, so rows of its
hashed tables cannot be reused.
"""

from embed.transforms.columns import Bucketized, Column, HashBucket, Identity, RawIds
from embed.transforms.crossed import Crossed, Transforms
from embed.transforms.vocabulary import Vocabulary

__all__ = [
  "Bucketized",
  "Column",
  "Crossed",
  "HashBucket",
  "Identity",
  "RawIds",
  "Transforms",
  "Vocabulary",
]
