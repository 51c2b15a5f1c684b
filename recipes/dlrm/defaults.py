"""The settings of a click model on your own table, where its config leaves them out."""

from typing import Any

DEFAULTS: dict[str, Any] = {
  "num_workers": 0,
  "model": "dcnv2",  # or dlrm
  "dim": 16,
  "dlrm": {"bottom": (128,), "top": (256, 128), "concat_tables": True},
  "dcnv2": {
    "bottom": (),
    "cross_layers": 3,
    "rank": 0,
    "deep": (256, 128),
    "structure": "parallel",
  },
  "dropout": 0.2,
  "table": {
    "optimizer": "adam",
    "sharding": "mod",
    "init_scale": 0.01,
    "learning_rate": 2e-3,
    "weight_decay": 0.0,
  },
  "dense_optimizer": "adamw",
  "learning_rate": 2e-3,
  "weight_decay": 0.0,
  "warmup_steps": -1,  # a tenth of the steps, up to 100
  "final_rate": 0.1,
  "seed": 0,
  "batch_size": 0,  # by the number of rows
  "eval_batch_size": 8192,
  "epochs": 5,
  "steps": 0,  # as many as the epochs have
  "log_every": 0,  # ten times an epoch
  "eval_every": 0,  # every epoch
  "checkpoint_every": 0,
  "select": "valid_auc",
  "patience": 2,
  "pipelined": False,
  "baseline": {"inverse_penalties": (0.01, 0.1, 1.0), "max_rows": 1_000_000},
}
