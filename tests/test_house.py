"""The shape of the library: imports point one way, and each kind of knowledge has one place."""

import ast
import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).parents[1]

# A file may import those before it.
ORDER = [
  "tools.text",
  "config",
  "structure",
  "engine.jax_internals",
  "engine.xla",
  "engine.layout",
  "engine.bags",
  "inputs",
  "padding",
  "engine.rounding",
  "transforms.hashing",
  "transforms.kinds",
  "transforms.columns",
  "transforms.vocabulary",
  "transforms.crossed",
  "transforms.batches",
  "transforms",
  "row_optimizer",
  "optimizers",
  "engine.collectives",
  "engine.host",
  "engine.switches",
  "initializers",
  "engine.packing",
  "engine.lookup",
  "serving.lookup",
  "engine.mesh",
  "engine.stack",
  "engine.cost",
  "engine.grads",
  "kernels.cpu.memory",
  "kernels.cpu.frame",
  "kernels.cpu.cache",
  "kernels.cpu.equations",
  "kernels.cpu.sources.probe",
  "kernels.cpu.sources.count_beyond",
  "kernels.cpu.sources.bag_sum",
  "kernels.cpu.sources.row_step",
  "kernels.cpu.sources.row_equation",
  "kernels.cpu.build",
  "kernels.cpu",
  "kernels.cpu.large_pages",
  "kernels.sparse_core.kernels",
  "kernels.sparse_core",
  "kernels",
  "engine.access",
  "engine.update_cpu",
  "engine.row_sums",
  "engine.route",
  "engine.exchange",
  "engine.row_step",
  "engine.update",
  "engine.taps",
  "engine",
  "storage.views",
  "storage.placing",
  "storage.tables",
  "storage.initial",
  "storage.changes",
  "storage",
  "gradients",
  "combiners",
  "stacking",
  "planning",
  "tools.profiling",
  "variables",
  "steps",
  "layer",
  "autodiff",
  "optimizer",
  "checkpoint",
  "deltas",
  "tpu_embedding.config_spec",
  "serving.files",
  "serving.export",
  "serving",
  "tpu_embedding.importers",
  "tpu_embedding",
  "",
  "tools.reference",
  "tools.check",
  "tools.inspection",
  "tools",
  "__main__",
]


# The tests of a file are in the test file of its name; those of these files are elsewhere.
TESTED_IN = {
  "": "test_api_pages",
  "engine.access": "engine/test_packing",
  "engine.bags": "engine/test_lookup",
  "storage.changes": "test_deltas",
  "engine.collectives": "engine/test_exchange",
  "engine.cost": "test_planning",
  "engine.grads": "test_gradients",
  "storage.initial": "storage/test_tables",
  "engine.jax_internals": "test_autodiff",
  "storage.placing": "storage/test_tables",
  "engine.route": "engine/test_exchange",
  "kernels.cpu.frame": "kernels/cpu/test_kernels",
  "kernels.cpu.sources.bag_sum": "kernels/cpu/test_kernels",
  "kernels.cpu.sources.count_beyond": "kernels/cpu/test_kernels",
  "kernels.cpu.sources.probe": "kernels/cpu/test_build",
  "kernels.cpu.sources.row_equation": "kernels/cpu/test_kernels",
  "kernels.cpu.sources.row_step": "kernels/cpu/test_kernels",
  "engine.row_step": "engine/test_update",
  "engine.row_sums": "engine/test_update",
  "engine.stack": "test_compiled_step",
  "engine.taps": "test_autodiff",
  "engine.xla": "test_in_place",
  "engine.update_cpu": "engine/test_update",
  "storage.views": "storage/test_tables",
  "padding": "test_inputs",
  "row_optimizer": "test_optimizers",
  "stacking": "test_planning",
  "steps": "test_conformance",
  "variables": "storage/test_tables",
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


def imported_files(path):
  """The library's files that a file imports: of `embed.engine.mesh` only that, not its package."""
  names = {name.removeprefix("embed").lstrip(".") for name in imports(path) if name[:5] == "embed"}
  names &= set(ORDER)
  return {name for name in names if not any(other.startswith(f"{name}.") for other in names)} - {""}


def test_imports_point_one_way():
  assert set(files()) == set(ORDER)
  for name, path in files().items():
    before = set(ORDER[: ORDER.index(name)])
    assert not imported_files(path) - before, name


def test_each_file_knows_only_its_own():
  for name, path in files().items():
    packages = {module.split(".")[0] for module in imports(path)}
    assert not packages & {"recipes", "configs", "grain", "absl", "ml_collections"}, path
    room = name.split(".")[0]
    if room in ("engine", "kernels", "storage") and name != "engine.jax_internals":
      assert "flax" not in packages, f"{path}: pure arrays, no nnx"
    private = {module for module in imports(path) if "._" in module and module[:5] != "embed"}
    assert name == "engine.jax_internals" or not private, path
    if name in ("config", "structure"):
      assert "jax" not in packages
    meshes = {module for module in imports(path) if module.startswith("jax.sharding.")}
    meshes -= {"jax.sharding.PartitionSpec"}
    assert name in ("engine.mesh", "storage.placing") or not meshes, path


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
