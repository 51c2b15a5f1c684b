"""Fits semantic ids to item vectors: each item gets a few codes, which similar items share.

    python -m recipes.semantic_ids vectors.parquet --out=codes --repair
    python -m recipes.semantic_ids served --out=codes
    python -m recipes.semantic_ids new.parquet --append=codes

The vectors come from a Parquet file with the columns `id` and `vector` (a list of floats), or from
the items of a folder that `recipes.export` has written. Residual k-means assigns a code per level:
the number of the centroid that is nearest to the vector, and at each further level of the one that
is nearest to the residual, the vector without the centroids before.

The folder gets `codes.parquet`, with the columns `id` (string) and `codes` (a list of int32, of one
length), which `recipes.sequence --config.model=tiger` reads, and `centroids.npz`, by
which --append assigns codes to new items. It never changes the codes of the others.

Items that share all their codes collide. --repair adds a last code that counts them from 0, as in
TIGER (Rajput et al. 2023, section 3.1). The alternative, to move an item to the nearest free
centroid, would separate it from similar items, and later ones could find no place.
"""

import collections
import contextlib
import json
import os
import re
import sys
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import pairwise_distances_argmin

from . import errors, files
from .errors import DamagedFileError, UserError

CODES, CENTROIDS = "codes.parquet", "centroids.npz"
_PUBLISHED = re.compile(r"<[a-z]_(\d+)>")


def fit(
  vectors: np.ndarray, *, levels: int = 3, size: int = 256, seed: int = 0
) -> list[np.ndarray]:
  """Returns the centroids of residual k-means, float32 `[K, D]` for each level.

  Each level clusters the residuals of the level before (Chen et al. 2010, "Approximate Nearest
  Neighbor Search by Residual Vector Quantization"). TIGER's RQ-VAE trains an encoder with them.

  Args:
    vectors: float `[N, D]`.
    levels: the number of codes of an item.
    size: K, the number of centroids per level; smaller where fewer different residuals are left.

  Raises:
    UserError: there are fewer vectors than centroids, or a number is not positive.

  >>> fit(np.array([[0.0], [1.0], [10.0], [11.0]]), levels=2, size=2)[1].tolist()
  [[-0.5], [0.5]]
  """
  if min(levels, size) < 1 or size > len(vectors):
    raise UserError(
      f"{levels} levels of {size} codes for {len(vectors)} items: choose at least one level, and 1 "
      f"to {len(vectors)} codes"
    )
  residuals, centroids = np.asarray(vectors, np.float32), []
  for _ in range(levels):
    means = KMeans(size, n_init=1, random_state=seed)
    with warnings.catch_warnings():
      # With fewer different residuals than centroids, some centroids are equal.
      warnings.simplefilter("ignore", ConvergenceWarning)
      means.fit(residuals)
    centroids.append(np.unique(means.cluster_centers_.astype(np.float32), axis=0))
    residuals = residuals - centroids[-1][pairwise_distances_argmin(residuals, centroids[-1])]
  return centroids


def assign(vectors: np.ndarray, centroids: Sequence[np.ndarray]) -> np.ndarray:
  """Returns the codes of vectors `[N, D]` by the centroids of `fit`, int32 `[N, levels]`.

  >>> assign(np.array([[0.1], [11.0]]), [np.array([[0.5], [10.5]]), np.array([[-0.5], [0.5]])])
  array([[0, 0],
         [1, 1]], dtype=int32)
  """
  residuals, codes = np.asarray(vectors, np.float32), []
  for level in centroids:
    codes.append(pairwise_distances_argmin(residuals, level))
    residuals = residuals - level[codes[-1]]
  return np.stack(codes, axis=1).astype(np.int32)


def repaired(codes: np.ndarray, before: np.ndarray | None = None) -> np.ndarray:
  """Returns codes `[N, L]` with one more, which counts the items of equal codes in their order.

  Args:
    before: `[M, L + 1]`, repaired codes of other items, after which to count on.

  >>> repaired(np.array([[3, 1], [0, 2], [3, 1]])).tolist()
  [[3, 1, 0], [0, 2, 0], [3, 1, 1]]
  """
  taken = collections.Counter[tuple[int, ...]]()
  for *group, last in [] if before is None else before.tolist():
    taken[tuple(group)] = max(taken[tuple(group)], last + 1)
  lasts = []
  for group in map(tuple, codes.tolist()):
    lasts.append(taken[group])
    taken[group] += 1
  return np.column_stack([codes, lasts]).astype(np.int32)


def report(codes: np.ndarray) -> str:
  """Returns how many items share their codes, in words.

  >>> report(np.array([[3, 1], [0, 2], [3, 1]]))
  '3 items, 2 distinct, up to 2 with the same codes; codes in use by level: 2, 2'
  """
  sizes = np.unique(codes, axis=0, return_counts=True)[1]
  used = ", ".join(str(len(np.unique(level))) for level in codes.T)
  return (
    f"{len(codes):,} items, {len(sizes):,} distinct, up to {sizes.max()} with the same codes; "
    f"codes in use by level: {used}"
  )


# --- files ----------------------------------------------------------------------------------------


def read(path: str | Path, *, first_id: int = 0) -> tuple[list[str], np.ndarray]:
  """Returns the ids of items and their codes, int32 `[N, levels]`.

  Args:
    path: a `codes.parquet` or its folder; or a JSON file as LETTER's and others' projects publish
      it, `{"0": ["<a_12>", "<b_7>", ...], ...}`, a letter for each level.
    first_id: of JSON, the id of the item that is "0" there: ids are numbers, counted from it.

  Raises:
    MissingFileError: there is no such file.
    DamagedFileError: it has other columns or another form, or ids that come twice.
  """
  path = codes_file(path)
  hint = (
    f"give a file that `python -m {__package__}.semantic_ids` has written, or JSON as "
    '{"0": ["<a_12>", "<b_7>"], ...}'
  )
  with _naming_the_file(path, "codes", hint), files.opened(path) as file:
    if path.suffix == ".json":
      texts = json.loads(file.read())
      codes = [[int(_PUBLISHED.fullmatch(code)[1]) for code in row] for row in texts.values()]  # type: ignore[index]
      table = pa.table({"id": [str(int(key) + first_id) for key in texts], "codes": codes})
    else:
      table = pq.read_table(file, columns=["id", "codes"])
    ids, found = _columns(table, "codes")
    if found.dtype.kind not in "iu" or found.min() < 0 or found.max() > np.iinfo(np.int32).max:
      raise ValueError("codes are int32 from 0 on")
  return ids, found.astype(np.int32)


def codes_file(path: str | Path) -> Path:
  """Returns the file of codes at a path, which may be its folder."""
  path = Path(path).expanduser()
  return path / CODES if path.is_dir() else path


def read_vectors(path: str | Path) -> tuple[list[str], np.ndarray]:
  """Returns the ids of items and their vectors, float32 `[N, D]`, of Parquet or an export.

  Raises:
    UserError: the file or the folder is missing or holds no vectors.
  """
  path = Path(path).expanduser()
  if path.is_dir():
    from .serving import folder as folder_lib  # it imports JAX; Parquet is read without
    from .tables.encoding import Entities

    with folder_lib.opened(path) as served:
      if served.candidates is None:
        raise UserError(f"{path} is a model of clicks, which has no vectors of items")
      vectors = np.asarray(served.candidates)[:, : served.about["width"]]  # without popularity
      return Entities.load(served.transforms, "items").texts, vectors
  hint = "give Parquet with the columns id and vector, or an export"
  with _naming_the_file(path, "vectors", hint), files.opened(path) as file:
    ids, vectors = _columns(pq.read_table(file, columns=["id", "vector"]), "vector")
    if not np.isfinite(vectors := vectors.astype(np.float32)).all():
      raise ValueError("vectors are finite numbers")
  return ids, vectors


@contextlib.contextmanager
def _naming_the_file(path: Path, what: str, hint: str) -> Iterator[None]:
  """Turns what readers raise for a file of another form into an error that names it."""
  try:
    yield
  except UserError:
    raise
  except (AttributeError, TypeError, ValueError, pa.ArrowException, zipfile.BadZipFile) as error:
    reason = str(error).partition("\n")[0]
    raise DamagedFileError(f"{path} holds no {what} ({reason}): {hint}") from error


def _columns(table: pa.Table, name: str) -> tuple[list[str], np.ndarray]:
  """Returns ids, and lists of one length as `[N, length]`; else raises ValueError."""
  ids, lengths = table["id"].cast(pa.string()).to_pylist(), pc.list_value_length(table[name])
  if None in ids or len(set(ids)) < len(ids):
    raise ValueError("every item needs an id of its own")
  if lengths.null_count or len(lengths.unique()) != 1 or not lengths[0].as_py():
    raise ValueError("every item needs a list, and all lists one length")
  return ids, pc.list_flatten(table[name]).to_numpy().reshape(len(ids), -1)


def _write(folder: Path, ids: Sequence[str], codes: np.ndarray) -> None:
  columns = {
    "id": pa.array(ids, pa.string()),
    "codes": pa.array(codes.tolist(), pa.list_(pa.int32())),
  }
  with files.replacing(folder / CODES) as file:
    pq.write_table(pa.table(columns), file)


def write(
  vectors: str | Path,
  out: str | Path,
  *,
  levels: int = 3,
  size: int = 256,
  seed: int = 0,
  repair: bool = False,
) -> str:
  """Fits codes to vectors, writes the folder `out`, and returns a line about collisions.

  Raises:
    UserError: as `read_vectors` and `fit`, or `out` holds other files.
  """
  out = Path(out)
  files.check_out(out, CODES)
  ids, points = read_vectors(vectors)
  centroids = fit(points, levels=levels, size=size, seed=seed)
  codes = assign(points, centroids)
  lines = [report(codes)]
  if repair:
    codes = repaired(codes)
    lines.append(f"repaired: {report(codes)}")
  with files.replacing_folder(out) as partial:
    np.savez(partial / CENTROIDS, *centroids)
    _write(partial, ids, codes)
  return "\n".join(lines)


def append(vectors: str | Path, folder: str | Path) -> str:
  """Adds the items that a folder of codes lacks, by its centroids; returns a line about collisions.

  Raises:
    UserError: as `read_vectors`; the folder has no codes or no centroids; or the vectors are of
      another width.
  """
  folder = files.latest(Path(folder))
  ids, codes = read(folder)
  path, hint = folder / CENTROIDS, "fit codes again"
  with (
    _naming_the_file(path, "centroids", hint),
    files.opened(path) as file,
    np.load(file) as stored,
  ):
    centroids = [stored[name] for name in stored.files]
  new, points = read_vectors(vectors)
  if points.shape[1] != centroids[0].shape[1]:
    raise UserError(
      f"{vectors} has vectors of {points.shape[1]} numbers, and the centroids of {folder} have "
      f"{centroids[0].shape[1]}: give vectors of the same model"
    )
  known = set(ids)
  places = [place for place, item in enumerate(new) if item not in known]
  added = assign(points[places], centroids) if places else codes[:0, : len(centroids)]
  if codes.shape[1] > len(centroids):
    added = repaired(added, codes)
  codes = np.concatenate([codes, added])
  _write(folder, [*ids, *(new[place] for place in places)], codes)
  return f"{len(places):,} new items, {len(new) - len(places):,} known ones; {report(codes)}"


def main(argv: Sequence[str]) -> None:
  parser = errors.parser(f"{__package__}.semantic_ids", __doc__)
  parser.add_argument("vectors", help="a Parquet file with id and vector, or an export's folder")
  target = parser.add_mutually_exclusive_group(required=True)
  target.add_argument("--out", help="the folder to write")
  target.add_argument("--append", metavar="FOLDER", help="an earlier --out, to add new items to")
  parser.add_argument("--levels", type=int, default=3, help="codes of an item; default: 3")
  parser.add_argument("--codes", type=int, default=256, help="of a level; default: 256")
  parser.add_argument("--repair", action="store_true", help="tell items of equal codes apart")
  parser.add_argument("--seed", type=int, default=0)
  given = parser.parse_args(argv)
  options = ("levels", "codes", "repair", "seed")
  if given.append and any(getattr(given, x) != parser.get_default(x) for x in options):
    parser.error("--append goes by what its folder holds: give no options of the codes")
  with errors.in_one_line(parser):
    if given.append:
      text = append(given.vectors, given.append)
    else:
      about = {"levels": given.levels, "size": given.codes, "seed": given.seed}
      text = write(given.vectors, given.out, repair=given.repair, **about)
  print(f"{text}\n{os.path.join(given.append or given.out, CODES)}")


if __name__ == "__main__":
  main(sys.argv[1:])
