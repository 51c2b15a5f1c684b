"""SASRec on Amazon Beauty, BERT4Rec's file, your own copy.

5-core, 54,542 items, leave one out, full ranking.

Reproduces: HR@10 / NDCG@10 of SASRec .0533 / .0327 with cross-entropy over all items, .0490 / .0295
  with 3,000 negatives, .0246 / .0126 with BCE.
Cost: 47 minutes on a CPU core shared with other work, 2026-11-27.
Number: test HR@10 / NDCG@10 .0528 / .0324 (seed 0, epoch 8 of 10); item kNN .0251 / .0140,
  popularity .0078 / .0035. EASE's matrix of all pairs of items would not fit. Block,
  initialization, positions, dropout, rate and loss are those of the published run; the batch of
  some 275 users, windows, a patience of 2 and at most ten epochs are not. One other setting was
  tried: a dropout of .2 and nine epochs at a rate that falls to a tenth, .0406 on validation
  against .0424 (seed 0). Before, 1,024 sampled items had test scores of .0494 / .0308 (mean of
  seeds 0, 1, 2), chosen among ten with test scores printed beside.
Command: python -m recipes.sequence --config=configs/sequence/beauty_bert4rec.py \
           --config.data_dir=<folder> --workdir=runs/beauty_bert4rec_0 --config.seed=0
"""


def get_config(mode: str = "") -> dict:
  config = {
    "dataset": "file",
    "data_file": "beauty.txt",
    "source": "https://github.com/FeiSun/BERT4Rec (data/beauty.txt)",
    "residual": "norm",
    "init": "normal",
    "positions": "start",
    "dropout": 0.1,
    "loss": "softmax",
    "table": {"learning_rate": 1e-3},
    "warmup_steps": 0,
    "final_rate": 1.0,
    "batch_size": 32,  # packed rows, 1,600 places
    "eval_batch_size": 512,
    "steps": 1_460,  # ten epochs at most
    "log_every": 146,  # an epoch
    "eval_every": 146,
    "patience": 2,
    "ks": (5, 10),
  }
  if mode == "smoke":
    config |= {"dim": 8, "max_length": 16, "batch_size": 8, "eval_batch_size": 64}
    config |= {"steps": 6, "warmup_steps": 2, "log_every": 2, "eval_every": 3}
  return config
