"""Reads the text of compiled XLA programs: exchanges, copies, layouts, offloads.

The text is `compiled.as_text()`: computations as blocks of one instruction a line, with the shapes
that one device holds.
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
# Instructions that make a new array. A gradient of a table's size begins with a broadcast; in a
# compiled program a reshape that moves nothing is a bitcast.
_MAKERS = ("broadcast", "concatenate", "copy", "copy-start", "pad", "reshape", "transpose")
_FREE_IN_FUSIONS = ("broadcast", "reshape")
# Instructions that pass numbers on as they are.
_UNCHANGED = (
  "all-gather-done",
  "bitcast",
  "copy",
  "copy-done",
  "copy-start",
  "fusion",
  "parameter",
  "reshape",
  "transpose",
)
_PRODUCTS = ("convolution", "dot")  # they round float32 operands to bfloat16 on TPUs
_NARROW = ("bf16", "f16")
_BYTES = {"pred": 1, "token": 0, "tuple": 0}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
# name = type opcode(operands). No word of a type is followed by a parenthesis.
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)")
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(
  r"(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations"
  r"|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_TENSOR = re.compile(r"tensor<(?:\d+x)*(\w+)>")


class Array(NamedTuple):
  """An array's type: `dtype` as XLA writes it, `layout` the text in braces after the shape."""

  dtype: str
  shape: tuple[int, ...]
  layout: str = ""

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  @property
  def item_bytes(self) -> int:
    bits = re.match(r"[a-z]+(\d+)", self.dtype)
    return _BYTES.get(self.dtype, int(bits[1]) // 8 if bits else 4)

  @property
  def nbytes(self) -> int:
    return self.size * self.item_bytes

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
    return math.prod(shape) * self.item_bytes

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
  def trip_count(self) -> int | None:
    """Runs of the computations that it calls; None for a loop of unknown length."""
    if self.opcode != "while":
      return 1
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.text)
    return int(known[1]) if known else None

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

  def __str__(self) -> str:
    return f"{self.opcode} {self.name}: {self.results[0]} in {self.computation}"


class Collective(NamedTuple):
  """Equal exchanges of a program.

  `times` is how often a step runs them, None inside a loop whose length depends on the data.
  """

  opcode: str
  results: tuple[Array, ...]
  group: int
  times: int | None
  instructions: int

  @property
  def nbytes(self) -> int:
    """The size of one result."""
    return sum(array.nbytes for array in self.results)

  @property
  def sent(self) -> int:
    """Bytes that one device sends at least for one result.

    For an all-to-all everything but its own part, for an all-reduce twice as much (a reduce-scatter
    and an all-gather).
    """
    remote = (self.group - 1) / self.group
    factor = {"all-reduce": 2 * remote, "reduce-scatter": self.group - 1, "collective-permute": 1}
    return round(self.nbytes * factor.get(self.opcode, remote))

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


class SparseCoreCall(NamedTuple):
  """A kernel that runs on the SparseCores while the schedule goes on.

  Attributes:
    kernel: its name, as "take_rows".
    always: whether every step runs it; not so inside a loop whose length depends on the data.
    start, done: where the schedule of its computation starts it, and where it waits for it.
  """

  kernel: str
  always: bool
  start: int
  done: int
  length: int


class Program:
  """A compiled program, read from `compiled.as_text()`.

  Attributes:
    instructions: of all computations, in the order of the text.
  """

  def __init__(self, text: str):
    self.text, self.instructions = text, tuple(_instructions(text))
    entry = re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)
    self._entry = entry[1] if entry else ""
    self._by_name = {i.name: i for i in self.instructions}
    self._fusions = {i.calls[0]: i.name for i in self.instructions if i.opcode == "fusion"}

  @property
  def parameters(self) -> tuple[Array, ...]:
    """The arguments of one device, in the layouts that the compiler chose."""
    entry = (i for i in self.instructions if i.computation == self._entry)
    return tuple(i.results[0] for i in entry if i.opcode == "parameter")

  @functools.cached_property
  def runs(self) -> dict[str, int | None]:
    """Runs per step of each computation that is reached; None inside a loop of unknown length.

    Of a computation that is called in several places, the first count that is known.
    """
    calls: dict[str, list[tuple[str, int | None]]] = collections.defaultdict(list)
    for i in self.instructions:
      calls[i.computation] += [(name, i.trip_count) for name in i.calls]
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

  def collectives(self, counted: Callable[[Instruction], bool] | None = None) -> list[Collective]:
    """Returns the exchanges between devices, equal ones added up, the largest first."""
    counts: collections.Counter[tuple] = collections.Counter()
    for i in self.instructions:
      opcode = i.opcode.removesuffix("-start")
      if opcode in COLLECTIVES and (counted is None or counted(i)):
        results = tuple(array._replace(layout="") for array in i.results)
        if i.opcode in ("all-gather-start", "collective-permute-start"):
          results = results[1:2]  # a started one returns its operand, too
        elif i.opcode == "all-to-all-start":  # operands, results, and perhaps a context
          results = results[len(i.operands) : 2 * len(i.operands)]
        counts[opcode, results, i.group_size, self.runs.get(i.computation, 1)] += 1
    merged = [
      Collective(op, results, group, None if runs is None else runs * n, n)
      for (op, results, group, runs), n in counts.items()
    ]
    return sorted(merged, key=lambda c: (-c.nbytes, c.opcode))

  def made(self, fits: Callable[[Array], bool]) -> list[str]:
    """Returns the instructions that put a new array that `fits` into the large memory of a device.

    What a fusion makes on its way is no array in memory, and what is fetched to the fast memory or
    comes back from there is the compiler's own caching.
    """
    makers = []
    for i in self.instructions:
      if i.opcode not in _MAKERS or not i.results or not fits(i.results[0]):
        continue
      sources = [self._by_name[name].results[0] for name in i.operands if name in self._by_name]
      is_cached = any("S(1)" in array.layout for array in (i.results[0], *sources[:1]))
      is_fused = i.opcode in _FREE_IN_FUSIONS and i.computation in self._fusions
      if not is_cached and not is_fused:
        makers.append(str(i))
    return makers

  def narrowed(self, stablehlo: str) -> list[str]:
    """Returns the exchanges that run in 16 bits although the program asked for them in 32.

    XLA may round before an exchange what a matrix product rounds after it: the values that other
    consumers see, and the sums of an all-reduce, then lose 16 bits without a warning. An exchange
    whose results only matrix products take loses nothing, and is left out.

    A program that computes in 16 bits itself may have all-reduces of them, which the compiler adds
    for the gradients of dense parameters.
    """
    used = set(_TENSOR.findall(stablehlo))
    asked: dict[str, set[str]] = collections.defaultdict(set)
    for opcode, dtypes in written(stablehlo):
      asked[opcode].update(dtypes)

    def is_harmless(dtype: str, opcode: str) -> bool:
      # An exchange that the compiler has added was not written; it may have any written dtype.
      return dtype in asked.get(opcode, used) or (opcode == "all-reduce" and dtype in used)

    exact = lambda i: not (i.opcode.startswith("all-gather") and self._only_multiplies(i.name))
    found = []
    for c in self.collectives(exact):
      narrow = [array for array in c.results if array.dtype in _NARROW]
      lossy = {array.dtype for array in narrow if not is_harmless(array.dtype, c.opcode)}
      found += [f"{c.opcode} of {', '.join(map(str, narrow))}"] * len(lossy)
    return found

  def _only_multiplies(self, name: str) -> bool:
    """Returns whether only matrix products take what an instruction returns."""
    pending, reached = [name], set()
    while pending:
      value = self._by_name[pending.pop()]
      is_exact = "operand_precision={high" in value.text
      if value.name in reached or (value.opcode in _PRODUCTS and not is_exact):
        continue
      if value.opcode not in _UNCHANGED and value.name != name:
        return False
      reached.add(value.name)
      for user in self._users[value.name]:
        if user.opcode == "fusion":
          places = [place for place, operand in enumerate(user.operands) if operand == value.name]
          pending += [self._inputs[user.calls[0], place] for place in places]
        else:
          pending.append(user.name)
      if value.text.lstrip().startswith("ROOT"):
        if value.computation not in self._fusions:
          return False
        pending.append(self._fusions[value.computation])
    return True

  @functools.cached_property
  def _users(self) -> dict[str, list[Instruction]]:
    users: dict[str, list[Instruction]] = collections.defaultdict(list)
    for i in self.instructions:
      for name in set(i.operands):
        users[name].append(i)
    return users

  @functools.cached_property
  def _inputs(self) -> dict[tuple[str, int], str]:
    """Names of the parameters of computations, by computation and number."""
    numbers = ((i, re.search(r" parameter\((\d+)\)", i.text)) for i in self.instructions)
    return {(i.computation, int(number[1])): i.name for i, number in numbers if number}

  def sparse_core_calls(self) -> list[SparseCoreCall]:
    """Returns the calls of this library's SparseCore kernels, in the order of the text."""
    position: dict[str, int] = {}
    length: collections.Counter[str] = collections.Counter()
    done: dict[str, int] = {}
    starts = []
    for i in self.instructions:
      position[i.name] = length[i.computation]
      length[i.computation] += 1
      if 'async_execution_thread="sparsecore"' in i.text and i.opcode.endswith("-start"):
        starts.append(i)
      elif i.opcode.endswith("-done") and i.operands:
        done[i.operands[0]] = position[i.name]
    wrappers = {name for i in starts for name in i.calls}  # they hold a start of their own
    return [
      SparseCoreCall(
        kernel[1],
        self.runs.get(i.computation, 1) is not None,
        position[i.name],
        done.get(i.name, position[i.name]),
        length[i.computation],
      )
      for i in starts
      if i.computation not in wrappers and (kernel := re.search(r"sparse_core_(\w+)/", i.text))
    ]

  def row_gathers(self) -> int:
    """Returns how many gathers of rows XLA makes itself: of floating point numbers, [rows, D]."""
    return sum(
      i.opcode == "gather" and i.results[0].dtype in ("f32", "bf16") and len(i.results[0].shape) > 1
      for i in self.instructions
    )

  def offloads(self) -> dict[str, int]:
    """Returns how many operations of each kind run on SparseCores."""
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
    (m[1].replace("_", "-"), tuple(_TENSOR.findall(m[2]))) for m in operation.finditer(stablehlo)
  ]


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
