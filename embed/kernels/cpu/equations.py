"""Equations of optimizers as machine code: a jaxpr of one row's step becomes vector instructions.

`program` reads what JAX traced of an equation: arithmetic on the elements of a row, and sums,
maxima and minima over the row. `compiled` emits it: numbers once for a row, each reduction a loop
over the row, and one more loop that writes the new row and slots. What goes into a loop is computed
in that loop again, so that nothing is ever stored in between.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from embed.engine import update
from embed.engine.jax_internals import Literal
from embed.kernels.cpu import frame, memory

_WORD, _INT, _FLOAT, _BOOL = ir.IntType(64), ir.IntType(32), ir.FloatType(), ir.IntType(1)
_KINDS = {"float32": _FLOAT, "int32": _INT, "bool": _BOOL}


class Unsupported(Exception):
  """Why an equation has no program."""


class Operation(NamedTuple):
  """One assignment: `name = op(arguments)`, of a row's elements or of one number."""

  name: str
  op: str
  arguments: tuple[str, ...]
  dtype: str
  is_row: bool
  parameter: int = 0


class Program(NamedTuple):
  """A row's step. Names: `g`, `w`, `rate`, `s0` ... for slots, `n0` ... for numbers, `i7` for 7.

  What it reads beside the row are words: the rules by which new rows are rounded at random, `RULE`
  words for each of `rules`, see `update.rounding_rules`; the step's index, if there are any; and
  the numbers, float32.

  Attributes:
    slots: whether each has a value for every element of a row.
    slot_dtypes: "float32" or "int32".
    has_rows: whether a row has more than one element.
    operations: in order.
    results: the names of the new row and slots.
    table: "float32" or "bfloat16".
    rules: how many rules for stochastic rounding there are; 0 for rounding to the nearest.
  """

  slots: tuple[bool, ...]
  slot_dtypes: tuple[str, ...]
  has_rows: bool
  operations: tuple[Operation, ...]
  results: tuple[str, ...]
  table: str = "float32"
  rules: int = 0


RULE = 5  # words


SGD = Program(
  (), (), True,
  (Operation("a", "mul", ("rate", "g"), "float32", True),
   Operation("b", "sub", ("w", "a"), "float32", True)),
  ("b",),
)  # fmt: skip


# --- reading --------------------------------------------------------------------------------------

_SAME = (
  "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy", "copy_p", "stop_gradient",
  "optimization_barrier",
)  # fmt: skip
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "custom_jvp_call": "call_jaxpr"}


class _Reader:
  def __init__(self, dim: int):
    self.dim, self.operations, self.numbers = dim, [], []  # type: ignore[var-annotated]
    self.counter = itertools.count()
    self.is_row: dict[str, bool] = {}

  def kind(self, aval: Any) -> tuple[str, bool]:
    """The dtype of an array, and whether it is a row."""
    if str(getattr(aval, "dtype", None)) not in _KINDS:
      raise Unsupported(f"{aval}")
    if aval.shape == (self.dim,) and self.dim > 1:
      return str(aval.dtype), True
    if aval.size != 1:
      raise Unsupported(f"an array of shape {aval.shape}")
    return str(aval.dtype), False

  def number(self, value: Any) -> str:
    """The name of a constant."""
    value = np.asarray(value)
    if value.size != 1:
      raise Unsupported(f"a constant of shape {value.shape}")
    if value.dtype.kind in "ib":
      return f"i{int(value.reshape(()))}"
    self.numbers.append(float(value.reshape(())))
    return f"n{len(self.numbers) - 1}"

  def run(self, closed: Any, arguments: Sequence[str]) -> list[str]:
    """Adds the operations of a jaxpr; returns the names of its results."""
    jaxpr = closed.jaxpr
    names: dict[Any, str] = dict(zip(jaxpr.constvars, map(self.number, closed.consts), strict=True))
    names |= dict(zip(jaxpr.invars, arguments, strict=True))
    read = lambda v: self.number(v.val) if isinstance(v, Literal) else names[v]
    for eqn in jaxpr.eqns:
      name, inputs = eqn.primitive.name, [read(v) for v in eqn.invars]
      if name in _CALLS:
        outputs = self.run(eqn.params[_CALLS[name]], inputs)
      elif name in _SAME:
        for v in eqn.outvars:
          self.kind(v.aval)
        outputs = inputs[: len(eqn.outvars)]
      else:
        outputs = [self.add(eqn, inputs)]
      names.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]

  def add(self, eqn: Any, inputs: list[str]) -> str:
    op = eqn.primitive.name
    if not eqn.invars or len(eqn.outvars) != 1:
      raise Unsupported(f"`{op}`")
    dtype, is_row = self.kind(eqn.outvars[0].aval)
    of = str(eqn.invars[0].aval.dtype)
    if op in _REDUCTIONS and not self.is_row.get(inputs[0], False):
      # A number that was broadcast to a row has kept its name.
      if op == "reduce_sum" and eqn.invars[0].aval.size != 1:
        raise Unsupported("the sum of a constant row")
      return inputs[0]
    known = (op, of) in _EMITTED or op in ("integer_pow", "select_n")
    known = known or (of == "float32" and (op in _REDUCTIONS or op == "pow"))
    if op == "convert_element_type":
      known = (of, dtype) in _CONVERSIONS
      op = f"{of} to {dtype}"
    if op == "select_n":
      known = of == "bool" and len(inputs) == 3
    if op == "integer_pow":
      known = abs(eqn.params["y"]) <= 8 and of == "float32"
    if not known:
      raise Unsupported(f"`{op}` of {of}")
    name = f"v{next(self.counter)}"
    self.is_row[name] = is_row
    power = eqn.params["y"] if op == "integer_pow" else 0
    op = f"{op} of {of}" if (op, of) in _EMITTED else op
    self.operations.append(Operation(name, op, tuple(inputs), dtype, is_row, power))
    return name


def program(
  step: Callable[..., Any],
  dim: int,
  slots: Sequence[tuple[bool, Any]],
  table: str = "float32",
  rules: int = 0,
) -> tuple[Program, np.ndarray]:
  """The program of a row's step, and its numbers.

  Args:
    step: `f(g, w, slots, rate) -> (w, slots)` of arrays `[D]`; slots are a list.
    dim: D.
    slots: of each, whether it has a value for every element, and its dtype.
    table: the table's dtype.
    rules: see `Program`.

  Raises:
    Unsupported: for an equation with anything that `compiled` cannot emit, and for slots of other
      dtypes than `frame.SLOTS`. A bool, for one, is a bit in a register and a byte in a slot.
  """
  dtypes = tuple(str(np.dtype(dtype)) for _, dtype in slots)
  if table not in frame.TABLES or not frame.SLOTS.keys() >= {*dtypes}:
    raise Unsupported(f"a table of {table} with slots of {dtypes}")
  row, one = jax.ShapeDtypeStruct((dim,), np.float32), jax.ShapeDtypeStruct((), np.float32)
  of_slots = [jax.ShapeDtypeStruct((dim,) if r else (), dtype) for r, dtype in slots]
  closed = jax.make_jaxpr(step)(row, row, of_slots, one)
  reader, names = _Reader(dim), ["g", "w", *(f"s{i}" for i in range(len(slots))), "rate"]
  for name, v in zip(names, closed.jaxpr.invars, strict=True):
    reader.is_row[name] = reader.kind(v.aval)[1]
  results = reader.run(closed, names)
  for v, dtype in zip(closed.jaxpr.outvars, ("float32", *dtypes), strict=True):
    if str(v.aval.dtype) != dtype:
      raise Unsupported(f"a result of {v.aval.dtype}")
  rows = tuple(r and dim > 1 for r, _ in slots)
  operations = tuple(reader.operations)
  made = Program(rows, dtypes, dim > 1, operations, tuple(results), table, rules)
  return made, np.asarray(reader.numbers, np.float32)


def _names(program: Program) -> set[str]:
  """The names that operations and results read."""
  return {*itertools.chain(*(op.arguments for op in program.operations)), *program.results}


def _first_number(program: Program) -> int:
  """The words before the numbers."""
  return RULE * program.rules + bool(program.rules)


def words(program: Program) -> int:
  """How many words a program reads, at least."""
  numbers = (int(name[1:]) + 1 for name in _names(program) if name[0] == "n")
  return _first_number(program) + max(numbers, default=0)


# --- emitting -------------------------------------------------------------------------------------


def _call(name: str) -> Callable[..., Any]:
  """An intrinsic of LLVM, of any width."""

  def emit(b, *args):
    kind = args[0].type
    suffix = f"v{memory.LANES}f32" if isinstance(kind, ir.VectorType) else "f32"
    function = ir.FunctionType(kind, [kind] * len(args))
    full_name = f"llvm.{name}.{suffix}"
    return b.call(cgutils.get_or_insert_function(b.module, function, full_name), args)

  return emit


def _larger(b: Any, x: Any, y: Any, sign: str = ">") -> Any:
  """The larger one, NaN if either is."""
  larger = b.select(b.fcmp_unordered(sign, x, y), x, y)
  return b.select(b.fcmp_unordered("uno", y, y), y, larger)


def _smaller(b: Any, x: Any, y: Any) -> Any:
  return _larger(b, x, y, "<")


def _sign(b: Any, x: Any) -> Any:
  zero, one, minus = (memory.constant(x.type, v) for v in (0, 1, -1))
  negative = b.select(b.fcmp_ordered("<", x, zero), minus, x)
  return b.select(b.fcmp_ordered(">", x, zero), one, negative)


def _of_integers(sign: str) -> Callable[..., Any]:
  return lambda b, x, y: b.select(b.icmp_signed(sign, x, y), x, y)


_FUSED = ("contract",)
_sqrt = _call("sqrt")
_EMITTED: dict[tuple[str, str], Callable[..., Any]] = {
  ("add", "float32"): lambda b, x, y: b.fadd(x, y, flags=_FUSED),
  ("add_any", "float32"): lambda b, x, y: b.fadd(x, y, flags=_FUSED),
  ("sub", "float32"): lambda b, x, y: b.fsub(x, y, flags=_FUSED),
  ("mul", "float32"): lambda b, x, y: b.fmul(x, y, flags=_FUSED),
  ("div", "float32"): lambda b, x, y: b.fdiv(x, y),
  ("neg", "float32"): lambda b, x: b.fneg(x),
  ("square", "float32"): lambda b, x: b.fmul(x, x, flags=_FUSED),
  ("sqrt", "float32"): _sqrt,
  ("rsqrt", "float32"): lambda b, x: b.fdiv(memory.constant(x.type, 1), _sqrt(b, x)),
  ("abs", "float32"): _call("fabs"),
  ("exp", "float32"): _call("exp"),
  ("log", "float32"): _call("log"),
  ("floor", "float32"): _call("floor"),
  ("ceil", "float32"): _call("ceil"),
  ("sign", "float32"): _sign,
  ("max", "float32"): _larger,
  ("min", "float32"): _smaller,
  ("clamp", "float32"): lambda b, low, x, high: _smaller(b, _larger(b, x, low), high),
  ("add", "int32"): lambda b, x, y: b.add(x, y),
  ("sub", "int32"): lambda b, x, y: b.sub(x, y),
  ("mul", "int32"): lambda b, x, y: b.mul(x, y),
  ("max", "int32"): _of_integers(">"),
  ("min", "int32"): _of_integers("<"),
  ("and", "bool"): lambda b, x, y: b.and_(x, y),
  ("or", "bool"): lambda b, x, y: b.or_(x, y),
  ("not", "bool"): lambda b, x: b.not_(x),
}
for _name, _sign_of in (("eq", "=="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">=")):
  _EMITTED[_name, "float32"] = lambda b, x, y, s=_sign_of: b.fcmp_ordered(s, x, y)
  _EMITTED[_name, "int32"] = lambda b, x, y, s=_sign_of: b.icmp_signed(s, x, y)
_EMITTED["ne", "float32"] = lambda b, x, y: b.fcmp_unordered("!=", x, y)
_EMITTED["ne", "int32"] = lambda b, x, y: b.icmp_signed("!=", x, y)
_CONVERSIONS: dict[tuple[str, str], Callable[..., Any]] = {
  ("float32", "float32"): lambda b, x, kind: x,
  ("int32", "int32"): lambda b, x, kind: x,
  ("int32", "float32"): lambda b, x, kind: b.sitofp(x, kind),
  ("bool", "float32"): lambda b, x, kind: b.uitofp(x, kind),
  ("bool", "int32"): lambda b, x, kind: b.zext(x, kind),
}
_REDUCTIONS = {
  "reduce_sum": (0.0, lambda b, x, y: b.fadd(x, y)),
  "reduce_max": (-np.inf, _larger),
  "reduce_min": (np.inf, _smaller),
}
_BY_TEXT = {f"{op} of {dtype}": emit for (op, dtype), emit in _EMITTED.items()}


def _power(b: Any, x: Any, exponent: int) -> Any:
  result = None
  for _ in range(abs(exponent)):
    result = x if result is None else b.fmul(result, x)
  if result is None:
    return memory.constant(x.type, 1)
  return result if exponent > 0 else b.fdiv(memory.constant(x.type, 1), result)


def _scramble(b: Any, x: Any) -> Any:
  """`update.scramble`."""
  of = lambda number: memory.constant(x.type, number)
  for shift, factor in update.SCRAMBLE:
    x = b.mul(b.xor(x, b.lshr(x, of(shift))), of(factor))
  return b.xor(x, b.lshr(x, of(update.LAST_SHIFT)))


class _Emitter:
  """The instructions of one row's step."""

  def __init__(self, builder: Any, program: Program, args: Sequence[Any]):
    self.b, self.program = builder, program
    grad, state, row, self.dim, rate, self.words = args
    rate = builder.load(memory.at(builder, rate, _FLOAT))
    b, is_row = builder, (True, *program.slots)
    names = ["w", *(f"s{i}" for i in range(len(program.slots)))]
    self.dtypes = {"g": "float32"} | dict(
      zip(names, ("float32", *program.slot_dtypes), strict=True)
    )
    self.dtypes |= {op.name: op.dtype for op in program.operations}
    self.addresses, self.values = {"g": grad}, {"rate": rate}
    for k, name in enumerate(names):
      base = b.load(b.gep(memory.at(b, state, _WORD), [_WORD(k)]))
      width = self.dim if is_row[k] else _WORD(1)
      size = _WORD(2 if self.stored(name) == "bfloat16" else 4)
      self.addresses[name] = b.add(base, b.mul(b.mul(row, width), size))
      if not (is_row[k] and program.has_rows):
        self.values[name] = self._load(name, (_WORD(0), _KINDS[self.dtypes[name]]))
    if not program.has_rows:
      self.values["g"] = b.load(memory.at(b, grad, _FLOAT))
    for name in _names(program):
      if name[0] == "n":
        at = _WORD(_first_number(program) + int(name[1:]))
        self.values[name] = b.load(b.gep(memory.at(b, self.words, _FLOAT), [at]))
    self.rows = {op.name: op for op in program.operations if op.is_row}
    self.names = names
    self.key = self.rounding_key(row) if program.rules else None

  def stored(self, name: str) -> str:
    """The dtype in memory."""
    return self.program.table if name == "w" else self.dtypes[name]

  def rounding_key(self, row: Any) -> Any:
    """What the noise of a row is made of: `update.rounding_rules` has the formula."""
    b, words, row = self.b, memory.at(self.b, self.words, _INT), self.b.trunc(row, _INT)
    rule = _INT(0)
    for later in range(1, self.program.rules):  # of the last table that begins before the row
      first = b.load(b.gep(words, [_WORD(RULE * later)]))
      rule = b.add(rule, b.zext(b.icmp_signed(">=", row, first), _INT))
    begin = b.mul(b.zext(rule, _WORD), _WORD(RULE))
    first, scale, base, shared, column = (
      b.load(b.gep(words, [b.add(begin, _WORD(i))])) for i in range(RULE)
    )
    number = b.add(b.mul(b.sub(row, first), scale), base)
    return b.add(_scramble(b, b.xor(number, shared)), b.mul(column, _INT(update.GOLDEN)))

  def noise(self, offset: Any, kind: Any) -> Any:
    """Random bits for the elements from an offset on; None if rows are rounded to the nearest."""
    if self.key is None:
      return None
    b, like = self.b, _INT
    steps = _INT(0)
    if isinstance(kind, ir.VectorType):
      like = ir.VectorType(_INT, kind.count)
      steps = ir.Constant(like, [*range(kind.count)])
    column = b.add(memory.splat(b, b.trunc(offset, _INT), like), steps)
    spread = b.mul(column, memory.constant(like, update.GOLDEN))
    return _scramble(b, b.add(memory.splat(b, self.key, like), spread))

  def store(self, name: str, at: Any, value: Any) -> None:
    """Writes a new value of a row or a slot."""
    offset, kind = at
    noise = self.noise(offset, kind) if name == "w" else None
    address = self.addresses[name]
    memory.store_floats(self.b, address, offset, value, self.stored(name), noise)

  def run(self) -> None:
    b, program = self.b, self.program
    for op in program.operations:
      if op.op in _REDUCTIONS:
        self.values[op.name] = self.reduce(op)
      elif not op.is_row:
        args = [self.value(name, None, op) for name in op.arguments]
        self.values[op.name] = self.apply(op, args, None)
    is_row = (True, *program.slots)
    outputs = list(zip(self.names, program.results, is_row, strict=True))
    if program.has_rows:

      def write(offset, kind):
        memo: dict[str, Any] = {}
        new = [
          (name, self.value(result, (offset, kind), self.dtypes[name], memo))
          for name, result, row in outputs
          if row
        ]
        for name, value in new:
          self.store(name, (offset, kind), value)

      memory.for_each_vector(b, self.dim, write)
    for name, result, row in outputs:
      if not (row and program.has_rows):
        value = self.value(result, None, self.dtypes[name])
        self.store(name, (_WORD(0), value.type), value)

  def value(self, name: str, at: Any, wanted: Any, memo: dict[str, Any] | None = None) -> Any:
    """A name's value: in a loop, of the vector `at` an offset; else one number."""
    b, memo = self.b, {} if memo is None else memo
    if name in memo:
      return memo[name]
    width = (lambda kind: ir.VectorType(kind, memory.LANES)) if self._is_vector(at) else lambda k: k
    if name in self.values:
      value = self.values[name]
      made = memory.splat(b, value, at[1]) if at is not None else value
    elif name[0] == "i" and name[1:].lstrip("-").isdigit():
      dtype = wanted if isinstance(wanted, str) else self._dtype_beside(wanted)
      return memory.constant(width(_KINDS[dtype]), int(name[1:]))
    elif name in self.addresses:
      made = self._load(name, at)
    else:
      op = self.rows[name]
      made = self.apply(op, [self.value(arg, at, op, memo) for arg in op.arguments], at)
    memo[name] = made
    return made

  def _is_vector(self, at: Any) -> bool:
    return at is not None and isinstance(at[1], ir.VectorType)

  def _dtype_beside(self, op: Operation) -> str:
    """The dtype of an integer constant among an operation's arguments."""
    if op.op in _BY_TEXT:
      return op.op.split(" of ")[1]
    return op.dtype

  def _load(self, name: str, at: Any) -> Any:
    kind = _KINDS[self.dtypes[name]]
    kind = ir.VectorType(kind, memory.LANES) if self._is_vector(at) else kind
    return memory.load_floats(self.b, self.addresses[name], at[0], kind, self.stored(name))

  def apply(self, op: Operation, args: list[Any], at: Any) -> Any:
    b = self.b
    if op.op in _BY_TEXT:
      return _BY_TEXT[op.op](b, *args)
    if op.op == "select_n":
      return b.select(args[0], args[2], args[1])
    if op.op == "integer_pow":
      return _power(b, args[0], op.parameter)
    if op.op == "pow":
      x, y = args
      y = y if y.type == x.type else b.sitofp(y, x.type)
      return _call("pow")(b, x, y)
    source, kind = op.op.split(" to ")[0], _KINDS[op.dtype]
    kind = ir.VectorType(kind, memory.LANES) if self._is_vector(at) else kind
    return _CONVERSIONS[source, op.dtype](b, args[0], kind)

  def reduce(self, op: Operation) -> Any:
    """A row's sum, maximum or minimum."""
    b, (start, join) = self.b, _REDUCTIONS[op.op]
    vector = ir.VectorType(_FLOAT, memory.LANES)
    parts = {kind: cgutils.alloca_once(b, kind) for kind in (vector, _FLOAT)}
    for kind, place in parts.items():
      b.store(memory.constant(kind, start), place)

    def add(offset, kind):
      place = parts[kind]
      value = self.value(op.arguments[0], (offset, kind), op)
      b.store(join(b, b.load(place), value), place)

    memory.for_each_vector(b, self.dim, add)
    total, lanes = b.load(parts[_FLOAT]), b.load(parts[vector])
    for lane in range(memory.LANES):
      total = join(b, total, b.extract_element(lanes, _INT(lane)))
    return total


def compiled(program: Program) -> Any:
  """`step_row(grad, state, row, dim, rate, words)` for compiled code: all of them int64.

  `grad` is the address of a row's gradient, `state` that of the addresses of the table and its
  slots, `rate` that of the learning rate and `words` that of the program's words.
  """

  @intrinsic
  def step_row(typingctx, grad, state, row, dim, rate, words):
    def codegen(context, builder, signature, args):
      _Emitter(builder, program, args).run()
      return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen

  return step_row
