"""The settings of two towers, where their config leaves them out."""

from typing import Any

DEFAULTS: dict[str, Any] = {
  "query": (),  # some of user, history and the features of users; () is all of them but user
  "candidate": (),  # some of item and the features of items; () is all of them
  "share_history": True,  # whether histories read the items' own table
  "history": 32,  # items of a history in training
  "eval_history": 256,  # items of a history in evaluation and predictions
  "dim": 64,  # columns of the tables, and of what the towers return
  "hidden": (),  # widths of the towers' MLPs; () makes them weighted sums
  "dropout": 0.0,  # rate in the query tower
  "temperature": 0.1,  # that scores are divided by in the softmax
  "logq": 1.0,  # how much of the logQ correction; 0 is none
  "popularity": 1.0,  # weight of the log popularity that is added to a score; 0 adds none
  "negatives": {
    "number": 0,  # drawn for a batch from the whole catalogue, besides its own items
  },
  "table": {
    "optimizer": "adam",  # or "adagrad", "rowwise_adagrad", "sgd"
    "sharding": "mod",  # a strategy of embed, for all tables
    "init_scale": 0.1,  # standard deviation of new rows
    "learning_rate": 5e-3,  # of the rows
    "weight_decay": 0.0,  # of the rows of a batch
  },
  "learning_rate": 3e-3,  # of dense parameters
  "eval_batch_size": 256,  # users that are ranked for at once, on all devices
  "epochs": 10,  # of a run whose `steps` are 0
  "select": "valid_ndcg@10",  # the metric whose best state is tested; "" tests the last state
  "patience": 3,  # validations without improvement until training stops; 0 never stops
  "examples": "users",  # a ranking for each user, or for each of the "rows"
  "exclude_seen": True,  # whether rankings leave out what the user has had
  "ks": (10, 20),  # cutoffs of the metrics
  "baseline": {"ease_l2": 0.0},  # EASE's penalty; 0 leaves it out
}

_PUBLISHED = {
  "data_dir": "",  # the folder of the files; "" downloads those that may be
  "split_seed": 0,  # of the random split
}

# The settings that a data set adds.
DATA_SETS: dict[str, dict[str, Any]] = {
  "synthetic": {
    "num_users": 5_000,  # that are drawn
    "num_items": 3_000,  # that they draw from
    "num_groups": 20,  # of items, which a user likes to different degrees
    "mean_items": 40,  # of a user
  },
  "movielens1m": {
    **_PUBLISHED,
    "core": 10,  # users and items with fewer rows are dropped
  },
  "movielens100k": _PUBLISHED,
  "gowalla": {
    **_PUBLISHED,
    "valid": 0.1,  # of a user's rows without valid.txt; 0 trains on those of valid.txt as well
  },
}
