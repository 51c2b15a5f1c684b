"""SASRec and HSTU on MovieLens 1M, SASRec's file, your own copy.

Reproduces: HR@10 / NDCG@10 of SASRec .3152 / .1821 (63 epochs), of HSTU .3037 / .1719
  (recomputed).
Cost: 103 minutes (:reference) and 108 (:hstu) on one CPU core, 2026-11-26; 163 with the settings
  here, on 2 shared cores, 2026-11-21.
Number: test HR@10 / NDCG@10 of SASRec as published (:reference) .3124 / .1804 (seed 0, the state of
  epoch 62 of 72, the best on validation NDCG@10); with the settings here, without windows, .3010 /
  .1732 (seed 0, 6,400 steps); HSTU (:hstu) .3109 / .1812 (seed 0, epoch 57 of 67, chosen likewise);
  EASE .1017 / .0511, popularity .0369 / .0180.
Command: python -m recipes.sequence --config=configs/sequence/movielens1m.py \
           --config.data_dir=<folder> --workdir=runs/movielens1m
         movielens1m.py:reference is SASRec as published by
         github.com/antklen/sasrec-bert4rec-recsys23 (Klenitskiy and Vasilev 2023);
         movielens1m.py:hstu trains HSTU as :reference trains SASRec. A run that is stopped resumes
         by the same command.
"""


def get_config(mode: str = "") -> dict:
  config = {
    "dataset": "file",
    "data_file": "ml-1m.txt",
    "source": "https://github.com/kang205/SASRec (data/ml-1m.txt)",
    "max_length": 200,
    "dropout": 0.1,
    "loss": "softmax",
    "table": {"learning_rate": 1e-3},
    "warmup_steps": 100,
    "batch_size": 32,  # packed rows, 6,400 places
    "steps": 6_400,  # 41 million targets, as many as the published run of 63 epochs
    "log_every": 154,  # an epoch
    "eval_every": 308,
    "checkpoint_every": 51,
    "patience": 0,
    "ks": (5, 10),
    "baseline": {"ease_l2": 50.0},
  }
  if mode in ("reference", "hstu"):  # a batch is 128 users, who have 13,700 targets
    config |= {"positions": "start", "init": "normal", "windows": False, "batch_size": 68}
    config |= {"warmup_steps": 0, "final_rate": 1.0, "log_every": 48, "eval_every": 48}
    config |= {"steps": 4_800, "patience": 10}  # up to 100 epochs; the published run took 63
  if mode == "reference":
    config |= {"residual": "norm"}
  if mode == "hstu":
    config |= {"model": "hstu", "dropout": 0.2}
  if mode == "smoke":
    config |= {"dim": 8, "max_length": 16, "negatives": {"number": 16}, "batch_size": 8}
    config |= {"eval_batch_size": 64, "steps": 6, "warmup_steps": 2, "log_every": 2}
    config |= {"eval_every": 3}
  return config
