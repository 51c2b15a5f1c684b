"""Bad configs end in an error that says which one and what."""

import contextlib
import operator

import cases
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from recorded_calls import CALLS, FC, NAMES, SE, TC, ragged

import embed

pytestmark = pytest.mark.usefixtures("strict")


def check_call(call, error):
  zeros = {"t": np.zeros((4, 2), np.float32)}
  serve = lambda features, weights, config: embed.serving_lookup(features, weights, zeros, config)
  with contextlib.nullcontext() if error is None else pytest.raises(error):
    nnx.eval_shape(lambda: eval(call, NAMES | {"S": serve}) and None)


def test_recorded_call():
  cases.each({call: (call, error) for call, error in CALLS.items()}, check_call)


# ------------------------------------------------------------------- more bad configs


def layer_by(optimizer):
  return lambda: SE({"f": FC()}, optimizer)


BAD = [
  (lambda: TC(vocabulary_size=True), "vocabulary_size"),
  (lambda: TC(vocabulary_size=-1), "vocabulary_size"),
  (lambda: TC(dim=True), "dim"),
  (lambda: TC(dim=2.0), "dim"),
  (lambda: TC(dtype=jnp.float64), "dtype"),
  *((layer_by(optimizer), "optimizer") for optimizer in ("sgd", 3, object)),
  (layer_by(optax.sgd(0.1)), "from_optax"),
]


def test_bad_config():
  cases.refused(BAD, lambda make: make())


def test_integers_of_any_kind_are_accepted():
  table = TC(vocabulary_size=np.int64(5), dim=np.int32(3))
  assert (operator.index(table.vocabulary_size), operator.index(table.dim)) == (5, 3)
  feature = FC(table, max_sequence_length=np.int64(2))
  activations = nnx.eval_shape(lambda: SE({"f": feature}, embed.sgd())({"f": ragged()}))
  assert activations["f"].shape == (2, 2, 3)
