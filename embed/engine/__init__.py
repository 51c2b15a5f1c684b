"""Array code behind `SparseEmbed`: no NNX, no public API. One step, from ids to new rows:

  bag, dropped = bags.from_input(parts, form, size)           # any input, as ids with padding
  bag = bag.normalized("mean", size)                          # the combiner becomes gains
  acts, record = exchange.look_up(stack, stored, [bag], ["movie"])
  call = grads.ActivationGrads(activation_grads, record)
  scalars = update.StepScalars.at(stack, step)
  arrays = update.step(stack, arrays, [call], scalars)        # new rows and slots

An update is in place if the enclosing jit donates the arrays. See `mesh` and `stack` for where rows
are stored; `bags` and `lookup` for one device; `rows` for how rows lie in memory; `grads` for the
forms of a gradient and the sum per row; `cost` and `exchange` for several devices; `update` for new
rows; `admission` for raw ids. `xla` only orders XLA's work, `hashes` has the bit mixer, and
`compat` has the names that differ between versions of JAX.

Two more packages handle only arrays. `embed.storage` makes stored arrays, and reads and loads them
as tables, which no step needs. `embed.kernels` has compiled code for some accelerators, which
registers itself with `backends`: `rows` and `update` call it wherever it supports the operation.
Imports between the packages go one way, as `pyproject.toml` specifies.

In shapes: V rows of D columns; N ids in B bags of L positions; S shards; C rows that a pair of
devices exchanges in a round.

Glossary:

  stack           tables of the same width, dtype and optimizer, stored in one array
  placement       the devices of a stack; LOCAL is one device
  shard           the rows of a stack that one device stores
  local row       the index of a row in its shard; the number of rows there is padding
  bag             the ids that are combined into one activation
  segments        the bag of each id, for bags of any length (ragged)
  gain            the factor of a row: the user's weight, normalized by the combiner
  record          the table ids that one call looked up in a stack, kept for its gradients
  route           the mapping from a call's ids to the shards that store their rows
  capacity        the most rows that a pair of devices exchanges in a round
  distinct rows   one summed gradient for each row that was looked up
"""
