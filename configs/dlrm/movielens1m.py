"""DCN-V2 and DLRM on MovieLens 1M as clicks, RecBole's protocol; downloads 6 MB.

Reproduces: RecBole's table of context-aware models on ml-1m: ratings of 3 dropped, 4 and 5 are
  clicks, 739,012 rows, embedding 16, random 80/10/10; test AUC / log loss of LR .8699 / .3488 and
  of DCNV2 .8998 / .3119. The split is drawn again (`split_seed`), so rows differ from RecBole's.
Cost: 48 to 79 s (DCN-V2) and 33 to 66 s (DLRM) a seed on 2 busy CPU cores, 2026-11-29.
Number: test AUC / log loss, mean of seeds 0, 1, 2 with the standard deviation of the AUC:
  DCN-V2 .8990 ± .0005 / .3131, DLRM .8974 ± .0004 / .3134, logistic regression .8726 / .3444.
  Splits differ by more than seeds: DCN-V2 (seed 0) has an AUC of .8987 and .9018 with split_seed
  1 and 2, logistic regression .8713 and .8751. The epoch is chosen on validation log loss.
Command: python -m recipes.dlrm --config=configs/dlrm/movielens1m.py --workdir=runs/movielens1m \
           --config.model=dcnv2 --config.seed=0
"""


def get_config(mode: str = "") -> dict:
  config = {
    "dataset": "movielens1m",
    "dlrm": {"bottom": (), "top": (256, 256)},
    "linear": False,
    "dcnv2": {"rank": 0, "deep": (256, 256)},
    "dropout": 0.3,
    "table": {"learning_rate": 0.6144},  # 3e-4 for each example of a batch
    "learning_rate": 2e-3,
    "warmup_steps": 100,
    "final_rate": 0.3,
    "batch_size": 2048,
    "steps": 2312,  # eight epochs at most
    "log_every": 100,
    "eval_every": 289,  # an epoch
    "patience": 2,
    "baseline": {"inverse_penalties": (1.0,)},
  }
  if mode == "smoke":
    config |= {"batch_size": 64, "eval_batch_size": 128}
    config |= {"steps": 6, "warmup_steps": 2, "log_every": 2, "eval_every": 3}
  return config
