"""Pipelined steps: a lookup before the update of the step before, every update applied once."""

import conformance
import layers
import numpy as np
from flax import nnx

import embed

CASES = {case["id"]: case for case in conformance.load("pipeline")["cases"]}


@nnx.jit
def look_up(model, bags):
  return model.lookup(bags)


@nnx.jit
def apply_and_look_up(model, grads, residual, bags):
  ahead = model.lookup(bags)
  model.apply_gradients(grads, residual)
  return ahead


def test_recorded_cases():
  for name in ("sgd/pipelined=1", "adam/pipelined=1"):
    case = CASES[name]
    make = getattr(embed, conformance.OPTIMIZERS[case["optimizer"]])
    model = layers.one_table(make(case["lr"], **case["config"]), rows=case["table"])
    bags = [embed.Padded(np.array(ids)) for ids in case["ids"]]
    act, residual = look_up(model, bags[0])
    for i, target in enumerate(case["targets"]):
      np.testing.assert_allclose(act, case["activations"][i], **case["tol"])
      grads = np.asarray(act) - target
      act, residual = apply_and_look_up(model, grads, residual, bags[(i + 1) % len(bags)])
    for key, value in case["final"].items():
      np.testing.assert_allclose(model.variables["t"][key], value, **case["tol"], err_msg=key)


def test_one_step_old_and_nothing_lost():
  """Three steps on row 1, which starts at 0: the loss is its distance to 8, the rate 1/2.

  Without pipelining it would be 0, 4, 6 and then 7; each lookup misses the update of its own step.
  """
  model = layers.one_table(embed.sgd(0.5), rows=np.zeros((2, 1), np.float32))
  ids = np.array([1])
  act, residual = look_up(model, ids)
  seen = []
  for _ in range(3):
    seen.append(float(act[0, 0]))
    act, residual = apply_and_look_up(model, np.asarray(act) - 8, residual, ids)
  # 0 + 4, then 4 + 4 by the gradient at 0, then 8 + 2 by the gradient at 4.
  assert seen == [0.0, 0.0, 4.0]
  assert float(model.tables["t"][1, 0]) == 10.0
