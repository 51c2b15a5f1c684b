"""A first look at a table: what its columns hold, and a config that trains on it.

    python -m recipes.describe clicks.csv --label=clicked --out=my.py

reads a sample of any file that the recipes read, prints what each column holds and what it could
be used for, and writes a config of at most 30 lines, which trains as it is and is for editing.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from . import escaping
from .errors import UserError
from .files import write
from .tables import proposing, sample
from .tables.finding import file_format, paths
from .tables.formats import Format, find_delimiter, records
from .tables.proposing import Plan, Proposal, Roles
from .tables.sample import JOIN, Column, Sample
from .tables.streams import Stream

_HEADER_ROWS = 200  # in which a header's fields should not occur as values
_WIDTH = 100  # of the config, and of the report at most
_LINES = 30  # of the config
_REPAIR = " Repair the row, or write config.on_bad_row='skip' to leave such rows out."
_TOP = 5  # values shown of a column


def report(sampled: Sample, plan: Plan, width: int = _WIDTH) -> str:
  """Returns the columns as a table of lines up to `width` characters, and the notes below it."""
  lines = [["column", "type", "distinct", "missing", "proposed", "values"]]
  for column in sampled.columns:
    proposal = plan.columns[column.name]
    missing = _share(column.missing) if column.missing else "-"
    distinct = f"{column.distinct:,}"
    if _is_bag(column, proposal):
      distinct = f"{len(column.items(_separator(column, proposal))[0].unique()):,}"
    line = [_cut(column.name, 24), column.type(), distinct, missing, _said(proposal)]
    lines.append([*line, _values(column, proposal)])
  widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)][:-1]
  aligns = (str.ljust, str.ljust, str.rjust, str.rjust, str.ljust)
  rows = []
  for *cells, values in lines:
    head = "  ".join(f(cell, n) for f, cell, n in zip(aligns, cells, widths, strict=True))
    rows.append(_cut(f"{head}  {values}", width, middle=False).rstrip())
  notes = [
    wrapped
    for note in [*_skipped(sampled), *plan.notes]
    for wrapped in _fill([*note.split()], width, "  ")
  ]
  return "\n".join([*rows, *([""] if notes else []), *notes])


def _skipped(sampled: Sample) -> list[str]:
  """Returns lines about rows that were left out, with the option that may read them."""
  hint = "; are they in another --encoding, as latin-1?"
  return [line + hint * (" is not utf-8" in line) for line in sampled.skipped]


def _said(proposal: Proposal) -> str:
  """Returns a proposal in a few words."""
  if not proposal.kind:
    return f"left out: {proposal.why}"
  words = [proposal.kind]
  words += [name for name in ("log", "hash") if proposal.options.get(name)]
  if count := proposal.options.get("min_count"):
    words.append(f"min_count {count}")
  return ", ".join(words) + (f": {proposal.why}" if proposal.why else "")


def _is_bag(column: Column, proposal: Proposal) -> bool:
  is_cut = proposal.kind == "bag" or "separator" in proposal.options
  return bool(column.present) and (column.stored == "list" or is_cut)


def _separator(column: Column, proposal: Proposal) -> str:
  return JOIN if column.stored == "list" else proposal.options.get("separator", "|")


def _values(column: Column, proposal: Proposal) -> str:
  """Returns the range of numbers and times, and the most frequent of other values."""
  if not column.present:
    return ""
  if proposal.kind == "number" or (column.type() == "number" and column.distinct > 2):
    low, median, high = np.quantile(column.of_rows(), (0, 0.5, 1))
    return " … ".join(map(_number, (low, median, high)))
  if proposal.kind == "time" or column.is_dated:
    assert column.times is not None
    ends = [
      column.texts[int(end)].as_py() for end in (column.times.argmin(), column.times.argmax())
    ]
    return " … ".join(ends)
  texts, counts, total = column.texts, column.counts, column.present
  if _is_bag(column, proposal):
    items, lengths = column.items(_separator(column, proposal))
    encoded = items.dictionary_encode()
    of_item = np.repeat(counts, lengths)
    counts = np.bincount(encoded.indices.to_numpy(), of_item, minlength=len(encoded.dictionary))
    order = np.argsort(-counts, kind="stable")[:_TOP]
    texts, counts, total = encoded.dictionary.take(order), counts[order], int(of_item.sum())
  if counts[0] < 0.005 * total:  # their shares say nothing
    return ", ".join(_cut(text, 30) for text in texts[:3].to_pylist())
  top = zip(texts[:_TOP].to_pylist(), counts[:_TOP].tolist(), strict=True)
  return ", ".join(f"{_cut(text, 30)} {_share(count / total)}" for text, count in top)


def _share(share: float) -> str:
  if 0 < share < 0.005:
    return "<1%"
  return ">99%" if 0.995 <= share < 1 else f"{share:.0%}"


def _number(number: float) -> str:
  return f"{number:,.0f}" if number.is_integer() and abs(number) < 1e9 else f"{number:.4g}"


def _cut(text: str, length: int, *, middle: bool = True) -> str:
  text = re.sub(r"\s", " ", text.replace(JOIN, " "))
  if len(text) <= length:
    return text
  end = length // 3 if middle else 0
  return f"{text[: length - end - 1]}…{text[len(text) - end :]}"


def _fill(words: Sequence[str], width: int, indent: str, first: str = "") -> Iterator[str]:
  """Yields lines of words up to a width, which a longer word exceeds."""
  line = first + words[0]
  for word in words[1:]:
    if len(line) + 1 + len(word) > width:
      yield line
      line = indent + word
    else:
      line += f" {word}"
  yield line


def config(plan: Plan, files: Sequence[str], format: Mapping[str, Any], command: str) -> str:
  """Returns a Python file whose `get_config()` declares the table, of at most 30 lines.

  Args:
    plan: the columns and settings.
    files: as the user named them.
    format: settings of `Format` that are not the defaults.
    command: that writes the file.
  """
  format = _with_missing(format, plan)
  written = escaping.terminal(command).replace("\n", "\\n")
  written = written.replace("\\", "\\\\").replace('"', '\\"')  # nothing ends the docstring
  head = ['"""The table as first proposed; written by', "", f"    {written}", '"""', ""]
  head += ["", "def get_config():", "  return {"]
  values: dict[str, Any] = {"files": _named(files)}
  values |= {"format": format} if format else {}
  for name, value in values.items():
    head += _fill(_words(value, f'"{name}": '), _WIDTH, "      ", "    ")
  tail = [f'    "{name}": {_literal(value)},' for name, value in plan.settings.items()]
  declared = {name: each.declaration for name, each in plan.columns.items() if each.kind}
  unused = [_literal(name) for name, each in plan.columns.items() if not each.kind]
  comment = [_cut(f"      # left out: {', '.join(unused)}", _WIDTH, middle=False)] if unused else []
  for least, width in [(_LINES, _WIDTH), *((3, n) for n in range(_WIDTH, 2000, 20))]:
    blocks = _blocks(declared, least)
    columns = [line for block in blocks for line in _fill(block, width, "      ", "      ")]
    lines = [*head, '    "columns": {', *columns, *comment, "    },", *tail, "  }"]
    if len(lines) <= _LINES:
      break
  return "\n".join(lines) + "\n"


def _with_missing(format: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
  missing = {"missing": Format().missing + plan.missing} if plan.missing else {}
  return {**format, **missing}


def side_table(plan: Plan, files: Sequence[str], format: Mapping[str, Any]) -> str:
  """Returns the setting that declares a table of users or items in another table's config."""
  key = next(name for name, proposal in plan.columns.items() if proposal.kind == plan.side)
  declared = {
    name: each.declaration for name, each in plan.columns.items() if each.kind and name != key
  }
  format = _with_missing(format, plan)
  lines = [
    f'    "{plan.side}_table": {{',
    *_fill(_words(_named(files), '"files": '), _WIDTH, "        ", "      "),
  ]
  if format:
    lines += _fill(_words(format, '"format": '), _WIDTH, "        ", "      ")
  lines += [f'      "key": {_literal(key)},', '      "columns": {']
  for block in _blocks(declared, _LINES):
    lines += _fill(block, _WIDTH, "        ", "        ")
  return "\n".join([*lines, "      },", "    },"])


def _named(files: Sequence[str]) -> Any:
  return files[0] if len(files) == 1 else tuple(files)


def _blocks(declared: Mapping[str, Any], least: int) -> list[list[str]]:
  """Returns the texts of the entries; each group of columns begins on a new line.

  Args:
    declared: the declarations by column.
    least: columns with one short declaration that make a group; with a long one, four do.
  """
  groups: dict[str, list[str]] = {}
  for name, value in declared.items():
    groups.setdefault(_literal(value), []).append(name)
  blocks: list[list[str]] = [[]]
  for name, value in declared.items():
    names = groups[_literal(value)]
    if len(names) < (min(least, 4) if isinstance(value, Mapping) else least):
      blocks[-1].append(f"{_literal(name)}: {_literal(value)},")
    elif name == names[0]:
      listed = [f"{_literal(each)}," for each in names]
      listed[0] = f"**dict.fromkeys(({listed[0]}"
      listed[-1] = f"{listed[-1].removesuffix(',')}), {_literal(value)}),"
      blocks += [listed, []]
  return [block for block in blocks if block]


def _words(value: Any, prefix: str) -> list[str]:
  """Returns the literal of a setting in pieces that lines may break between."""
  if isinstance(value, Mapping):
    words = [word for key, each in value.items() for word in _words(each, f"{_literal(key)}: ")]
    words[0] = f"{prefix}{{{words[0]}"
    return [*words[:-1], f"{words[-1].removesuffix(',')}}},"]
  if not isinstance(value, tuple) or len(value) == 1:
    return [f"{prefix}{_literal(value)},"]
  words = [f"{_literal(each)}," for each in value]
  return [f"{prefix}({words[0]}", *words[1:-1], f"{words[-1].removesuffix(',')}),"]


def _literal(value: Any) -> str:
  if isinstance(value, str):
    return escaping.terminal(json.dumps(value, ensure_ascii=False))
  if isinstance(value, Mapping):
    return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
  if isinstance(value, tuple):
    return f"({', '.join(map(_literal, value))}{',' if len(value) == 1 else ''})"
  return repr(value)


def commands(plan: Plan, out: str) -> list[str]:
  """Returns the commands that train on a config, the first for the recipe to try first."""
  lines = []
  for recipe in plan.recipes:
    workdir = f"runs/{Path(out).stem}" + ("" if recipe == plan.recipes[0] else f"_{recipe}")
    quoted = map(shlex.quote, (out, workdir))
    line = "python -m {}.{} --config={} --workdir={}".format(__package__, recipe, *quoted)
    if recipe != "dlrm" and "split" in plan.settings:
      line += " --config.split.by=last"
    lines.append(line)
  return lines


def _head(sampled: Sample, files: Sequence[str]) -> str:
  named = files[0] if len(files) == 1 else f"{len(files)} files"
  rows = f"{sampled.num_rows:,} rows"
  if sampled.is_all:
    rows = f"all {rows}"
  else:
    rows = f"{rows} of {sampled.places} places" if sampled.places > 1 else f"the first {rows}"
    rows += f", of about {sampled.total:,}" if sampled.total else ""
  return f"{named}: {len(sampled.columns)} columns, {rows}"


def _first_lines(path: Path, format: Format) -> list[list[str]]:
  """Returns the fields of the first lines of a text file, [] of another file."""
  if file_format(path) in ("Parquet", "ArrayRecord"):
    return []
  with Stream(path, format.encoding) as stream:
    text = stream.peek().decode("utf-8", "replace")
  delimiter = format.delimiter or find_delimiter(text, path, format)
  lines = islice(records(text, delimiter, format.quote, strict=False), _HEADER_ROWS)
  return [[field.strip() for field in line] for line in lines]


def _check_header(path: Path, format: Format) -> None:
  """Raises UserError where the first line of a text file seems a row."""
  fields, *rows = [[]] if format.names else _first_lines(path, format) or [[]]
  are_numbers = sum(bool(re.fullmatch(r"[-+.\d]+", field)) for field in fields)
  # The name of a column is hardly ever one of its values.
  columns = list(zip_longest(*(row for row in rows if row != fields), fillvalue=""))
  again = sum(field in values for field, values in zip(fields, columns, strict=False) if field)
  if 2 * are_numbers > len(fields) or (again > 1 and 3 * again > len(fields)):
    raise UserError(
      f"{path}: the first line seems a row, not a header: name its {len(fields)} columns, as "
      "--names=user,item,…, or call them c1, c2, … with --no_header"
    )


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    f"python -m {__package__}.describe",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument("files", nargs="+", metavar="FILE", help="a file, a folder or a pattern")
  parser.add_argument("--label", default="", help="the column that is predicted")
  parser.add_argument("--positive", default="", help="the value of the label that is a click")
  parser.add_argument("--user", default="", help="the column with the ids of users")
  parser.add_argument("--item", default="", help="the column with the ids of items")
  parser.add_argument("--time", default="", help="the column that says when")
  parser.add_argument("--out", default="", help="the config to write, as my.py")
  parser.add_argument("--force", action="store_true", help="write over the file of --out")
  parser.add_argument("--rows", type=int, default=200_000, help="of the sample; %(default)s")
  parser.add_argument("--names", default="", help="of the columns, where no header names them")
  parser.add_argument("--no_header", action="store_true", help="call the columns c1, c2, …")
  parser.add_argument("--delimiter", default="", help="between fields, where it is not found")
  parser.add_argument("--encoding", default="", help="of text files that are not in UTF-8")
  parser.add_argument("--quote", default=None, help="around fields; '' gives quotes no meaning")
  return parser


def _format(arguments: argparse.Namespace) -> dict[str, Any]:
  """Returns the settings of the format that the command line gives."""
  settings: dict[str, Any] = {}
  if arguments.names:
    settings["names"] = tuple(name.strip() for name in arguments.names.split(","))
  for name in ("delimiter", "encoding"):
    if getattr(arguments, name):
      settings[name] = getattr(arguments, name)
  return settings if arguments.quote is None else settings | {"quote": arguments.quote}


def _files(names: Sequence[str]) -> list[str]:
  """Returns a pattern for the files that a shell has made of one, or the names."""
  parents = {str(Path(name).parent) for name in names}
  suffixes = {"".join(Path(name).suffixes) for name in names}
  if len(names) > 3 and len(parents) == len(suffixes) == 1:
    pattern = str(Path(*parents) / f"*{next(iter(suffixes))}")
    if set(paths(pattern)) == {Path(name) for name in names}:
      return [pattern]
  return list(names)


def _check_out(out: str, force: bool) -> None:
  if out and not out.endswith(".py"):
    raise UserError(f"--out={out}: a config is a Python file: --out={out}.py")
  if out and Path(out).exists() and not force:
    raise UserError(f"{out} exists: choose another --out, or add --force to write over it")


def run(arguments: argparse.Namespace, command: str) -> Iterator[str]:
  """Yields the blocks of text to print, and writes the config.

  Raises:
    UserError: a file or an option has to be changed; says how.
  """
  _check_out(arguments.out, arguments.force)
  if arguments.rows < 1:
    raise UserError(f"--rows={arguments.rows}: read one row or more")
  files, settings = _files(arguments.files), _format(arguments)
  data_files, format = paths(files), Format(**settings)
  if arguments.no_header and (fields := next(iter(_first_lines(data_files[0], format)), [])):
    settings = {"names": tuple(f"c{place}" for place in range(1, len(fields) + 1)), **settings}
    format = Format(**settings)
  _check_header(data_files[0], format)
  sampled = sample.read(data_files, format, arguments.rows)
  roles = (arguments.label, arguments.user, arguments.item, arguments.time, arguments.positive)
  plan = proposing.propose(sampled, Roles(*roles))
  width = min(max(shutil.get_terminal_size((_WIDTH, 24)).columns, 80), _WIDTH)
  yield _head(sampled, files)
  yield report(sampled, plan, width)
  if plan.side:
    yield "In the config of the table that says who had what:"
    yield side_table(plan, files, settings)
  if not plan.recipes:
    if arguments.out:
      raise UserError(f"{arguments.out} is not written. {plan.notes[-1]}")
    return
  if not arguments.out:
    first = commands(plan, "my.py")[0]
    yield f"--out=my.py writes a config of these columns, for\n\n{first}"
    return
  out = Path(arguments.out)
  out.parent.mkdir(parents=True, exist_ok=True)
  write(out, config(plan, files, settings, command))
  first, *more = commands(plan, arguments.out)
  yield "\n".join([f"{out} is written. Train on it:", "", first])
  if more:
    yield "\n".join(["It also serves", "", *more])


def main(argv: Sequence[str]) -> None:
  parser = _parser()
  arguments = parser.parse_args(argv)
  command = shlex.join(
    ["python", "-m", f"{__package__}.describe", *(a for a in argv if a != "--force")]
  )
  try:
    print(*map(escaping.terminal, run(arguments, command)), sep="\n\n", flush=True)
  except BrokenPipeError:  # of `| head`; Python would fail once more at its exit
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  except UserError as error:
    text = str(error).replace(_REPAIR, "")
    text = re.sub(r"config\.format\.names=\(.*?\)", "--names=…,…", text)
    text = re.sub(r"config\.format\.(delimiter|encoding|names|quote)", r"--\1", text)
    parser.exit(2, escaping.terminal(f"error: {text}\n"))


if __name__ == "__main__":
  main(sys.argv[1:])
