"""The settings of a sequence model, where its config leaves them out."""

from typing import Any

DEFAULTS: dict[str, Any] = {
  "model": "sasrec",  # or "hstu"
  "dim": 64,  # columns of the table, and of the encoder
  "blocks": 2,  # of the encoder
  "heads": 1,  # of attention in a block
  "max_length": 50,  # items of a history that the model sees, the last ones
  # True trains on longer histories in several windows, so that every item is a target; False trains
  # on their last items only.
  "windows": True,
  "positions": "end",  # the last item is at the last position; or "start", the first at the first
  "dropout": 0.2,  # rate on the input and in the blocks
  # The residual of a block of sasrec: "input", as in the paper, or "norm", as in the authors' code.
  "residual": "input",
  # Dense layers, but for queries, keys and values: "xavier", or "normal", with deviation 0.02.
  "init": "xavier",
  "loss": "sampled_softmax",  # or "softmax", over all items
  "negatives": {
    "number": 256,  # drawn for a batch
  },
  "table": {
    "optimizer": "adam",  # or "adagrad", "rowwise_adagrad", "sgd"
    "sharding": "mod",  # a strategy of embed, for all tables
    "init_scale": 0.02,  # standard deviation of new rows
    "learning_rate": 1e-2,  # of the rows
    "weight_decay": 0.0,  # of the rows of a batch
  },
  "learning_rate": 1e-3,  # of dense parameters
  "eval_batch_size": 256,  # users that are ranked for at once, on all devices
  "epochs": 30,  # of a run whose `steps` are 0
  "select": "valid_ndcg@10",  # the metric whose best state is tested; "" tests the last state
  "patience": 3,  # validations without improvement until training stops; 0 never stops
  "exclude_seen": True,  # whether rankings leave out what the user has had
  "ks": (10, 20),  # cutoffs of the metrics
  "baseline": {"ease_l2": 0.0},  # EASE's penalty; 0 leaves it out
}

# The settings that a data set adds.
DATA_SETS: dict[str, dict[str, Any]] = {
  "synthetic": {
    "num_users": 20_000,  # that are drawn
    "num_items": 2_000,  # that they draw from
    "noise": 0.3,  # the probability that any item follows, and no successor
    "data_seed": 0,  # of the draws
  },
  "file": {
    "data_dir": "",  # the folder of data_file
    "data_file": "",  # its name
    "layout": "pairs",  # `user item` a line; or "lines", `user item item ...`
    "source": "",  # where the file comes from
  },
}
