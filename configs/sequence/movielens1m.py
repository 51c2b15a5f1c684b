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

import ml_collections


def get_config(mode: str = "") -> ml_collections.ConfigDict:
  """Returns the settings; mode "bert4rec" is that model, mode "smoke" a run of seconds."""
  config = ml_collections.ConfigDict()

  config.dataset = "file"
  config.data_dir = ""  # the folder that holds data_file
  config.data_file = "ml-1m.txt"
  config.layout = "pairs"
  config.counts = (6_040, 3_416, 999_611)  # users, items, interactions; () to take any file
  config.source = "https://github.com/kang205/SASRec (data/ml-1m.txt)"
  config.cache_dir = "~/.cache/sparse_embed"
  config.num_workers = 0

  config.model = "sasrec"  # or hstu, bert4rec
  config.dim = 64
  config.blocks = 2
  config.heads = 1
  config.max_length = 200
  config.positions = "end"
  config.dropout = 0.1
  config.mask_rate = 0.2

  config.loss = "softmax"
  config.negatives = ml_collections.ConfigDict()
  config.negatives.number = 256
  config.negatives.distribution = "uniform"
  config.negatives.shared = True
  config.negatives.logq = True
  config.negatives.calibration = 0.75

  config.table = ml_collections.ConfigDict()
  config.table.optimizer = "adam"
  config.table.sharding = "mod"
  config.table.init_scale = 0.02
  config.table.learning_rate = 1e-3
  config.table.weight_decay = 0.0
  config.learning_rate = 1e-3
  config.weight_decay = 0.0
  config.warmup_steps = 100
  config.final_rate = 0.1

  config.seed = 0
  config.batch_size = 32  # packed rows, 6,400 places
  config.eval_batch_size = 256
  config.steps = 6_400  # 63 epochs
  config.log_every = 102  # an epoch
  config.eval_every = 204
  config.checkpoint_every = 51
  config.select = "valid_ndcg@10"
  config.patience = 0
  config.pipelined = False  # look up each batch during the step before it
  config.ks = (5, 10)
  config.exclude_seen = True  # leave out of a ranking what the user has had

  config.baseline = ml_collections.ConfigDict()
  config.baseline.ease_l2 = 50.0  # its penalty; 0 leaves it out

  if mode == "bert4rec":
    config.model = "bert4rec"
    config.heads = 2

  if mode == "smoke":
    config.dim = 8
    config.max_length = 16
    config.negatives.number = 16
    config.batch_size = 8
    config.eval_batch_size = 64
    config.steps = 6
    config.warmup_steps = 2
    config.log_every = 2
    config.eval_every = 3
  return config
