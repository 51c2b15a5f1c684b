"""Environment variables are 1 or 0, and anything else is refused wherever one is read."""

import numpy as np
import pytest
from cases import each

import embed
from embed.engine import backends
from embed.engine import stack as stack_lib
from embed.kernels import cpu as cpu_kernels
from embed.kernels import sparse_core

NAME = "SPARSE_EMBED_TEST"


def test_a_variable_decides_and_the_default_where_it_is_not_set(monkeypatch):
  monkeypatch.delenv(NAME, raising=False)
  assert (backends.is_on(NAME, True), backends.is_on(NAME, False)) == (True, False)
  for value, expected in (("1", True), ("0", False)):
    monkeypatch.setenv(NAME, value)
    assert backends.is_on(NAME, not expected) is expected
  monkeypatch.setenv(NAME, "")
  assert backends.is_on(NAME, True)


def planned():
  features = embed.FeatureConfig(embed.TableConfig(8, 4))
  return embed.plan(features, None, np.zeros(2, np.int32)).stacks()


def test_other_values_are_refused_by_name():
  def refused(variable, read):
    with pytest.MonkeyPatch.context() as patch:
      patch.setenv(variable, "true")
      with pytest.raises(ValueError, match=f"{variable} is 'true': write 0 or 1"):
        read()

  each(
    {
      "kernels": (cpu_kernels.SWITCH, cpu_kernels.is_on),
      "packing": (stack_lib.PACKING_SWITCH, planned),
      "sparse_core": (sparse_core.SWITCH, planned),
    },
    refused,
  )


def test_kernels_can_be_switched_off(monkeypatch):
  monkeypatch.setenv(cpu_kernels.SWITCH, "0")
  assert not cpu_kernels.is_on()
