"""Pure arrays behind `SparseEmbed`: no NNX, nothing public. One step, from ids to new rows:

  bag, dropped = bags.from_input(parts, form, size)           # any input, as ids with padding
  bag = bag.normalized("mean", size)                          # the combiner becomes gains
  acts, record = exchange.look_up(stack, stored, [bag], ["movie"])
  call = grads.ActivationGrads(activation_grads, record)
  scalars = update.StepScalars.at(stack, step)
  arrays = update.step(stack, arrays, [call], scalars)        # new rows and slots

An update is in place if the jit around it donates the arrays. Read `mesh` and `stack` for where
rows are; `bags` and `lookup` for one device; `rows` for how rows lie in memory; `grads` for the
forms of a gradient and one sum per row; `cost` and `exchange` for several devices; `update` for new
rows; `admission` for raw ids. `xla` has what only orders XLA's work, `hashes` the one mixer of
bits, and `compat` what JAX has renamed.

Two more packages are pure arrays. `embed.storage` makes stored arrays, and reads and loads them as
tables, which no step needs. `embed.kernels` has compiled code for the SparseCores of TPUs, which
registers itself with `backends`: `rows` and `update` call it where it can do what they define, only
faster. Imports between the packages point one way, as `pyproject.toml` says.

In shapes: V rows of D columns; N ids in B bags of L positions; S shards, which exchange C rows with
each device in a round.

Glossary:

  stack           tables of one width, dtype and optimizer, stored in one array
  placement       the devices of a stack; LOCAL is one device
  shard           the rows of a stack that one device stores
  local row       the index of a row in its shard; the number of rows there is padding
  bag             the ids that are combined into one activation
  segments        the bag of each id, where bags have any length (ragged)
  gain            what a row is multiplied by: the user's weight, normalized by the combiner
  record          what one call looked up in a stack, ids of its tables, kept for its gradients
  route           how a call's ids map to the shards that store their rows
  capacity        the rows that a pair of devices exchanges in a round
  distinct rows   one summed gradient for each row that was looked up
"""
