"""Gowalla check-ins in LightGCN's split: `train.txt`, `test.txt` and, if there is one, `valid.txt`.

A user a line: `user item item ...`. Without `valid.txt` a tenth of each user's training items is
held out for validation. The published split has no validation, and published figures are of models
that have learned from all that is not tested: `config.refit` does the same, for a last run with
settings and steps that were chosen on validation before. The check-ins are SNAP's (Cho, Myers and
Leskovec 2011); the split is the one of He et al. 2020, "LightGCN".
"""

from typing import Any

from .. import files

SOURCE = "https://github.com/kuandeng/LightGCN, Data/gowalla"
HINT = f"The files of Gowalla have a fixed format: get them again from {SOURCE}"


def table(config) -> dict[str, Any]:
  """Returns the settings of the table; see `recipes.tables.settings`.

  Raises:
    MissingFileError: no folder is given, or it lacks a file; says where they come from.
  """
  hint = f"Get train.txt and test.txt from {SOURCE}, and pass --config.data_dir=<their folder>."
  folder = files.data_folder(config.data_dir, hint)
  sources = {name: files.require(folder, f"{name}.txt", hint=hint) for name in ("train", "test")}
  if (folder / "valid.txt").is_file():
    sources["valid"] = folder / "valid.txt"
  return {
    "files": sources,
    "format": {"delimiter": " ", "names": ("user", "items"), "rest": True},
    "columns": {"user": "user", "items": {"kind": "item", "separator": " "}},
    "split": {"seed": config.split_seed},
  }
