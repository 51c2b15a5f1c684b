"""The shape of the library: imports point one way, and each kind of knowledge has one place."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[1]

# A file may import those before it. `config` and `layout` stand alone; nnx starts at
# `module`.
ORDER = [
  "internals",
  "text",
  "config",
  "layout",
  "traffic",
  "ragged",
  "rounding",
  "keys",
  "transforms",
  "optimizers",
  "lookup",
  "combining",
  "serving",
  "cpu",
  "update",
  "exchange",
  "sharding",
  "views",
  "initializers",
  "stack",
  "grads",
  "planning",
  "profiling",
  "module",
  "routing",
  "optimizer",
  "checkpoint",
  "spec",
  "exporting",
  "importers",
  "__init__",
  "reference",
  "check",
  "inspection",
  "__main__",
]


def imports(path):
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
  return found


def test_imports_point_one_way():
  files = {path.stem: path for path in (ROOT / "embed").glob("*.py")}
  assert set(files) == set(ORDER)
  for i, name in enumerate(ORDER):
    mine = {m.split(".")[1] for m in imports(files[name]) if m.startswith("embed.")}
    assert not (mine & set(ORDER)) - set(ORDER[:i]), name


def test_each_file_knows_only_its_own():
  for path in (ROOT / "embed").glob("*.py"):
    packages = {name.split(".")[0] for name in imports(path)}
    assert not packages & {"recipes", "configs", "grain", "absl", "ml_collections"}, path
    if path.stem in ORDER[: ORDER.index("module")]:
      assert "flax" not in packages, f"{path}: pure arrays, no nnx"
    assert path.stem == "internals" or not any(m.startswith("jax._src") for m in imports(path))
    if path.stem == "config":
      assert "jax" not in packages
    meshes = {name for name in imports(path) if name.startswith("jax.sharding.")}
    if path.stem in ("views", "stack"):
      meshes -= {"jax.sharding.PartitionSpec"}
    assert path.stem == "sharding" or not meshes, path


def test_recipes_do_not_import_each_other():
  recipes = [p for p in (ROOT / "recipes").iterdir() if (p / "__main__.py").exists()]
  assert recipes
  for recipe in recipes:
    others = {f"recipes.{other.name}" for other in recipes if other != recipe}
    for path in recipe.glob("*.py"):
      used = {".".join(name.split(".")[:2]) for name in imports(path)}
      assert not used & others, path


def test_everything_public_is_exported_and_documented():
  import embed

  for name in embed.__all__:
    assert getattr(embed, name).__doc__, name
  assert sorted(embed.__all__) == list(embed.__all__)
