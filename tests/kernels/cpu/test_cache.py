"""Machine code on disk: whole or not at all, and nobody else's."""

import os
import stat

import pytest

pytest.importorskip("numba", reason="the extra `cpu` is not installed")

from numba import types

from embed.kernels.cpu import cache

pytestmark = pytest.mark.ci


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


def test_a_damaged_file_is_written_anew(root):
  assert not is_loaded()
  assert is_loaded()
  (file,) = files(root)
  file.write_bytes(file.read_bytes()[:-1])
  assert not is_loaded()
  assert is_loaded()
  assert files(root) == [file]


def test_a_file_is_whole_or_not_there(root, monkeypatch):
  monkeypatch.setattr(os, "replace", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("full")))
  with pytest.warns(UserWarning, match="full"):
    assert not is_loaded()
  assert not files(root)


def test_only_the_user_can_enter(root):
  old = os.umask(0)
  try:
    assert not is_loaded()
  finally:
    os.umask(old)
  mode = lambda path: stat.S_IMODE(path.stat().st_mode)
  assert [mode(root / part) for part in ("", "sparse_embed", "sparse_embed/cpu")] == [0o700] * 3
  assert [mode(file) for file in files(root)] == [0o600]


@pytest.mark.parametrize("path", ["", "sparse_embed/cpu", "sparse_embed/cpu/*"])
def test_what_others_can_write_is_not_loaded(root, path):
  assert not is_loaded()
  (opened,) = [root] if not path else root.glob(path)
  opened.chmod(0o777)
  with pytest.warns(UserWarning, match="other users can write to"):
    assert not is_loaded()
