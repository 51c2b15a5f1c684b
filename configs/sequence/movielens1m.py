"""SASRec and BERT4Rec on MovieLens 1M, SASRec's file, your own copy.

Reproduces: HR@10 / NDCG@10 of SASRec .3152 / .1821 (63 epochs), of BERT4Rec .2843 / .1537 (197
  epochs), of HSTU .3037 / .1719 (recomputed).
Cost: 163 minutes on 2 CPU cores shared with other work, in several goes, 2026-11-21.
Number: test HR@10 / NDCG@10 of SASRec .3010 / .1732 (seed 0, the state of step 6,324 of
  6,400, the best on validation NDCG@10); EASE .1017 / .0511, popularity .0369 / .0180.
  BERT4Rec .2642 / .1447 (seed 0, 6,400 steps, 63 epochs).
Command: python -m recipes.sequence --config=configs/sequence/movielens1m.py \
           --config.data_dir=<folder> --workdir=runs/movielens1m
         BERT4Rec is movielens1m.py:bert4rec. A run that is stopped resumes from its last checkpoint
         by the same command.
"""


def get_config(mode: str = "") -> dict:
  config = {
    "dataset": "file",
    "data_file": "ml-1m.txt",
    "counts": (6_040, 3_416, 999_611),  # users, items, interactions; () takes any file
    "source": "https://github.com/kang205/SASRec (data/ml-1m.txt)",
    "max_length": 200,
    "dropout": 0.1,
    "loss": "softmax",
    "warmup_steps": 100,
    "batch_size": 32,  # packed rows, 6,400 places
    "steps": 6_400,  # 63 epochs
    "log_every": 102,  # an epoch
    "eval_every": 204,
    "checkpoint_every": 51,
    "patience": 0,
    "ks": (5, 10),
    "baseline": {"ease_l2": 50.0},
  }
  if mode == "bert4rec":
    config |= {"model": "bert4rec", "heads": 2}
  if mode == "smoke":
    config |= {"dim": 8, "max_length": 16, "negatives": {"number": 16}, "batch_size": 8}
    config |= {"eval_batch_size": 64, "steps": 6, "warmup_steps": 2, "log_every": 2}
    config |= {"eval_every": 3}
  return config
