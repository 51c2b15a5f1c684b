"""Compiled training steps: what their programs say of the tables that they update."""

import re

import jax
from flax import nnx

import embed


def compile_step(step, modules, *args, place=lambda state: state):
  """The program of `step(*modules, *args)`, which donates the modules.

  They may be abstract (`nnx.eval_shape`) on one device: nothing of the size of a table is made.
  """
  graphdef, state = nnx.split(tuple(modules))

  def pure(state, *args):
    modules = nnx.merge(graphdef, state)
    out = step(*modules, *args)
    return nnx.state(modules), out

  return jax.jit(pure, donate_argnums=0).lower(place(state), *args).compile()


def stored(model):
  """A device's part of each table and slot, as it is stored; all of it where it is abstract."""
  variables = jax.tree.leaves(nnx.state(model, (embed.Table, embed.SlotVariable)))
  return [x.addressable_shards[0].data if isinstance(x, jax.Array) else x for x in variables]


def assert_in_place(compiled, arrays, temporary):
  """Tables and slots are updated in place: no copy of one, and at most so many bytes beside."""
  memory = compiled.memory_analysis()
  assert memory.alias_size_in_bytes >= sum(x.size * x.dtype.itemsize for x in arrays), (
    "a table is not aliased"
  )
  shapes = {f"{x.shape[0]}(?:,{x.shape[1]})?" for x in arrays if x.ndim == 2}
  made = "copy|copy-start|fusion\\S*kind=kLoop"
  copy = re.compile(rf"= \(?\w+\[(?:{'|'.join(sorted(shapes))})\]\S* (?:{made})\(")
  copies = [line.strip()[:120] for line in compiled.as_text().splitlines() if copy.search(line)]
  assert not copies, copies
  assert memory.temp_size_in_bytes < temporary, f"{memory.temp_size_in_bytes} of {temporary}"
