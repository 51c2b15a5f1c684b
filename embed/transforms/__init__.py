"""Maps raw features to ids on the host, in NumPy: the counterpart of TensorFlow's feature columns.

`Transforms` turns a batch of strings and numbers into inputs of `SparseEmbed`. It is a small frozen
object that can be pickled and touches no device: the same object maps a Grain dataset, also in
worker processes, and prepares the requests of a server.

**Kinds.** A NumPy array, or a list of scalars, has one value per output and gives a dense int32
array of its shape. Bags are a list of lists (or of arrays; None is an empty bag), which gives
`embed.Padded`; or they are `embed.Padded`, `embed.Ragged` or `embed.Sparse` of strings or numbers,
and keep their kind.

**Padding.** The empty string, None and -1 are padding and become -1, as in TensorFlow. Other
negative keys raise an error; give signed 64-bit hashes as `x.view(np.uint64)`. A value without an
id also raises an error, unless `default_value` gives it one.

**Hashes** are XXH64 (https://github.com/Cyan4973/xxHash) of the UTF-8 of a string, of bytes as they
are, and of the 8 little-endian bytes of an integer of any dtype. 42 and "42" are different keys;
TensorFlow hashes them alike, with a different function.
"""

from embed.transforms.columns import Bucketized, Column, HashBucket, RawIds, Transforms, Vocabulary

__all__ = ["Bucketized", "Column", "HashBucket", "RawIds", "Transforms", "Vocabulary"]
