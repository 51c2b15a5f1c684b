"""Downloads and folders: checked, whole or not at all, with helpful errors."""

import gc
import hashlib
import os

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
    files.download(f"{address}/x.zip", path, sha256=SHA256)
    assert path.read_bytes() == TEXT
    path.write_bytes(TEXT[:5])
    files.download(f"{address}/x.zip", path, sha256=SHA256)
    assert path.read_bytes() == TEXT
  # Nobody serves it any more.
  files.download(f"{address}/x.zip", path, sha256=SHA256)
  assert os.listdir(path.parent) == ["x.zip"]


# pooch leaves the socket of a connection that was cut to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.ci
def test_a_download_that_fails_says_what_to_do(tmp_path, published):
  def check(url, sha256=SHA256):
    path = tmp_path / "cache" / "x.zip"
    wanted = r"by other means, unpack it, and pass the folder as --config\.data_dir"
    with pytest.raises(errors.UserError, match=wanted) as error:
      files.download(url, path, sha256=sha256)
    assert f"Could not download {url} (" in str(error.value)
    assert not path.parent.exists() or not os.listdir(path.parent)
    return str(error.value)

  with http_server.serving(published) as address:
    check(f"{address}/y.zip")
    message = check(f"{address}/x.zip", "0" * 64)
    assert SHA256 in message
    assert "0" * 64 in message
  with http_server.serving(published, handler=http_server.Cut) as address:
    check(f"{address}/x.zip")
  gc.collect()


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
