"""What the text of a compiled XLA program says: exchanges, copies, layouts, offloads.

The text is `compiled.as_text()`: computations as blocks of one instruction a line. Shapes in it are
those of one device.
"""

import collections
import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "all-to-all",
  "collective-broadcast",
  "collective-permute",
  "ragged-all-to-all",
  "reduce-scatter",
)
# Instructions that make an array anew; a gradient the size of a table begins with a broadcast.
_MAKERS = ("broadcast", "concatenate", "copy", "copy-start", "pad", "transpose")
_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "token": 0, "tuple": 0}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(
  r"(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations"
  r"|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)


class Array(NamedTuple):
  """An array's type: `dtype` as XLA writes it, `layout` what stands in braces behind the shape."""

  dtype: str
  shape: tuple[int, ...]
  layout: str = ""

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  @property
  def nbytes(self) -> int:
    return self.size * _item_bytes(self.dtype)

  @property
  def padded_bytes(self) -> int:
    """Bytes with the dimensions filled up to whole tiles, as the array lies in memory.

    >>> Array("f32", (1000, 16), "1,0:T(8,128)").padded_bytes // Array("f32", (1000, 16)).nbytes
    8
    """
    order, _, rest = self.layout.partition(":")
    tile = re.match(r"T\(([\d,]+)\)", rest)
    if not tile or not order:
      return self.nbytes
    widths = [int(x) for x in tile[1].split(",")]
    shape = [self.shape[int(i)] for i in reversed(order.split(","))]  # minor dimension last
    shape = [1] * (len(widths) - len(shape)) + shape
    for i, width in enumerate(reversed(widths), start=1):
      shape[-i] = -(-shape[-i] // width) * width
    return math.prod(shape) * _item_bytes(self.dtype)

  @property
  def in_fast_memory(self) -> bool:
    return "S(1)" in self.layout

  def __str__(self) -> str:
    return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Instruction(NamedTuple):
  """One line of a program: `repeats` is how often it runs in a step, None if that is not fixed."""

  name: str
  opcode: str
  results: tuple[Array, ...]
  computation: str
  repeats: int | None
  text: str

  @property
  def operands(self) -> list[str]:
    arguments = self.text.partition(f" {self.opcode}(")[2].partition(")")[0]
    return re.findall(r"%([\w.\-]+)", arguments)

  def __str__(self) -> str:
    return f"{self.opcode} {self.name}: {self.results[0]} in {self.computation}"


class Collective(NamedTuple):
  """Equal exchanges of a program.

  `times` is how often a step runs them; None where they stand in a loop whose length depends on the
  data. `nbytes` is the size of one result, and `sent` what one device has to send for it to others:
  of an all-to-all all but its own part, of an all-reduce twice that (a reduce-scatter and an
  all-gather, the least there is).
  """

  opcode: str
  results: tuple[Array, ...]
  group: int
  times: int | None
  instructions: int

  @property
  def nbytes(self) -> int:
    return sum(array.nbytes for array in self.results)

  @property
  def sent(self) -> int:
    others = (self.group - 1) / self.group
    factor = {"all-reduce": 2 * others, "reduce-scatter": self.group - 1, "collective-permute": 1}
    return round(self.nbytes * factor.get(self.opcode, others))

  def to_json(self) -> dict[str, Any]:
    return {
      "op": self.opcode,
      "dtypes": sorted({array.dtype for array in self.results}),
      "shapes": [str(array) for array in self.results],
      "devices": self.group,
      "instructions": self.instructions,
      "count": self.times,
      "bytes": self.nbytes,
      "sent": self.sent,
    }


class Program:
  """A compiled program's text, taken apart."""

  def __init__(self, text: str):
    self.text = text
    self.instructions = tuple(_instructions(text))

  @functools.cached_property
  def parameters(self) -> tuple[Array, ...]:
    """The arguments of one device, in the layouts that the compiler chose."""
    entry = _entry(self.text)
    return tuple(
      i.results[0] for i in self.instructions if i.computation == entry and i.opcode == "parameter"
    )

  def collectives(self) -> list[Collective]:
    """The exchanges between devices, equal ones added up, the largest first."""
    found: collections.Counter[tuple] = collections.Counter()
    for i in self.instructions:
      opcode = i.opcode.removesuffix("-start")
      if opcode in COLLECTIVES:
        results = tuple(array._replace(layout="") for array in i.results)
        if i.opcode in ("all-gather-start", "collective-permute-start"):
          results = results[1:2]  # a started one returns its operand, too
        found[opcode, results, _group_size(i.text), i.repeats] += 1
    merged = [
      Collective(op, results, group, None if repeats is None else repeats * n, n)
      for (op, results, group, repeats), n in found.items()
    ]
    return sorted(merged, key=lambda c: (-c.nbytes, c.opcode))

  def made(self, fits: Callable[[Array], bool]) -> list[str]:
    """Instructions that put a new array that `fits` into the device's large memory.

    What a fusion makes on its way is no array in memory, and what is fetched to the fast memory or
    comes back from there is the compiler's own caching.
    """
    by_name = {i.name: i for i in self.instructions}
    found = []
    for i in self.instructions:
      if i.opcode not in _MAKERS or not i.results or not fits(i.results[0]):
        continue
      sources = [by_name[name].results[0] for name in i.operands if name in by_name]
      cached = any(array.in_fast_memory for array in (i.results[0], *sources[:1]))
      fused = i.opcode == "broadcast" and "fused" in i.computation
      if not cached and not fused:
        found.append(str(i))
    return found

  def offloads(self) -> dict[str, int]:
    """What runs on SparseCores, by kind."""
    return dict(collections.Counter(re.findall(r'"offload":"(\w+)"', self.text)))


def written(stablehlo: str) -> list[tuple[str, tuple[str, ...]]]:
  """Returns the exchanges that a program asks for before compilation, with their dtypes.

  Args:
    stablehlo: `lowered.as_text()`. What the compiler adds to keep shardings is not in it.
  """
  operation = re.compile(
    r'"?stablehlo\.(all_gather|all_reduce|all_to_all|collective_broadcast|collective_permute'
    r'|reduce_scatter)"?\(.*?-> (\([^)]*\)|tensor<[^>]*>)',
    re.DOTALL,
  )
  return [
    (m[1].replace("_", "-"), tuple(re.findall(r"tensor<(?:\d+x)*(\w+)>", m[2])))
    for m in operation.finditer(stablehlo)
  ]


def narrowed(collectives: list[Collective], stablehlo: str) -> list[str]:
  """Returns the exchanges that run in 16 bits although the program asked for them in 32.

  XLA may round before an exchange what a matrix product rounds after it: the values that other
  consumers see, and the sums of an all-reduce, lose 16 bits without a word.
  """
  asked: dict[str, set[str]] = collections.defaultdict(set)
  for opcode, dtypes in written(stablehlo):
    asked[opcode].update(dtypes)
  narrow = ("bf16", "f16")
  return [
    f"{c.opcode} of {', '.join(str(a) for a in c.results if a.dtype in narrow)}"
    for c in collectives
    for dtype in {a.dtype for a in c.results if a.dtype in narrow}
    # Those the compiler has added have no written counterpart: then nothing at all may be narrow.
    if dtype not in (asked[c.opcode] if c.opcode in asked else _dtypes(stablehlo))
  ]


def _dtypes(stablehlo: str) -> set[str]:
  return set(re.findall(r"tensor<(?:\d+x)*(\w+)>", stablehlo))


def _item_bytes(dtype: str) -> int:
  if dtype in _BYTES:
    return _BYTES[dtype]
  bits = re.match(r"[a-z]+(\d+)", dtype)
  return int(bits[1]) // 8 if bits else 4


def _arrays(text: str) -> tuple[Array, ...]:
  return tuple(
    Array(m[1], tuple(int(x.lstrip("<=")) for x in m[2].split(",") if x), m[3] or "")
    for m in _ARRAY.finditer(text)
  )


def _entry(text: str) -> str:
  found = re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)
  return found[1] if found else ""


def _lines(text: str) -> Iterator[tuple[str, str, str, str, str]]:
  """Yields computation, name, type, opcode and the whole line of every instruction."""
  computation = ""
  for line in text.splitlines():
    if block := _COMPUTATION.match(line):
      computation = block[1]
    elif computation and (m := _INSTRUCTION.match(line)):
      kind, rest = _split_type(m[2])
      opcode = re.match(r"[\w\-]+", rest)
      if opcode:
        yield computation, m[1], kind, opcode[0], line


def _split_type(text: str) -> tuple[str, str]:
  """Splits "type opcode(...)" behind the type, which holds balanced parentheses and spaces."""
  depth = 0
  for i, c in enumerate(text):
    depth += (c in "({") - (c in ")}")
    if c == " " and depth == 0:
      return text[:i], text[i + 1 :]
  return text, ""


def _instructions(text: str) -> Iterator[Instruction]:
  lines = list(_lines(text))
  repeats = _repeats(lines, _entry(text))
  for computation, name, kind, opcode, line in lines:
    yield Instruction(name, opcode, _arrays(kind), computation, repeats.get(computation, 1), line)


def _repeats(lines: list[tuple[str, str, str, str, str]], entry: str) -> dict[str, int | None]:
  """How often each computation runs in a step; None inside a loop of unknown length."""
  calls = collections.defaultdict(list)
  for computation, _, _, opcode, line in lines:
    times: int | None = 1
    if opcode == "while":
      known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
      times = int(known[1]) if known else None
    for m in _CALLED.finditer(line):
      for name in re.findall(r"[\w.\-]+", m[1]):
        calls[computation].append((name, times))
  repeats: dict[str, int | None] = {entry: 1}
  todo = [entry]
  while todo:
    outer = todo.pop()
    for name, times in calls[outer]:
      total = _product(repeats[outer], times)
      if name not in repeats or (total is not None and repeats[name] is None):
        repeats[name] = total
        todo.append(name)
  return repeats


def _product(a: int | None, b: int | None) -> int | None:
  return None if a is None or b is None else a * b


def _group_size(line: str) -> int:
  """The devices that exchange with one another."""
  if m := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
    return len(m[1].split(","))
  if m := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
    return int(m[2])
  if m := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
    sizes = {name: int(size) for name, size in re.findall(r"('\w+')=(\d+)", m[1])}
    return math.prod(sizes[name] for name in re.findall(r"'\w+'", m[2]))
  return len(re.findall(r"\{\d+,\d+\}", line)) or 1
