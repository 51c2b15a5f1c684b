"""The README's example runs as it stands, and its commands name what exists."""

import collections
import json
import pathlib
import re
import statistics

import pytest
import test_pages

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
STATING = [ROOT / "README.md", *ROOT.glob("recipes/*/README.md"), *ROOT.glob("configs/*/*.py")]


def test_the_examples_run(capsys):
  scope = {}
  for example in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
    exec(compile(example, "README.md", "exec"), scope)
  assert float(scope["loss"]) > 0
  untouched = scope["model"].embed.variables["movie"]["accumulators"][0]
  assert (untouched == untouched[0]).all()
  assert scope["layer"](scope["batch"])["watched"].shape == (2, 64)
  assert scope["plan"]["movie"].strategy == "div"
  assert "on each of 8 devices" in capsys.readouterr().out


def test_paths_exist():
  for path in re.findall(r"--config=(\S+?\.py)", README):
    assert (ROOT / path).exists(), path
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
        yield f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f}".replace("0.", ".")


@pytest.mark.parametrize("path", STATING, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_means_are_those_of_the_committed_runs(path):
  stated = re.findall(r"\.\d{4} ± \.\d{4}", path.read_text())
  assert stated or path.name != "README.md"
  assert not set(stated) - set(means())


def test_speed_is_that_of_the_page():
  rows = re.findall(r"^\| (.*) \|$", README.split("## Speed")[1].split("\n## ")[0], re.MULTILINE)
  rows = [row.replace("**", "").replace("no such optimizer", "").split("|") for row in rows[1:]]
  found = [[cell.strip() for cell in row] for row in rows]
  assert found == test_pages.table("One step of one table on CPU")
