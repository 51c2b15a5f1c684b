"""DCN-V2 on Criteo's click logs of the Kaggle challenge of 2014, your own copy.

Reproduces: the setting of Naumov et al. 2019 (arXiv 1906.00091): seven days in the order of time,
  six to train, half of the last to validate and half to test. Not run: the full file is under a
  licence. For orientation, BARS (another, random split) has LR .7886, DLRM .8138, DCN-V2 .8142.
Mode "sample": the first 10,000 rows alone, chronological 70/10/20, as a test of the loader and of
  overfitting, not a benchmark: the standard error of its test AUC is .013.
Cost of "sample": half a minute on 2 cores, most of it compilation.
Number of "sample": DCN-V2 .7266 ± .0020 over seeds 0, 1, 2; logistic regression .7329. On so few
  rows the linear model is the better one.
Command: python -m recipes.dlrm --config=configs/dlrm/criteo_kaggle.py \
           --config.data_dir=<folder of train.txt> --workdir=runs/criteo
         python -m recipes.dlrm --config=configs/dlrm/criteo_kaggle.py:sample \
           --config.data_dir=<folder> --config.data_file=first10k.txt --workdir=runs/criteo_sample
"""

from typing import Any


def get_config(mode: str = "") -> dict:
  config: dict[str, Any] = {
    "dataset": "criteo",
    "dlrm": {"bottom": (512, 256, 64), "top": (512, 256), "concat_tables": False},
    "linear": False,
    "dcnv2": {"rank": 0, "deep": (400, 400, 400)},
    "dropout": 0.0,
    "table": {"optimizer": "adam", "learning_rate": 1e-3},
    "select": "valid_auc",
    "learning_rate": 1e-3,
    "warmup_steps": 1_000,
    "final_rate": 0.0,
    "batch_size": 4096,
    "eval_batch_size": 16_384,
    "steps": 9_592,  # one epoch
    "log_every": 100,
    "eval_every": 2_398,
    "checkpoint_every": 1_000,
    "patience": 0,
    "baseline": {"inverse_penalties": (0.03, 0.1)},
  }
  if mode in ("sample", "smoke"):
    config |= {
      "valid_fraction": 0.1, "test_fraction": 0.2, "dim": 4,
      "dcnv2": {"cross_layers": 1, "rank": 0, "deep": (32,)}, "dropout": 0.3,
      "table": {"optimizer": "adam", "learning_rate": 1e-2},
      "learning_rate": 3e-3, "weight_decay": 0.1, "warmup_steps": 0,
      "batch_size": 256, "eval_batch_size": 1_024, "steps": 140,  # five epochs
      "log_every": 14, "eval_every": 14, "checkpoint_every": 0,
    }  # fmt: skip
    config["dlrm"] |= {"bottom": (32,), "top": (32,)}
  if mode == "smoke":
    config |= {"batch_size": 64, "eval_batch_size": 128}
    config |= {"steps": 6, "log_every": 2, "eval_every": 3}
  return config
