"""The settings of a sequence model on your own table, where its config leaves them out."""

from typing import Any

DEFAULTS: dict[str, Any] = {
  "num_workers": 0,
  "model": "sasrec",  # or hstu, bert4rec
  "dim": 64,
  "blocks": 2,
  "heads": 1,
  "max_length": 50,
  "positions": "end",
  "dropout": 0.2,
  "mask_rate": 0.2,
  "loss": "sampled_softmax",
  "negatives": {
    "number": 256,
    "distribution": "uniform",
    "shared": True,
    "logq": True,
    "calibration": 0.75,
  },
  "table": {
    "optimizer": "adam",
    "sharding": "mod",
    "init_scale": 0.02,
    "learning_rate": 1e-3,
    "weight_decay": 0.0,
  },
  "learning_rate": 1e-3,
  "weight_decay": 0.0,
  "warmup_steps": -1,  # a tenth of the steps, up to 100
  "final_rate": 0.1,
  "seed": 0,
  "batch_size": 0,  # of packed rows, by their number
  "eval_batch_size": 256,
  "epochs": 30,
  "steps": 0,  # as many as the epochs have
  "log_every": 0,  # ten times an epoch
  "eval_every": 0,  # every epoch
  "checkpoint_every": 0,
  "select": "valid_ndcg@10",
  "patience": 3,
  "pipelined": False,
  "ks": (10, 20),
  "baseline": {"ease_l2": 0.0},  # EASE takes a matrix of all pairs of items; 0 leaves it out
}
