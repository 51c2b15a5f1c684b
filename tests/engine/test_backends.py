"""Environment variables are 1 or 0, and anything else is refused wherever one is read."""

import numpy as np
import pytest

import embed
from embed.engine import stack as stack_lib
from embed.kernels import sparse_core


@pytest.mark.parametrize("variable", [stack_lib.PACKING_SWITCH, sparse_core.SWITCH])
def test_other_values_are_refused_by_name(variable, monkeypatch):
  monkeypatch.setenv(variable, "true")
  features = embed.FeatureConfig(embed.TableConfig(8, 4))
  plan = embed.plan(features, None, np.zeros(2, np.int32))
  with pytest.raises(ValueError, match=f"{variable} is 'true': write 0 or 1"):
    plan.stacks()
