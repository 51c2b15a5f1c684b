"""Bytes of a text file, as UTF-8 without a byte order mark, unpacked where it ends in .gz."""

import codecs
import gzip
import io
import zlib
from pathlib import Path
from typing import IO

from ..errors import DamagedFileError, UserError

# What reading a damaged file raises.
DECODING_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error, UnicodeError)

_BLOCK = 1 << 20
_PEEK = 1 << 18
_MAGIC = {
  b"PAR1": "is a Parquet file. Name it so: {stem}.parquet",
  b"\x1f\x8b": "is compressed with gzip. Name it so: {path}.gz",
  b"PK\x03\x04": "is a zip archive or a spreadsheet. Unpack it, or save the sheet as CSV",
  b"\x28\xb5\x2f\xfd": "is compressed with zstd. Unpack it first",
  b"BZh": "is compressed with bzip2. Unpack it first",
  b"\xfd7zXZ": "is compressed with xz. Unpack it first",
}
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class Stream(io.RawIOBase):
  """A text file as a file of UTF-8 bytes; bytes that its codec cannot decode stay no UTF-8.

  Attributes:
    sentinel: a last line, which `read` adds to those of the file.
    has_nul: a NUL byte was read.

  Raises:
    DamagedFileError: the file is empty, or no text.
  """

  def __init__(self, path: Path, encoding: str):
    self._path = path
    self.sentinel, self.has_nul = "", False
    try:
      self._raw = path.open("rb")
    except OSError as error:
      raise UserError(f"{path} cannot be read: {error.strerror}") from error
    is_gzip = path.suffix.lower() == ".gz"
    self._bytes: IO[bytes] = gzip.GzipFile(fileobj=self._raw) if is_gzip else self._raw  # type: ignore[assignment]
    self._decoder = None
    if codecs.lookup(encoding).name not in ("utf-8", "utf-8-sig", "ascii"):
      self._decoder = codecs.getincrementaldecoder(encoding)(errors="surrogateescape")
    self._ready, self._ended = b"", False
    try:
      self._refuse_binary()
    except BaseException:
      self.close()
      raise

  def _refuse_binary(self) -> None:
    try:
      while len(self._ready) < _PEEK and self._fill():
        pass
    except DECODING_ERRORS as error:
      raise DamagedFileError(
        f"{self._path} breaks off or is damaged at its beginning ({error}). "
        "Copy or download it again."
      ) from error
    for magic, problem in _MAGIC.items():
      if self._ready.startswith(magic):
        raise DamagedFileError(
          f"{self._path} {problem.format(path=self._path, stem=self._path.with_suffix(''))}."
        )
    if self._ready.startswith(_UTF_16):
      raise DamagedFileError(
        f"{self._path} is written in UTF-16. Write config.format.encoding='utf-16'."
      )
    self._ready = self._ready.removeprefix(codecs.BOM_UTF8).lstrip(b"\r\n")
    if not self._ready.strip():
      raise DamagedFileError(f"{self._path} is empty. Copy or download it again, or leave it out.")

  def _fill(self) -> bool:
    """Reads one more block; returns False at the end of the file."""
    if self._ended:
      return False
    block = self._bytes.read(_BLOCK)
    self._ended = not block
    if self._decoder is not None:
      # Surrogates, for which a decoder takes what it cannot read, are no valid UTF-8.
      block = self._decoder.decode(block, final=self._ended).encode("utf-8", "surrogatepass")
    self.has_nul = self.has_nul or b"\0" in block
    self._ready += block
    return not self._ended

  @property
  def position(self) -> int:
    """Bytes of the file that were read; of the compressed one for .gz."""
    return self._raw.tell()

  def peek(self) -> bytes:
    """Returns the first quarter of a megabyte, or all that there is."""
    return self._ready[:_PEEK]

  def readable(self) -> bool:
    return True

  def read(self, size: int = -1) -> bytes:
    while len(self._ready) < size and self._fill():
      pass
    if self._ended and self.sentinel:
      self._ready += f"\n{self.sentinel}\n".encode()
      self.sentinel = ""
    block, self._ready = self._ready[:size], self._ready[size:]
    return block

  def close(self) -> None:
    if not self.closed:
      self._bytes.close()
      self._raw.close()
    super().close()
