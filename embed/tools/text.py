"""Text output: aligned columns and sizes in bytes."""

from collections.abc import Collection, Sequence


def aligned(lines: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
  """Aligns the cells of lines in columns, to the right except for the columns in `left`.

  >>> print(aligned([("table", "rows"), ("movie", "60000")]))
  table   rows
  movie  60000
  """
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  align = lambda i, cell: cell.ljust(widths[i]) if i in left else cell.rjust(widths[i])
  return "\n".join("  ".join(align(*c) for c in enumerate(line)).rstrip() for line in lines)


def size(num_bytes: int) -> str:
  """Writes a number of bytes with a unit.

  >>> size(1536)
  '1.5k'
  """
  for unit, factor in (("G", 1 << 30), ("M", 1 << 20), ("k", 1 << 10)):
    if num_bytes >= factor:
      return f"{num_bytes / factor:.1f}{unit}"
  return str(num_bytes)
