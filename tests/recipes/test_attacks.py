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
from cases import each, refused
from flax import nnx
from recipe_runs import write_run

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


@pytest.mark.ci
def test_what_is_no_file_is_not_read(checkpoint, tmp_path):
  """A pipe would be waited for, and a link leads elsewhere."""
  run = pathlib.Path(write_run(tmp_path / "run"))
  manifest, result, log = checkpoint / arrays.MANIFEST, run / "result.json", run / "metrics.jsonl"
  of_step = lambda: checkpoints.of_step(checkpoint.parent, 20)
  cases = [
    (manifest, of_step, "pipe", "is no regular file"),
    (checkpoint / "state" / "arrays", of_step, "/dev/zero", "is a symbolic link"),
    (result, lambda: runs_lib.result(run), "/etc/passwd", "is a symbolic link"),
    (log, lambda: report.load(run), "/etc/passwd", "is a symbolic link"),
  ]
  for path, call, by, words in cases:
    content = path.read_bytes()
    replaced(path, by)
    with within(10), pytest.raises(UserError, match=f"{path.name} {words}"):
      call()
    restore(path, content)


@pytest.mark.ci
def test_nothing_is_written_or_copied_through_a_link(clicks, tmp_path, capsys):
  mine = tmp_path / "bashrc"
  mine.write_text("mine")
  run = pathlib.Path(write_run(tmp_path / "run"))
  for name in ("report.md", "report.png"):
    (run / name).symlink_to(mine)
  report.main([str(run)])
  assert not (run / "report.md").is_symlink()
  (tmp_path / "new").mkdir()
  (tmp_path / "new" / "metrics.jsonl").symlink_to(mine)
  with pytest.raises(UserError, match=r"metrics\.jsonl is a symbolic link"):
    Journal(tmp_path / "new", 0, types.SimpleNamespace(steps=1, batch_size=1))
  (tmp_path / "my.py").symlink_to(mine)
  out = f"--out={tmp_path / 'my.py'}"
  describe.main([str(clicks.file), "--label=clicked", "--force", out])
  (tmp_path / "folder").mkdir()
  (tmp_path / "served.partial").symlink_to(tmp_path / "folder")
  export.export(clicks.workdir, tmp_path / "served", platforms=("cpu",))
  assert not list((tmp_path / "folder").iterdir())
  assert mine.read_text() == "mine"

  (tmp_path / "serve").mkdir()
  (tmp_path / "serve" / "columns.json").symlink_to(mine)
  with pytest.raises(UserError, match=r"serve/columns\.json is a symbolic link"):
    runs_lib._copy(tmp_path / "serve", tmp_path / "copied")
  assert not (tmp_path / "copied").exists()
  (tmp_path / "linked").symlink_to(tmp_path / "serve")
  with pytest.raises(UserError, match="linked is a symbolic link"):
    files.copy_folder(tmp_path / "linked", tmp_path / "copy")


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


def test_names_are_no_code(tmp_path, monkeypatch, capsys):
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


def escapes(text):
  return [char for char in text if not (char.isprintable() or char == "\n")]


@pytest.mark.ci
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


@pytest.mark.ci
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


@pytest.mark.ci
def test_a_prediction_shows_escape_sequences(clicks, tmp_path, capfd):
  rows = tmp_path / "rows.csv"
  header = f"price,age,city,shop,tags,x{ESCAPE}"
  contents = [
    f"{header},x{ESCAPE}\n1,2,a,b,c,d,e\n",  # two columns of a name
    f"{header}\n{ESCAPE},2,a,b,c,d\n",  # no number
  ]
  for content in contents:
    rows.write_text(content)
    with pytest.raises(SystemExit):
      predict.main([str(clicks.served), str(rows)])
  with pytest.raises(SystemExit):
    predict.main([str(clicks.served), f"{rows}{ESCAPE}"])
  shown = capfd.readouterr().err
  assert shown.count("error: ") == 3
  assert not escapes(shown)


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
  names = {"bit": "arrays.npz", "cut": "program.bin", "edited": "served.json"}
  damages = [(names.get(kind, "transforms/columns.json"), kind) for kind in KINDS]
  check_damages(clicks, tmp_path / "served", [*damages, (arrays.MANIFEST, "bit")])


@pytest.mark.weekly
def test_random_damages_of_a_served_folder_are_noticed(clicks, tmp_path):
  draw, names = random.Random(0), files.names(clicks.served)
  damages = [(draw.choice(names), draw.choice(KINDS)) for _ in range(5000)]
  check_damages(clicks, tmp_path / "served", damages)


# --- damages of everything else -------------------------------------------------------------------


def parts(run):
  """Reads a run as an export does, but for the checkpoint, whose files have checksums."""
  opened = export._opened(run)
  return export._parts(run, opened.config, opened.recipe)


def check_fuzzed(path, call, expected=UserError):
  """Damages a file again and again; `call` returns, or raises an error that names a file."""
  content = path.read_bytes()
  most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + (1 << 20)  # KiB
  for seed in range(300):
    draw, changed = random.Random(seed), bytearray(content)
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


@pytest.mark.weekly
def test_damaged_files_are_named_or_read(clicks, checkpoint, tmp_path):
  reported, copy = pathlib.Path(write_run(tmp_path / "reported")), clicks.copy(tmp_path)

  def call_report():
    groups = report.grouped([report.load(reported)])
    report.markdown(groups, "title", None)
    report.text(groups)

  check_fuzzed(reported / "result.json", call_report)
  check_fuzzed(reported / "metrics.jsonl", call_report)
  check_fuzzed(checkpoint / arrays.MANIFEST, lambda: checkpoints.newest(checkpoint.parent))
  for name in ("config.json", "serve/columns.json", "serve/columns.parquet"):
    check_fuzzed(copy / name, lambda: parts(copy))


@pytest.mark.ci
def test_a_vocabulary_that_is_cut_is_named(clicks, tmp_path):
  copy = clicks.copy(tmp_path)
  path = copy / "serve" / "columns.json"
  path.write_bytes(path.read_bytes()[:-20])
  with pytest.raises(UserError, match=str(path.parent)):
    parts(copy)


@pytest.mark.ci
def test_a_delta_with_a_flipped_bit_is_named(tmp_path):
  table, folder = embed.TableConfig(50, 4, name="item"), tmp_path / "delta"
  layer = embed.SparseEmbed(embed.FeatureConfig(table), rngs=nnx.Rngs(0))
  since = embed.deltas.fingerprint(1, model=layer)
  rows = np.array(layer.tables["item"])
  rows[[3, 7]] = 1.0
  layer.load_tables({"item": rows})
  embed.deltas.write(folder, embed.deltas.changes(since, 2, model=layer)[0])
  for name in files.names(folder):
    content = (folder / name).read_bytes()
    damage(random.Random(0), folder, name, "bit")
    with pytest.raises((ValueError, OSError)):
      embed.deltas.read(folder)
    restore(folder / name, content)
  embed.deltas.read(folder)
