"""The settings of a click model, where its config leaves them out."""

from typing import Any

DEFAULTS: dict[str, Any] = {
  "model": "dcnv2",  # or "dlrm"
  "dim": 16,  # columns of the tables
  # Adds a linear model of all features to the logits. Each table stores the linear weights of its
  # ids in one more column.
  "linear": True,
  # "regression" starts a new run as the logistic regression of the baselines: the linear model has
  # its weights, and all else adds 0. "random" draws all weights, as does a run with `init_from`, no
  # validation, more rows than `baseline.max_rows`, or columns that share a table.
  "start": "regression",
  "dlrm": {
    "bottom": (128,),  # widths of the MLP on the dense features, before its last layer
    "top": (256, 128),  # widths of the MLP on the dot products
    "concat_tables": True,  # whether the top MLP also reads the tables' vectors
  },
  "dcnv2": {
    "bottom": (),  # widths of an MLP on the dense features; () leaves them as they are
    "cross_layers": 3,  # of the cross network
    "rank": 16,  # of the cross layers' matrices; 0 is full
    "deep": (256, 128),  # widths of the deep network
    "structure": "parallel",  # or "stacked": the deep network after the cross layers
  },
  "history": {
    "model": "pooled",  # or "din", "transformer", "hstu": how to combine a sequence's positions
  },
  "dropout": 0.5,  # rate in the MLP before the logit
  "table": {
    "optimizer": "rowwise_adagrad",  # or "adagrad", "adam", "sgd"
    "sharding": "mod",  # strategy for all tables; see `embed.plan`
    "init_scale": 0.01,  # standard deviation of new rows; 10 times it with a "regression" start
    "learning_rate": -1.0,  # of the rows; -1 is 2e-3 for adam, and 0.2 for the others
    "weight_decay": 0.0,  # of the rows of a batch
  },
  "dense_optimizer": "adamw",  # or "adagrad"
  "learning_rate": 1e-3,  # of dense parameters
  "eval_batch_size": 8192,  # rows per evaluation step, over all devices
  "epochs": 15,  # if `steps` is 0
  "select": "valid_logloss",  # or "valid_auc": selects the tested state; "" tests the last state
  "patience": 3,  # validations without improvement until training stops; 0 never stops
  "baseline": {
    "inverse_penalties": (0.01, 0.1, 1.0),  # values of C to try for the logistic regression
    "max_rows": 1_000_000,  # most rows that the regression is fitted to; 0 leaves it out
  },
}

# The settings that a data set adds.
DATA_SETS: dict[str, dict[str, Any]] = {
  "synthetic": {
    "rows": 1_000_000,  # in all; validation and test get a tenth each
    "data_seed": 0,  # of the generated rows
  },
  "movielens1m": {
    "data_dir": "",  # "" downloads the archive; else a folder with its files
    "split_seed": 0,  # of the random split
  },
  "criteo": {
    "data_dir": "",  # the folder of data_file
    "on_bad_row": "raise",  # or "skip", which leaves bad rows out and counts them
    "data_file": "train.txt",
    "valid_fraction": 1 / 14,  # the rows before the test rows
    "test_fraction": 1 / 14,  # the last rows
    "min_count": 10,  # training rows that a category needs for a table row of its own
  },
  "criteo_1tb": {
    "data_dir": "",  # the folder of day_0 to day_23, plain or .gz
    "on_bad_row": "raise",  # or "skip", which leaves bad rows out and counts them
    # Half of day 23 each; all days have 4,373,472,329 rows.
    "valid_fraction": 0.0203814,
    "test_fraction": 0.0203814,
    "vocabulary_sizes": (),  # rows of the 26 tables
    "valencies": (),  # ids per example of the 26 features
  },
}
