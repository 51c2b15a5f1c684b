"""The settings of two towers, where their config leaves them out."""

from typing import Any

DEFAULTS: dict[str, Any] = {
  "query": (),  # user, history and features of users; () is all but user
  "candidate": (),  # item and features of items; () is all
  "share_history": True,  # whether histories read the items' own table
  "history": 32,  # most items of a history in training
  "eval_history": 256,  # most items of a history in evaluation and predictions
  "dim": 64,  # width of the tables, and of the towers' outputs
  "hidden": (),  # widths of the towers' MLPs; () sums weighted vectors instead
  "dropout": 0.0,  # rate in the query tower
  "temperature": 0.1,  # divides the scores in the softmax
  "logq": 1.0,  # strength of the logQ correction; 0 does not correct
  "popularity": 1.0,  # weight of the log popularity in a score; 0 leaves it out
  "negatives": {
    "number": 0,  # drawn per batch from the whole catalogue, in addition to its own items
  },
  "table": {
    "optimizer": "adam",  # or "adagrad", "rowwise_adagrad", "sgd"
    "sharding": "mod",  # strategy for all tables; see `embed.plan`
    "init_scale": 0.1,  # standard deviation of new rows
    "learning_rate": 5e-3,  # of the rows
    "weight_decay": 0.0,  # of the rows of a batch
  },
  "learning_rate": 3e-3,  # of dense parameters
  "eval_batch_size": 256,  # users per evaluation step, over all devices
  "epochs": 10,  # if `steps` is 0
  "select": "valid_ndcg@10",  # metric that selects the tested state; "" tests the last state
  "patience": 3,  # validations without improvement until training stops; 0 never stops
  "examples": "users",  # one ranking per user; "rows" makes one per row of the split
  "exclude_seen": True,  # whether to leave a user's previous items out of rankings
  "ks": (10, 20),  # cutoffs of the metrics
  "baseline": {"ease_l2": 0.0},  # EASE's penalty; 0 leaves it out
}

_PUBLISHED = {
  "data_dir": "",  # folder of the files; "" downloads them where that is allowed
  "split_seed": 0,  # of the random split
}

# The settings that a data set adds.
DATA_SETS: dict[str, dict[str, Any]] = {
  "synthetic": {
    "num_users": 5_000,  # to generate
    "num_items": 3_000,  # that users choose from
    "num_groups": 20,  # of items; a user likes groups to different degrees
    "mean_items": 40,  # per user
  },
  "movielens1m": {
    **_PUBLISHED,
    "core": 10,  # drops users and items with fewer rows
  },
  "movielens100k": _PUBLISHED,
  "gowalla": {
    **_PUBLISHED,
    "valid": 0.1,  # share of a user's rows if there is no valid.txt; 0 also trains on valid.txt
  },
}
