"""Sequences from a known process: the default run, which downloads nothing.

Reproduces: nothing published; it shows how close a model comes to the best reachable ranking, which
  is known here because what follows an item is drawn from known probabilities.
Cost: 40 s on 2 busy cores.
Number: test HR@10 / NDCG@10 .5713 / .4584 (SASRec, seed 0), EASE .4125 / .2184, popularity .2178 /
  .1311, best possible .6695 / .5268.
Command: python -m recipes.sequence --config=configs/sequence/synthetic.py --workdir=runs/sequence
"""


def get_config(mode: str = "") -> dict:
  config = {
    "dataset": "synthetic",
    "dim": 32,
    "blocks": 1,
    "max_length": 40,
    "dropout": 0.1,
    "table": {"learning_rate": 3e-3},
    "learning_rate": 3e-3,
    "warmup_steps": 50,
    "final_rate": 0.0,
    "batch_size": 64,  # packed rows
    "eval_batch_size": 512,
    "steps": 1_500,
    "log_every": 50,
    "eval_every": 375,
    "patience": 0,
    "ks": (5, 10),
    "baseline": {"ease_l2": 50.0},
  }
  if mode == "smoke":
    config |= {"num_users": 200, "num_items": 100, "dim": 8, "negatives": {"number": 16}}
    config |= {"batch_size": 8, "eval_batch_size": 64, "steps": 6, "warmup_steps": 2}
    config |= {"log_every": 2, "eval_every": 3}
  return config
