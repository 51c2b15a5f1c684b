"""The settings of a click model, where its config leaves them out."""

from typing import Any

DEFAULTS: dict[str, Any] = {
  "model": "dcnv2",  # or "dlrm"
  "dim": 16,  # columns of the tables
  # Adds a linear model of all features to the logits. Each table stores its weights in one more
  # column for each output.
  "linear": True,
  # "regression" starts a new run as the baseline's logistic regression: the linear model has its
  # weights, and all else adds 0. "random" draws all weights, as does a run with `init_from`, no
  # validation, more rows than `baseline.max_rows`, or columns that share a table.
  "start": "regression",
  "dlrm": {
    "bottom": (128,),  # widths of the MLP on the dense features, before its last layer
    "top": (256, 128),  # widths of the MLP on the dot products
    "concat_tables": True,  # whether it sees the tables' vectors as well
  },
  "dcnv2": {
    "bottom": (),  # widths of an MLP on the dense features; () leaves them as they are
    "cross_layers": 3,  # of the cross network
    "rank": 16,  # of the cross layers' matrices; 0 is full
    "deep": (256, 128),  # widths of the deep network
    "structure": "parallel",  # or "stacked": the deep network after the cross layers
  },
  "history": {
    "model": "pooled",  # or "din", "transformer", "hstu": what is made of a sequence's positions
  },
  "dropout": 0.5,  # rate in the MLP before the logit
  "table": {
    "optimizer": "rowwise_adagrad",  # or "adagrad", "adam", "sgd"
    "sharding": "mod",  # a strategy of embed, for all tables
    "init_scale": 0.01,  # standard deviation of new rows; 10 times it beside a regression's start
    "learning_rate": -1.0,  # of the rows; -1 is 2e-3 for adam, and 0.2 for the others
    "weight_decay": 0.0,  # of the rows of a batch
  },
  "dense_optimizer": "adamw",  # or "adagrad"
  "learning_rate": 1e-3,  # of dense parameters
  "eval_batch_size": 8192,  # rows that are evaluated at once, on all devices
  "epochs": 15,  # of a run whose `steps` are 0
  "select": "valid_logloss",  # or "valid_auc": its best state is tested; "" tests the last state
  "patience": 3,  # validations without improvement until training stops; 0 never stops
  "baseline": {
    "inverse_penalties": (0.01, 0.1, 1.0),  # values of C of the logistic regression to choose from
    "max_rows": 1_000_000,  # that it is fitted to; 0 leaves it out
  },
}

# The settings that a data set adds.
DATA_SETS: dict[str, dict[str, Any]] = {
  "synthetic": {
    "rows": 1_000_000,  # in all; a tenth each validates and tests
    "data_seed": 0,  # of the draws
  },
  "movielens1m": {
    "data_dir": "",  # "" downloads the archive; else a folder with its files
    "split_seed": 0,  # of the random split
  },
  "criteo": {
    "data_dir": "",  # the folder of data_file
    "on_bad_row": "raise",  # or "skip", which counts
    "data_file": "train.txt",
    "valid_fraction": 1 / 14,  # the last rows but those of the test
    "test_fraction": 1 / 14,  # the last rows
    "min_count": 10,  # rows that a category needs for a row of its own
  },
  "criteo_1tb": {
    "data_dir": "",  # the folder of day_0 to day_23, plain or .gz
    # Half of day 23 each, of 4,373,472,329 rows.
    "valid_fraction": 0.0203814,
    "test_fraction": 0.0203814,
    "vocabulary_sizes": (),  # rows of the 26 tables
    "valencies": (),  # ids of the 26 features in a row
  },
}
