"""The README's example runs as it stands, and its commands name what exists."""

import collections
import json
import pathlib
import re
import statistics

import pytest

NO_BREAK = "\u00a0"
ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
STATING = [ROOT / "README.md", *ROOT.glob("recipes/*/README.md"), *ROOT.glob("configs/*/*.py")]


@pytest.mark.ci
def test_the_examples_run(capsys):
  scope = {}
  for example in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
    exec(compile(example, "README.md", "exec"), scope)
  assert float(scope["loss"]) > 0
  untouched = scope["model"].embed.variables["movie"]["accumulators"][0]
  assert (untouched == untouched[0]).all()
  assert scope["model"].embed(scope["batch"])["watched"].shape == (2, 64)
  assert scope["plan"]["movie"].strategy == "div"
  assert "on each of 8 devices" in capsys.readouterr().out


def test_paths_exist():
  written = re.findall(r"--out=(\S+)", README)  # by a command of the page
  for path in re.findall(r"--config=(\S+?\.py)", README):
    assert (ROOT / path).exists() or path in written, path
  for path in re.findall(r"\]\((?!http)([^)#]+)\)", README):
    assert (ROOT / path).exists(), path


def means():
  """Mean and standard deviation of every metric over the seeds of every committed run."""
  runs = collections.defaultdict(list)
  for path in (ROOT / "docs" / "results").glob("*_[0-9].json"):
    runs[path.stem[:-2]].append(json.loads(path.read_text())["metrics"])
  for seeds in runs.values():
    for name in seeds[0]:
      values = [metrics[name] for metrics in seeds]
      if len(values) > 1:
        yield spread(values)


def spread(values):
  """The mean, and the standard deviation where there are several values."""
  numbers = [statistics.fmean(values), *([statistics.stdev(values)] if len(values) > 1 else [])]
  return " ± ".join(f"{number:.4f}".removeprefix("0") for number in numbers)


@pytest.mark.parametrize("path", STATING, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_means_are_those_of_the_committed_runs(path):
  stated = re.findall(r"\.\d{4} ± \.\d{4}", path.read_text().replace(NO_BREAK, " "))
  assert not set(stated) - set(means())
