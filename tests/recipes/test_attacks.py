"""Files, folders and texts from others: an error that names the file, and nothing else happens."""

import contextlib
import json
import os
import pathlib
import random
import resource
import runpy
import shutil
import signal
import types

import numpy as np
import pytest
from flax import nnx
from recipe_runs import write_run
from served_models import CLICKS, run_of, write_clicks

import embed
import embed.deltas
from recipes import arrays, describe, export, files, predict, report, serving
from recipes.errors import UserError
from recipes.run import checkpoints
from recipes.run import workdir as runs_lib
from recipes.run.journal import Journal

ROOT = pathlib.Path(__file__).parents[2]
ESCAPE = "\x1b]52;c;aGk=\x07\x1b[2J"  # to the clipboard, and clear the screen
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


def edit(path, **changes):
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))


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
NO_FILES = {  # what may stand at the name of a file, and the words for it
  "pipe": "is no regular file",
  "/dev/zero": "is a symbolic link",
  "/etc/passwd": "is a symbolic link",
  "nowhere": "is a symbolic link",
}


@pytest.fixture
def checkpoint(tmp_path):
  folder = tmp_path / "checkpoints" / "20"
  (folder / "state").mkdir(parents=True)
  (folder / "state" / "arrays").write_bytes(b"content")
  progress = {"step": 20, "best_step": 0}
  arrays.write_manifest(folder, {"follows": None, "progress": progress})
  return folder


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"follows": 20}, "follows step 20"),
    ({"follows": 30}, "follows step 30"),
    ({"follows": -1}, "follows step -1"),
    ({"follows": "../../.."}, "follows is '../../..', expected"),
    ({"follows": "/etc"}, "follows is '/etc', expected"),
    ({"follows": True}, "follows is True, expected"),
    ({"progress": {"step": 20, "best_step": []}}, r"best_step is \[\], expected"),
    ({"files": []}, r"files is \[\], expected dict"),
    ({"files": {"state/arrays": {"size": 7}}}, "has no 'xxh3_128'"),
    ({"files": {"../../secret": ENTRY}}, "names '../../secret'"),
    ({"files": {"/dev/zero": ENTRY}}, "names '/dev/zero'"),
    ({"files": {"": ENTRY}}, "names ''"),
    ({"files": {"a\0b": ENTRY}}, "names"),
  ],
)
def test_manifests_that_lead_elsewhere(changes, words, checkpoint):
  sealed(checkpoint, **changes)
  with within(10), pytest.raises(UserError, match=rf"checkpoints/20.*{words}"):
    checkpoints.of_step(checkpoint.parent, 20)
  with within(10), pytest.raises(UserError, match=words):
    checkpoints.newest(checkpoint.parent)


@pytest.mark.parametrize("by", NO_FILES)
@pytest.mark.parametrize("name", ["state/arrays", arrays.MANIFEST])
def test_checkpoints_with_what_is_no_file(name, by, checkpoint):
  replaced(checkpoint / name, by)
  with within(10), pytest.raises(UserError, match=f"{name} {NO_FILES[by]}"):
    checkpoints.of_step(checkpoint.parent, 20)


@pytest.mark.parametrize("by", NO_FILES)
@pytest.mark.parametrize("name", ["result.json", "metrics.jsonl"])
def test_runs_with_what_is_no_file(name, by, tmp_path):
  run = pathlib.Path(write_run(tmp_path / "run"))
  replaced(run / name, by)
  with within(10), pytest.raises(UserError, match=rf"{name}"):
    report.load(run)
  if name == "result.json":
    with within(10), pytest.raises(UserError, match=f"{name} {NO_FILES[by]}"):
      runs_lib.result(run)


@pytest.mark.parametrize("name", ["report.md", "report.png"])
def test_a_report_writes_through_no_link(name, tmp_path, capsys):
  run = pathlib.Path(write_run(tmp_path / "run"))
  (tmp_path / "bashrc").write_text("mine")
  (run / name).symlink_to(tmp_path / "bashrc")
  report.main([str(run)])
  assert (tmp_path / "bashrc").read_text() == "mine"
  assert not (run / name).is_symlink()


def test_a_journal_and_a_config_write_through_no_link(tmp_path, capsys):
  (tmp_path / "bashrc").write_text("mine\n")
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "metrics.jsonl").symlink_to(tmp_path / "bashrc")
  with pytest.raises(UserError, match=r"metrics\.jsonl is a symbolic link"):
    Journal(tmp_path / "run", 0, types.SimpleNamespace(steps=1, batch_size=1))
  write_clicks(tmp_path / "clicks.csv", rows=400)
  (tmp_path / "my.py").symlink_to(tmp_path / "bashrc")
  out = f"--out={tmp_path / 'my.py'}"
  describe.main([str(tmp_path / "clicks.csv"), "--label=clicked", "--force", out])
  assert (tmp_path / "bashrc").read_text() == "mine\n"


@pytest.mark.parametrize("by", ["pipe", "secret"])
def test_transforms_are_copied_without_links(by, tmp_path):
  (tmp_path / "serve").mkdir()
  (tmp_path / "secret").write_text("private key")
  (tmp_path / "serve" / "columns.json").write_text("{}")
  replaced(tmp_path / "serve" / "columns.json", by if by == "pipe" else tmp_path / by)
  with within(10), pytest.raises(UserError, match=r"serve/columns\.json is"):
    runs_lib._copy(tmp_path / "serve", tmp_path / "run")
  assert not (tmp_path / "run").exists()
  (tmp_path / "linked").symlink_to(tmp_path / "serve")
  with pytest.raises(UserError, match="linked is a symbolic link"):
    files.copy_folder(tmp_path / "linked", tmp_path / "copy")


# --- names and values as text ---------------------------------------------------------------------


def write_table(path, header="city"):
  lines = [f"{i % 2},c{i % 7}" for i in range(400)]
  path.write_text("\n".join([f"clicked,{header}", *lines]) + "\n")
  return path


@pytest.mark.parametrize(
  "name",
  [
    'day """;open("ran", "w");""" .csv',
    'a\n"""\nopen("ran", "w")\n"""\n.csv',
    '\\"""\nopen("ran", "w")#.csv',
    "a'''\nopen('ran', 'w')\n'''.csv",
    f"a{MARKS}b.csv",
  ],
)
@pytest.mark.parametrize("is_column", [False, True])
def test_names_are_no_code(name, is_column, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  column = name.replace('"', '""').replace(".csv", "")
  table = write_table(pathlib.Path("t.csv" if is_column else name), f'"{column}"')
  extra = ["--label=clicked", "--out=my.py"]
  try:
    describe.main([str(table), *extra])
  except SystemExit:  # a header over several lines is refused
    assert is_column
    assert not pathlib.Path("my.py").exists()
    return
  text = pathlib.Path("my.py").read_text()
  assert all(char.isprintable() or char == "\n" for char in text)
  config = runpy.run_path("my.py")["get_config"]()
  assert not pathlib.Path("ran").exists()
  if not is_column:
    assert config["files"] == name


def escapes(text):
  return [char for char in text if not (char.isprintable() or char == "\n")]


def test_a_description_shows_escape_sequences(tmp_path, capsys):
  table = tmp_path / f"a{ESCAPE}.csv"
  lines = [f"{i % 2},c{i % 7}{ESCAPE},{i}" for i in range(400)]
  table.write_text("\n".join([f"clicked,city{ESCAPE},n", *lines]) + "\n")
  describe.main([str(table), "--label=clicked"])
  for wrong in ([f"--label=x{ESCAPE}"], ["--label=clicked", f"--positive={ESCAPE}"]):
    with pytest.raises(SystemExit):
      describe.main([str(table), *wrong])
  shown = capsys.readouterr()
  assert r"\x1b]52;" in shown.out
  assert r"\x1b]52;" in shown.err
  assert not escapes(shown.out + shown.err)


BAD = f'<script>alert(1)</script>|`**[a](javascript:b){ESCAPE}\n# "c'


def test_a_report_shows_text_from_results(tmp_path, capsys):
  run = pathlib.Path(write_run(tmp_path / "run", model=BAD, source=BAD, note=BAD))
  other = pathlib.Path(write_run(tmp_path / "other", model=BAD, source=BAD, note=f"{BAD}2"))
  for folder in (run, other):
    device = {"kind": BAD, "count": 1, "host_cores": 2}
    versions = dict.fromkeys(("jax", "flax", "sparse-embed"), BAD)
    changes = {"notes": [BAD], "data_sha256": {BAD: BAD}, "versions": versions}
    scores = {"test_auc": 0.5, f"test_{BAD}": 0.5}
    changes |= {"device": device, "metrics": scores, "baselines": {BAD: scores}}
    edit(folder / "result.json", **changes)
  report.main([str(run), str(other), f"--out={tmp_path / 'page'}", f"--title={BAD}"])
  page, shown = (tmp_path / "page.md").read_text(), capsys.readouterr()
  assert "<script" not in page
  assert "](javascript" not in page
  assert "\n# &#34" not in page
  assert page.count("\n# ") == 0
  assert not escapes((page + shown.out + shown.err).replace("\u00a0", " "))


def test_no_page_names_a_package_that_an_index_may_give_to_others():
  pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/**/*")]
  text = {path: path.read_text() for path in pages if path.suffix in (".md", ".py")}
  assert not [path for path, each in text.items() if "pip install sparse-embed" in each]
  assert not [path for path, each in text.items() if "pip install 'sparse-embed" in each]


# --- exports --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp("clicks")
  file = write_clicks(folder / "clicks.csv", rows=200)
  table = {"batch_size": 64, "dim": 8, "files": str(file), "columns": CLICKS}
  run_of("dlrm", table, folder / "run")
  return folder / "run"


@pytest.fixture(scope="module")
def served(run):
  return export.export(run, run.parent / "served", platforms=("cpu",))


@pytest.mark.ci
def test_an_export_writes_through_no_link(run, tmp_path):
  (tmp_path / "mine").mkdir()
  (tmp_path / "mine" / "README.md").write_text("mine")
  (tmp_path / "served.partial").symlink_to(tmp_path / "mine")
  export.export(run, tmp_path / "served", platforms=("cpu",))
  assert [path.name for path in (tmp_path / "mine").iterdir()] == ["README.md"]
  assert (tmp_path / "mine" / "README.md").read_text() == "mine"


@pytest.mark.ci
def test_a_prediction_shows_escape_sequences(served, tmp_path, capfd):
  rows = tmp_path / "rows.csv"
  header = f"price,age,city,shop,tags,x{ESCAPE}"
  contents = [
    f"{header},x{ESCAPE}\n1,2,a,b,c,d,e\n",  # two columns of a name
    f"pric{ESCAPE},age,city,shop,tags\n1,2,a,b,c\n",  # none
    f"{header}\n{ESCAPE},2,a,b,c,d\n",  # no number
    f"price,age,city,shop,tags,score{ESCAPE}\n1,2,a,b\n",
  ]
  for content in contents:
    rows.write_text(content)
    with pytest.raises(SystemExit):
      predict.main([str(served), str(rows)])
  with pytest.raises(SystemExit):
    predict.main([str(served), f"{rows}{ESCAPE}"])
  shown = capfd.readouterr().err
  assert shown.count("error: ") == 5
  assert not escapes(shown)


def as_json(content):
  try:
    return json.loads(content)
  except ValueError:
    return None


def damage(draw, folder, other):
  """Damages a file of a folder once; returns its name."""
  names = files.names(folder)
  name = draw.choice(names)
  path, content = folder / name, (folder / name).read_bytes()
  at, kind = draw.randrange(max(len(content), 1)), draw.randrange(8)
  if kind <= 2 and content:
    changed = bytearray(content)
    changed[at] ^= 1 << draw.randrange(8)
    path.write_bytes(changed)
  elif kind == 3 and content:
    path.write_bytes(content[:at])
  elif kind == 4:
    path.write_bytes(content[:at] + draw.randbytes(9) + content[at:])
  elif kind == 5 and (other / name).read_bytes() != content:
    shutil.copyfile(other / name, path)  # of another export
  elif kind == 6 and isinstance(value := as_json(content), dict):
    value[draw.choice([*value, "new"])] = draw.choice([None, -1, "../x", [], {}, 1e308, True])
    path.write_text(json.dumps(value))
  elif kind == 7:
    replaced(path, draw.choice(["pipe", "/dev/zero", folder / draw.choice(names)]))
  else:
    path.unlink()
  return name


def restore(path, content):
  path.unlink(missing_ok=True)
  path.write_bytes(content)


COUNTS = [20, pytest.param(5000, marks=pytest.mark.weekly)]


@pytest.mark.parametrize("count", COUNTS)
def test_damages_of_a_served_folder_are_noticed_when_it_is_loaded(count, served, run, tmp_path):
  folder, other = tmp_path / "served", tmp_path / "other"
  shutil.copytree(served, folder)
  export.export(run, other, platforms=("cpu",))
  for path in (other / "arrays.npz", other / "README.md", other / "program.bin"):
    path.write_bytes(path.read_bytes()[::-1])  # of another model
  content = {name: (folder / name).read_bytes() for name in files.names(folder)}
  rows = {"price": ["1"], "age": ["2"], "city": ["c1"], "shop": ["s1"], "tags": [""]}
  expected = serving.load(folder).predict(rows)
  for seed in range(count):
    name = damage(random.Random(seed), folder, other)
    try:
      # The manifest of another export names the files that differ from it.
      said = "served/" if name == arrays.MANIFEST else name.replace(".", r"\.")
      with within(10), pytest.raises(UserError, match=said):
        serving.load(folder)
    except BaseException as error:
      raise AssertionError(f"seed {seed}, {name}") from error
    restore(folder / name, content[name])
  np.testing.assert_array_equal(serving.load(folder).predict(rows), expected)


# --- damages of everything else -------------------------------------------------------------------


def parts(run):
  """Reads a run as an export does, but for the checkpoint, whose files have checksums."""
  opened = export._opened(run)
  return export._parts(run, opened.config, opened.recipe)


def fields(value, path=()):
  """Yields the paths of all parts of a JSON value."""
  yield path
  items = value.items() if isinstance(value, dict) else ()
  for key, each in items:
    yield from fields(each, (*path, key))


def edited(draw, value):
  """Returns a JSON value with one part removed or replaced."""
  value = json.loads(json.dumps(value))
  path = draw.choice([path for path in fields(value) if path])
  owner = value
  for key in path[:-1]:
    owner = owner[key]
  choices = [None, -1, 0, 3.5, "", "../../x", [], {}, [[]], True, 10**30, "\x1b"]
  if (choice := draw.randrange(len(choices) + 1)) == len(choices):
    del owner[path[-1]]
  else:
    owner[path[-1]] = choices[choice]
  return value


def check_fuzzed(path, call, count, is_edited, expected=UserError):
  """Damages a file again and again; `call` returns, or raises an error that names a file."""
  content = path.read_bytes()
  most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + (1 << 20)  # KiB
  for seed in range(count):
    draw = random.Random(seed)
    if seed == 0:
      path.unlink()
    elif is_edited:
      path.write_text(json.dumps(edited(draw, json.loads(content))))
    else:
      changed = bytearray(content)
      for _ in range(draw.randrange(1, 4)):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
      path.write_bytes(changed[: draw.randrange(len(changed))] if seed % 4 == 0 else changed)
    said = path.name
    try:
      with within(10):
        call()
    except expected as error:
      said = str(error)
    except BaseException as error:
      raise AssertionError(f"seed {seed}") from error
    finally:
      restore(path, content)
    assert str(path.parent) in said or path.name in said, f"seed {seed}: {said}"
  assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < most


FUZZED = [20, pytest.param(300, marks=pytest.mark.weekly)]


@pytest.mark.parametrize("count", FUZZED)
@pytest.mark.parametrize(
  ("name", "is_edited"), [("result.json", False), ("result.json", True), ("metrics.jsonl", False)]
)
def test_damaged_runs_are_reported_or_named(name, is_edited, count, tmp_path):
  run = pathlib.Path(write_run(tmp_path / "run"))

  def call():
    groups = report.grouped([report.load(run)])
    report.markdown(groups, "title", None)
    report.text(groups)

  check_fuzzed(run / name, call, count, is_edited)


@pytest.mark.parametrize("count", FUZZED)
@pytest.mark.parametrize("is_edited", [False, True])
def test_damaged_manifests_are_named(is_edited, count, checkpoint):
  path = checkpoint / arrays.MANIFEST
  check_fuzzed(path, lambda: checkpoints.newest(checkpoint.parent), count, is_edited)


@pytest.mark.weekly
@pytest.mark.parametrize("count", FUZZED)
@pytest.mark.parametrize("is_edited", [False, True])
def test_damaged_configs_are_named_or_exported(is_edited, count, run, tmp_path):
  copy = tmp_path / "run"
  shutil.copytree(run, copy)
  call = lambda: parts(copy)
  check_fuzzed(copy / "config.json", call, count, is_edited)


@pytest.mark.parametrize("count", FUZZED)
@pytest.mark.parametrize(
  ("name", "is_edited"),
  [
    ("columns.json", False),
    ("columns.json", True),
    ("columns.parquet", False),
    ("sides.json", False),
  ],
)
def test_damaged_vocabularies_are_named(name, is_edited, count, run, tmp_path):
  copy = tmp_path / "run"
  shutil.copytree(run, copy)
  check_fuzzed(copy / "serve" / name, lambda: parts(copy), count, is_edited)


@pytest.mark.parametrize("count", FUZZED)
@pytest.mark.parametrize("name", ["ids.npy", "meta.json"])
def test_damaged_prepared_data_are_made_again(name, count, tmp_path, capsys):
  def build(folder):
    arrays.column(folder, "ids", (100,), np.int32)[:] = np.arange(100)
    return {}

  def call():
    columns, _ = arrays.prepared(tmp_path, "data", {}, build)
    np.testing.assert_array_equal(columns["ids"], np.arange(100))

  call()
  (path,) = tmp_path.glob(f"data-*/{name}")
  check_fuzzed(path, call, count, is_edited=False)


@pytest.mark.parametrize("count", FUZZED)
@pytest.mark.parametrize("is_edited", [False, True])
def test_damaged_deltas_are_named(is_edited, count, tmp_path):
  table = embed.TableConfig(50, 4, name="item")
  layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  since = embed.deltas.fingerprint(1, model=layer)
  rows = np.array(layer.tables["item"])
  rows[[3, 7]] = 1.0
  layer.load_tables({"item": rows})
  delta, _ = embed.deltas.changes(since, 2, model=layer)
  embed.deltas.write(tmp_path / "delta", delta)
  expected = str(embed.deltas.read(tmp_path / "delta"))

  def call():
    assert str(embed.deltas.read(tmp_path / "delta")) == expected

  for name in files.names(tmp_path / "delta"):
    path = tmp_path / "delta" / name
    if path.stat().st_size and (not is_edited or as_json(path.read_bytes())):
      check_fuzzed(path, call, count, is_edited, (ValueError, OSError))
