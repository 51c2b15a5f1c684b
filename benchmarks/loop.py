"""What a run of a recipe loses between its steps, and whether its input keeps up with them.

    python benchmarks/loop.py dlrm/synthetic two_tower/synthetic sequence/synthetic --json=loop.json

For each config, in turns, in one process: the bare step, on batches that are on the device already;
the loop, as `python -m recipes.<name>` takes the same step, with its input and its log; and the
input alone. Rates are of windows of `log_every` steps, the best and the median one, but for the
windows in which something is compiled.
"""

import argparse
import importlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import jax
import step as timing
from absl import flags

import embed
from recipes import config as config_lib
from recipes import log

# Batches on the device for the bare step: with a few of them, their rows would stay in the caches.
_KEPT = 64


def windows(steps: Iterator[Any], size: int, seconds: float) -> list[float]:
  """Returns the seconds of each window of `size` steps, but for the first one."""
  times: list[float] = []
  end = time.perf_counter() + seconds
  while len(times) < 4 or time.perf_counter() < end:
    began = time.perf_counter()
    jax.block_until_ready(list(itertools.islice(steps, size)))
    times.append(time.perf_counter() - began)
  return times[1:]


def bare(config, parts: "Parts", seconds: float) -> list[float]:
  """Returns the examples a second of the step alone, a number for each window."""
  batches = iter(parts.batches())
  kept = itertools.cycle([jax.device_put(next(batches)) for _ in range(_KEPT)])
  step = parts.step()
  take = iter(lambda: step(next(kept))["loss"], None)
  times = windows(take, config.log_every, seconds)
  return [config.log_every * config.batch_size / x for x in times]


def in_loop(config, parts: "Parts", steps: int) -> list[float]:
  """Returns the examples a second of a run, as its log says."""
  config = config_lib.copied(config, steps=steps, eval_every=steps)
  with tempfile.TemporaryDirectory() as folder:
    parts.train.run(config, folder)
    found = [line.get("examples_per_second") for line in log.lines(Path(folder) / log.FILE)]
    return list(filter(None, found))[1:]


def input_alone(config, parts: "Parts", seconds: float) -> list[float]:
  """Returns the examples a second of the input alone."""
  times = windows(iter(parts.batches()), config.log_every, seconds)
  return [config.log_every * config.batch_size / x for x in times]


class Parts:
  """Model, optimizer, step and batches of a recipe."""

  def __init__(self, recipe: str, config):
    self.train = train = importlib.import_module(f"recipes.{recipe}.train")
    data = train.data_lib.load(config)
    config = train.decide(config, data)
    self.model, self.optimizer = train.make_state(config, data)
    self.batches = lambda: train.data_lib.train_batches(data, config)
    take = train.make_train_step(config, data)
    self.step = lambda: embed.jit_step(take, self.model, self.optimizer)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
  """Returns the rates of a config."""
  recipe, config = name.partition("/")[0], common.load(name)
  config.update({"select": "", "patience": 0, "checkpoint_every": 0, "test": False})
  config.steps = 10**6  # as many batches as are asked for
  training = Parts(recipe, config)
  rates: dict[str, list[float]] = {"step": [], "loop": [], "input": []}
  load_of_others = timing.Load()
  for _ in range(args.turns):
    rates["step"] += bare(config, training, args.seconds)
    count = int(args.seconds * statistics.median(rates["step"]) / config.batch_size)
    count = max(count // config.log_every, 4) * config.log_every
    rates["loop"] += in_loop(config, training, count)
    rates["input"] += input_alone(config, training, args.seconds)
  best = {key: max(values) for key, values in rates.items()}
  median = {key: statistics.median(values) for key, values in rates.items()}
  for title, of in (("best", best), ("median", median)):
    looped, fed = (of[key] / of["step"] for key in ("loop", "input"))
    print(
      f"{name:24} {title:6} step {of['step']:>10,.0f}/s  loop {of['loop']:>10,.0f}/s {looped:6.1%}"
      f"  input {of['input']:>10,.0f}/s {fed:5.1f} x",
      flush=True,
    )
  busy = load_of_others.cores()
  return {"batch_size": config.batch_size, "best": best, "median": median, "busy_cores": busy}


def main() -> None:
  parser = common.parser(__doc__)
  parser.add_argument("configs", nargs="+", help="<recipe>/<config>[:mode], as in configs/")
  parser.add_argument("--seconds", type=float, default=10.0, help="of each of the three, in a turn")
  parser.add_argument("--turns", type=int, default=3)
  args = parser.parse_args()
  flags.FLAGS.mark_as_parsed()  # Grain's workers ask for it
  results = {name: measure(name, args) for name in args.configs}
  common.write(args.json, {"examples_per_second": results})


if __name__ == "__main__":
  main()
