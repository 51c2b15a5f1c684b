"""The command for whoever has a TPU or a GPU, run on CPU with little."""

import argparse
import sys

import pytest
from pages import ROOT

import embed
from embed.tools import check


@pytest.fixture
def device(monkeypatch):
  monkeypatch.syspath_prepend(ROOT / "benchmarks")
  monkeypatch.delitem(sys.modules, "contenders", raising=False)
  import device

  return device


ARGUMENTS = argparse.Namespace(rows=64, ids=64, dim=[16], steps=2)


@pytest.mark.full
def test_packed_tables_and_tables_in_the_host_are_timed(device, monkeypatch, capsys):
  monkeypatch.setattr(check, "main", lambda: 0)
  monkeypatch.setenv("SPARSE_EMBED_PACKED", "1")
  found = device.of_way("packed", ARGUMENTS)
  assert (found["kind"], found["devices"], "failed" in found) == ("cpu", 8, False)
  names = ["lookup", "sgd", "rowwise_adagrad", "adagrad", "adam", "rowwise_adagrad, host"]
  assert list(found["ms"]) == [f"16, {name}" for name in names]
  assert all(ms > 0 for times in found["ms"].values() for ms in times.values())
  assert "16 rowwise_adagrad, host" in capsys.readouterr().out


def test_nothing_is_timed_if_the_check_fails(device, monkeypatch):
  monkeypatch.setattr(check, "main", lambda: 1)
  assert device.of_way("plain", ARGUMENTS)["failed"] == "python -m embed check"


def test_a_way_that_the_devices_lack_is_reported_with_the_reason(device):
  reason = "devices of kind cpu are not known to have any"
  assert device.of_way("SparseCores", ARGUMENTS)["not run"] == reason


@pytest.mark.full
def test_a_step_that_fails_is_reported_and_the_others_run(device, monkeypatch):
  monkeypatch.setattr(check, "main", lambda: 0)
  monkeypatch.setattr(embed.SparseEmbed, "apply_gradients", lambda *_, **__: 1 / 0)
  found = device.of_way("plain", ARGUMENTS)
  assert found["failed"] == "16, sgd; 16, rowwise_adagrad; 16, adagrad; 16, adam"
  assert found["ms"]["16, sgd"] == {"failed": "ZeroDivisionError: division by zero"}
  assert found["ms"]["16, lookup"]["each"] > 0
