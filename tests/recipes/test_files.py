"""Downloads and folders: checked, whole or not at all, with helpful errors."""

import gc
import hashlib
import os
import threading

import http_server
import pytest

from recipes import errors, files

TEXT = b"twelve bytes"
SHA256 = hashlib.sha256(TEXT).hexdigest()


@pytest.fixture
def published(tmp_path):
  (tmp_path / "published").mkdir()
  (tmp_path / "published" / "x.zip").write_bytes(TEXT)
  return tmp_path / "published"


def test_a_file_is_downloaded_once_and_again_where_it_is_damaged(tmp_path, published):
  path = tmp_path / "cache" / "x.zip"
  with http_server.serving(published) as address:
    assert files.download(f"{address}/x.zip", path, sha256=SHA256) == path
    assert path.read_bytes() == TEXT
    path.write_bytes(TEXT[:5])
    files.download(f"{address}/x.zip", path, sha256=SHA256)
    assert path.read_bytes() == TEXT
  # Nobody serves it any more.
  files.download(f"{address}/x.zip", path, sha256=SHA256)
  assert os.listdir(path.parent) == ["x.zip"]


def test_a_file_with_another_hash_is_refused_and_both_hashes_are_named(tmp_path, published):
  path = tmp_path / "cache" / "x.zip"
  with (
    http_server.serving(published) as address,
    pytest.raises(errors.DownloadError, match="the archive has changed") as error,
  ):
    files.download(f"{address}/x.zip", path, sha256="0" * 64)
  assert f"{address}/x.zip" in str(error.value)
  assert SHA256 in str(error.value)
  assert "0" * 64 in str(error.value)
  assert not os.listdir(path.parent)


# pooch leaves the socket of a connection that was cut to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.ci
def test_a_download_that_fails_says_what_to_do(tmp_path, published):
  with http_server.serving(published) as address:
    check_failure(f"{address}/y.zip", tmp_path / "cache" / "x.zip")
  with http_server.serving(published, handler=http_server.Cut) as address:
    check_failure(f"{address}/x.zip", tmp_path / "cache" / "x.zip")
  gc.collect()


def check_failure(url, path):
  wanted = r"by other means, unpack it, and pass the folder as --config\.data_dir"
  with pytest.raises(errors.DownloadError, match=wanted) as error:
    files.download(url, path, sha256=SHA256)
  assert f"Could not download {url} (" in str(error.value)
  assert not path.parent.exists() or not os.listdir(path.parent)


@pytest.mark.ci
def test_who_comes_second_waits_and_says_so(tmp_path, capsys):
  """A lock is of an open file: a thread waits as a process does."""
  released = threading.Event()

  def hold():
    with files.locked(tmp_path / "lock"):
      held.set()
      released.wait(10)

  held, thread = threading.Event(), threading.Thread(target=hold)
  thread.start()
  held.wait(10)
  timer = threading.Timer(0.1, released.set)
  timer.start()
  with files.locked(tmp_path / "lock"):
    assert released.is_set()
  thread.join()
  assert "waiting for another process, which holds " in capsys.readouterr().err


def write_version(folder, name):
  with files.replacing_folder(folder) as new:
    (new / "deep").mkdir()
    for path in (new / "deep" / "same", new / name):
      path.write_text(name)


def read_version(folder):
  paths = (path for path in folder.rglob("*") if path.is_file())
  return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


def test_an_error_leaves_the_folder_as_it_was(tmp_path):
  write_version(tmp_path / "folder", "old")
  with pytest.raises(NotADirectoryError):
    write_version(tmp_path / "folder", "deep/same/file")
  assert read_version(tmp_path / "folder") == {"old": "old", "deep/same": "old"}
  assert os.listdir(tmp_path) == ["folder"]
