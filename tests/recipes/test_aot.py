"""Compilation ahead of time: what a program's text says, by hand, and one real compilation."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from recipes.aot import hlo

# A table of 1000 rows on two devices, as XLA for TPUs writes programs, cut to what matters.
PROGRAM = """\
HloModule jit_train_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

FileNames
1 "/somewhere/exchange.py"

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(128)} parameter(0)
  %y = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%x, %y)
}

%fused_computation.7 (p: f32[8,16,128]) -> f32[500,128] {
  %p = f32[8,16,128]{2,1,0:T(8,128)} parameter(0)
  %zeros = f32[500,128]{1,0:T(8,128)} broadcast(%p), dimensions={}
  ROOT %scattered = f32[500,128]{1,0:T(8,128)} add(%zeros, %zeros)
}

%extra_round (state: (s32[], f32[2,16,128])) -> (s32[], f32[2,16,128]) {
  %state = (s32[]{:T(128)}, f32[2,16,128]{2,1,0:T(8,128)}) parameter(0)
  %rows.2 = f32[2,16,128]{2,1,0:T(8,128)} get-tuple-element(%state), index=1
  %exchanged.2 = f32[2,16,128]{2,1,0:T(8,128)} all-to-all(%rows.2), channel_id=1, replica_groups={{0,1}}, dimensions={0}
  ROOT %next = (s32[]{:T(128)}, f32[2,16,128]{2,1,0:T(8,128)}) tuple(%state, %exchanged.2)
}

%goes_on (state.1: (s32[], f32[2,16,128])) -> pred[] {
  %state.1 = (s32[]{:T(128)}, f32[2,16,128]{2,1,0:T(8,128)}) parameter(0)
  ROOT %less = pred[]{:T(512)} compare(%state.1, %state.1), direction=LT
}

%three_times (state.2: (s32[], f32[64])) -> (s32[], f32[64]) {
  %state.2 = (s32[]{:T(128)}, f32[64]{0:T(128)}) parameter(0)
  %whole = f32[64]{0:T(128)} all-gather(%state.2), channel_id=2, replica_groups=[1,2]<=[2], dimensions={0}
  ROOT %again = (s32[]{:T(128)}, f32[64]{0:T(128)}) tuple(%state.2, %whole)
}

ENTRY %main.9_spmd (table: f32[500,128], narrow: f32[500,16], ids: s32[32]) -> (f32[500,128]) {
  %table = f32[500,128]{1,0:T(8,128)} parameter(0), sharding={devices=[2,1]<=[2]}, metadata={op_name="model['embed']"}
  %narrow = f32[500,16]{1,0:T(8,128)} parameter(1)
  %ids = s32[32]{0:T(128)} parameter(2)
  %asked = s32[2,1,16]{2,1,0:T(1,128)} all-to-all(%ids), channel_id=1, replica_groups={{0,1}}, dimensions={0}
  %rows = f32[2,16,128]{2,1,0:T(8,128)} all-to-all(%table), channel_id=1, replica_groups={{0,1}}, dimensions={0}
  %back = f32[2,16,128]{2,1,0:T(8,128)} all-to-all(%rows), channel_id=1, replica_groups={{0,1}}, dimensions={0}
  %dense = (f32[13,16]{1,0:T(8,128)}, f32[16]{0:T(128)S(1)}, /*index=2*/f32[]{:T(128)}) all-reduce(%rows, %rows, %rows), channel_id=3, replica_groups=mesh['axis_0'=2,'axis_1'=3] {'axis_0'}, use_global_device_ids=true, to_apply=%add
  %cached = (f32[500,128]{1,0:T(8,128)S(1)}, f32[500,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%table)
  %cached.1 = f32[500,128]{1,0:T(8,128)S(1)} copy-done(%cached)
  %spilled = f32[500,128]{1,0:T(8,128)} copy(%cached.1)
  %more = (s32[]{:T(128)}, f32[2,16,128]{2,1,0:T(8,128)}) while(%rows), condition=%goes_on, body=%extra_round
  %thrice = (s32[]{:T(128)}, f32[64]{0:T(128)}) while(%ids), condition=%goes_on, body=%three_times, backend_config={"known_trip_count":{"n":"3"}}
  %taken = f32[32,128]{1,0:T(8,128)} custom-call(%table, %ids), custom_call_target="x", backend_config={"offload":"OFFLOAD_GATHER"}
  %new = f32[500,128]{1,0:T(8,128)} fusion(%rows), kind=kCustom, calls=%fused_computation.7
  ROOT %out = (f32[500,128]{1,0:T(8,128)}) tuple(%new)
}
"""  # noqa: E501


def test_collectives_are_counted_where_they_run():
  found = {(c.opcode, str(c.results[0]), c.times): c for c in hlo.Program(PROGRAM).collectives()}
  assert set(found) == {
    ("all-to-all", "f32[2,16,128]", 2),
    ("all-to-all", "f32[2,16,128]", None),  # in the loop whose length only the data knows
    ("all-to-all", "s32[2,1,16]", 1),
    ("all-reduce", "f32[13,16]", 1),
    ("all-gather", "f32[64]", 3),  # in the loop of three rounds
  }
  rows = found["all-to-all", "f32[2,16,128]", 2]
  assert (rows.group, rows.nbytes, rows.sent) == (2, 16_384, 8_192)
  dense = found["all-reduce", "f32[13,16]", 1]
  assert (dense.group, dense.nbytes) == (2, 4 * (13 * 16 + 16 + 1))
  assert dense.sent == dense.nbytes  # twice the half that is another device's
  assert found["all-gather", "f32[64]", 3].sent == 128
  assert dense.to_json()["shapes"] == ["f32[13,16]", "f32[16]", "f32[]"]


def test_layouts_are_of_the_entry_and_padded_to_tiles():
  table, narrow, ids = hlo.Program(PROGRAM).parameters
  assert (str(table), str(narrow), str(ids)) == ("f32[500,128]", "f32[500,16]", "s32[32]")
  assert (table.nbytes, table.padded_bytes) == (500 * 512, 504 * 512)
  assert (narrow.nbytes, narrow.padded_bytes) == (500 * 64, 504 * 512)
  assert ids.padded_bytes == 512
  columns = hlo.Array("f32", (500, 16), "0,1:T(8,128)")  # column by column
  assert columns.padded_bytes == 16 * 512 * 4
  assert hlo.Array("bf16", (3, 5), "1,0:T(8,128)(2,1)").padded_bytes == 8 * 128 * 2
  assert hlo.Array("pred", ()).nbytes == 1


@pytest.mark.ci
@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="libtpu is not installed: pip install -e '.[tpu]' to compile for TPUs here",
)
@pytest.mark.parametrize(
  ("recipe", "config", "settings"),
  [
    ("dlrm", "criteo_1tb", []),
    pytest.param(
      "two_tower",
      "synthetic",
      ["--config.clip_norm=1.0"],
      marks=pytest.mark.weekly,
    ),
    pytest.param(
      "sequence",
      "synthetic",
      ["--config.dtype=bfloat16", "--config.hbm_bytes=1000000000"],
      marks=pytest.mark.weekly,
    ),
  ],
)
def test_the_training_step_compiles_for_tpus(recipe, config, settings, tmp_path):
  """The command of the recipe's README, on tables of a few rows; about half a minute each."""
  topology = "v6e:2x2"
  command = [
    sys.executable, "-m", "recipes.aot", recipe, f"--config=configs/{recipe}/{config}.py:smoke",
    "--config.dim=128", f"--devices={topology}", f"--workdir={tmp_path}",
    f"--config.cache_dir={tmp_path / 'cache'}", *settings,
  ]  # fmt: skip
  done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=900)
  report = json.loads((tmp_path / "aot.json").read_text())[topology]
  # A synthetic catalogue is so small that any array may be as large as its tables.
  problems = [problem for problem in report["problems"] if "of a table's size" not in problem]
  assert not problems, done.stdout + done.stderr
  assert recipe != "dlrm" or "no problem found" in done.stdout
  assert done.returncode == bool(report["problems"])
  assert report["compiled"]
  assert report["devices"] == 4
  if config == "criteo_1tb":  # others have few rows, which are filled up to whole tiles
    assert abs(report["tables"]["laid_out_deviation_percent"]) < 5
  kinds = {(c["op"], *c["dtypes"]) for c in report["collectives"]}
  # With so small a batch, two_tower's tables are read whole.
  exchange = "all-gather" if recipe == "two_tower" else "all-to-all"
  assert {(exchange, "s32"), (exchange, "f32"), ("all-reduce", "f32")} <= kinds
  assert report["memory"]["aliased"] >= report["tables"]["sharded"]
  assert report["memory"]["needed"] < report["memory"]["available"]
