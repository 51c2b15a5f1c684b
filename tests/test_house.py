"""The shape of the library: imports point one way, and each kind of knowledge has one place."""

import ast
import importlib.metadata
import importlib.util
import pathlib
import re
import tomllib
import warnings

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = pathlib.Path(__file__).parents[1]

# The tests of a file are in the test file of its name; those of these files are elsewhere.
TESTED_IN = {
  "": "test_api_pages",
  "engine.bags": "engine/test_lookup",
  "engine.cost": "test_planning",
  "engine.grads": "engine/test_update",
  "engine.jax_internals": "test_autodiff",
  "engine.stack": "engine/test_layout",
  "engine.taps": "test_autodiff",
  "engine.xla": "test_in_place",
  "kernels.cpu.frame": "kernels/cpu/test_kernels",
  "kernels.cpu.memory": "kernels/cpu/test_kernels",
  "kernels.cpu.sources.bag_sum": "kernels/cpu/test_kernels",
  "kernels.cpu.sources.count_beyond": "kernels/cpu/test_kernels",
  "kernels.cpu.sources.find_rows": "engine/test_admission",
  "kernels.cpu.sources.probe": "kernels/cpu/test_build",
  "kernels.cpu.sources.row_equation": "kernels/cpu/test_kernels",
  "kernels.cpu.sources.row_step": "kernels/cpu/test_kernels",
  "elementwise": "test_optimizers",
  "storage.changes": "test_deltas",
  "storage.initial": "storage/test_tables",
  "storage.owners": "test_dynamic_vocabulary",
  "variables": "test_deltas",
}
# A step, the choice of kernels, and names.
PACKAGES = {
  "engine",
  "kernels",
  "kernels.cpu",
  "kernels.sparse_core",
  "serving",
  "storage",
  "tools",
  "tpu_embedding",
  "transforms",
}


def files():
  """The files of the library by dotted name: "" for the package itself."""
  root = ROOT / "embed"
  dotted = lambda path: ".".join(path.relative_to(root).with_suffix("").parts)
  return {dotted(path).removesuffix("__init__").rstrip("."): path for path in root.rglob("*.py")}


def imports(path):
  names = set()
  package = ".".join(path.relative_to(ROOT).parent.parts)
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
      names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
  return names


@pytest.mark.ci
def test_imports_point_one_way():
  """By the contracts of pyproject.toml: no cycle anywhere, and the engine below all others."""
  cli = pytest.importorskip("importlinter.cli", reason="import-linter is not installed")
  assert cli.lint_imports(str(ROOT / "pyproject.toml"), no_cache=True) == cli.EXIT_STATUS_SUCCESS


def test_each_file_knows_only_its_own():
  for name, path in files().items():
    private = {module for module in imports(path) if "._" in module and module[:5] != "embed"}
    assert name == "engine.jax_internals" or not private, path
    meshes = {module for module in imports(path) if module.startswith("jax.sharding.")}
    meshes -= {"jax.sharding.PartitionSpec"}
    assert name in ("engine.mesh", "storage.tables") or not meshes, path


def test_only_bags_reads_segments():
  for name, path in files().items():
    read = [x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.Attribute)]
    assert name == "engine.bags" or not any(x.attr == "segments" for x in read), path


NAMED_TUPLES = {"_replace", "_fields", "_asdict", "_make"}  # public in spite of the underscore


def foreign_private_names(path):
  """Names with an underscore that a file reads and does not define."""
  tree = ast.parse(path.read_text())
  own, used = set(), set()
  for node in ast.walk(tree):
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
      own.add(node.name)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
      own.add(node.id)
    elif isinstance(node, ast.Attribute):
      is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
      (own if is_own else used).add(node.attr)
    elif isinstance(node, ast.ImportFrom) and node.module.startswith("embed"):
      used |= {alias.name for alias in node.names}
  private = {name for name in used if name.startswith("_") and not name.endswith("__")}
  return private - own - NAMED_TUPLES


def test_no_file_reads_private_names_of_another():
  for name, path in files().items():
    if name != "engine.jax_internals":
      assert not foreign_private_names(path), name


def test_recipes_do_not_import_each_other():
  recipes = [path.parent for path in (ROOT / "recipes").glob("*/train.py")]
  assert recipes
  for recipe in recipes:
    others = {f"recipes.{other.name}" for other in recipes if other != recipe}
    for path in recipe.glob("*.py"):
      used = {".".join(name.split(".")[:2]) for name in imports(path)}
      assert not used & others, path


def test_recipes_have_no_import_cycle():
  """Imports in functions count; a module does not wait for the packages that it is in."""
  paths = {}
  for path in (ROOT / "recipes").rglob("*.py"):
    parts = path.relative_to(ROOT).with_suffix("").parts
    paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
  used = {
    name: {
      other for other in imports(path) & paths.keys() if not f"{name}.".startswith(f"{other}.")
    }
    for name, path in paths.items()
  }
  light = {name for name in used if not used[name]}
  while rest := used.keys() - light:
    free = {name for name in rest if used[name] <= light}
    assert free, f"a cycle runs through some of {sorted(rest)}"
    light |= free


def test_every_file_has_its_tests():
  mirrored = set()
  for name in files().keys() - PACKAGES:
    folder, _, stem = name.rpartition(".")
    mirror = f"{folder.replace('.', '/')}/test_{stem.strip('_')}".removeprefix("/")
    assert (ROOT / "tests" / f"{TESTED_IN.get(name, mirror)}.py").exists(), name
    mirrored |= {name} if (ROOT / "tests" / f"{mirror}.py").exists() else set()
  assert not TESTED_IN.keys() - files().keys(), "a file that is not there"
  assert not TESTED_IN.keys() & mirrored, "a file that has its own tests"


def test_no_test_imports_another():
  """What tests share is in tests/support."""
  for path in (ROOT / "tests").rglob("*.py"):
    modules = {name.split(".")[0] for name in imports(path)}
    assert not {name for name in modules if name.startswith("test")}, path


def test_everything_public_is_exported_and_documented():
  import embed

  for name in embed.__all__:
    assert getattr(embed, name).__doc__, name
  assert sorted(embed.__all__) == list(embed.__all__)


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
  workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
  assert set(re.findall(r'python: "([\d.]+)"', workflow)) == set(pythons)
  for name in newest:
    installed = importlib.metadata.version(name)
    if Version(installed) > Version(newest[name]):
      warnings.warn(f"{name} {installed} is newer than {newest[name]}, of newest.txt", stacklevel=1)
