"""Arrays in files that are whole: a reader finds all of the new file, or all of the old one."""

import os
import pathlib
import zipfile
from collections.abc import Mapping

import numpy as np


def write_npz(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
  """Writes arrays by name, for `numpy.load`; the file appears when all of it is on the disk.

  One process at a time writes a file. What a kill leaves, `<name>.part`, the next call overwrites.

  Raises:
    OSError: naming the file, which then stays as it was.
  """
  part = path.with_name(f"{path.name}.part")
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with part.open("wb") as file:
      # `numpy.savez` writes the same, but refuses the names of its own arguments, such as "file".
      with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
          with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
            np.lib.format.write_array(entry, array, allow_pickle=False)
      file.flush()
      os.fsync(file.fileno())
    part.replace(path)
  except OSError as error:
    raise OSError(error.errno, error.strerror or str(error), str(path)) from error
  finally:
    part.unlink(missing_ok=True)
