"""Environment variables are 1 or 0, and anything else is refused wherever one is read."""

import numpy as np
import pytest

import embed
from embed.engine import backends
from embed.engine import stack as stack_lib
from embed.kernels import sparse_core

NAME = "SPARSE_EMBED_TEST"


def test_a_variable_decides_and_the_default_where_it_is_not_set(monkeypatch):
  monkeypatch.delenv(NAME, raising=False)
  assert (backends.is_on(NAME, True), backends.is_on(NAME, False)) == (True, False)
  for value, expected in (("1", True), ("0", False)):
    monkeypatch.setenv(NAME, value)
    assert backends.is_on(NAME, not expected) is expected


@pytest.mark.parametrize("variable", [stack_lib.PACKING_SWITCH, sparse_core.SWITCH])
def test_other_values_are_refused_by_name(variable, monkeypatch):
  monkeypatch.setenv(variable, "true")
  features = embed.FeatureConfig(embed.TableConfig(8, 4))
  plan = embed.plan(features, None, np.zeros(2, np.int32))
  with pytest.raises(ValueError, match=f"{variable} is 'true': write 0 or 1"):
    plan.stacks()
