"""Compilation ahead of time: what a program's text says, by hand, and one real compilation."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

from benchmarks.aot import hlo

ROOT = pathlib.Path(__file__).parents[2]
# A table of 1000 rows on two devices, as XLA for TPUs writes programs, cut to what matters.
PROGRAM = """\
HloModule jit_train_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

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

%three_times (state.2: (s32[], f32[64])) -> (s32[], f32[64]) {
  %state.2 = (s32[]{:T(128)}, f32[64]{0:T(128)}) parameter(0)
  %whole = f32[64]{0:T(128)} all-gather(%state.2), channel_id=2, replica_groups=[1,2]<=[2], dimensions={0}
  ROOT %again = (s32[]{:T(128)}, f32[64]{0:T(128)}) tuple(%state.2, %whole)
}

ENTRY %main.9_spmd (table: f32[500,128], ids: s32[32]) -> (f32[500,128]) {
  %table = f32[500,128]{1,0:T(8,128)} parameter(0), sharding={devices=[2,1]<=[2]}, metadata={op_name="model['embed']"}
  %ids = s32[32]{0:T(128)} parameter(1)
  %asked = s32[2,1,16]{2,1,0:T(1,128)} all-to-all(%ids), channel_id=1, replica_groups={{0,1}}, dimensions={0}
  %rows = f32[2,16,128]{2,1,0:T(8,128)} all-to-all(%table), channel_id=1, replica_groups={{0,1}}, dimensions={0}
  %back = f32[2,16,128]{2,1,0:T(8,128)} all-to-all(%rows), channel_id=1, replica_groups={{0,1}}, dimensions={0}
  %dense = (f32[13,16]{1,0:T(8,128)}, f32[16]{0:T(128)S(1)}, /*index=2*/f32[]{:T(128)}) all-reduce(%rows, %rows, %rows), channel_id=3, replica_groups=mesh['axis_0'=2,'axis_1'=3] {'axis_0'}, use_global_device_ids=true, to_apply=%add
  %cached = (f32[500,128]{1,0:T(8,128)S(1)}, f32[500,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%table)
  %cached.1 = f32[500,128]{1,0:T(8,128)S(1)} copy-done(%cached)
  %spilled = f32[500,128]{1,0:T(8,128)} copy(%cached.1)
  %more = (s32[]{:T(128)}, f32[2,16,128]{2,1,0:T(8,128)}) while(%rows), condition=%goes_on, body=%extra_round
  %thrice = (s32[]{:T(128)}, f32[64]{0:T(128)}) while(%ids), condition=%goes_on, body=%three_times, backend_config={"known_trip_count":{"n":"3"}}
  %new = f32[500,128]{1,0:T(8,128)} fusion(%rows), kind=kCustom, calls=%fused_computation.7
  ROOT %out = (f32[500,128]{1,0:T(8,128)}) tuple(%new)
}
"""  # noqa: E501


def test_collectives_are_counted_where_they_run():
  by_kind = {(c["op"], c["shapes"][0], c["count"]): c for c in hlo.Program(PROGRAM).collectives()}
  assert set(by_kind) == {
    ("all-to-all", "f32[2,16,128]", 2),
    ("all-to-all", "f32[2,16,128]", None),  # in the loop whose length only the data knows
    ("all-to-all", "s32[2,1,16]", 1),
    ("all-reduce", "f32[13,16]", 1),
    ("all-gather", "f32[64]", 3),  # in the loop of three rounds
  }
  rows = by_kind["all-to-all", "f32[2,16,128]", 2]
  assert (rows["devices"], rows["bytes"], rows["sent"]) == (2, 16_384, 8_192)
  dense = by_kind["all-reduce", "f32[13,16]", 1]
  assert (dense["devices"], dense["bytes"]) == (2, 4 * (13 * 16 + 16 + 1))
  assert dense["sent"] == dense["bytes"]  # twice the half that is another device's
  assert by_kind["all-gather", "f32[64]", 3]["sent"] == 128
  assert dense["shapes"] == ["f32[13,16]", "f32[16]", "f32[]"]


def test_new_arrays_are_those_in_the_large_memory():
  assert hlo.Program(PROGRAM).made(lambda array: array.size == 500 * 128) == []
  plain = PROGRAM.replace("copy(%cached.1)", "copy(%table)")
  (made,) = hlo.Program(plain).made(lambda array: array.size == 500 * 128)
  assert made == "copy spilled: f32[500,128] in main.9_spmd"


@pytest.mark.ci
@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="libtpu is not installed: pip install -e '.[tpu]' to compile for TPUs here",
)
@pytest.mark.parametrize(
  ("config", "settings"),
  [
    ("dlrm/criteo_1tb", []),
    pytest.param("two_tower/synthetic", ["clip_norm=1.0"], marks=pytest.mark.weekly),
    pytest.param(
      "sequence/synthetic", ["dtype=bfloat16", "hbm_bytes=1000000000"], marks=pytest.mark.weekly
    ),
  ],
)
def test_the_training_step_compiles_for_tpus(config, settings, tmp_path):
  """On tables of a few rows; about half a minute each."""
  topology, path = "v6e:2x2", tmp_path / "aot.json"
  command = [
    sys.executable, "-m", "benchmarks.aot", f"{config}:smoke", f"--devices={topology}",
    f"--json={path}", "--set", "dim=128", f"cache_dir={tmp_path / 'cache'}", *settings,
  ]  # fmt: skip
  done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900)
  report = json.loads(path.read_text())[topology]
  # A synthetic catalogue is so small that any array may be as large as its tables.
  problems = [problem for problem in report["problems"] if "of a table's size" not in problem]
  assert not problems, done.stdout + done.stderr
  assert config != "dlrm/criteo_1tb" or "no problem found" in done.stdout
  assert done.returncode == bool(report["problems"])
  kinds = {(c["op"], *c["dtypes"]) for c in report["collectives"]}
  assert {("all-to-all", "s32"), ("all-to-all", "f32"), ("all-reduce", "f32")} <= kinds
