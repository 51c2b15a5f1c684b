"""Numbers as people read them."""

from collections.abc import Collection, Sequence


def aligned(lines: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
  """Lines of cells as columns, to the right but for those in `left`.

  >>> print(aligned([("table", "rows"), ("movie", "60000")]))
  table   rows
  movie  60000
  """
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  align = lambda i, cell: cell.ljust(widths[i]) if i in left else cell.rjust(widths[i])
  return "\n".join("  ".join(align(*c) for c in enumerate(line)).rstrip() for line in lines)


def size(number: int) -> str:
  """A number of bytes.

  >>> size(1536)
  '1.5k'
  """
  for unit, bytes_ in (("G", 1 << 30), ("M", 1 << 20), ("k", 1 << 10)):
    if number >= bytes_:
      return f"{number / bytes_:.1f}{unit}"
  return str(number)
