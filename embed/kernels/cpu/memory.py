"""What the kernels need and Numba's Python has no word for: addresses, atomics, function pointers.

Everything here is a few instructions that Numba places into the kernels. An address is an int64;
nobody checks what is there, so a kernel checks every id before it becomes one.
"""

import sys
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

OPTIONS: dict[str, Any] = {"error_model": "numpy"}
LINE = 64  # bytes of a line of the cache
PAGE = 1 << 21  # bytes of a large page
HUGEPAGE = 14  # MADV_HUGEPAGE of <linux/mman.h>
IS_LINUX = sys.platform == "linux"  # on other systems the number may be other advice
LANES = 8  # floats in a vector
AHEAD = 32  # rows that `weighted_sum` asks for ahead of time

_WORD, _HALF, _SHORT, _FLOAT = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.FloatType()
_BYTES = ir.IntType(8).as_pointer()
Emit = Callable[..., Any]


def at(builder: Any, address: Any, kind: Any) -> Any:
  """A pointer to what is at an address."""
  return builder.inttoptr(address, kind.as_pointer())


def _reader(kind: Any, result: Any) -> Any:
  @intrinsic
  def read(typingctx, address, index):
    def codegen(context, builder, signature, args):
      return builder.load(builder.gep(at(builder, args[0], kind), [args[1]]))

    return result(types.int64, types.int64), codegen

  return read


def _writer(kind: Any, value_type: Any) -> Any:
  @intrinsic
  def write(typingctx, address, index, value):
    def codegen(context, builder, signature, args):
      builder.store(args[2], builder.gep(at(builder, args[0], kind), [args[1]]))
      return context.get_dummy_value()

    return types.void(types.int64, types.int64, value_type), codegen

  return write


read_word, write_word = _reader(_WORD, types.int64), _writer(_WORD, types.int64)
read_int, write_int = _reader(_HALF, types.int32), _writer(_HALF, types.int32)
read_float, write_float = _reader(_FLOAT, types.float32), _writer(_FLOAT, types.float32)


def _of_libc(name: str, arguments: int) -> Any:
  """A function of the C library on words; through `ctypes`, Numba could not cache its callers."""
  words = [types.int64] * arguments

  def codegen(context, builder, signature, args):
    kind = ir.FunctionType(_WORD, [_WORD] * arguments)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)

  def none(typingctx):
    return types.int64(), codegen

  def one(typingctx, first):
    return types.int64(*words), codegen

  def two(typingctx, first, second):
    return types.int64(*words), codegen

  def three(typingctx, first, second, third):
    return types.int64(*words), codegen

  return intrinsic((none, one, two, three)[arguments])


malloc, calloc, free = _of_libc("malloc", 1), _of_libc("calloc", 2), _of_libc("free", 1)
memset, sched_yield = _of_libc("memset", 3), _of_libc("sched_yield", 0)
madvise = _of_libc("madvise", 3)


@intrinsic
def atomic_add(typingctx, address, amount):
  """Adds to the int64 at an address, and returns what was there before."""

  def codegen(context, builder, signature, args):
    return builder.atomic_rmw("add", at(builder, args[0], _WORD), args[1], "seq_cst")

  return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_read(typingctx, address):
  """Reads an int64 that other threads write, and after it what they wrote before."""

  def codegen(context, builder, signature, args):
    return builder.load_atomic(at(builder, args[0], _WORD), "acquire", 8)

  return types.int64(types.int64), codegen


@intrinsic
def call(typingctx, function, arguments):
  """Calls the C function at an address with a tuple of words."""

  def codegen(context, builder, signature, args):
    words = cgutils.unpack_tuple(builder, args[1], len(arguments))
    kind = ir.FunctionType(ir.VoidType(), [_WORD] * len(words))
    builder.call(at(builder, args[0], kind), words)
    return context.get_dummy_value()

  return types.void(types.int64, types.UniTuple(types.int64, len(arguments))), codegen


@intrinsic
def invoke(typingctx, function, size, fields):
  """Calls a function of XLA's C interface; returns an error's address, or 0.

  Its argument is a struct of `size` bytes: the size, a pointer to extensions, and a tuple of words.
  """

  def codegen(context, builder, signature, args):
    words = [args[1], _WORD(0), *cgutils.unpack_tuple(builder, args[2], len(fields))]
    struct = cgutils.alloca_once(builder, ir.ArrayType(_WORD, len(words)))
    for i, word in enumerate(words):
      builder.store(word, cgutils.gep_inbounds(builder, struct, 0, i))
    kind = ir.FunctionType(_WORD, [struct.type])
    return builder.call(at(builder, args[0], kind), [struct])

  words = types.UniTuple(types.int64, len(fields))
  return types.int64(types.int64, types.int64, words), codegen


@intrinsic(prefer_literal=True)
def text(typingctx, value):
  """The address of a literal string, as C has them."""
  literal = value.literal_value

  def codegen(context, builder, signature, args):
    return builder.ptrtoint(context.insert_const_string(builder.module, literal), _WORD)

  return types.int64(value), codegen


@intrinsic(prefer_literal=True)
def address_of(typingctx, symbol):
  """The address of a symbol, a literal string, that `llvmlite.binding.add_symbol` has named."""
  name = symbol.literal_value

  def codegen(context, builder, signature, args):
    kind = ir.FunctionType(ir.VoidType(), [_WORD])
    return builder.ptrtoint(cgutils.get_or_insert_function(builder.module, kind, name), _WORD)

  return types.int64(symbol), codegen


def _emit_prefetch(builder: Any, address: Any) -> None:
  kind = ir.FunctionType(ir.VoidType(), [_BYTES, _HALF, _HALF, _HALF])
  function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
  read, keep, data = _HALF(0), _HALF(3), _HALF(1)
  builder.call(function, [at(builder, address, ir.IntType(8)), read, keep, data])


@intrinsic
def _prefetch_line(typingctx, address):
  def codegen(context, builder, signature, args):
    _emit_prefetch(builder, args[0])
    return context.get_dummy_value()

  return types.void(types.int64), codegen


@numba.njit(**OPTIONS)
def prefetch(address, size):
  """Asks for `size` bytes of memory that are read soon."""
  for offset in range(0, size, LINE):
    _prefetch_line(address + offset)


# --- rows -----------------------------------------------------------------------------------------


def for_each_vector(builder: Any, size: Any, emit: Emit) -> None:
  """Emits `emit(offset, kind)` for every vector of `size` floats, and for those that are left."""
  lanes = _WORD(LANES)
  whole = builder.mul(builder.sdiv(size, lanes), lanes)
  for start, stop, step, kind in (
    (_WORD(0), whole, lanes, ir.VectorType(_FLOAT, LANES)),
    (whole, size, _WORD(1), _FLOAT),
  ):
    with cgutils.for_range_slice(builder, start, stop, step, _WORD) as (offset, _):
      emit(offset, kind)


def _like(kind: Any, element: Any) -> Any:
  """A type of as many elements of another type."""
  return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


def constant(kind: Any, value: float) -> Any:
  """A number, or a vector of it."""
  if isinstance(kind, ir.VectorType):
    return ir.Constant(kind, [value] * kind.count)
  return ir.Constant(kind, value)


def _element(builder: Any, address: Any, offset: Any, width: int, kind: Any) -> Any:
  """A pointer to what begins at an element, of so many bytes, of a row."""
  pointer = builder.gep(at(builder, address, ir.IntType(8 * width)), [offset])
  return builder.bitcast(pointer, kind.as_pointer())


def load_floats(builder: Any, address: Any, offset: Any, kind: Any, dtype: str = "float32") -> Any:
  """The floats of a row from an offset on; bfloat16 are the upper halves of their bits."""
  if dtype == "bfloat16":
    half = _like(kind, _SHORT)
    bits = builder.load(_element(builder, address, offset, 2, half), align=2)
    whole = _like(kind, _HALF)
    bits = builder.shl(builder.zext(bits, whole), constant(whole, 16))
    return builder.bitcast(bits, kind)
  return builder.load(_element(builder, address, offset, 4, kind), align=4)


def store_floats(
  builder: Any, address: Any, offset: Any, value: Any, dtype: str = "float32", noise: Any = None
) -> None:
  """Writes floats to a row from an offset on.

  As bfloat16 they are rounded to the nearest, ties to even, or, with random bits int32 as `noise`,
  as `update.to_bfloat16` does.
  """
  if dtype == "bfloat16":
    value = _to_bfloat16(builder, value, noise)
  width = 2 if dtype == "bfloat16" else 4
  builder.store(value, _element(builder, address, offset, width, value.type), align=width)


def _to_bfloat16(b: Any, value: Any, noise: Any) -> Any:
  """The bits of floats as bfloat16."""
  whole, half = _like(value.type, _HALF), _like(value.type, _SHORT)
  bits, of = b.bitcast(value, whole), lambda number: constant(whole, number)
  is_odd = b.and_(b.lshr(bits, of(16)), of(1))
  nearest = b.add(bits, b.add(is_odd, of(0x7FFF)))
  if noise is not None:
    is_finite = b.icmp_unsigned("<", b.and_(bits, of(0x7FFFFFFF)), of(0x7F800000))
    nearest = b.select(is_finite, b.add(bits, b.and_(noise, of(0xFFFF))), nearest)
  is_nan = b.fcmp_unordered("uno", value, value)
  rounded = b.select(is_nan, b.or_(bits, of(0x400000)), nearest)
  return b.trunc(b.lshr(rounded, of(16)), half)


def splat(builder: Any, value: Any, kind: Any) -> Any:
  """A number in every lane of a vector."""
  if not isinstance(kind, ir.VectorType):
    return value
  vector = ir.VectorType(value.type, kind.count)
  first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, _HALF(0))
  zeros = ir.Constant(ir.VectorType(_HALF, kind.count), [0] * kind.count)
  return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def _weighted_sum(dtype: str) -> Any:
  """Sets the row at `total` to scale * (row at `start` + the sum of gain * row).

  `rows` holds the addresses of `count` rows and of the `AHEAD` that are read after them, which it
  asks for meanwhile; gains are `stride` floats apart. A block of columns stays in registers for all
  rows. Both other rows are float32.
  """

  def codegen(context, builder, signature, args):
    b, (total, start, dim, rows, gains, stride, count, scale) = builder, args

    def sum_block(offset, kind, columns):
      columns = [b.add(offset, _WORD(column)) for column in columns]
      sums = [cgutils.alloca_once(b, kind) for _ in columns]
      for column, place in zip(columns, sums, strict=True):
        b.store(load_floats(b, start, column, kind), place)
      with cgutils.for_range(b, count, intp=_WORD) as loop:
        row, later = (
          b.load(b.gep(at(b, rows, _WORD), [b.add(loop.index, _WORD(distance))]))
          for distance in (0, AHEAD)
        )
        gain = b.load(b.gep(at(b, gains, _FLOAT), [b.mul(loop.index, stride)]))
        gain = splat(b, gain, kind)
        for column, place in zip(columns, sums, strict=True):
          _emit_prefetch(b, b.add(later, b.mul(column, _WORD(2 if dtype == "bfloat16" else 4))))
          term = b.fmul(load_floats(b, row, column, kind, dtype), gain, flags=("contract",))
          b.store(b.fadd(b.load(place), term, flags=("contract",)), place)
      for column, place in zip(columns, sums, strict=True):
        store_floats(b, total, column, b.fmul(b.load(place), splat(b, scale, kind)))

    done = _WORD(0)
    for lanes, vectors in ((LINE // 4, 4), (LINE // 4, 1), (LANES, 1), (1, 1)):
      width = _WORD(lanes * vectors)
      end = b.add(done, b.mul(b.sdiv(b.sub(dim, done), width), width))
      with cgutils.for_range_slice(b, done, end, width, _WORD) as (offset, _):
        kind = ir.VectorType(_FLOAT, lanes) if lanes > 1 else _FLOAT
        sum_block(offset, kind, range(0, lanes * vectors, lanes))
      done = end
    return context.get_dummy_value()

  return types.void(*[types.int64] * 7, types.float32), codegen


@intrinsic
def weighted_sum(typingctx, total, start, dim, rows, gains, stride, count, scale):
  """`_weighted_sum` of rows of float32."""
  return _weighted_sum("float32")


@intrinsic
def weighted_sum_bfloat16(typingctx, total, start, dim, rows, gains, stride, count, scale):
  """`_weighted_sum` of rows of bfloat16."""
  return _weighted_sum("bfloat16")
