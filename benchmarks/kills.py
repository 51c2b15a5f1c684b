"""Kills training runs at random moments, starts them again, and compares them with whole ones.

    python benchmarks/kills.py --sigkill=30 --sigterm=10 --pairs=5

A run of the dlrm recipe on generated clicks saves every other step, so that many signals fall into
a save. Each disturbed run is killed once or twice, between its start and its
end, and the same command is given until it ends. Its log, its metrics and every array of its last
checkpoint must equal those of the run that was left alone, to the bit. A run of two processes
(`--pairs`) loses both to SIGKILL, or is told by a SIGTERM to one of them. Prints the counts, and
exits with 1 if a run differs or loses more than it may.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np

_STEPS, _EVERY = 40, 2
_ATTEMPTS = 8  # at a run, of which only the first two are disturbed
_GOES_ON = 75
_ROOT = pathlib.Path(__file__).resolve().parents[1]


def start(workdir: pathlib.Path, cache: pathlib.Path, count: int) -> list[subprocess.Popen]:
  """Starts the run's processes."""
  command = [
    sys.executable, "-m", "recipes.dlrm", "--config=configs/dlrm/synthetic.py:smoke",
    f"--workdir={workdir}", f"--config.cache_dir={cache}", f"--config.steps={_STEPS}",
    "--config.log_every=1", "--config.eval_every=10", f"--config.checkpoint_every={_EVERY}",
    "--config.dropout=0.2", "--config.baseline.max_rows=0",
  ]  # fmt: skip
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",
    # Compiling is most of the work here; all runs of one size share what the first one compiles.
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    "JAX_COMPILATION_CACHE_DIR": str(cache / "compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
  with socket.socket() as free:
    free.bind(("localhost", 0))
    address = f"localhost:{free.getsockname()[1]}"
  processes = []
  for index in range(count):
    if count > 1:
      environment |= {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(index),
      }
    log = (workdir.parent / f"{workdir.name}.{index}.log").open("ab")
    with log:
      processes.append(
        subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=log, stderr=log)
      )
  return processes


def wait(processes: list[subprocess.Popen]) -> list[int]:
  """Returns the exit statuses; kills what is left when one process has failed."""
  deadline = time.monotonic() + 900
  while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
    time.sleep(0.02)
  for process in processes:
    process.kill()
  return [process.wait() for process in processes]


def steps_of(workdir: pathlib.Path) -> int:
  """Returns how many steps a run has logged."""
  path = workdir / "metrics.jsonl"
  return path.read_bytes().count(b'"loss"') if path.exists() else 0


def saved(workdir: pathlib.Path) -> int:
  """Returns the step of the latest checkpoint."""
  names = [path.name for path in (workdir / "checkpoints").glob("*")]
  return max((int(name) for name in names if name.isdecimal()), default=0)


def disturb(
  processes: list[subprocess.Popen], workdir: pathlib.Path, how: signal.Signals, after: int
) -> bool:
  """Sends a signal some milliseconds after a step; returns whether it came before the run's end."""
  delay = random.random() * 0.15
  log = workdir.parent / f"{workdir.name}.0.log"
  size = log.stat().st_size  # a process that has said nothing is Python starting
  while log.stat().st_size == size and all(process.poll() is None for process in processes):
    time.sleep(0.002)
  while steps_of(workdir) < after and all(process.poll() is None for process in processes):
    time.sleep(0.002)
  time.sleep(delay)
  if any(process.poll() is not None for process in processes):
    return False
  told = processes if how == signal.SIGKILL else processes[-1:]
  for process in told:
    process.send_signal(how)
  return True


def arrays_of(workdir: pathlib.Path, step: int) -> dict[str, np.ndarray]:
  """Returns the arrays of a checkpoint by path."""
  import jax
  import orbax.checkpoint as ocp

  with ocp.PyTreeCheckpointer() as reader:
    path = workdir / "checkpoints" / str(step) / "state"
    metadata = reader.metadata(path).item_metadata.tree
    args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata)
    tree = reader.restore(path, restore_args=args)
  return {
    jax.tree_util.keystr(where): np.asarray(x)
    for where, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def content(workdir: pathlib.Path) -> tuple[dict, list, dict]:
  """Returns a run's metrics, its log without how fast it was, and the arrays of its last step."""
  result = json.loads((workdir / "result.json").read_text())
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  log = [{k: v for k, v in line.items() if k != "examples_per_second"} for line in lines]
  return result["metrics"], log, arrays_of(workdir, _STEPS)


def equal(first: tuple[dict, list, dict], second: tuple[dict, list, dict]) -> bool:
  """Returns whether two runs are equal to the bit."""
  same = first[:2] == second[:2] and first[2].keys() == second[2].keys()
  return same and all(
    x.dtype == second[2][name].dtype and x.tobytes() == second[2][name].tobytes()
    for name, x in first[2].items()
  )


def attempt(
  workdir: pathlib.Path, cache: pathlib.Path, count: int, how: signal.Signals
) -> tuple[int, str]:
  """Disturbs a run until it ends; returns how often, and what was wrong, or ""."""
  disturbed = 0
  for number in range(_ATTEMPTS):
    processes = start(workdir, cache, count)
    # Processes that are alone while they join wait for the one that has been told: the first signal
    # comes after a step of this attempt.
    first = min(steps_of(workdir) + int(count > 1), _STEPS - 1)
    is_told = number < random.choice((1, 2)) and disturb(
      processes, workdir, how, random.randint(first, _STEPS - 1)
    )
    statuses = wait(processes)
    disturbed += is_told
    if all(status == 0 for status in statuses):
      return disturbed, ""
    if not is_told:
      return disturbed, f"ended with {statuses}"
    if how == signal.SIGTERM and any(status != _GOES_ON for status in statuses):
      return disturbed, f"SIGTERM ended it with {statuses}, not {_GOES_ON}"
    lost = steps_of(workdir) - saved(workdir)
    if lost > _EVERY + 1 or (how == signal.SIGTERM and lost):
      return disturbed, f"{lost} steps were lost"
  return disturbed, f"has not ended after {_ATTEMPTS} attempts"


def main() -> None:
  formatter = argparse.RawDescriptionHelpFormatter
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
  parser.add_argument("--sigkill", type=int, default=30, help="runs of one process")
  parser.add_argument("--sigterm", type=int, default=10, help="runs of one process")
  parser.add_argument("--pairs", type=int, default=5, help="runs of two processes")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--folder", type=pathlib.Path, help="default: a temporary one")
  arguments = parser.parse_args()
  random.seed(arguments.seed)
  folder = arguments.folder or pathlib.Path(tempfile.mkdtemp())
  folder.mkdir(parents=True, exist_ok=True)
  cases = [("SIGKILL", 1, signal.SIGKILL, arguments.sigkill)]
  cases += [("SIGTERM", 1, signal.SIGTERM, arguments.sigterm)]
  cases += [("SIGKILL, two processes", 2, signal.SIGKILL, -(-arguments.pairs // 2))]
  cases += [("SIGTERM, two processes", 2, signal.SIGTERM, arguments.pairs // 2)]
  whole, failures = {}, 0
  for title, count, how, runs in cases:
    if runs and count not in whole:
      workdir = folder / f"whole_{count}"
      if any(wait(start(workdir, folder / "cache", count))):
        sys.exit(f"the undisturbed run failed: see {folder}")
      whole[count] = content(workdir)
    signals, same = 0, 0
    for number in range(runs):
      workdir = folder / f"{how.name}_{count}_{number}"
      disturbed, problem = attempt(workdir, folder / "cache", count, how)
      problem = problem or ("" if equal(content(workdir), whole[count]) else "differs")
      signals, same, failures = signals + disturbed, same + (not problem), failures + bool(problem)
      if problem:
        print(f"{workdir}: {problem}", flush=True)
    print(f"{title}: {runs} runs, {signals} signals, {same} equal to the bit", flush=True)
  sys.exit(bool(failures))


if __name__ == "__main__":
  main()
