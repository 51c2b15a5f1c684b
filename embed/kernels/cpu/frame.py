"""The call frame of XLA's foreign functions, read by address, and work shared by XLA's threads.

The structs are those of `xla/ffi/api/c_api.h`, which comes with JAX; its words are counted here,
and `is_known` compares them with what the running XLA passes. XLA promises that a handler of an
older version works for a year.
"""

import pathlib
import re
from collections.abc import Sequence

import jax
import numba

from embed.kernels.cpu.memory import (
  OPTIONS,
  atomic_add,
  atomic_read,
  call,
  free,
  invoke,
  malloc,
  read_int,
  read_word,
  sched_yield,
  text,
  write_int,
  write_word,
)

MAJOR = 0  # of the interface that is described here
# The words of a call frame that are read, and of the structs in it.
_EXTENSION, _API, _CONTEXT, _ARG_COUNT, _ARG_LIST, _RET_COUNT, _RET_LIST = 1, 2, 3, 7, 9, 12, 14
_DATA, _RANK, _DIMS, _METADATA = 3, 4, 5, 1
_DTYPE = 4  # counted in halves of a word
F32, S32, U32, BF16 = 11, 4, 8, 16  # of XLA_FFI_DataType
TABLES = {"float32": F32, "bfloat16": BF16}  # dtypes that tests hold the kernels to
SLOTS = {"float32": F32, "int32": S32}
_THREADS_BYTES, _TASK_BYTES = 32, 40  # the arguments of the functions for threads
_ERROR_BYTES, _INTERNAL = 28, 13  # the arguments of XLA_FFI_Error_Create, and a code for them
# The first word of a struct is its size, in bytes.
_ARGS, _RETS, _ATTRS = 5, 10, 15
_FRAME_BYTES, _ARGS_BYTES, _ATTRS_BYTES, _BUFFER_BYTES = 168, 40, 48, 48
_API_WORDS, _API_VERSION = 6, 4  # words before the first function; the word of both numbers


def _interface() -> tuple[int, int, Sequence[str]]:
  """The version of the interface that comes with JAX, and its functions in order."""
  header = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
  major, minor = (
    int(re.search(rf"#define XLA_FFI_API_{part} (\d+)", header).group(1))  # type: ignore[union-attr]
    for part in ("MAJOR", "MINOR")
  )
  return major, minor, re.findall(r"^ *_XLA_FFI_API_STRUCT_FIELD\((\w+)\);", header, re.MULTILINE)


try:
  VERSION, _MINOR, _FUNCTIONS = _interface()
  _ERROR, _SCHEDULE, _NUM_THREADS = (
    _API_WORDS + _FUNCTIONS.index(f"XLA_FFI_{name}")
    for name in ("Error_Create", "ThreadPool_Schedule", "ThreadPool_NumThreads")
  )
except (AttributeError, OSError, ValueError) as error:
  raise ImportError("the header of XLA's foreign functions is not as expected") from error
_API_BYTES = 8 * (_API_WORDS + len(_FUNCTIONS))
LAYOUT = (VERSION, _MINOR, _API_BYTES, _SCHEDULE, _NUM_THREADS)


# --- arguments and results ------------------------------------------------------------------------


@numba.njit(**OPTIONS)
def is_query(frame):
  """Answers XLA's question for the version of a handler; False for a call."""
  extension = read_word(frame, _EXTENSION)
  if extension == 0 or read_int(extension, 2) != _METADATA:
    return False
  metadata = read_word(extension, 3)
  write_word(metadata, 3, VERSION | (_MINOR << 32))
  write_int(metadata, 8, 0)  # no trait
  return True


@numba.njit(**OPTIONS)
def is_known(frame):
  """Whether a call has the structs that are described here."""
  if read_word(frame, 0) != _FRAME_BYTES or read_word(frame, _ARGS) != _ARGS_BYTES:
    return False
  if read_word(frame, _RETS) != _ARGS_BYTES or read_word(frame, _ATTRS) != _ATTRS_BYTES:
    return False
  api = read_word(frame, _API)
  if read_word(api, 0) != _API_BYTES or read_word(api, _API_VERSION) != VERSION | (_MINOR << 32):
    return False
  return read_word(result(frame, 0), 0) == _BUFFER_BYTES


@numba.njit(**OPTIONS)
def argument(frame, index):
  """The address of an argument's struct, for `data`, `rank` and `dimension`."""
  return read_word(read_word(frame, _ARG_LIST), index)


@numba.njit(**OPTIONS)
def arguments(frame):
  """How many arguments there are."""
  return read_word(frame, _ARG_COUNT)


@numba.njit(**OPTIONS)
def results(frame):
  """How many results there are."""
  return read_word(frame, _RET_COUNT)


@numba.njit(**OPTIONS)
def result(frame, index):
  """The address of a result's struct."""
  return read_word(read_word(frame, _RET_LIST), index)


@numba.njit(**OPTIONS)
def data(buffer):
  """The address of the first element."""
  return read_word(buffer, _DATA)


@numba.njit(**OPTIONS)
def rank(buffer):
  """How many axes there are."""
  return read_word(buffer, _RANK)


@numba.njit(**OPTIONS)
def dimension(buffer, axis):
  """The size along an axis."""
  return read_word(read_word(buffer, _DIMS), axis)


@numba.njit(**OPTIONS)
def elements(buffer):
  """How many elements there are."""
  size = 1
  for axis in range(rank(buffer)):
    size *= dimension(buffer, axis)
  return size


@numba.njit(**OPTIONS)
def holds(buffer, dtype, size):
  """Whether a buffer has a dtype and so many elements."""
  return read_int(buffer, _DTYPE) == dtype and elements(buffer) == size


@numba.njit(**OPTIONS)
def width(buffer):
  """The bytes of an element, of a dtype of `TABLES` or `SLOTS`."""
  return 2 if read_int(buffer, _DTYPE) == BF16 else 4


@numba.njit(**OPTIONS)
def misfit(frame):
  """What a handler returns for a call with arrays that are not as its kernel reads them."""
  function = read_word(read_word(frame, _API), _ERROR)
  message = text("a kernel of SparseEmbed was called with arrays of other dtypes or shapes")
  return invoke(function, _ERROR_BYTES, (message, _INTERNAL))


# --- threads --------------------------------------------------------------------------------------

# Work is cut into parts with numbers. The handler's thread and tasks on XLA's threads take the next
# number until there is none. The handler waits for parts that a task has begun, never for a task
# that has not: all of XLA's threads may be in handlers. Such a task finds no part left, later, so
# the counters outlive the handler: whoever lets go of them last frees them.
_NEXT, _DONE, _HOLDERS, _PARTS, _PHASE, _WORK, _JOB_WORDS = 0, 1, 2, 3, 4, 5, 6


@numba.njit(**OPTIONS)
def threads(frame):
  """How many threads XLA has for its work; at least 1."""
  function = read_word(read_word(frame, _API), _NUM_THREADS)
  number = malloc(8)
  write_word(number, 0, 1)
  invoke(function, _THREADS_BYTES, (read_word(frame, _CONTEXT), number))
  size = read_word(number, 0)
  free(number)
  return size


@numba.njit(**OPTIONS)
def share(task, frame, helpers, phase, parts, work):
  """Runs `task` on a job of so many parts, here and on `helpers` of XLA's threads, to its end.

  `task` is the address of a C function: for each `next_part` of its job it does the part and says
  `part_done`, and then it does `let_go`.
  """
  job = malloc(8 * _JOB_WORDS)
  write_word(job, _NEXT, 0)
  write_word(job, _DONE, 0)
  write_word(job, _HOLDERS, 2)
  write_word(job, _PARTS, parts)
  write_word(job, _PHASE, phase)
  write_word(job, _WORK, work)
  schedule = read_word(read_word(frame, _API), _SCHEDULE)
  for _ in range(min(helpers, parts - 1)):
    atomic_add(job + 8 * _HOLDERS, 1)
    if invoke(schedule, _TASK_BYTES, (read_word(frame, _CONTEXT), task, job)) != 0:
      atomic_add(job + 8 * _HOLDERS, -1)
  call(task, (job,))
  while atomic_read(job + 8 * _DONE) < parts:
    sched_yield()
  let_go(job)


@numba.njit(**OPTIONS)
def next_part(job):
  """The number of a part that nobody has begun; -1 if there is none."""
  part = atomic_add(job + 8 * _NEXT, 1)
  return part if part < read_word(job, _PARTS) else -1


@numba.njit(**OPTIONS)
def part_done(job):
  atomic_add(job + 8 * _DONE, 1)


@numba.njit(**OPTIONS)
def let_go(job):
  if atomic_add(job + 8 * _HOLDERS, -1) == 1:
    free(job)


@numba.njit(**OPTIONS)
def phase(job):
  """The phase that was shared."""
  return read_word(job, _PHASE)


@numba.njit(**OPTIONS)
def work(job):
  """The address of the work that was shared."""
  return read_word(job, _WORK)
