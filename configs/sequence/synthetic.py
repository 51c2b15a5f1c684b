"""Sequences from a known process: the default run, which downloads nothing.

Reproduces: nothing published; it shows how close a model comes to the best reachable ranking, which
  is known here because what follows an item is drawn from known probabilities.
Cost: 40 s on 2 busy cores; mode bert4rec 3 minutes.
Number: test HR@10 / NDCG@10 .5713 / .4584 (SASRec, seed 0), EASE .4125 / .2184, popularity .2178 /
  .1311, best possible .6695 / .5268. BERT4Rec (mode bert4rec, seed 0) .4460 / .3422.
Command: python -m recipes.sequence --config=configs/sequence/synthetic.py --workdir=runs/sequence
"""

import ml_collections


def get_config(mode: str = "") -> ml_collections.ConfigDict:
  """Returns the settings; mode "bert4rec" is that model, mode "smoke" a run of seconds."""
  config = ml_collections.ConfigDict()

  config.dataset = "synthetic"
  config.num_users = 20_000
  config.num_items = 2_000
  config.noise = 0.3
  config.data_seed = 0
  config.cache_dir = "~/.cache/sparse_embed"
  config.num_workers = 0

  config.model = "sasrec"  # or bert4rec, hstu
  config.dim = 32
  config.blocks = 1
  config.heads = 1
  config.max_length = 40
  config.positions = "end"
  config.dropout = 0.1
  config.mask_rate = 0.2  # bert4rec

  config.loss = "sampled_softmax"  # or softmax, bce, gbce
  config.negatives = ml_collections.ConfigDict()
  config.negatives.number = 256
  config.negatives.distribution = "uniform"  # or popularity
  config.negatives.shared = True
  config.negatives.logq = True
  config.negatives.calibration = 0.75  # gbce

  config.table = ml_collections.ConfigDict()
  config.table.optimizer = "adam"
  config.table.sharding = "mod"
  config.table.init_scale = 0.02
  config.table.learning_rate = 3e-3
  config.table.weight_decay = 0.0
  config.learning_rate = 3e-3
  config.weight_decay = 0.0
  config.warmup_steps = 50
  config.final_rate = 0.0

  config.seed = 0
  config.batch_size = 64  # packed rows
  config.eval_batch_size = 512
  config.steps = 1_500
  config.log_every = 50
  config.eval_every = 375
  config.checkpoint_every = 0
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
    config.loss = "softmax"
    config.table.learning_rate = 1e-3
    config.learning_rate = 1e-3
    config.steps = 3_000
    config.eval_every = 500

  if mode == "smoke":
    config.num_users = 200
    config.num_items = 100
    config.dim = 8
    config.negatives.number = 16
    config.batch_size = 8
    config.eval_batch_size = 64
    config.steps = 6
    config.warmup_steps = 2
    config.log_every = 2
    config.eval_every = 3
  return config
