"""Bad configs end in an error that says which one and what."""

import contextlib
import operator

import jax.numpy as jnp
import numpy as np
import pytest
from recorded_calls import CALLS, FC, SE, TC, ragged, run

import embed

pytestmark = pytest.mark.usefixtures("strict")


@pytest.mark.parametrize("call", CALLS)
def test_recorded_call(call):
  error = CALLS[call]
  with contextlib.nullcontext() if error is None else pytest.raises(error):
    run(call)


# ------------------------------------------------------------------- more bad configs


@pytest.mark.parametrize(
  "make",
  [
    lambda: TC(vocabulary_size=True),
    lambda: TC(dim=True),
    lambda: TC(vocabulary_size=-1),
    lambda: TC(dim=2.0),
    lambda: TC(dtype=jnp.float64),
    lambda: embed.ftrl(l2_regularization_strength=-1.0),
    lambda: embed.ftrl(initial_accumulator_value=-0.1),
    lambda: embed.adam(beta_2=-0.1),
    lambda: embed.adam(epsilon=-1e-7),
    lambda: embed.adagrad_momentum(epsilon=-1e-10),
    lambda: embed.adagrad_momentum(exponent=-2.0),
    lambda: embed.proximal_adagrad(initial_accumulator_value=0.0),
    lambda: embed.rowwise_adagrad(initial_accumulator_value=0.0),
    lambda: embed.adagrad(use_gradient_accumulation=False, clipvalue=(None, None)),
  ],
)
def test_bad_config(make):
  with pytest.raises(ValueError, match=r"."):
    make()


def test_integers_of_any_kind_are_accepted():
  table = TC(vocabulary_size=np.int64(5), dim=np.int32(3))
  assert (operator.index(table.vocabulary_size), operator.index(table.dim)) == (5, 3)
  feature = FC(table, max_sequence_length=np.int64(2))
  layer = SE({"f": feature}, embed.sgd())
  assert layer({"f": ragged()})["f"].shape == (2, 2, 3)


def test_optimizer_errors_say_what_was_given():
  for optimizer in ("sgd", 3, object):
    with pytest.raises(ValueError, match="optimizer"):
      SE({"f": FC()}, optimizer)


def test_optax_transformation_is_not_an_optimizer_but_the_hint_is_there():
  optax = pytest.importorskip("optax")
  with pytest.raises(ValueError, match="from_optax"):
    SE({"f": FC()}, optax.sgd(0.1))


@pytest.mark.parametrize("scalar", [np.float32, jnp.float32, np.array])
def test_scalar_arrays_are_numbers(scalar):
  coarse = embed.QuantizationConfig(scalar(3), -scalar(1.0), scalar(1.0))
  assert coarse == embed.QuantizationConfig(3, -1.0, 1.0)
  assert hash(coarse) == hash(embed.QuantizationConfig(3, -1.0, 1.0))
  combiner = embed.CustomCombiner(
    lambda *_: None, 2, 2, np.zeros, combiner_weights_learning_rate=scalar(0.5)
  )
  assert type(combiner.combiner_weights_learning_rate) is float
  with pytest.raises(ValueError, match="upper must be one number"):
    embed.QuantizationConfig(3, -1.0, np.ones(2))
