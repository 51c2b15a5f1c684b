"""Bytes of a text file, as UTF-8 without a byte order mark, unpacked where it ends in .gz.

Arrow stops at a row that is not UTF-8. Bytes that cannot be decoded are therefore passed on as the
last private characters of Unicode, which no table has: byte 0x80 + n as U+10FF80 + n.
"""

import codecs
import gzip
import io
import re
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import DamagedFileError, UserError

# What reading a damaged file raises.
_DECODING_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error, UnicodeError)

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

_MARKS = (b"\xf4\x8f\xbe", b"\xf4\x8f\xbf")  # the first bytes of the private characters in UTF-8
_TO_MARK = 0x10FF80 - 0xDC80  # from the surrogates of Python's handler "surrogateescape"


def is_undecoded(values: pa.BinaryArray) -> pa.BooleanArray:
  """Returns the values with bytes that could not be decoded."""
  first, second = (pc.greater_equal(pc.find_substring(values, mark), 0) for mark in _MARKS)
  return pc.or_(first, second)


def original(text: str, encoding: str) -> bytes:
  """Returns the bytes that a text was in the file.

  >>> original("caf\U0010ffe9", "utf-8")
  b'caf\\xe9'
  """
  surrogates = re.sub("[\U0010ff80-\U0010ffff]", lambda mark: chr(ord(mark[0]) - _TO_MARK), text)
  return surrogates.encode(encoding, "surrogateescape")


class Stream(io.RawIOBase):
  """A text file as a file of UTF-8 bytes.

  Attributes:
    sentinel: a last line, which `read` adds to those of a whole file.
    has_nul: a NUL byte was read.
    has_undecoded: a byte was read that could not be decoded.
    error: the exception at which the file broke off before its end, or None.

  Raises:
    DamagedFileError: the file is empty, or no text.
  """

  def __init__(self, path: Path, encoding: str):
    self._path = path
    self.sentinel, self.has_nul, self.has_undecoded = "", False, False
    self.error: Exception | None = None
    try:
      self._raw = path.open("rb")
    except OSError as error:
      raise UserError(f"{path} cannot be read: {error.strerror}") from error
    is_gzip = path.suffix.lower() == ".gz"
    self._bytes = gzip.GzipFile(fileobj=self._raw) if is_gzip else self._raw
    self._is_utf8 = codecs.lookup(encoding).name in ("utf-8", "utf-8-sig", "ascii")
    decoder = codecs.getincrementaldecoder("utf-8" if self._is_utf8 else encoding)
    self._decoder = decoder(errors="surrogateescape")
    self._first, self._ready, self._ended = b"", bytearray(), False
    try:
      self._begin()
    except BaseException:
      self.close()
      raise

  def _begin(self) -> None:
    """Reads the first block, without byte order mark and empty lines; refuses what is no text."""
    while len(self._ready) < _PEEK and self._fill():
      pass
    if self.error is not None and not self._ready:
      raise DamagedFileError(
        f"{self._path} breaks off or is damaged at its beginning ({self.error}). "
        "Copy or download it again."
      ) from self.error
    for magic, problem in _MAGIC.items():
      if self._first.startswith(magic):
        stem = self._path.with_suffix("")
        raise DamagedFileError(f"{self._path} {problem.format(path=self._path, stem=stem)}.")
    if self._is_utf8 and self._first.startswith(_UTF_16):
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
    try:
      block = self._bytes.read1(_BLOCK)
      self._ended = not block
      self._first = self._first or block[:8]
      block = self._decoded(block)
    except _DECODING_ERRORS as error:
      self.error, self._ended = error, True
      return False
    self.has_nul = self.has_nul or b"\0" in block
    self._ready += block
    return not self._ended

  def _decoded(self, block: bytes) -> bytes:
    is_ascii = self._is_utf8 and block.isascii()
    if is_ascii and not self._ended and not self._decoder.getstate()[0]:
      return block
    text = self._decoder.decode(block, final=self._ended)
    try:
      return text.encode()
    except UnicodeEncodeError:
      self.has_undecoded = True
      mark = lambda surrogate: chr(ord(surrogate[0]) + _TO_MARK)
      return re.sub("[\udc80-\udcff]", mark, text).encode()

  @property
  def position(self) -> int:
    """Bytes of the file that were read; of the compressed one for .gz."""
    return self._raw.tell()

  def peek(self) -> bytes:
    """Returns the first quarter of a megabyte, or all that there is."""
    return bytes(self._ready[:_PEEK])

  def readable(self) -> bool:
    return True

  def read(self, size: int = -1) -> bytes:
    while len(self._ready) < size and self._fill():
      pass
    if self._ended and self.sentinel and self.error is None:
      self._ready += f"\n{self.sentinel}\n".encode()
      self.sentinel = ""
    block = bytes(self._ready[:size])
    del self._ready[:size]
    return block

  def close(self) -> None:
    if not self.closed:
      self._bytes.close()
      self._raw.close()
    super().close()
