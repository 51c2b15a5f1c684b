"""The settings of a sequence model, where its config leaves them out."""

from typing import Any

DEFAULTS: dict[str, Any] = {
  "model": "sasrec",  # or "hstu"
  "dim": 64,  # width of the table and of the encoder
  "blocks": 2,  # of the encoder
  "heads": 1,  # attention heads of a block
  "max_length": 50,  # the model sees this many last items of a history
  # True cuts longer histories into windows, so that every item but the first is a target; False
  # trains on their last items only.
  "windows": True,
  "positions": "end",  # last item at the last position; or "start": first item at the first
  "dropout": 0.2,  # rate on the input and in the blocks
  # The residual of a block of sasrec: "input", as in the paper, or "norm", as in the authors' code.
  "residual": "input",
  # Initializer of dense layers except queries, keys and values: "xavier", or "normal" (std 0.02).
  "init": "xavier",
  "loss": "sampled_softmax",  # or "softmax", over all items
  "negatives": {
    "number": 256,  # drawn per batch
  },
  "table": {
    "optimizer": "adam",  # or "adagrad", "rowwise_adagrad", "sgd"
    "sharding": "mod",  # strategy for all tables; see `embed.plan`
    "init_scale": 0.02,  # standard deviation of new rows
    "learning_rate": 1e-2,  # of the rows
    "weight_decay": 0.0,  # of the rows of a batch
  },
  "learning_rate": 1e-3,  # of dense parameters
  "eval_batch_size": 256,  # users per evaluation step, over all devices
  "epochs": 30,  # if `steps` is 0
  "select": "valid_ndcg@10",  # metric that selects the tested state; "" tests the last state
  "patience": 3,  # validations without improvement until training stops; 0 never stops
  "exclude_seen": True,  # whether to leave a user's previous items out of rankings
  "ks": (10, 20),  # cutoffs of the metrics
  "baseline": {"ease_l2": 0.0},  # EASE's penalty; 0 leaves it out
}

# The settings that a data set adds.
DATA_SETS: dict[str, dict[str, Any]] = {
  "synthetic": {
    "num_users": 20_000,  # to generate
    "num_items": 2_000,  # that users choose from
    "noise": 0.3,  # probability that any item follows, instead of a successor
    "data_seed": 0,  # of the generated sequences
  },
  "file": {
    "data_dir": "",  # the folder of data_file
    "data_file": "",  # its name
    "layout": "pairs",  # one `user item` per line; or "lines": `user item item ...`
    "source": "",  # where the file comes from
  },
}
