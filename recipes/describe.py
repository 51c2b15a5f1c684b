"""A first look at a table: what its columns hold, and a config that trains on it.

    python -m recipes.describe clicks.csv --label=clicked --out=my.py

reads a sample of any file that the recipes read, prints what each column holds and what it could
be used for, and writes a config of at most 30 lines, which trains as it is and is for editing.
"""

import argparse
import collections
import json
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from . import errors
from .errors import UserError, terminal
from .files import write
from .tables import profile, proposing, source
from .tables.formats import Format, fields_of, file_format, find_delimiter, paths
from .tables.profile import JOIN, Column, Sample
from .tables.proposing import Plan, Proposal, Roles

_HEADER_ROWS = 200  # in which a header's fields should not occur as values
_WIDTH = 100  # of the config, and of the report at most
_TOP = 5  # values shown of a column
_LINES = 30  # of the config
_CUTOFF = 20  # the larger one of the rankings' metrics; a catalogue has as many items at least
_REPEATED = 120  # characters of declarations that are alike, which are written once
_REPAIR = " Repair the row, or write config.on_bad_row='skip' to leave such rows out."
_NUMERIC = r"[-+]?[\d.]+(e[-+]?\d+)?|[\d:/-]*\d[\d:/-]*([T ][\d:.]+Z?)?"
_NAME = "--names=user,item,…, or call them c1, c2, … with --no_header"


def report(sample: Sample, plan: Plan, width: int = _WIDTH) -> str:
  """Returns the columns as a table of lines up to `width` characters, and the notes below it."""
  lines = [["column", "type", "distinct", "missing", "proposed", "values"]]
  for name, column in sample.columns.items():
    distinct, values = _values(column, plan.columns[name])
    kind, missing = column.type(), _share(column.missing) if column.missing else "-"
    said = _cut(_said(plan.columns[name]), 35)
    lines.append([_cut(name, 24), kind, f"{distinct:,}", missing, said, values])
  a, b, c, d, e, _ = (max(map(len, cells)) for cells in zip(*lines, strict=True))
  form = f"{{:{a}}}  {{:{b}}}  {{:>{c}}}  {{:>{d}}}  {{:{e}}}  {{}}"
  rows = [_cut(form.format(*line), width, middle=False).rstrip() for line in lines]
  hint = "; are they in another --encoding, as latin-1?"
  notes = [line + hint * (" is not utf-8" in line) for line in sample.skipped] + plan.notes
  filled = [textwrap.fill(note, width, subsequent_indent="  ") for note in notes]
  return "\n".join([*rows, *[""] * bool(notes), *filled])


def _said(proposal: Proposal) -> str:
  """Returns a proposal in a few words."""
  if not proposal.kind:
    return f"left out: {proposal.why}"
  words = [proposal.kind, *(name for name in ("log", "hash") if proposal.options.get(name))]
  words += [f"{name} {n}" for name in ("min_count", "buckets") if (n := proposal.options.get(name))]
  return ", ".join(words) + (f": {proposal.why}" if proposal.why else "")


def _values(column: Column, proposal: Proposal) -> tuple[int, str]:
  """Returns how many values there are, and their range or the most frequent ones."""
  if not column.present:
    return 0, ""
  texts, counts, distinct = column.texts, column.counts, column.distinct
  if column.numbers is not None and (
    proposal.kind == "number" or (column.type() == "number" and distinct > 2)
  ):
    return distinct, " … ".join(map(_number, np.nanquantile(column.of_rows, (0, 0.5, 1))))
  if column.is_dated and column.times is not None:
    ends = (column.times.argmin(), column.times.argmax())
    return distinct, " … ".join(texts[int(end)].as_py() for end in ends)
  is_list = column.stored == "list"
  if is_list or proposal.kind == "bag" or "separator" in proposal.options:
    separator = JOIN if is_list else proposal.options.get("separator", "|")
    texts, _, counts = column.items(separator)
    distinct = len(texts)
  top, total = np.argsort(-counts, kind="stable")[:_TOP], counts.sum()
  named = [(_cut(texts[int(index)].as_py(), 30), counts[index] / total) for index in top]
  if named[0][1] < 0.005:  # the shares say nothing
    return distinct, ", ".join(text for text, _ in named[:3])
  return distinct, ", ".join(f"{text} {_share(share)}" for text, share in named)


def _share(share: float) -> str:
  if 0 < share < 1 and f"{share:.0%}" in ("0%", "100%"):
    return "<1%" if share < 0.5 else ">99%"
  return f"{share:.0%}"


def _number(number: float) -> str:
  return f"{number:,.0f}" if number.is_integer() and abs(number) < 1e9 else f"{number:.4g}"


def _cut(text: str, length: int, *, middle: bool = True) -> str:
  text = re.sub(r"\s", " ", text.replace(JOIN, " "))
  if len(text) <= length:
    return text
  end = length // 3 if middle else 0
  return f"{text[: length - end - 1]}…{text[len(text) - end :]}"


# --- the config -----------------------------------------------------------------------------------


def config(plan: Plan, files: Any, format: Mapping[str, Any], command: str) -> str:
  """Returns a Python file whose `get_config()` declares the table, of at most 30 lines."""
  written = terminal(command).replace("\n", "\\n")
  written = written.replace("\\", "\\\\").replace('"', '\\"')  # nothing ends the docstring
  head = ['"""The table as first proposed; written by', "", f"    {written}", '"""', ""]
  head += ["", "def get_config():", "  return {"]
  unread = [name for name, each in plan.columns.items() if not each.kind]
  left = ", ".join(_literal(name) for name in unread if name not in plan.sources)
  comment = [_cut(f"      # left out: {left}", _WIDTH, middle=False)] * bool(left)
  for width in range(_WIDTH, 2000, 20):
    body = _settings({"files": files} | ({"format": format} if format else {}), width)
    body += ['    "columns": {', *_columns(plan.declared, width), *comment, "    },"]
    body += _settings(plan.settings, width)
    if len(head) + len(body) < _LINES:
      break
  return "\n".join([*head, *body, "  }"]) + "\n"


def side_table(plan: Plan, files: Any, format: Mapping[str, Any]) -> str:
  """Returns the setting that declares a table of users or items in another table's config."""
  key = next(name for name, proposal in plan.columns.items() if proposal.kind == plan.side)
  columns = {name: each for name, each in plan.declared.items() if name != key}
  settings = {"files": files} | ({"format": format} if format else {})
  settings["key"] = plan.columns[key].options.get("column", key)
  inner = [*_settings(settings), '    "columns": {', *_columns(columns), "    },"]
  return "\n".join([f'    "{plan.side}_table": {{', *(f"  {line}" for line in inner), "    },"])


def _settings(settings: Mapping[str, Any], width: int = _WIDTH) -> list[str]:
  lines = (f'"{name}": {_literal(value)},' for name, value in settings.items())
  return [each for line in lines for each in _wrapped(line, width, "    ")]


def _columns(declared: Mapping[str, Any], width: int = _WIDTH) -> list[str]:
  """Returns the lines of the declarations; columns that repeat a long one are a group."""
  groups = collections.defaultdict(list)
  for name, value in declared.items():
    groups[_literal(value)].append(name)
  blocks = [""]
  for name, value in declared.items():
    names, literal = groups[_literal(value)], _literal(value)
    if len(names) * len(literal) < _REPEATED:
      blocks[-1] += f"{_literal(name)}: {literal}, "
    elif name == names[0]:
      blocks += [f"**dict.fromkeys(({', '.join(map(_literal, names))}), {literal}),", ""]
  return [line for block in blocks if block for line in _wrapped(block, width, " " * 6)]


def _wrapped(text: str, width: int, indent: str) -> list[str]:
  """Returns the lines of code that is broken between two values, not within a text."""
  options: Any = {"break_long_words": False, "break_on_hyphens": False}
  inner = " " * max(len(indent), 6)
  lines = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=inner, **options)
  return [line.replace(JOIN, " ") for line in lines]


def _literal(value: Any) -> str:
  """Returns a value as code, with `JOIN` for the spaces of its texts."""
  if isinstance(value, str):
    return terminal(json.dumps(value, ensure_ascii=False)).replace(" ", JOIN)
  if isinstance(value, Mapping):
    return "{" + ", ".join(f"{_literal(k)}:{JOIN}{_literal(v)}" for k, v in value.items()) + "}"
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
    if recipe != "dlrm" and 0 < plan.items < _CUTOFF:
      line += f" --config.ks='({plan.items},)' --config.select=valid_ndcg@{plan.items}"
    lines.append(line)
  return lines


# --- the command line -----------------------------------------------------------------------------


def _first_lines(path: str, format: Format) -> tuple[list[list[str]], str]:
  """Returns the fields of the first lines of a text file, and the delimiter between them."""
  with source.connect() as con:
    source.check_magic(path)
    lines = [line for line in source.head(con, path, format) if line.strip()]
  # The first line may be a title, which does not tell the delimiter.
  delimiter = format.delimiter or find_delimiter(lines[1:] or lines, path, format)
  rows = fields_of(lines, delimiter, format.quote)[:_HEADER_ROWS]
  return [[field.strip() for field in row] for row in rows if row], delimiter


def _check_header(path: str, lines: list[list[str]], delimiter: str) -> None:
  """Raises UserError where the first line of a text file seems a row or a title."""
  fields, *rows = lines
  ((width, _),) = collections.Counter(map(len, rows)).most_common(1) or [(len(fields), 0)]
  full = [row for row in rows if len(row) == width]
  here = shlex.quote(str(path))
  is_title = sum(map(bool, fields)) == 1 and (len(fields) == 1 < width or 2 < width == len(fields))
  if is_title and full and all(full[0]) and not re.fullmatch(_NUMERIC, full[0][-1]):
    raise UserError(
      f"{path}: the first line seems a title ({_cut(''.join(fields), 40)}), not the header. Remove "
      f"it: tail -n +2 {here} > table.csv"
    )
  if full and width == len(fields) + 1 and not any(row[-1] for row in full) and all(fields):
    raise UserError(
      f"{path}: the rows end in {delimiter!r}, and the header does not. End it so, too: "
      f"sed '1s/$/{delimiter}/' {here} > table.csv"
    )
  # The name of a column is hardly ever one of its values.
  are_numbers = [bool(re.fullmatch(_NUMERIC, field)) for field in fields]
  twice = any(n and fields.count(f) > 1 for f, n in zip(fields, are_numbers, strict=True))
  columns = list(zip_longest(*(row for row in rows if row != fields), fillvalue=""))
  again = sum(field in values for field, values in zip(fields, columns, strict=False) if field)
  if 2 * sum(are_numbers) > len(fields) or twice or (again > 1 and 3 * again > len(fields)):
    raise UserError(
      f"{path}: the first line seems a row, not a header: name its {len(fields)} columns, "
      f"as {_NAME}"
    )


_OPTIONS = {
  "label": "the column that is predicted, or several, with commas between",
  "positive": "the value of the label that is a click",
  "user": "the column with the ids of users",
  "item": "the column with the ids of items",
  "time": "the column that says when",
  "out": "the config to write, as my.py",
  "names": "of the columns, where no header names them",
  "delimiter": "between fields, where it is not found",
  "encoding": "of text files that are not in UTF-8",
}


def _parser() -> argparse.ArgumentParser:
  form = argparse.RawDescriptionHelpFormatter
  name = f"python -m {__package__}.describe"
  parser = argparse.ArgumentParser(name, None, __doc__, formatter_class=form, allow_abbrev=False)
  parser.add_argument("files", nargs="+", metavar="FILE", help="a file, a folder or a pattern")
  for option, text in _OPTIONS.items():
    parser.add_argument(f"--{option}", default="", help=text)
  parser.add_argument("--quote", default=None, help="around fields; '' gives quotes no meaning")
  parser.add_argument("--no_header", action="store_true", help="call the columns c1, c2, …")
  parser.add_argument("--rows", type=int, default=200_000, help="of the sample; %(default)s")
  parser.add_argument("--force", action="store_true", help="write over the file of --out")
  return parser


def _format(arguments: argparse.Namespace, path: str) -> dict[str, Any]:
  """Returns the settings of the format that the command line gives, and checks the header."""
  names = tuple(name.strip() for name in arguments.names.split(",") if arguments.names)
  given = {"names": names, "delimiter": arguments.delimiter, "encoding": arguments.encoding}
  settings: dict[str, Any] = {name: value for name, value in given.items() if value}
  settings |= {} if arguments.quote is None else {"quote": arguments.quote}
  if names or file_format(path) in ("parquet", "json"):
    return settings
  lines, delimiter = _first_lines(path, Format(**settings))
  if arguments.no_header:
    return {"names": tuple(f"c{place}" for place in range(1, len(lines[0]) + 1)), **settings}
  _check_header(path, lines, delimiter)
  return settings


def _files(names: Sequence[str]) -> Any:
  """Returns the file, the names, or a pattern for the files that a shell has made of one."""
  suffixes = {"".join(Path(name).suffixes) for name in names}
  if len(names) > 3 and len({str(Path(name).parent) for name in names}) == len(suffixes) == 1:
    pattern = str(Path(names[0]).parent / f"*{suffixes.pop()}")
    if set(paths(pattern)) == set(names):
      return pattern
  return names[0] if len(names) == 1 else tuple(names)


def run(arguments: argparse.Namespace, command: str) -> Iterator[str]:
  """Yields the blocks of text to print, and writes the config."""
  out, files = arguments.out, _files(arguments.files)
  if out and not out.endswith(".py"):
    raise UserError(f"--out={out}: a config is a Python file: --out={out}.py")
  if out and Path(out).exists() and not arguments.force:
    raise UserError(f"{out} exists: choose another --out, or add --force to write over it")
  if arguments.rows < 1:
    raise UserError(f"--rows={arguments.rows}: read one row or more")
  data_files = paths(files)
  settings = _format(arguments, data_files[0])
  sample = profile.read(data_files, Format(**settings), arguments.rows)
  is_one = arguments.label in sample.columns
  label, *more = [arguments.label] if is_one else arguments.label.split(",")
  others = {name: getattr(arguments, name) for name in Roles._fields[1:5]}
  plan = proposing.propose(sample, Roles(label, **others, more=tuple(more)))
  settings |= {"missing": Format().missing + plan.missing} if plan.missing else {}
  named = files if isinstance(files, str) else f"{len(files)} files"
  rows, of = f"{sample.num_rows:,} rows", f", of about {sample.total:,}"
  places = f"{rows} of {sample.places} places" if sample.places > 1 else f"the first {rows}"
  rows = f"all {rows}" if sample.is_all else places + of
  yield f"{named}: {len(sample.columns)} columns, {rows}"
  width = min(max(shutil.get_terminal_size((_WIDTH, 24)).columns, 80), _WIDTH)
  yield report(sample, plan, width)
  if plan.side:
    yield "In the config of the table that says who had what:"
    yield side_table(plan, files, settings)
  if plan.recipes and out:
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    write(Path(out), config(plan, files, settings, command))
    first, *more = commands(plan, out)
    yield "\n".join([f"{out} is written. Train on it:", "", first])
    if more:
      yield "\n".join(["It also serves", "", *more])
  elif plan.recipes:
    yield f"--out=my.py writes a config of these columns, for\n\n{commands(plan, 'my.py')[0]}"
  elif out:
    raise UserError(f"{out} is not written. {plan.notes[-1]}")


def main(argv: Sequence[str]) -> None:
  parser = _parser()
  arguments = parser.parse_args(argv)
  command = ["python", "-m", f"{__package__}.describe", *(a for a in argv if a != "--force")]
  with errors.in_one_line(parser):
    try:
      blocks = run(arguments, shlex.join(command))
      print(*map(terminal, blocks), sep="\n\n", flush=True)
    except UserError as error:
      text = re.sub(r"config\.format\.names=\(.*?\)", _NAME, str(error).replace(_REPAIR, ""))
      text = re.sub(r"config\.format\.(delimiter|encoding|names|quote)", r"--\1", text)
      raise UserError(text) from error


if __name__ == "__main__":
  main(sys.argv[1:])
