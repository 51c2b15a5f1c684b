"""Reads the text of compiled XLA programs: exchanges, new arrays, kernels on SparseCores.

The text is `compiled.as_text()`: computations as blocks of one instruction a line, with the shapes
that one device holds.
"""

import collections
import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_COLLECTIVE = re.compile(
  r"(?:all-gather|all-reduce|(?:ragged-)?all-to-all|collective-(?:broadcast|permute)"
  r"|reduce-scatter)(?:-start)?"
)
# Instructions that make a new array. A gradient of a table's size begins with a broadcast; in a
# compiled program a reshape that moves nothing is a bitcast.
_MAKERS = ("broadcast", "concatenate", "copy", "copy-start", "pad", "reshape", "transpose")
_FREE_IN_FUSIONS = ("broadcast", "reshape")
_BYTES = {"pred": 1, "token": 0}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
# name = type opcode(operands). No word of a type is followed by a parenthesis.
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)")
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(
  r"(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations"
  r"|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)


class Array(NamedTuple):
  """An array's type: `dtype` as XLA writes it, `layout` the text in braces after the shape."""

  dtype: str
  shape: tuple[int, ...]
  layout: str = ""

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  @property
  def nbytes(self) -> int:
    bits = re.match(r"[a-z]+(\d+)", self.dtype)
    return self.size * _BYTES.get(self.dtype, int(bits[1]) // 8 if bits else 4)

  def __str__(self) -> str:
    return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Instruction(NamedTuple):
  """One line of a program, `text`, in the computation `computation`.

  Attributes:
    operands: names of the instructions whose results it takes.
  """

  name: str
  opcode: str
  results: tuple[Array, ...]
  operands: list[str]
  computation: str
  text: str

  @property
  def calls(self) -> list[str]:
    """Names of the computations that it runs."""
    return [name for m in _CALLED.finditer(self.text) for name in re.findall(r"[\w.\-]+", m[1])]

  @property
  def group_size(self) -> int:
    """Number of devices that exchange with one another."""
    if m := re.search(r"replica_groups=\{\{([\d,]*)\}", self.text):
      return len(m[1].split(","))
    if m := re.search(r"replica_groups=\[(\d+),(\d+)\]", self.text):
      return int(m[2])
    if m := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", self.text):
      sizes = {name: int(size) for name, size in re.findall(r"('\w+')=(\d+)", m[1])}
      return math.prod(sizes[name] for name in re.findall(r"'\w+'", m[2]))
    return len(re.findall(r"\{\d+,\d+\}", self.text)) or 1

  @property
  def exchanged(self) -> tuple[Array, ...]:
    """Returns the results of a collective; an asynchronous start returns its operands, too."""
    results = tuple(array._replace(layout="") for array in self.results)
    if self.opcode in ("all-gather-start", "collective-permute-start"):
      return results[1:2]
    if self.opcode == "all-to-all-start":  # operands, results, and perhaps a context
      return results[len(self.operands) : 2 * len(self.operands)]
    return results


class Program:
  """A compiled program.

  Attributes:
    instructions: of all computations, in the order of the text.
    exchanges: those that are collectives.
  """

  def __init__(self, text: str):
    self.instructions = tuple(_instructions(text))
    self.exchanges = [i for i in self.instructions if _COLLECTIVE.fullmatch(i.opcode)]
    entry = re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)
    self._entry = entry[1] if entry else ""

  @functools.cached_property
  def _runs(self) -> dict[str, int | None]:
    """Runs per step of each computation that is reached; None inside a loop of unknown length.

    Of a computation that is called in several places, the first count that is known.
    """
    calls: dict[str, list[tuple[str, int | None]]] = collections.defaultdict(list)
    for i in self.instructions:
      known = re.search(r'"known_trip_count":\{"n":"(\d+)"', i.text)
      trips = int(known[1]) if known else None if i.opcode == "while" else 1
      calls[i.computation] += [(name, trips) for name in i.calls]
    runs: dict[str, int | None] = {self._entry: 1}
    pending = [self._entry]
    while pending:
      caller = pending.pop()
      for name, trips in calls[caller]:
        outer = runs[caller]
        total = None if outer is None or trips is None else outer * trips
        if name not in runs or (total is not None and runs[name] is None):
          runs[name] = total
          pending.append(name)
    return runs

  def collectives(self) -> list[dict[str, Any]]:
    """Returns the exchanges between devices, equal ones added up, the largest first.

    `count` is how often a step runs them, None inside a loop whose length depends on the data, and
    `bytes` the size of one result. `sent` are the bytes that one device sends at least for it: for
    an all-to-all everything but its own part, for an all-reduce twice as much (a reduce-scatter and
    an all-gather).
    """
    counts: collections.Counter[tuple] = collections.Counter()
    for i in self.exchanges:
      opcode, runs = i.opcode.removesuffix("-start"), self._runs.get(i.computation, 1)
      counts[opcode, i.exchanged, i.group_size, runs] += 1
    merged = []
    for (opcode, arrays, group, runs), number in counts.items():
      nbytes, remote = sum(array.nbytes for array in arrays), (group - 1) / group
      shares = {"all-reduce": 2 * remote, "reduce-scatter": group - 1, "collective-permute": 1}
      merged.append({
        "op": opcode,
        "dtypes": sorted({array.dtype for array in arrays}),
        "shapes": list(map(str, arrays)),
        "devices": group,
        "instructions": number,
        "count": None if runs is None else runs * number,
        "bytes": nbytes,
        "sent": round(nbytes * shares.get(opcode, remote)),
      })  # fmt: skip
    return sorted(merged, key=lambda of: (-of["bytes"], of["op"]))

  def made(self, fits: Callable[[Array], bool]) -> list[str]:
    """Returns the instructions that put a new array that `fits` into the large memory of a device.

    What a fusion makes on its way is no array in memory, and what is fetched to the fast memory or
    comes back from there is the compiler's own caching.
    """
    by_name = {i.name: i for i in self.instructions}
    fusions = {i.calls[0] for i in self.instructions if i.opcode == "fusion"}
    makers = []
    for i in self.instructions:
      if i.opcode not in _MAKERS or not i.results or not fits(i.results[0]):
        continue
      sources = [by_name[name].results[0] for name in i.operands if name in by_name]
      is_cached = any("S(1)" in array.layout for array in (i.results[0], *sources[:1]))
      is_fused = i.opcode in _FREE_IN_FUSIONS and i.computation in fusions
      if not is_cached and not is_fused:
        makers.append(f"{i.opcode} {i.name}: {i.results[0]} in {i.computation}")
    return makers

  def sparse_core_calls(self) -> list[dict[str, Any]]:
    """Returns the calls of this library's SparseCore kernels, in the order of the text.

    `start` and `done` are where the schedule of its computation, of `length` instructions, starts
    the kernel and waits for it.
    """
    thread = 'async_execution_thread="sparsecore"'
    starts = [i for i in self.instructions if i.opcode.endswith("-start") and thread in i.text]
    wrappers = {name for i in starts for name in i.calls}  # they hold a start of their own
    blocks = collections.defaultdict(list)
    for i in self.instructions:
      blocks[i.computation].append(i)
    calls = []
    for i in starts:
      kernel, block = re.search(r"sparse_core_(\w+)/", i.text), blocks[i.computation]
      if kernel and i.computation not in wrappers:
        waits = (place for place, user in enumerate(block) if user.operands[:1] == [i.name])
        place = {"start": block.index(i), "done": next(waits), "length": len(block)}
        calls.append({"kernel": kernel[1]} | place)
    return calls

  def row_gathers(self) -> int:
    """Returns how many gathers of rows XLA makes itself: of floating point numbers, [rows, D]."""
    return sum(
      i.opcode == "gather" and i.results[0].dtype in ("f32", "bf16") and len(i.results[0].shape) > 1
      for i in self.instructions
    )


def _instructions(text: str) -> Iterator[Instruction]:
  computation = ""
  for line in text.splitlines():
    if block := _COMPUTATION.match(line):
      computation = block[1]
    elif computation and (m := _INSTRUCTION.match(line)):
      name, types, opcode, operands = m.groups()
      results = tuple(
        Array(a[1], tuple(int(x.lstrip("<=")) for x in a[2].split(",") if x), a[3] or "")
        for a in _ARRAY.finditer(types)
      )
      takes = re.findall(r"%([\w.\-]+)", operands)
      yield Instruction(name, opcode, results, takes, computation, line)
