"""Machine code on disk: whole or not at all, and nobody else's."""

import hashlib
import os
import pathlib
import pickle
import shutil
import stat
import subprocess
import sys
import tempfile

import pytest

pytest.importorskip("numba", reason="the extra `cpu` is not installed")

from numba import types

from embed.kernels.cpu import cache

ROOT = pathlib.Path(__file__).parents[3]
PROGRAM = """
from numba import types
from embed.kernels.cpu import cache

@cache.compiled(types.int64(types.int64))
def plus_one(x):
  return x + 1

print(plus_one.ctypes(41), plus_one.cache_hits)
"""
VICTIM, ATTACKER = 65533, 65532


@pytest.fixture
def root(tmp_path, monkeypatch):
  """A new cache, and the memory of warnings."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
  monkeypatch.setattr(cache, "_reasons", [])
  return tmp_path / "home"


def is_loaded():
  """Whether a function comes from the cache; it is compiled otherwise, and right in any case."""

  @cache.compiled(types.int64(types.int64))
  def plus_one(x):
    return x + 1

  assert plus_one.ctypes(41) == 42
  return bool(plus_one.cache_hits)


def files(root):
  return [path for path in root.rglob("*") if path.is_file()]


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "damage",
  [
    lambda data: b"",
    lambda data: data[:20],
    lambda data: data[:-1],
    lambda data: data[:3000] + bytes(256) + data[3256:],
    lambda data: b"noise" * 1000,
  ],
  ids=["empty", "cut early", "cut late", "a hole", "noise"],
)
def test_a_damaged_file_is_written_anew(root, damage):
  assert not is_loaded()
  assert is_loaded()
  (file,) = files(root)
  file.write_bytes(damage(file.read_bytes()))
  assert not is_loaded()
  assert is_loaded()
  assert files(root) == [file]


def test_a_file_is_whole_or_not_there(root, monkeypatch):
  monkeypatch.setattr(os, "replace", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("full")))
  with pytest.warns(UserWarning, match="full"):
    assert not is_loaded()
  assert not files(root)


@pytest.mark.parametrize("path", ["/proc/nothing", "file", "relative"])
def test_without_a_folder_nothing_is_kept(root, monkeypatch, tmp_path, path):
  (tmp_path / "file").write_text("")
  (tmp_path / "temporary").mkdir()
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
  monkeypatch.setenv("XDG_CACHE_HOME", path if path != "file" else str(tmp_path / path))
  monkeypatch.chdir(tmp_path)
  before = sorted(tmp_path.rglob("*"))
  with pytest.warns(UserWarning, match="not kept") as warned:
    assert [is_loaded(), is_loaded()] == [False, False]
  assert len(warned) == 1
  assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.weekly
def test_a_limit_of_file_sizes_is_no_error(root):
  command = f"ulimit -f 1; exec {sys.executable} -c '{PROGRAM}'"
  done = subprocess.run(
    ["bash", "-c", command],
    env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert done.stdout.split() == ["42", "0"]
  assert "File too large" in done.stderr
  assert not files(root)


# --- other users ----------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0, 0o77, 0o777])
def test_only_the_user_can_enter(root, umask):
  old = os.umask(umask)
  try:
    assert not is_loaded()
  finally:
    os.umask(old)
  mode = lambda path: stat.S_IMODE(path.stat().st_mode)
  assert [mode(root / part) for part in ("", "sparse_embed", "sparse_embed/cpu")] == [0o700] * 3
  assert [mode(file) for file in files(root)] == [0o600]
  assert is_loaded()


@pytest.mark.parametrize(
  ("path", "mode"),
  [
    ("", 0o777),
    ("sparse_embed", 0o770),
    ("sparse_embed/cpu", 0o777),
    ("sparse_embed/cpu", 0o1777),
    ("sparse_embed/cpu/*", 0o666),
  ],
)
def test_what_others_can_write_is_not_loaded(root, path, mode):
  assert not is_loaded()
  (opened,) = [root] if not path else root.glob(path)
  opened.chmod(mode)
  with pytest.warns(UserWarning, match="other users can write to"):
    assert not is_loaded()


def test_a_sticky_folder_above_is_safe(root):
  assert not is_loaded()
  root.chmod(0o1777)
  assert is_loaded()


def test_links_are_followed(root, tmp_path, monkeypatch):
  """A home or a cache may be on another disk."""
  assert not is_loaded()
  (tmp_path / "link").symlink_to(root)
  (tmp_path / "links").symlink_to("link/../link")
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "links"))
  assert is_loaded()
  (tmp_path / "circle").symlink_to("circle")
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "circle"))
  with pytest.warns(UserWarning, match="not a folder"):
    assert not is_loaded()


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_only_regular_files_are_loaded(root, kind):
  assert not is_loaded()
  (file,) = files(root)
  moved = file.rename(root / "moved")
  {"fifo": os.mkfifo, "link": lambda f: f.symlink_to(moved), "folder": os.mkdir}[kind](file)
  with pytest.warns(UserWarning, match="not kept"):
    assert not is_loaded()


class Evil:
  """A pickle that leaves a mark."""

  def __init__(self, mark):
    self.mark = mark

  def __reduce__(self):
    return os.mkdir, (self.mark,)


def test_what_the_user_alone_can_write_is_loaded(root, tmp_path):
  """So that the next tests show something: this cache runs what is in it."""
  assert not is_loaded()
  code = pickle.dumps(Evil(str(tmp_path / "mark")))
  files(root)[0].write_bytes(hashlib.sha256(code).digest() + code)
  with pytest.raises(TypeError):
    is_loaded()
  assert (tmp_path / "mark").is_dir()


@pytest.fixture
def shared():
  """A folder that all users can enter; pytest's own are closed to them."""
  if os.geteuid() != 0:
    pytest.skip("an attack by a second user needs root, who may become others")
  folder = pathlib.Path(tempfile.mkdtemp())
  folder.chmod(0o755)
  yield folder
  shutil.rmtree(folder)


BECOME = """
import numba, os
from embed.kernels.cpu import cache
numba.cfunc("int64(int64)")(lambda x: x + 1)  # reads of Python's files what the user may not
os.setgroups([])
os.setgid({user})
os.setuid({user})
"""


def run_as(user, program, **variables):
  done = subprocess.run(
    [sys.executable, "-c", BECOME.format(user=user) + program],
    env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
    capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  return done.stdout.split(), done.stderr


def owned(path, user, mode=0o755):
  path.mkdir(exist_ok=True)
  path.chmod(mode)
  os.chown(path, user, user)
  return path


ATTACK = """
import os
os.makedirs({folder!r}, exist_ok=True)
path = os.path.join({folder!r}, {name!r})
try:
  open(path, "wb").write({data!r})  # in place: it remains the victim's
except PermissionError:
  os.unlink(path)
  open(path, "wb").write({data!r})
if {link!r}:
  os.symlink({root!r}, {link!r})
"""


@pytest.mark.weekly
@pytest.mark.parametrize("attack", ["folder", "file", "parent", "link", "NUMBA_CACHE_DIR"])
def test_another_user_runs_no_code(shared, attack):
  """Another user writes where the system lets them: a program of the victim does not load it."""
  home, theirs = owned(shared / "home", VICTIM), owned(shared / "theirs", ATTACKER)
  marks, everyone = owned(shared / "marks", VICTIM), owned(shared / "everyone", 0, 0o1777)
  variables = {"XDG_CACHE_HOME": str(home)}
  assert run_as(VICTIM, PROGRAM, **variables) == (["42", "0"], "")
  (file,) = files(home)
  folder, link = home / "sparse_embed" / "cpu", ""
  if attack == "folder":
    folder.parent.chmod(0o755)
    folder.chmod(0o777)
  elif attack == "file":
    folder.parent.chmod(0o755)
    folder.chmod(0o755)
    file.chmod(0o666)
  else:
    folder = theirs / "sparse_embed" / "cpu"
    if attack == "NUMBA_CACHE_DIR":
      variables["NUMBA_CACHE_DIR"] = str(theirs)
    else:
      link = str(everyone / "link") if attack == "link" else ""
      variables["XDG_CACHE_HOME"] = link or str(theirs)
  code = pickle.dumps(Evil(str(marks / "mark")))
  data = hashlib.sha256(code).digest() + code
  attacker = ATTACK.format(
    folder=str(folder), name=file.name, data=data, link=link, root=str(theirs)
  )
  run_as(ATTACKER, attacker, **variables)
  is_safe = attack == "NUMBA_CACHE_DIR"
  answer, errors = run_as(VICTIM, PROGRAM, **variables)
  assert answer == ["42", str(int(is_safe))]
  assert ("not kept" in errors) == (not is_safe)
  assert not list(marks.iterdir())
