"""The parts of a recipe's run, for tests that take them one by one."""

import dataclasses
import importlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class Parts:
  """What `train.run` trains, under the config that the data have decided."""

  config: Any
  data: Any
  model: Any
  optimizer: Any
  step: Any  # (model, optimizer, batch) -> scalars, not compiled
  batches: Any
  evaluate: Any

  @property
  def state(self):
    return {"model": self.model, "optimizer": self.optimizer}

  @property
  def serve(self):
    return self.data.serve


def prepare(recipe, config, mesh=None):
  """Returns the parts of a recipe's run; raises what `train.run` does before its first step."""
  train = importlib.import_module(f"recipes.{recipe}.train")
  train.check(config, mesh)
  data = train.data_lib.load(config)
  config = train.decide(config, data, mesh)
  model, optimizer = train.make_state(config, data, mesh)
  step = train.make_train_step(config, data, mesh)
  batches = train.data_lib.train_batches(data, config)
  evaluate = train.evaluator(data, config, mesh)
  return Parts(config, data, model, optimizer, step, batches, evaluate)
