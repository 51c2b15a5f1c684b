"""What is installed: the wheel holds the library, its recipes and their configs."""

import fnmatch
import pathlib
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
INSTALLED_AS = {"embed": "embed", "recipes": "embed.recipes", "configs": "embed.configs"}


def sources():
  """The Python files that are installed, relative to the checkout."""
  for top in INSTALLED_AS:
    for path in sorted((ROOT / top).rglob("*.py")):
      yield path.relative_to(ROOT)


def test_every_folder_with_python_files_is_installed():
  listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
  wanted = set()
  for path in sources():
    top, *below = path.parent.parts
    wanted.add(".".join([INSTALLED_AS[top], *below]))
  assert sorted(listed["packages"]) == sorted(wanted)
  names = {top: name for top, name in INSTALLED_AS.items() if top != name}
  assert listed["package-dir"] == {name: top for top, name in names.items()}


@pytest.mark.ci
def test_the_wheel_holds_every_file_and_no_other_top_level_name(tmp_path):
  for name in ("pyproject.toml", "README.md", "LICENSE"):
    shutil.copy(ROOT / name, tmp_path)
  for top in INSTALLED_AS:
    shutil.copytree(ROOT / top, tmp_path / top, ignore=shutil.ignore_patterns("__pycache__"))
  build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
  subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
  (wheel,) = (tmp_path / "dist").glob("*.whl")
  held = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
  rest = {path for path in held if not fnmatch.fnmatch(path, "*.dist-info/*")}
  wanted = {"/".join([*INSTALLED_AS[p.parts[0]].split("."), *p.parts[1:]]) for p in sources()}
  assert rest == wanted | {"embed/py.typed"}
