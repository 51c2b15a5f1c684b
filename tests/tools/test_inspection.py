"""What `python -m embed inspect` says of checkpoints."""

import numpy as np
import pytest
from layers import ROWS, one_table

import embed
from embed import __main__ as program
from embed.tools import inspection


@pytest.mark.ci
def test_a_checkpoint(tmp_path, capsys):
  ocp = pytest.importorskip("orbax.checkpoint")
  tree = embed.checkpoint.to_tree(model=one_table(embed.rowwise_adagrad(0.1)))
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", tree)
  assert program.main(["inspect", str(tmp_path / "state")]) == 0
  (line,) = [line for line in capsys.readouterr().out.splitlines() if "accumulators" in line]
  assert line.split()[1:4] == [*map(str, ROWS.shape), "float32"]


def test_untouched_rows_have_the_commonest_slots():
  rows, accumulators = np.ones((4, 2)), np.array([0.1, 0.1, 0.1, 0.5])
  assert inspection.statistics({"parameters": rows, "a": accumulators}) == ("1.414", "75%")
