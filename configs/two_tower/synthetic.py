"""A catalogue with known groups: the default run, which downloads nothing.

Reproduces: nothing published; it shows how close a model comes to the best reachable score, known
  here because users draw items from known probabilities.
Cost: 9 s on 2 shared CPU cores, 2026-11-29.
Number: test NDCG@10 .1341 ± .0003, mean of seeds 0, 1, 2; EASE .1399, popularity .0624, best
  possible .1781.
Command: python -m recipes.two_tower --config=configs/two_tower/synthetic.py \
           --workdir=runs/two_tower
"""


def get_config(mode: str = "") -> dict:
  config = {
    "dataset": "synthetic",
    "query": ("user", "history", "favourite"),
    "candidate": ("item", "tags"),
    "share_history": False,
    "popularity": 0.0,  # rows are split at random, and logq learns it
    "temperature": 0.17,
    "table": {"learning_rate": 1e-2},
    "warmup_steps": 100,
    "batch_size": 1024,
    "eval_batch_size": 512,
    "steps": 600,
    "log_every": 50,
    "eval_every": 200,
    "patience": 0,
    "baseline": {"ease_l2": 500.0},
  }
  if mode == "smoke":
    config |= {"num_users": 300, "num_items": 120, "num_groups": 5, "mean_items": 15}
    config |= {"history": 8, "batch_size": 64, "eval_batch_size": 64, "negatives": {"number": 16}}
    config |= {"steps": 6, "warmup_steps": 2, "log_every": 2, "eval_every": 3}
  return config
