"""Items that training never sees: found by their codes, and by ids alone.

    python benchmarks/cold_items.py --data-dir=DIR --codes=FILE --json=cold_items.json

A share of the items of S3-Rec's Beauty.txt is taken out of what trains, and left where it validates
and tests; with the few that train nothing anyway, these are the cold items. TIGER and SASRec train
on the rest, and rank the whole catalogue for the users whose last item is cold, and for the others.
"""

import argparse
import dataclasses
import json
import runpy
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import step as timing  # before `recipes`, which it finds

from recipes.run import settings
from recipes.run import workdir as runs
from recipes.sequence import data as data_lib
from recipes.sequence import train

METRICS = ("hr@10", "ndcg@10", "hr@50", "ndcg@50")
BEAUTY = Path(__file__).parents[1] / "configs/sequence/beauty.py"


def without(path: Path, out: Path, share: float, seed: int) -> set[str]:
  """Writes a file of sequences of which cold items train nothing; returns these items."""
  users = [line.split() for line in path.read_text().splitlines()]
  items = sorted({item for _, *items in users for item in items}, key=int)
  drawn = np.random.default_rng(seed).choice(len(items), round(share * len(items)), replace=False)
  cold = {items[place] for place in drawn}
  kept = [(user, [i for i in items[:-2] if i not in cold], items[-2:]) for user, *items in users]
  # Without a training item the last two would train.
  lines = [" ".join([user, *trained, *last]) for user, trained, last in kept if trained]
  out.write_text("\n".join(lines) + "\n")
  return cold


def only(data: data_lib.SequenceData, users: np.ndarray) -> data_lib.SequenceData:
  """Returns the data of some users."""
  parts = np.split(data.columns["items"], data.columns["offsets"][1:-1])
  kept = [parts[user] for user in users]
  offsets = np.cumsum([0, *map(len, kept)])
  return dataclasses.replace(data, columns={"items": np.concatenate(kept), "offsets": offsets})


def measure(config: dict[str, Any], workdir: Path) -> dict[str, dict[str, float]]:
  """Trains a model; returns its test metrics of users with a cold last item, and of the others."""
  train.run(config, str(workdir))
  run = runs.open_run(workdir)
  data = run.load()
  model, asked = run.model(data), settings.copied(run.config, ks=(10, 50))
  users = data.evaluated
  last = data.columns["items"][data.columns["offsets"][users + 1] - 1]
  is_cold = data_lib.train_counts(data)[last] == 0
  found = {}
  for name, chosen in (("cold", users[is_cold]), ("others", users[~is_cold])):
    metrics = train.evaluator(only(data, chosen), asked)(model, "test")
    found[name] = {"users": len(chosen)} | {each: metrics[each] for each in METRICS}
  return found


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--data-dir", type=Path, required=True, help="the folder of Beauty.txt")
  parser.add_argument("--codes", required=True, help="the file of the items' codes")
  parser.add_argument("--first-id", type=int, default=1, help='of the item "0" in JSON')
  parser.add_argument("--share", type=float, default=0.05, help="of the items that are cold")
  parser.add_argument("--steps", type=int, default=0, help="of a run; default: the config's")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--workdir", type=Path, help="keeps the runs, which resume")
  parser.add_argument("--json", type=Path)
  given = parser.parse_args()
  with tempfile.TemporaryDirectory() as temporary:
    folder = given.workdir or Path(temporary)
    folder.mkdir(parents=True, exist_ok=True)
    cold = without(given.data_dir / "Beauty.txt", folder / "Beauty.txt", given.share, given.seed)
    found: dict[str, Any] = {"items_taken_out": len(cold), "results": {}}
    get_config = runpy.run_path(str(BEAUTY))["get_config"]
    for model in ("tiger", "sasrec"):
      config = get_config("tiger" if model == "tiger" else "sampled")
      config |= {"data_dir": str(folder), "counts": (), "seed": given.seed}
      config |= {"steps": given.steps, "eval_every": given.steps} if given.steps else {}
      if model == "tiger":
        config["tiger"] = {"codes": given.codes, "first_id": given.first_id}
      found["results"][model] = measure(config, folder / model)
      for users, metrics in found["results"][model].items():
        shown = "  ".join(f"{name} {metrics[name]:.4f}" for name in METRICS)
        print(f"{model:8}{users:8}{shown}", flush=True)
  if given.json:
    given.json.write_text(json.dumps(timing.about() | found, indent=1) + "\n")


if __name__ == "__main__":
  main()
