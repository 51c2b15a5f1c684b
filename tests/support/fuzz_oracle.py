"""Rows of a table in float64, stepped by `reference.py`, which recorded cases hold."""

import numpy as np
import reference


class Table:
  """Rows and slots of one table, and its optimizer `(name, arguments)`."""

  def __init__(self, rows, optimizer):
    self.name, self.arguments = optimizer
    self.variables = reference.initial_variables(self.name, np.float64(rows), **self.arguments)

  @property
  def rows(self):
    return self.variables["parameters"]

  def step(self, ids, grads):
    """One step from the gradients `[N, D]` of the occurrences `ids`, in batch order."""
    config = dict(self.arguments)
    rate = config.pop("learning_rate")
    self.variables = reference.apply_rows(self.name, self.variables, ids, grads, rate, **config)
