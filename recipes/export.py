"""Writes the model of a finished run on a table for `recipes.predict`, with all that it needs.

served.json     the recipe, the declared columns, and what to install for predictions
model.npz       the program of the model, as `jax.export` writes it, and the arrays that it reads
candidates.npy  two_tower, sequence with a temperature: the vectors of the items
transforms/     columns to ids and numbers; users, items, and what each user has had
README.md       how to use it
"""

import dataclasses
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

import embed

from . import config as config_lib
from . import errors, files
from . import mesh as mesh_lib
from . import run as run_lib
from .errors import MissingFileError, UserError, from_settings, markdown
from .evaluation import retrieval
from .serving import folder as folder_lib
from .tables import spec
from .tables.settings import READING
from .tables.transforms import Encoder, Entities
from .training.features import feature_configs

PLATFORMS = ("cpu", "cuda", "tpu")
# Not from an index by name: a package of that name there need not be ours.
_WHEEL = "./sparse_embed-{}-py3-none-any.whl"


@dataclasses.dataclass(frozen=True)
class _Parts:
  """The parts of a recipe that are exported.

  Attributes:
    model: built as in training, its tables split over the devices; not restored yet.
    function: `(model, inputs) -> array`.
    inputs: an example of two rows.
    about: settings that serving reads.
    candidates: returns the vectors of the items of the restored model, where they are no array of
      the program.
  """

  model: nnx.Module
  function: Callable[[Any, Any], Any]
  inputs: Any
  about: dict[str, Any]
  candidates: Callable[[], np.ndarray] | None = None


def export(
  workdir: str | Path,
  out: str | Path,
  *,
  platforms: Sequence[str] = PLATFORMS,
) -> Path:
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
  workdir, out = Path(workdir), Path(out)
  unknown = set(platforms) - {*PLATFORMS, "rocm"}
  if unknown or not platforms:
    raise UserError(f"--platforms is {','.join(platforms)!r}: choose of {', '.join(PLATFORMS)}")
  run = _opened(workdir)
  files.check_out(out, folder_lib.NAME)
  config, recipe, serve = run.config, run.recipe, workdir / "serve"
  mesh = mesh_lib.start()
  with from_settings():
    parts = _RECIPES[recipe](config, serve, mesh)
  mesh_lib.replicate(mesh, parts.model)
  run.restore(parts.model)
  parts.model.eval()
  program = embed.export(
    parts.function, parts.model, parts.inputs, any_batch=True, platforms=tuple(platforms)
  )
  with files.replacing_folder(out) as partial:
    program.save(partial / folder_lib.MODEL)
    if parts.candidates is not None:
      np.save(partial / folder_lib.CANDIDATES, parts.candidates())
    shutil.copytree(serve, partial / folder_lib.TRANSFORMS)
    # Popularity is in the vectors of the items: predictions do not read the order of the log.
    (partial / folder_lib.TRANSFORMS / "history_when.npy").unlink(missing_ok=True)
    about = _about(run, files.read_json(serve / READING)) | parts.about
    files.write_json(partial / folder_lib.NAME, about)
    files.write(partial / "README.md", _readme(about, workdir))
  return out


def _opened(workdir: Path) -> run_lib.Run:
  """Opens a run on a table."""
  if (workdir / "result.json").exists() and not (workdir / "serve").is_dir():
    raise MissingFileError(
      f"{workdir} has no folder serve, of transforms and raw ids, as only runs on tables have. If "
      "its data set is a table now, train again"
    )
  return run_lib.opened(workdir)


def _about(run: run_lib.Run, reading: dict[str, Any]) -> dict[str, Any]:
  versions, columns = run_lib.versions(), reading["columns"]
  names = ("sparse-embed", "jax", "numpy", "python")
  header = [
    kind.get("column") or name
    for name, kind in columns.items()
    if kind.get("kind") != "cross" and not kind.get("of")
  ]
  return {
    "format": folder_lib.FORMAT,
    "recipe": run.recipe,
    "step": run.result["tested_step"],
    "versions": {name: versions[name] for name in names},
    "install": f"pip install '{_WHEEL.format(versions['sparse-embed'])}[serving]'",
    "columns": columns,
    "num_columns": len(columns),
    "header": header,
    "text": reading["format"],
    "exclude_seen": run.config.get("exclude_seen", True),
  }


def _readme(about: dict[str, Any], workdir: Path) -> str:
  """Returns the page that tells how to use the folder."""
  is_click, package = about["recipe"] == "dlrm", __package__
  call = "model.predict(rows)" if is_click else "model.recommend(rows, top=10).items"
  several = sum(column.get("kind") == "label" for column in about["columns"].values()) > 1
  scores = "a column `score_<label>` for each label" if several else "a column `score`"
  read = ", ".join(f"`{markdown(name)}`" for name in about["header"])
  adds = (
    f"{scores} to rows with the columns {read}, in any order; label, weight, split and "
    "time may be missing"
    if is_click
    else "columns `item_1`, `score_1`, … by `--top=10` to rows that name the user, or features of "
    "the user, as training rows do, or have a `history`: raw ids of items, separated by `|`"
  )
  lists = ", ".join(f"`{markdown(name)}`" for name in about.get("lists", ()))
  histories = (
    f"""
Histories are lists in the rows, in the order of time: {lists}.
"""
    if lists
    else ""
  )
  return f"""# A model of {markdown(workdir.name)}: {about["recipe"]}, step {about["step"]}

    {about["install"]}
    python -m {package}.predict FOLDER < rows.csv > out.csv

adds {adds}. The wheel comes from a checkout: `pip wheel --no-deps CHECKOUT`. The same in Python:

    from {package} import serving
    model = serving.load("FOLDER")
    {call}

`help({package}.serving)` says what is done with unknown and missing values.
{histories}
An export contains a program: predict only with exports of people whose programs you would run.
"""


def _dlrm(config: ConfigDict, serve: Path, mesh: Mesh | None) -> _Parts:
  from .dlrm import data as data_lib
  from .dlrm import train

  encoder = Encoder.load(serve)
  features, num_dense = encoder.features, len(encoder.dense_names)
  columns = {"dense": np.zeros((0, num_dense), np.float32)}
  kinds = spec.parse(files.read_json(serve / READING)["columns"])
  known: Any = {"labels": spec.labels(kinds), "vectors": encoder.vectors}
  data = data_lib.ClickData(columns, {}, features, {}, {}, **known)
  model = train.build_model(config, data, mesh)
  row: dict[str, np.ndarray] = {
    "label": np.zeros(2, np.uint8),
    "dense": np.zeros((2, num_dense), np.float32),
    "ids": np.full((2, sum(feature.columns for feature in features)), -1, np.int32),
  }
  configs = feature_configs(features, dim=1)
  inputs = data_lib.split_features(row, features=features, configs=configs)
  del inputs["label"]
  lists = [p.name for h in encoder.histories for p in h.parts if p.by != "table"]
  return _Parts(model, train.logits, inputs, {"lists": lists})


def _two_tower(config: ConfigDict, serve: Path, mesh: Mesh | None) -> _Parts:
  from .two_tower import data as data_lib
  from .two_tower import table, train

  users, items = Entities.load(serve, "users"), Entities.load(serve, "items")
  columns = {
    table.column_name(side, name): ids
    for side, entities in (("user", users), ("item", items))
    for name, ids in {**entities.ids, **entities.vectors}.items()
  }
  data = data_lib.RetrievalData(
    columns, {}, len(users.texts), len(items.texts),
    {"user": users.features, "item": items.features},
    {
      side: {name: each.shape[1] for name, each in entities.vectors.items()}
      for side, entities in (("user", users), ("item", items))
    },
  )  # fmt: skip
  count = 1 if mesh is None else mesh.size
  size = max(config.eval_batch_size // count, 1) * count  # of a batch of items
  config = config_lib.copied(config, eval_batch_size=size)
  model = train.build_model(config, data, mesh)
  history = np.full((2, config.eval_history), -1, np.int32)
  query = data.inputs("user", np.zeros(2, np.int32)) | {"history": embed.Padded(history)}

  def candidates() -> np.ndarray:
    encode = train.make_encode(mesh)
    item, when = (np.load(serve / f"{name}.npy") for name in ("history", "history_when"))
    half_life = config.popularity.half_life
    popularity = data_lib.log_popularity(item, when, half_life, data.num_items)
    batches = train.catalogue(data, config, popularity, mesh)
    items = (mesh_lib.to_global(mesh, batch) for batch in batches)
    vectors = retrieval.joined([encode(model, batch) for batch in items], mesh)
    return np.asarray(vectors)[: data.num_items]

  about = {
    "query": list(config.query),
    "eval_history": config.eval_history,
    "popularity": bool(config.popularity.weight),
    "candidates": folder_lib.CANDIDATES,
    "width": config.dim,
  }
  inputs = {name: query[name] for name in config.query}
  return _Parts(model, lambda model, query: model.queries(query), inputs, about, candidates)


def _sequence(config: ConfigDict, serve: Path, mesh: Mesh | None) -> _Parts:
  from .sequence import model as model_lib
  from .sequence import train

  items = Entities.load(serve, "items")
  model = train.build_model(config, len(items.texts), mesh)
  row = np.zeros((2, config.max_length), np.int32)
  inputs = {"items": row, "segments": row, "positions": row, "last": row[:, 0]}
  about = {
    "max_length": config.max_length,
    "positions": config.positions,
    "ask": config.model == "bert4rec",
    "candidates": f"embed/{model_lib.ITEM}",
    "width": config.dim,
  }
  return _Parts(model, model_lib.queries, inputs, about)


_RECIPES: dict[str, Callable[[ConfigDict, Path, Mesh | None], _Parts]] = {
  "dlrm": _dlrm,
  "two_tower": _two_tower,
  "sequence": _sequence,
}


def main(argv: Sequence[str]) -> None:
  parser = errors.parser(f"{__package__}.export", __doc__)
  parser.add_argument("run", help="the workdir of a run on a table that has ended")
  parser.add_argument("--out", required=True, help="the folder to write")
  parser.add_argument(
    "--platforms", default=",".join(PLATFORMS), help="that can predict; default: %(default)s"
  )
  arguments = parser.parse_args(argv)
  logging.set_verbosity(logging.ERROR)  # Orbax warns of files that it can do without
  platforms = tuple(filter(None, arguments.platforms.split(",")))
  with errors.in_one_line(parser):
    out = export(arguments.run, arguments.out, platforms=platforms)
  print(f"{out}: python -m {__package__}.predict {out} < rows.csv > out.csv")


if __name__ == "__main__":
  main(sys.argv[1:])
