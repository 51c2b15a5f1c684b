"""A first look at a table: what its columns hold, and a config that trains on it.

    python -m recipes.describe clicks.csv --label=clicked --out=my.py

reads a sample of any file that the recipes read, prints what each column holds and what it could
be used for, and writes a config of at most 30 lines, which trains as it is and is for editing.
--positive is the value of the label that is a click; --names are for a file without a header.
"""

import argparse
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import errors
from .errors import UserError, terminal
from .files import write
from .tables import propose, source
from .tables.formats import Format, fields_of, file_format, find_delimiter, paths
from .tables.propose import Column, Plan, Sample
from .tables.values import literal

_WIDTH, _LINES = 100, 30  # of the config; the report is as wide
_ROLES = ("label", "user", "item", "time")
_NUMERIC = r"[-+]?[\d.]+(e[-+]?\d+)?|[\d:/-]*\d[\d:/-]*([T ][\d:.]+Z?)?"
_NAMES = "--names=user,item,…, or call them c1, c2, … with --no_header"


def report(sample: Sample, plan: Plan) -> str:
  """Returns the columns as a table, and the notes below it."""
  rows = [["column", "type", "distinct", "missing", "proposed", "values"]]
  for name, column in sample.columns.items():
    kind, why, options = plan.columns[name]
    said = ", ".join([kind or "left out", *(f"{key}={value}" for key, value in options.items())])
    missing = f"{column.missing:.0%}" if column.missing else "-"
    cells = [name, column.type, f"{column.distinct:,}", missing, said + f": {why}" * bool(why)]
    rows.append([_cut(cell, 36) for cell in cells] + [_values(column)])
  widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
  lines = [_cut("  ".join(map(str.ljust, row, widths)).rstrip(), _WIDTH) for row in rows]
  notes = [textwrap.fill(note, _WIDTH) for note in sample.skipped + plan.notes]
  return "\n".join([*lines, "", *notes]).rstrip()


def _values(column: Column) -> str:
  """Returns the range of the values, or the most frequent ones."""
  if column.type == "number" and column.distinct > 20:
    return " … ".join(f"{number:.10g}" for number in (column.low, column.median, column.high))
  pairs = zip(column.top, column.counts, strict=True)
  return ", ".join(f"{_cut(text, 30)} {count / column.rows:.0%}" for text, count in pairs)


def _cut(text: str, length: int) -> str:
  text = re.sub(r"\s", " ", text)
  return text if len(text) <= length else f"{text[: length - 1]}…"


def config(plan: Plan, settings: Mapping[str, Any], command: str) -> str:
  """Returns a Python file whose `get_config()` declares the table, of at most 30 lines."""
  head = ['"""The table as first proposed; written by the command below."""', ""]
  head += [f"# {repr(command)[1:-1]}", "", "", "def get_config():", "  return {"]
  declared = {
    name: {"kind": each.kind, **each.options} if each.options else each.kind
    for name, each in plan.columns.items()
    if each.kind
  }
  as_items = lambda values: [f"{name!r}: {value!r}," for name, value in values.items()]
  before, after = ([f"    {item}" for item in as_items(of)] for of in (settings, plan.settings))
  left = ", ".join(repr(name) for name in plan.columns if name not in declared)
  comment = [_cut(f"      # left out: {left}", _WIDTH)] * bool(left)
  text = " ".join(item.replace(" ", "\x1f") for item in as_items(declared))  # breaks no item
  for width in range(_WIDTH, 10_000, 20):
    lines = textwrap.wrap(text, width - 6, break_long_words=False, break_on_hyphens=False)
    columns = [f"      {line}".replace("\x1f", " ") for line in lines]
    body = [*before, "    'columns': {", *columns, *comment, "    },", *after, "  }"]
    if len(head) + len(body) <= _LINES:
      break
  return "\n".join([*head, *body]) + "\n"


def _format(arguments: argparse.Namespace, path: str) -> dict[str, Any]:
  """Returns the settings of the format that the command line gives."""
  names = tuple(name.strip() for name in arguments.names.split(",") if arguments.names)
  given = {key: getattr(arguments, key) for key in ("delimiter", "encoding", "quote")}
  settings = {k: v for k, v in {"names": names, **given}.items() if v != getattr(Format(), k)}
  if arguments.no_header and not names and file_format(path) == "text":
    format = Format(**settings)
    with source.connect() as con:
      lines = [line for line in source.head(con, path, format) if line.strip()]
    delimiter = format.delimiter or find_delimiter(lines, path, format)
    width = len(fields_of(lines, delimiter, format.quote)[0])
    settings["names"] = tuple(f"c{place}" for place in range(1, width + 1))
  return settings


def run(arguments: argparse.Namespace, command: str) -> Iterator[str]:
  """Yields the blocks of text to print, and writes the config."""
  out, files = arguments.out, arguments.files
  if out and not out.endswith(".py"):
    raise UserError(f"--out={out}: a config is a Python file: --out={out}.py")
  if out and Path(out).exists() and not arguments.force:
    raise UserError(f"{out} exists: choose another --out, or add --force to write over it")
  data_files = paths(files)
  format = _format(arguments, data_files[0])
  sample = propose.read(data_files, Format(**format), arguments.rows)
  names = list(sample.columns)
  numeric = sum(bool(re.fullmatch(_NUMERIC, name)) for name in names)
  again = sample.ask(f"SELECT count(*) FROM counts WHERE text = {literal(names)}[n + 1]")[0][0]
  has_header = file_format(data_files[0]) == "text" and "names" not in format
  if has_header and (2 * numeric > len(names) or 1 < again > len(names) / 3):
    raise UserError(f"{data_files[0]}: the first line seems a row: name the columns, as {_NAMES}")
  roles = {role: name for role in _ROLES if (name := getattr(arguments, role))}
  plan = propose.propose(sample, roles, arguments.positive)
  table = files[0] if len(files) == 1 else tuple(files)
  rows = f"{'all' if sample.is_all else 'the first'} {sample.rows:,} rows"
  yield f"{', '.join(files)}: {len(names)} columns, {rows}"
  yield report(sample, plan)
  lines = [f"{out} is written. Train on it:" if out else "--out=my.py writes a config, for", ""]
  for recipe in plan.recipes:
    workdir = f"runs/{Path(out).stem or 'my'}" + f"_{recipe}" * (recipe != plan.recipes[0])
    quoted = map(shlex.quote, (out or "my.py", workdir))
    line = "python -m {}.{} --config={} --workdir={}".format(__package__, recipe, *quoted)
    lines.append(line + " --config.split.by=" * (recipe != "dlrm" and "split" in plan.settings))
  if out and not plan.recipes:
    raise UserError(f"{out} is not written. {plan.notes[-1]}")
  if out:
    settings = {"files": table} | ({"format": format} if format else {})
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    write(Path(out), config(plan, settings, command))
  yield "\n".join(lines) if plan.recipes else "Nothing is written."


def main(argv: Sequence[str]) -> None:
  parser = errors.parser(f"{__package__}.describe", __doc__)
  parser.add_argument("files", nargs="+", metavar="FILE", help="a file, a folder or a pattern")
  for option in (*_ROLES, "positive", "out", "names", "delimiter"):
    parser.add_argument(f"--{option}", default="")
  parser.add_argument("--encoding", default="utf-8")
  parser.add_argument("--quote", default='"', help="around fields; '' gives quotes no meaning")
  parser.add_argument("--no_header", action="store_true", help="call the columns c1, c2, …")
  parser.add_argument("--rows", type=int, default=200_000, help="of the sample; %(default)s")
  parser.add_argument("--force", action="store_true", help="write over the file of --out")
  arguments = parser.parse_args(argv)
  command = ["python", "-m", f"{__package__}.describe", *(a for a in argv if a != "--force")]
  with errors.in_one_line(parser):
    try:
      blocks = run(arguments, shlex.join(command))
      print(*map(terminal, blocks), sep="\n\n", flush=True)
    except UserError as error:
      text = re.sub(r"config\.format\.names=\(.*?\)", _NAMES, str(error))
      text = re.sub(r"config\.format\.(delimiter|encoding|names|quote)", r"--\1", text)
      raise UserError(text) from error


if __name__ == "__main__":
  main(sys.argv[1:])
