"""The settings of two towers on your own table, where its config leaves them out."""

from typing import Any

DEFAULTS: dict[str, Any] = {
  "num_workers": 0,
  "query": (),  # some of user, history and the features of users; () is all of them
  "candidate": (),  # some of item and the features of items; () is all of them
  "share_history": True,
  "history": 32,
  "eval_history": 256,
  "dim": 64,
  "query_hidden": (),
  "candidate_hidden": (),
  "dropout": 0.0,
  "normalize": True,
  "temperature": 0.1,
  "logq": 1.0,
  "remove_accidental_hits": True,
  "hard_negatives": 0,
  "queue": 0,
  "frequency": {"buckets": 0, "rate": 0.02},
  "negatives": {"number": 0, "distribution": "uniform", "power": 0.75},
  "table": {
    "optimizer": "adam",
    "sharding": "mod",
    "init_scale": 0.1,
    "learning_rate": 5e-3,
    "weight_decay": 0.0,
  },
  "learning_rate": 3e-3,
  "weight_decay": 0.0,
  "warmup_steps": -1,  # a tenth of the steps, up to 100
  "final_rate": 0.1,
  "seed": 0,
  "batch_size": 0,  # by the number of interactions
  "eval_batch_size": 256,
  "epochs": 10,
  "steps": 0,  # as many as the epochs have
  "log_every": 0,  # ten times an epoch
  "eval_every": 0,  # every epoch
  "checkpoint_every": 0,
  "select": "valid_ndcg@10",
  "patience": 3,
  "pipelined": False,
  "examples": "users",
  "ks": (10, 20),
  "ann": False,
  "baseline": {
    "select": "ndcg@10",
    "ease_l2": (),  # EASE takes a matrix of all pairs of items
  },
}
