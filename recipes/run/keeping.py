"""The transforms that a run keeps in its workdir, so that it does not depend on a cache or a run.

serve/        what serving needs besides the model, and what the run resumes with
data.json     hashes of the data where serving needs nothing besides
split.parquet which row of which file is in which split
init/serve/   that of the run that it started from, whose transforms its own have grown from
"""

import shutil
from pathlib import Path
from typing import Any

from .. import arrays, files
from ..errors import UserError
from ..tables import row_ids
from . import settings

_INIT, _SERVE = "init", "serve"


def keep(serve: Path | None, data_sha256: dict[str, str], workdir: Path, *, is_new: bool) -> None:
  """Copies what serving needs into the workdir; a copy that a kill has cut short is made again.

  Args:
    serve: the folder that was prepared with the data; None if there is none.
    data_sha256: hashes of the data by file.
    workdir: of the run.
    is_new: whether the run has no checkpoint yet, so that an earlier copy is replaced.

  Raises:
    UserError: the data, or the transforms fitted on them, are not those that the run began with, or
      the run has a checkpoint and no copy.
  """
  target = workdir / _SERVE
  if serve is None:
    source, about = workdir / "data.json", data_sha256
    if is_new or not source.exists():  # or begun by an earlier version
      arrays.write_json(source, about)
      return
  else:
    source, about = target / "source.json", {**data_sha256, "transforms": row_ids.digest(serve)}
    if is_new:
      _copy(serve, target, about)
      split = serve.parent / "split.parquet"
      if split.is_dir():  # of several files, prepared on a cluster
        with files.replacing_folder(workdir / split.name) as partial:
          files.copy_folder(split, partial)
      elif split.exists():
        with split.open("rb") as rows, files.replacing(workdir / split.name) as file:
          shutil.copyfileobj(rows, file)
      return
    if not target.exists():
      raise UserError(
        f"the run in {workdir} was begun before its data set kept raw ids, or its folder {_SERVE} "
        "was removed: choose another --workdir"
      )
  # A run of an earlier version knows the hashes of the files alone.
  if any(about.get(name) != value for name, value in arrays.read_json(source, schema={}).items()):
    raise UserError(
      f"the data have changed since the run in {workdir} began: choose another --workdir"
    )


def keep_base(other: Path, workdir: Path) -> None:
  """Copies the transforms of the run that this one starts from, if it has any."""
  target = workdir / _INIT / _SERVE
  source = files.latest(other / _SERVE)
  if source.is_dir():
    target.parent.mkdir(parents=True, exist_ok=True)
    _copy(source, target, {})


def with_own_base(config, workdir: Path) -> Any:
  """Returns the config to prepare data with: `init_from` is the run's own copy, if it has one."""
  if not settings.value(config, "init_from") or not files.latest(workdir / _INIT / _SERVE).is_dir():
    return config
  own = settings.copied(config)
  own.init_from = str(workdir / _INIT)
  return own


def _copy(source: Path, target: Path, about: dict[str, str]) -> None:
  with files.replacing_folder(target) as partial:
    files.copy_folder(source, partial)
    if about:
      arrays.write_json(partial / "source.json", about)
