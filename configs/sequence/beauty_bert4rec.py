"""SASRec on Amazon Beauty, BERT4Rec's file, your own copy.

5-core, 54,542 items, leave one out, full ranking.

Reproduces: HR@10 / NDCG@10 of SASRec .0533 / .0327 with cross-entropy over all items, .0490 / .0295
  with 3,000 negatives, .0246 / .0126 with BCE.
Cost: 399 to 982 s a seed on 2 CPU cores shared with other work, 2026-11-21.
Number: test HR@10 / NDCG@10 .0494 ± .0005 / .0308 ± .0002, mean of seeds 0, 1, 2 with the
  standard deviation; popularity .0078 / .0035. EASE's matrix of all pairs of items would not fit.
  The epoch and the settings were chosen on validation NDCG@10, the settings among ten for the two
  Beauty files, test scores being printed beside. These runs were without windows, of 5,680 steps.
Command: python -m recipes.sequence --config=configs/sequence/beauty_bert4rec.py \
           --config.data_dir=<folder> --workdir=runs/beauty_bert4rec_0 --config.seed=0
"""


def get_config(mode: str = "") -> dict:
  config = {
    "dataset": "file",
    "data_file": "beauty.txt",
    "counts": (40_226, 54_542, 353_962),  # users, items, interactions; () takes any file
    "source": "https://github.com/FeiSun/BERT4Rec (data/beauty.txt)",
    "blocks": 1,
    "dropout": 0.4,
    "negatives": {"number": 1024},
    "table": {"learning_rate": 1e-2},  # most items are seen a few times an epoch
    "warmup_steps": 100,
    "batch_size": 32,  # packed rows, 1,600 places
    "eval_batch_size": 512,
    "steps": 5_840,  # 40 epochs
    "log_every": 146,  # an epoch
    "eval_every": 1_168,
    "patience": 0,
    "ks": (5, 10),
  }
  if mode == "smoke":
    config |= {"dim": 8, "max_length": 16, "negatives": {"number": 16}, "batch_size": 8}
    config |= {"eval_batch_size": 64, "steps": 6, "warmup_steps": 2, "log_every": 2}
    config |= {"eval_every": 3}
  return config


def get_sweep() -> list:
  """More negatives, and the published run's softmax over all items, which overfits in few."""
  softmax = {"loss": "softmax", "table.learning_rate": 1e-3, "steps": 1_460, "eval_every": 146}
  published = {"blocks": 2, "residual": "norm", "init": "normal", "positions": "start"}
  return [
    {"negatives.number": 4096},
    {"negatives.number": 4096, "dropout": 0.5},
    {**softmax, "dropout": 0.4},
    {**softmax, **published, "dropout": 0.1, "warmup_steps": 0, "final_rate": 1.0},
  ]
