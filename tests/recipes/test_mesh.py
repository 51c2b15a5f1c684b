"""The same program on one device, on several and in several processes: real ones, on CPU.

The jobs here are `python -m recipes.dlrm` as users start it, joined through gloo. A sum over the
batch is split among the devices in another order, so that results agree to rounding and not to the
last bit; everything else, the batches, dropout and initial values, is the same.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from cases import each
from flax import nnx

import embed
from recipes import mesh as mesh_lib
from recipes import pipeline

STEPS = 12
# Relative, on losses: one float32 sum in another order is off by some 1e-7, which is what was seen
# of all of them, at every step.
LOSS = 1e-6
# Absolute, on AUC over 500 rows: two examples that change places are worth 2e-5.
AUC = 5e-5


# --- in this process, with the eight devices of conftest.py ---------------------------------------


def test_one_process_on_one_device_has_no_mesh(monkeypatch):
  monkeypatch.setattr(jax, "device_count", lambda: 1)
  assert mesh_lib.start() is None
  batch = {"x": np.arange(3)}
  assert mesh_lib.to_global(None, batch) is batch
  mesh_lib.check_batch_sizes(None, batch_size=7)


def test_batches_are_split_over_all_devices():
  mesh = mesh_lib.start()
  assert mesh.axis_names == ("data",)
  assert mesh.axis_types == (jax.sharding.AxisType.Auto,)
  batch = {"x": np.arange(32).reshape(16, 2), "bag": embed.Padded(np.arange(48).reshape(16, 3))}
  split = mesh_lib.to_global(mesh, batch)
  assert {shard.data.shape for shard in split["x"].addressable_shards} == {(2, 2)}
  assert len(split["bag"].values.sharding.device_set) == 8
  np.testing.assert_array_equal(mesh_lib.gather(split["x"]), batch["x"])


class Counted:
  """Batch number -> sixteen rows of it."""

  def __len__(self):
    return 20

  def __getitem__(self, number):
    return {"x": np.full((16, 2), number)}


def test_batches_are_prefetched_in_order():
  batches = mesh_lib.prefetch_to_device(mesh_lib.start(), pipeline.batches(Counted(), dict))
  for number, batch in enumerate(batches):
    assert len(batch["x"].sharding.device_set) == 8
    np.testing.assert_array_equal(batch["x"], np.full((16, 2), number))
  assert number == 19


def test_one_accelerator_gets_arrays_and_one_cpu_batches_as_they_were_read(monkeypatch):
  for backend, kind in (("tpu", jax.Array), ("cpu", np.ndarray)):
    monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
    with contextlib.closing(
      iter(mesh_lib.prefetch_to_device(None, pipeline.batches(Counted(), dict)))
    ) as it:
      assert isinstance(next(it)["x"], kind)


def test_a_batch_that_does_not_divide_is_named():
  with pytest.raises(ValueError, match="eval_batch_size is 100, which must be a multiple of the 8"):
    mesh_lib.check_batch_sizes(mesh_lib.start(), batch_size=64, eval_batch_size=100)


def test_replicate_leaves_what_is_on_the_mesh_alone():
  mesh = mesh_lib.start()
  make = lambda: nnx.Dict(
    a=nnx.Linear(8, 8, rngs=nnx.Rngs(0)), b=nnx.Dropout(0.5, rngs=nnx.Rngs(1))
  )
  model = nnx.jit(make)()
  rows = jax.NamedSharding(mesh, jax.P("data"))
  model["a"].kernel.set_value(jax.device_put(np.ones((8, 8), np.float32), rows))
  values = lambda: [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param))]
  before = values()
  mesh_lib.replicate(mesh, model)
  assert model["a"].kernel.get_value().sharding.spec == jax.P("data")
  assert model["a"].bias.get_value().is_fully_replicated
  assert len(model["b"].rngs.key.get_value().sharding.device_set) == 8
  jax.tree.map(np.testing.assert_array_equal, values(), before)


JOINS = [
  ({}, None),
  ({"JAX_NUM_PROCESSES": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "n[1-4]"}, None),
  ({"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "n1"}, None),
  ({"SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "n[1-4]"}, ((), {})),
  ({"OMPI_COMM_WORLD_SIZE": "2"}, ((), {})),
  (
    {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
    ((), {"num_processes": 2, "process_id": 0, "cluster_detection_method": "deactivate"}),
  ),
]


def test_who_joins(monkeypatch):
  def check(environment, expected):
    calls = []
    with monkeypatch.context() as patch:
      patch.setattr(jax.distributed, "initialize", lambda *a, **k: calls.append((a, k)))
      for name, value in environment.items():
        patch.setenv(name, value)
      mesh_lib.start()
    assert calls == ([] if expected is None else [expected])

  each({str(case[0]): case for case in JOINS}, check)


# --- several processes ---------------------------------------------------------------------------


class Jobs:
  """Starts programs as `processes` processes each, and ends those that a test leaves behind."""

  def __init__(self, logs):
    self._logs, self._started = logs, []

  def start(self, command, *, processes=1, devices=1):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environment["JAX_PLATFORMS"] = "cpu"
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    # Compiling is most of the work here. Jobs of one shape run the same programs; the first one
    # compiles them for all.
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
    environment["JAX_COMPILATION_CACHE_DIR"] = str(self._logs / "compiled")
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    if processes > 1:
      environment["JAX_COORDINATOR_ADDRESS"] = f"localhost:{free_port()}"
      environment["JAX_NUM_PROCESSES"] = str(processes)
    job = []
    for index in range(processes):
      if processes > 1:
        environment["JAX_PROCESS_ID"] = str(index)
      log = (self._logs / f"{len(self._started)}.log").open("w+")
      process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
      process.log = log
      self._started.append(process)
      job.append(process)
    return job

  def run(self, command, **kwargs):
    """Runs to the end; returns what each process has printed."""
    job = self.start(command, **kwargs)
    for process in job:
      code = process.wait(timeout=180)
      assert code == 0, said(process)
    return [said(process) for process in job]

  def close(self):
    for process in self._started:
      process.kill()
      process.wait()
      process.log.close()


def said(process):
  process.log.seek(0)
  return process.log.read()


def free_port():
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    return probe.getsockname()[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def jobs(folder):
  found = Jobs(folder)
  yield found
  found.close()


def recipe(workdir):
  return [
    sys.executable, "-m", "recipes.dlrm", "--config=configs/dlrm/synthetic.py:smoke",
    f"--workdir={workdir}", f"--config.cache_dir={workdir.parent / 'cache'}",
    f"--config.steps={STEPS}", "--config.log_every=1", "--config.eval_every=6",
    "--config.checkpoint_every=5", "--config.dropout=0.2",
  ]  # fmt: skip


def outcome(workdir):
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  return json.loads((workdir / "result.json").read_text()), lines


@pytest.fixture(scope="module")
def alone(jobs, folder):
  jobs.run(recipe(folder / "alone"))
  return outcome(folder / "alone")


@pytest.fixture(scope="module")
def pair(jobs, folder):
  """Two processes of one device each; returns also what they said."""
  output = jobs.run(recipe(folder / "pair"), processes=2)
  return (*outcome(folder / "pair"), output)


def assert_same(found, expected):
  """Compares results, and every line of the logs, to the tolerances above."""
  (result, lines), (alone_result, alone_lines) = found, expected
  assert [line["step"] for line in lines] == [line["step"] for line in alone_lines]
  for line, other in zip(lines, alone_lines, strict=True):
    assert_close(line, other)
  assert result["tested_step"] == alone_result["tested_step"]
  assert_close(result["metrics"], alone_result["metrics"])


def assert_close(found, expected):
  assert found.get("dropped_ids") == expected.get("dropped_ids")
  for name in expected:
    if name.endswith("loss"):
      np.testing.assert_allclose(found[name], expected[name], rtol=LOSS, err_msg=name)
    if name.endswith("auc"):
      np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=AUC, err_msg=name)


@pytest.mark.ci
def test_two_processes_train_as_one(alone, pair):
  result, lines, output = pair
  assert (result["device"]["count"], result["device"]["processes"]) == (2, 2)
  assert_same((result, lines), alone)
  assert "logloss" in output[0]
  assert "logloss" not in output[1]
  assert {"exchange_rounds", "buffer_fill"} <= lines[0].keys()


def wait_for_lines(workdir, number, process):
  path, deadline = workdir / "metrics.jsonl", time.monotonic() + 120
  while not path.exists() or path.read_bytes().count(b"\n") < number:
    assert time.monotonic() < deadline, said(process)
    assert process.poll() is None, said(process)
    time.sleep(0.002)


@pytest.mark.weekly
def test_a_killed_process_and_the_same_job_again(jobs, folder, pair):
  workdir = folder / "killed"
  main, other = jobs.start(recipe(workdir), processes=2)
  wait_for_lines(workdir, 6, main)  # a checkpoint is after step 5
  other.send_signal(signal.SIGKILL)
  assert other.wait(timeout=60) == -signal.SIGKILL, said(main)
  main.kill()
  main.wait()
  assert not (workdir / "result.json").exists()
  output = jobs.run(recipe(workdir), processes=2)
  assert "resuming from step" in output[0]
  result, lines = outcome(workdir)
  assert result["metrics"] == pair[0]["metrics"]
  assert_same((result, lines), pair[:2])


@pytest.mark.weekly
def test_a_signal_to_one_process_ends_all_at_the_same_step(jobs, folder, pair):
  workdir = folder / "preempted"
  job = jobs.start(recipe(workdir), processes=2)
  wait_for_lines(workdir, 3, job[0])
  job[1].send_signal(signal.SIGTERM)
  assert [process.wait(timeout=120) for process in job] == [75, 75], said(job[0])
  assert not (workdir / "result.json").exists()
  step = max(int(path.name) for path in (workdir / "checkpoints").glob("[0-9]*"))
  assert f"stopped at step {step}; the same command resumes there" in said(job[0])
  output = jobs.run(recipe(workdir), processes=2)
  assert f"resuming from step {step}" in output[0]
  assert outcome(workdir)[0]["metrics"] == pair[0]["metrics"]


ROWS, DIM = 1_000_000, 64
BUILD = f"""
import json, pathlib, jax, embed
from flax import nnx
from recipes import mesh as mesh_lib

def memory(which):  # VmRSS now, VmHWM at its peak; getrusage's peak starts at that of the parent
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))

def build(rows, **where):
  before = memory("VmRSS")
  make = embed.row_wise(jax.nn.initializers.normal(0.01))
  table = embed.TableConfig(rows, {DIM}, initializer=make, name="table")
  layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0), **where)
  kept.append(jax.block_until_ready(nnx.state(layer)))  # freed memory would serve the next
  return memory("VmHWM") - before

mesh, kept = mesh_lib.start(), []
build(1000, mesh=mesh)  # what compiling takes is not the table's
print(json.dumps([build({ROWS}, mesh=mesh), build({ROWS})]))
"""


@pytest.mark.ci
def test_a_process_makes_its_own_rows_only(jobs):
  table = ROWS * DIM * 4
  # Beside its rows a process needs the memory that compiling and drawing take, some rows at a time:
  # a constant, here a quarter of the table, so that a whole table beside it cannot hide there.
  allowed = table // 2 + table // 4
  for output in jobs.run([sys.executable, "-c", BUILD], processes=2):
    sharded, whole = json.loads(output.splitlines()[-1])
    assert 0.9 * table // 2 < sharded < allowed
    assert whole > allowed  # the same measure, of a process that makes every row
