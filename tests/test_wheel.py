"""What is installed: the wheel holds the library, its recipes and their configs, and runs them."""

import fnmatch
import importlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

from recipes import catalogue, errors

ROOT = pathlib.Path(__file__).parents[1]
INSTALLED_AS = {"embed": "embed", "recipes": "embed.recipes", "configs": "embed.configs"}
RECIPES = list(catalogue.recipes())


def sources():
  """The Python files that are installed, relative to the checkout."""
  for top in INSTALLED_AS:
    for path in sorted((ROOT / top).rglob("*.py")):
      yield path.relative_to(ROOT)


def python(*argv, cwd, path=ROOT):
  """Runs a command with the packages of one folder; returns its status and both its streams."""
  environment = os.environ | {"PYTHONPATH": str(path), "XLA_FLAGS": ""}
  environment |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # it compiles more than it computes
  return subprocess.run(
    [sys.executable, *argv], cwd=cwd, env=environment, capture_output=True, text=True, check=False
  )


def test_every_folder_with_python_files_is_installed():
  listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
  wanted = set()
  for path in sources():
    top, *below = path.parent.parts
    wanted.add(".".join([INSTALLED_AS[top], *below]))
  assert sorted(listed["packages"]) == sorted(wanted)
  names = {top: name for top, name in INSTALLED_AS.items() if top != name}
  assert listed["package-dir"] == {name: top for top, name in names.items()}


WITHOUT = """
import runpy, sys
sys.modules[sys.argv.pop(1)] = None  # an import of it is a ModuleNotFoundError
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
  ("package", "module"),
  [("absl", "recipes.dlrm"), ("ml_collections", "recipes.sequence"), ("uniplot", "recipes.report")],
)
def test_a_package_that_is_not_installed_is_one_line(package, module, tmp_path):
  done = python("-c", WITHOUT, package, module, cwd=tmp_path)
  wanted = f"error: {package} is not installed: pip install -e '.[recipes]'\n"
  assert (done.returncode, done.stdout, done.stderr) == (1, "", wanted)


@pytest.mark.ci
def test_a_package_that_only_training_needs_is_one_line(tmp_path):
  done = python("-c", WITHOUT, "grain", "recipes.two_tower", cwd=tmp_path)
  assert done.returncode == 1
  assert done.stderr.splitlines()[1:] == [
    "error: grain is not installed: pip install -e '.[recipes]'"
  ]


def test_a_module_of_ours_that_is_missing_keeps_its_traceback():
  for name in ("recipes.nosuch", "embed.nosuch"):
    with pytest.raises(ModuleNotFoundError), errors.importing():
      importlib.import_module(name)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
  """A folder of packages in which the wheel is installed, and nothing else of the checkout."""
  checkout, site = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("site")
  for name in ("pyproject.toml", "README.md", "LICENSE"):
    shutil.copy(ROOT / name, checkout)
  for top in INSTALLED_AS:
    shutil.copytree(ROOT / top, checkout / top, ignore=shutil.ignore_patterns("__pycache__"))
  build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
  done = python("-c", build, cwd=checkout)
  assert done.returncode == 0, done.stderr
  (wheel,) = (checkout / "dist").glob("*.whl")
  zipfile.ZipFile(wheel).extractall(site)
  return site


@pytest.mark.ci
def test_the_wheel_holds_every_file_and_no_other_top_level_name(site):
  held = {str(path.relative_to(site)) for path in site.rglob("*.*") if path.is_file()}
  rest = {path for path in held if not fnmatch.fnmatch(path, "*.dist-info/*")}
  wanted = {"/".join([*INSTALLED_AS[p.parts[0]].split("."), *p.parts[1:]]) for p in sources()}
  assert rest == wanted | {"embed/py.typed"}


@pytest.mark.ci
def test_commands_are_listed_as_they_are_called(site, tmp_path):
  done = python("-m", "embed.recipes", cwd=tmp_path, path=site)
  assert done.returncode == 0, done.stderr
  commands = re.findall(r"^python -m (embed\.recipes\.\S+)", done.stdout, re.MULTILINE)
  programs = [
    "minimal", "describe", "config", "days", "sweep", "baselines", "evaluate", "export", "predict",
    "report", "semantic_ids", "aot",
  ]  # fmt: skip
  assert commands == [f"embed.recipes.{name}" for name in [*RECIPES, *programs]]
  assert f"These files are in {site}/embed\n" in done.stdout
  paths = re.findall(r"^  (configs/[^\s\[]+)", done.stdout, re.MULTILINE)
  assert paths == [str(path) for recipe in RECIPES for path in catalogue.configs(recipe)]
  assert all((site / "embed" / path).is_file() for path in paths)


@pytest.mark.ci
def test_recipes_run_in_a_folder_of_the_user(site, tmp_path):
  """With workers that import the main module."""
  own = (ROOT / "configs/dlrm/synthetic.py").read_text()
  changed = own.replace('"dataset": "synthetic"', '"dataset": "synthetic", "num_workers": 1')
  assert changed != own
  (tmp_path / "mine.py").write_text(changed)
  configs = {recipe: f"configs/{recipe}/synthetic.py" for recipe in RECIPES} | {"dlrm": "mine.py"}
  for recipe, config in configs.items():
    flags = [f"--config={config}:smoke", f"--config.cache_dir={tmp_path}/cache"]
    module = f"embed.recipes.{recipe}"
    done = python("-m", module, *flags, f"--workdir=runs/{recipe}", cwd=tmp_path, path=site)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"\ncurves:  python -m embed.recipes.report runs/{recipe}\n")
    result = json.loads((tmp_path / "runs" / recipe / "result.json").read_text())
    assert result["recipe"] == recipe
    assert result["baselines"]
  runs = [f"runs/{recipe}" for recipe in RECIPES]
  done = python("-m", "embed.recipes.report", *runs, "--out=all", cwd=tmp_path, path=site)
  assert done.returncode == 0, done.stderr
  assert (tmp_path / "all.md").is_file()


@pytest.mark.ci
def test_a_mistake_is_answered_with_the_installed_name(site, tmp_path):
  for config, hint in (
    ("nosuch.py", "`python -m embed.recipes` lists them"),
    ("configs/sequence/synthetic.py", "that is a config for `python -m embed.recipes.sequence`"),
  ):
    done = python("-m", "embed.recipes.dlrm", f"--config={config}", cwd=tmp_path, path=site)
    assert hint in done.stderr
