"""Writes the model of a finished run on a table for `recipes.predict`, with all that it needs.

served.json     the recipe, the declared columns, and settings that predictions read
model.npz       the program of the model, as `jax.export` writes it, and the arrays that it reads
candidates.npy  two_tower, sequence: the vectors of the items
transforms/     columns to ids and numbers; users, items, and what each user has had

`--vectors` and `--user-vectors` also write raw ids and vectors of items and users as Parquet, for a
vector store. Their dot products are the scores of recommendations.

An export contains a program: predict only with exports of people whose programs you would run.
"""

import dataclasses
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from absl import logging
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

import embed

from . import config as config_lib
from . import errors, files
from . import mesh as mesh_lib
from . import run as run_lib
from .errors import UserError, from_settings
from .evaluation import retrieval
from .serving import models as models_lib
from .tables import spec
from .tables.settings import READING
from .tables.transforms import Entities, Transforms

PLATFORMS = ("cpu", "cuda", "tpu")


class _Parts(NamedTuple):
  """The parts of a recipe that are exported."""

  model: nnx.Module  # built as in training, its tables split over the devices; not restored yet
  function: Callable[[Any, Any], Any]  # of the model and inputs
  inputs: Any  # of some rows
  about: dict[str, Any]  # settings that serving reads
  candidates: Callable[[], np.ndarray] | None = None  # of the restored model


def export(workdir: str | Path, out: str | Path, *, platforms: Sequence[str] = PLATFORMS) -> Path:
  """Exports the tested state of a run; returns the folder.

  Neither the data nor the cache of the run is read, nor does it matter how many devices trained it.
  Tables are split over the devices of this process, and read from there: none holds a whole one.

  Args:
    workdir: of a run on a table that has ended.
    out: the folder; an earlier export there is replaced.
    platforms: that the program can run on, of "cpu", "cuda", "rocm" and "tpu".

  Raises:
    UserError: the run is of no table, has not ended, or is damaged; or `out` holds other files.
  """
  out, run = Path(out), run_lib.opened(workdir)
  serve = run.serve
  files.check_out(out, models_lib.NAME)
  mesh = mesh_lib.start()
  with from_settings():
    parts = _RECIPES[run.recipe](config_lib.with_even_evaluation(run.config, mesh), serve, mesh)
  mesh_lib.replicate(mesh, parts.model)
  run.restore(parts.model)
  parts.model.eval()
  program = embed.export(
    parts.function, parts.model, parts.inputs, any_batch=True, platforms=platforms
  )
  reading = files.read_json(serve / READING)
  about = {
    "recipe": run.recipe,
    "step": run.result["tested_step"],
    "columns": reading["columns"],
    "text": reading["format"],
    "exclude_seen": run.config.get("exclude_seen", True),
  }
  with files.replacing_folder(out) as partial:
    program.save(partial / models_lib.MODEL)
    if parts.candidates is not None:
      np.save(partial / models_lib.CANDIDATES, parts.candidates())
    shutil.copytree(serve, partial / models_lib.TRANSFORMS)
    files.write_json(partial / models_lib.NAME, about | parts.about)
  return out


def _dlrm(config: ConfigDict, serve: Path, mesh: Mesh | None) -> _Parts:
  from .dlrm import data as data_lib
  from .dlrm import train
  from .tables import clicks

  transforms = Transforms.load(serve)
  kinds = spec.parse(files.read_json(serve / READING)["columns"])
  width = sum(feature.valency for feature in transforms.features)
  columns = {
    "label": np.zeros(0, np.uint8),
    "dense": np.zeros((0, len(transforms.dense_names)), np.float32),
    "ids": np.zeros((0, width), np.int32),
  }
  data = data_lib.ClickData(columns, clicks.meta_of(kinds, transforms))
  inputs = data_lib.batch_shapes(data, config)
  del inputs["label"]
  model = train.build_model(config, data, mesh)
  return _Parts(model, lambda model, batch: model(batch), inputs, {})


def _two_tower(config: ConfigDict, serve: Path, mesh: Mesh | None) -> _Parts:
  from .two_tower import data as data_lib
  from .two_tower import train

  sides = {side: Entities.load(serve, f"{side}s") for side in ("user", "item")}
  # The checkpoint knows the items that have been trained.
  meta: dict[str, Any] = {"splits": {"train": (0, 0)}, "features": {}}
  columns = {"item": np.zeros(0, np.int32)}
  for side, entities in sides.items():
    meta[f"{side}s"] = len(entities.texts)
    meta["features"][side] = [*map(dataclasses.asdict, entities.by_feature)]
    for place, ids in enumerate(entities.by_feature.values()):
      columns[f"{side}_{place}"] = ids
  data = data_lib.RetrievalData(columns, meta)
  model = train.build_model(config, data, mesh)
  history = np.full((2, config.eval_history), -1, np.int32)
  query = data.inputs("user", np.zeros(2, np.int32)) | {"history": embed.Padded(history)}

  def candidates() -> np.ndarray:
    encode = train.make_encode(mesh)
    history = np.load(serve / "history.npy")
    popularity = data_lib.log_popularity(np.bincount(history, minlength=data.num_items))
    batches = train.catalogue(data, config, popularity, mesh)
    vectors = [encode(model, mesh_lib.to_global(mesh, batch)) for batch in batches]
    return np.asarray(retrieval.joined(vectors, mesh))[: data.num_items]

  about = {"query": list(config.query), "eval_history": config.eval_history}
  about |= {"popularity": bool(config.popularity)}
  inputs = {name: query[name] for name in config.query}
  return _Parts(model, lambda model, query: model.queries(query), inputs, about, candidates)


def _sequence(config: ConfigDict, serve: Path, mesh: Mesh | None) -> _Parts:
  from .sequence import model as model_lib

  items = Entities.load(serve, "items")
  model = model_lib.SequenceModel(config, len(items.texts), mesh)
  row = np.zeros((2, config.max_length), np.int32)
  inputs = {"items": row, "segments": row, "positions": row, "last": row[:, 0]}
  about = {name: config[name] for name in ("max_length", "positions")}

  def candidates() -> np.ndarray:
    return np.asarray(model.embed.tables[model_lib.ITEM], np.float32)[: len(items.texts)]

  return _Parts(model, model_lib.queries, inputs, about, candidates)


_RECIPES = {"dlrm": _dlrm, "two_tower": _two_tower, "sequence": _sequence}


def main(argv: Sequence[str]) -> None:
  parser = errors.parser(f"{__package__}.export", __doc__)
  parser.add_argument("run", help="the workdir of a run on a table that has ended")
  parser.add_argument("--out", required=True, help="the folder to write")
  parser.add_argument("--vectors", default="", help="a .parquet file to write, of items' vectors")
  parser.add_argument("--user-vectors", default="", help="a .parquet file to write, of users'")
  arguments = parser.parse_args(argv)
  logging.set_verbosity(logging.ERROR)  # Orbax warns of files that it can do without
  with errors.in_one_line(parser):
    stores = {"item": arguments.vectors, "user": arguments.user_vectors}
    if any(stores.values()) and run_lib.opened(arguments.run).recipe == "dlrm":
      raise UserError("dlrm has no vectors of items and users: export a two_tower or sequence run")
    out = export(arguments.run, arguments.out)
    if any(stores.values()):
      model: Any = models_lib.load(out)
    for side, path in stores.items():
      if path:
        ids, vectors = model.vectors(side)
        Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"id": ids, "vector": [*vectors]}), path)
  print(f"{out}: python -m {__package__}.predict {out} < rows.csv > out.csv")


if __name__ == "__main__":
  main(sys.argv[1:])
