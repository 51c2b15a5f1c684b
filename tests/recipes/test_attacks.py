"""Files, folders and texts from others: an error that names the file, and nothing else happens."""

import contextlib
import json
import os
import pathlib
import random
import runpy
import shutil
import signal

import pytest
from cases import each, refused

from recipes import arrays, describe, files, serving
from recipes.errors import UserError
from recipes.run import checkpoints

ROOT = pathlib.Path(__file__).parents[2]
MARKS = "\u202e\u2066"  # turn the direction of writing


@contextlib.contextmanager
def within(seconds):
  """Fails what takes longer, as one that waits for a pipe."""

  def late(*unused):
    raise TimeoutError(f"more than {seconds} s")

  before = signal.signal(signal.SIGALRM, late)
  signal.alarm(seconds)
  try:
    yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def sealed(folder, **changes):
  """Rewrites a manifest as one who knows its format."""
  content = json.loads((folder / arrays.MANIFEST).read_text()) | changes
  content.pop(arrays._OWN)
  content[arrays._OWN] = arrays._checksum_of(content)
  (folder / arrays.MANIFEST).write_text(json.dumps(content))


def replaced(path, by):
  """Puts something else than a regular file at a path."""
  path.unlink()
  if by == "pipe":
    os.mkfifo(path)
  else:
    path.symlink_to(by)


ENTRY = {"size": 1, "xxh3_128": "0"}


@pytest.fixture
def checkpoint(tmp_path):
  folder = tmp_path / "checkpoints" / "20"
  (folder / "state").mkdir(parents=True)
  (folder / "state" / "arrays").write_bytes(b"content")
  progress = {"step": 20, "best_step": 0}
  arrays.write_manifest(folder, {"follows": None, "progress": progress})
  return folder


def test_manifests_that_lead_elsewhere(checkpoint):
  manifest = checkpoint / arrays.MANIFEST
  content = manifest.read_text()

  def call(changes):
    manifest.write_text(content)
    sealed(checkpoint, **changes)
    with pytest.raises(UserError):
      checkpoints.newest(checkpoint.parent)
    checkpoints.of_step(checkpoint.parent, 20)

  cases = [
    ({"follows": -1}, "follows step -1"),
    ({"follows": "../../.."}, "follows is '../../..', expected"),
    ({"files": []}, r"files is \[\], expected dict"),
    ({"files": {"../../secret": ENTRY}}, "names '../../secret'"),
    ({"files": {"/dev/zero": ENTRY}}, "names '/dev/zero'"),
    ({"files": {"a\0b": ENTRY}}, "names"),
  ]
  refused([(changes, rf"checkpoints/20.*{words}") for changes, words in cases], call, UserError)


# --- names and values as text ---------------------------------------------------------------------


def write_table(path, header="city"):
  lines = [f"{i % 2},c{i % 7}" for i in range(400)]
  path.write_text("\n".join([f"clicked,{header}", *lines]) + "\n")
  return path


NAMES = {
  "closed": 'day """;open("ran", "w");""" .csv',
  "lines": 'a\n"""\nopen("ran", "w")\n"""\n.csv',
  "backslash": '\\"""\nopen("ran", "w")#.csv',
  "single": "a'''\nopen('ran', 'w')\n'''.csv",
  "direction": f"a{MARKS}b.csv",
}


def test_names_are_no_code(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)

  def check(name, is_column):
    column = name.replace('"', '""').replace(".csv", "")
    table = write_table(pathlib.Path("t.csv" if is_column else name), f'"{column}"')
    pathlib.Path("my.py").unlink(missing_ok=True)
    try:
      describe.main([str(table), "--label=clicked", "--out=my.py"])
    except SystemExit:  # a header over several lines is refused
      assert is_column
      assert not pathlib.Path("my.py").exists()
      return
    text = pathlib.Path("my.py").read_text()
    assert all(char.isprintable() or char == "\n" for char in text)
    config = runpy.run_path("my.py")["get_config"]()
    assert not pathlib.Path("ran").exists()
    assert is_column or config["files"] == name

  each(
    {f"{key}, {of}": (NAMES[key], of == "column") for key in NAMES for of in ("file", "column")},
    check,
  )


def test_no_page_names_a_package_that_an_index_may_give_to_others():
  pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/**/*")]
  text = {path: path.read_text() for path in pages if path.suffix in (".md", ".py")}
  assert not [path for path, each in text.items() if "pip install sparse-embed" in each]
  assert not [path for path, each in text.items() if "pip install 'sparse-embed" in each]


# --- exports --------------------------------------------------------------------------------------


def as_json(content):
  try:
    return json.loads(content)
  except ValueError:
    return None


def damage(draw, folder, name, kind):
  """Damages a file of a folder."""
  path, content = folder / name, (folder / name).read_bytes()
  at = draw.randrange(max(len(content), 1))
  if kind == "bit" and content:
    changed = bytearray(content)
    changed[at] ^= 1 << draw.randrange(8)
    path.write_bytes(changed)
  elif kind == "cut" and content:
    path.write_bytes(content[:at])
  elif kind == "longer":
    path.write_bytes(content[:at] + draw.randbytes(9) + content[at:])
  elif kind == "other" and content[::-1] != content:
    path.write_bytes(content[::-1])
  elif kind == "edited" and isinstance(value := as_json(content), dict):
    value[draw.choice([*value, "new"])] = draw.choice([None, -1, "../x", [], {}, 1e308, True])
    path.write_text(json.dumps(value))
  elif kind == "pipe":
    replaced(path, "pipe")
  elif kind == "link":
    replaced(path, draw.choice(["/dev/zero", folder / draw.choice(files.names(folder))]))
  else:
    path.unlink()


def restore(path, content):
  path.unlink(missing_ok=True)
  path.write_bytes(content)


KINDS = ("bit", "cut", "longer", "other", "edited", "pipe", "link", "removed")


def check_damages(trained, folder, damages):
  """Each damage, `(name, kind)`, is noticed when the folder is loaded, and the file is named."""
  shutil.copytree(trained.served, folder)
  for seed, (name, kind) in enumerate(damages):
    content = (folder / name).read_bytes()
    damage(random.Random(seed), folder, name, kind)
    try:
      with within(10), pytest.raises(UserError, match=name.replace(".", r"\.")):
        serving.load(folder)
    except BaseException as error:
      raise AssertionError(f"seed {seed}, {name}, {kind}") from error
    restore(folder / name, content)
  serving.load(folder)


def test_damages_of_a_served_folder_are_noticed_when_it_is_loaded(clicks, tmp_path):
  names = {"bit": "model.npz", "cut": "model.npz", "edited": "served.json"}
  damages = [(names.get(kind, "transforms/columns.json"), kind) for kind in KINDS]
  check_damages(clicks, tmp_path / "served", [*damages, (arrays.MANIFEST, "bit")])


# --- damages of everything else -------------------------------------------------------------------
