"""The command for whoever has a TPU or a GPU, run on CPU with little."""

import argparse
import json
import sys

import pytest
from pages import ROOT

import embed
from embed import check


@pytest.fixture
def device(monkeypatch):
  monkeypatch.syspath_prepend(ROOT / "benchmarks")
  monkeypatch.delitem(sys.modules, "contenders", raising=False)
  import device

  return device


ARGUMENTS = argparse.Namespace(rows=64, ids=64, dim=[16], steps=2, cpu=True)


@pytest.mark.ci
@pytest.mark.parametrize("scale", [1, 1.001])
def test_sums_are_compared(device, monkeypatch, scale):
  apply = embed.SparseEmbed.apply_gradients
  wrong = lambda layer, grads, residual: apply(layer, grads * scale, residual)
  monkeypatch.setattr(embed.SparseEmbed, "apply_gradients", wrong)
  found, text = device.sums_of_a_step(3, "float32", 256)
  assert bool(found) == (scale != 1), text
  if found:
    names = [line.partition(":")[0] for line in found]
    assert names == ["a power law", "one id", "distinct ids", "ids out of range"]


@pytest.mark.ci
def test_what_fails_is_reported_and_the_rest_runs(device, monkeypatch, capsys):
  monkeypatch.setattr(check, "main", lambda: 1)
  monkeypatch.setattr(embed.SparseEmbed, "apply_gradients", lambda *_, **__: 1 / 0)
  monkeypatch.setattr(device, "WIDTHS", ())
  report = device.of_way("plain", ARGUMENTS)
  steps = ["16, sgd", "16, rowwise_adagrad", "16, adagrad", "16, adam"]
  assert report["failed"] == "; ".join(["python -m embed check", *steps])
  assert report["ms"]["16, sgd"] == {"failed": "ZeroDivisionError: division by zero"}
  assert report["ms"]["16, lookup"]["each_ms"] > 0
  assert "Traceback" in capsys.readouterr().err


def run(device, monkeypatch, path, *arguments):
  monkeypatch.setattr(sys, "argv", ["device.py", "--recipes", f"--json={path}", *arguments])
  return device.main(), json.loads(path.read_text())


@pytest.mark.ci
def test_a_way_that_the_devices_lack_is_skipped_with_the_reason(device, monkeypatch, tmp_path):
  arguments = "--ways", "SparseCores", "--cpu"
  status, report = run(device, monkeypatch, tmp_path / "device.json", *arguments)
  assert status == 0
  assert {"jax", "jaxlib", "libtpu"} < set(report["versions"])
  way = report["ways"]["SparseCores"]
  assert way["not run"] == "devices of kind cpu are not known to have any"
  assert "not run: devices of kind cpu" in way["printed"]


@pytest.mark.ci
def test_a_process_that_hangs_is_given_up(device, monkeypatch, tmp_path):
  program = tmp_path / "hangs"
  program.write_text("#!/bin/sh\necho started\nexec sleep 60\n")
  program.chmod(0o755)
  monkeypatch.setattr(device.sys, "executable", str(program))
  path = tmp_path / "device.json"
  _, report = run(device, monkeypatch, path, "--ways", "plain", "--cpu", "--minutes=0.005")
  assert report["ways"]["plain"]["failed"] == "not done in time, exit status -9"
  assert report["ways"]["plain"]["printed"] in ("started\n", "")
