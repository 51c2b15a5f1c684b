"""The shape of the project: how large its parts may be, and the versions that it is tested with."""

import importlib.metadata
import os
import pathlib
import re
import tomllib
import warnings

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import embed

ROOT = pathlib.Path(__file__).parents[1]

# Lines, and files where they count. A change may lower a number, and raises none.
BUDGETS = {
  "embed/**/*.py": (10_940, 48),
  "recipes/**/*.py": (10_491, 72),
  "configs/**/*.py": (544, None),
  "benchmarks/**/*.py": (2_941, None),
  "tests/*.py tests/[!r]*/**/*.py": (10_976, None),  # all but the recipes' own
  "tests/recipes/**/*.py": (7_599, None),
  "*.md docs/**/*.md recipes/**/*.md colabs/*.md benchmarks/*.md tests/**/*.md": (3_400, None),
}
UNCOUNTED = {"CHANGELOG.md", "docs/_build", "docs/colabs"}  # the last two a build writes


def test_no_part_grows():
  over = {}
  uncounted = [ROOT / name for name in UNCOUNTED]
  for patterns, (most_lines, most_files) in BUDGETS.items():
    found = [path for pattern in patterns.split() for path in ROOT.glob(pattern)]
    paths = [path for path in found if not any(map(path.is_relative_to, uncounted))]
    lines = sum(path.read_bytes().count(b"\n") for path in paths)
    if lines > most_lines or len(paths) > (most_files or len(paths)):
      over[patterns] = f"{lines} lines in {len(paths)} files"
  assert not over


def pinned(name):
  """The versions by package in a file of `package==version` lines."""
  lines = (ROOT / "tests" / name).read_text().splitlines()
  return dict(line.split("==") for line in lines if not line.startswith("#"))


@pytest.mark.filterwarnings("default")  # a version that appeared since is no failure
def test_the_versions_that_are_tested():
  """README and CI name those of pyproject.toml, oldest.txt and newest.txt."""
  oldest, newest = pinned("oldest.txt"), pinned("newest.txt")
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  requirements = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
  for name in ("jax", "flax"):
    assert str(requirements[name]).split(",")[-1] == f">={oldest[name]}"
    assert newest[name] in requirements[name]
  prefix = "Programming Language :: Python :: 3."
  pythons = [c.removeprefix(prefix[:-2]) for c in project["classifiers"] if c.startswith(prefix)]
  readme = " ".join((ROOT / "README.md").read_text().split())
  assert f"Python {pythons[0]} to {pythons[-1]}" in readme
  assert f"JAX {oldest['jax']} to {newest['jax']}" in readme
  assert f"Flax {oldest['flax']} to {newest['flax']}" in readme
  for workflow in ("ci.yml", "release.yml"):
    text = (ROOT / ".github" / "workflows" / workflow).read_text()
    assert set(re.findall(r' python: "([\d.]+)"', text)) == set(pythons), workflow
  citation = (ROOT / "CITATION.cff").read_text()
  assert f"\nversion: {embed.__version__}\n" in citation
  for name, version in newest.items():
    installed = importlib.metadata.version(name)
    if os.environ.get("CI_STEP") == "newest":  # unless another package does not allow it
      assert Version(installed) >= Version(version), name
    if Version(installed) > Version(version):
      warnings.warn(f"{name} {installed} is newer than {version}, of newest.txt", stacklevel=1)
