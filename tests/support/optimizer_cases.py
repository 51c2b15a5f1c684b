"""Every optimizer and way to use it, for the tests that go through them all."""

import jax.numpy as jnp
import numpy as np

import embed

SCHEDULE = np.array([0.125, 0.0625, 0.25], np.float32)
DECAY = {"weight_decay_factor": 0.125}
LR_DECAY = {"weight_decay_factor": 0.5, "multiply_weight_decay_factor_by_learning_rate": True}
CLIP = {"clipvalue": (-0.25, 0.5), "clip_weight_min": -1.0, "clip_weight_max": 1.5}
L1_L2 = {"l1_regularization_strength": 0.125, "l2_regularization_strength": 0.25, "beta": 0.5}
NESTEROV = {"use_nesterov": True, "exponent": 3.0, "beta2": 0.75, "epsilon": 0.1}
# One line per optimizer and way to use it.
OPTIMIZERS = [
  ("sgd", {}),
  ("sgd", {"clipvalue": 0.5} | LR_DECAY),
  ("sgd", DECAY),
  ("adagrad", {}),
  ("adagrad", CLIP | DECAY),
  ("adagrad", CLIP),
  ("adagrad", {"initial_accumulator_value": 0.0, "epsilon": 0.25}),
  ("rowwise_adagrad", {}),
  ("rowwise_adagrad", {"initial_accumulator_value": 0.5} | CLIP | LR_DECAY),
  ("rowwise_adagrad", {"epsilon": 0.25}),
  ("adagrad_momentum", {"momentum": 0.5, "epsilon": 0.01}),
  ("adagrad_momentum", {"momentum": 0.5} | NESTEROV),
  ("ftrl", {}),
  ("ftrl", {"learning_rate_power": -0.75} | L1_L2),
  ("ftrl", {"multiply_linear_by_learning_rate": True} | L1_L2),
  ("adam", {"epsilon": 1e-3}),
  ("adam", {"epsilon": 1e-3, "sum_inside_sqrt": False} | CLIP | DECAY),
]

# The recorded cases have these tolerances too.
TOLERANCE = {"adam": {"rtol": 1e-4, "atol": 5e-5}, "ftrl": {"rtol": 1e-4, "atol": 1e-5}}


def optimizer_id(index):
  return "-".join([OPTIMIZERS[index][0], *(key[:12] for key in OPTIMIZERS[index][1])])


def _across_the_row(g, w, s, lr):
  """Scales by the row's largest gradient; "n" counts a row's steps, "k" those of an element."""
  scale = jnp.max(jnp.abs(g), axis=-1) + 1
  moved = s["m"] + g / scale[..., None]
  return w - lr * moved, {"n": s["n"] + scale, "m": moved, "k": s["k"] + 1}


# All that how rows are stored and stepped can see of an optimizer.
STEPS = {
  "sum": embed.sgd(0.125),  # added to the rows, which are not read
  "summed": embed.sgd(0.125, clipvalue=0.25, weight_decay_factor=0.125),
  "elements": embed.adagrad(0.125),  # a slot [V, D]
  "row": embed.rowwise_adagrad(0.125, epsilon=0.25),  # a slot [V]
  "both": embed.custom_optimizer(
    _across_the_row,
    {"n": embed.Slot(per_row=True), "m": 0.0, "k": embed.Slot(0, dtype=jnp.int32)},
    0.125,
  ),
}
