"""SASRec on Amazon Beauty, BERT4Rec's file, your own copy.

5-core, 54,542 items, leave one out, full ranking.

Reproduces: HR@10 / NDCG@10 of SASRec .0533 / .0327 with cross-entropy over all items, .0490 / .0295
  with 3,000 negatives, .0246 / .0126 with BCE.
Cost: 399 to 982 s a seed on 2 CPU cores shared with other work, 2026-11-21.
Number: test HR@10 / NDCG@10 .0494 ± .0005 / .0308 ± .0002, mean of seeds 0, 1, 2 with the
  standard deviation; popularity .0078 / .0035. EASE's matrix of all pairs of items would not fit.
  The epoch and the settings were chosen on validation NDCG@10, the settings among ten for the two
  Beauty files, test scores being printed beside.
Command: python -m recipes.sequence --config=configs/sequence/beauty_bert4rec.py \
           --config.data_dir=<folder> --workdir=runs/beauty_bert4rec_0 --config.seed=0
"""

import ml_collections


def get_config(mode: str = "") -> ml_collections.ConfigDict:
  """Returns the settings; mode "smoke" is a run of seconds."""
  config = ml_collections.ConfigDict()

  config.dataset = "file"
  config.data_dir = ""  # the folder that holds data_file
  config.data_file = "beauty.txt"
  config.layout = "pairs"
  config.counts = (40_226, 54_542, 353_962)  # users, items, interactions; () to take any file
  config.source = "https://github.com/FeiSun/BERT4Rec (data/beauty.txt)"
  config.cache_dir = "~/.cache/sparse_embed"
  config.num_workers = 0

  config.model = "sasrec"  # or hstu, bert4rec
  config.dim = 64
  config.blocks = 1
  config.heads = 1
  config.max_length = 50
  config.positions = "end"
  config.dropout = 0.4
  config.mask_rate = 0.2

  config.loss = "sampled_softmax"
  config.negatives = ml_collections.ConfigDict()
  config.negatives.number = 1024
  config.negatives.distribution = "uniform"
  config.negatives.shared = True
  config.negatives.logq = True
  config.negatives.calibration = 0.75

  config.table = ml_collections.ConfigDict()
  config.table.optimizer = "adam"
  config.table.sharding = "mod"
  config.table.init_scale = 0.02
  config.table.learning_rate = 1e-2  # most items are seen a few times an epoch
  config.table.weight_decay = 0.0
  config.learning_rate = 1e-3
  config.weight_decay = 0.0
  config.warmup_steps = 100
  config.final_rate = 0.1

  config.seed = 0
  config.batch_size = 32  # packed rows, 1,600 places
  config.eval_batch_size = 512
  config.steps = 5_680  # 40 epochs
  config.log_every = 142  # an epoch
  config.eval_every = 1_136
  config.checkpoint_every = 0
  config.select = "valid_ndcg@10"
  config.patience = 0
  config.pipelined = False  # look up each batch during the step before it
  config.ks = (5, 10)
  config.exclude_seen = True  # leave out of a ranking what the user has had

  config.baseline = ml_collections.ConfigDict()
  config.baseline.ease_l2 = 0.0  # left out: its matrix would take 24 GB

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
