"""Two towers on MovieLens 100K, as tutorials split it; downloads 5 MB.

Reproduces: the tutorials' top-100 accuracy of about .30 (all ratings are positives, random 80/20),
  which is `test_recall@100` with `--config.exclude_seen=False`: there, items that the user has seen
  stay in the ranking. A tenth of the training rows is held out for validation.
Cost: 23 to 33 s a seed on 2 shared CPU cores; 5 MB to download.
Number: test Recall@100 .6218 ± .0017, mean of seeds 0, 1, 2; EASE .6165, popularity .4100. With
  the seen items in the ranking .4153 (seed 0), EASE .3139, popularity .2988.
Command: python -m recipes.two_tower --config=configs/two_tower/movielens100k.py \
           --workdir=runs/two_tower_ml100k_0 --config.seed=0
"""

import ml_collections


def get_config(mode: str = "") -> ml_collections.ConfigDict:
  """Returns the settings; mode "smoke" is a run of seconds."""
  config = ml_collections.ConfigDict()

  config.dataset = "movielens100k"
  config.data_dir = ""  # empty downloads the archive; else a folder with its files
  config.cache_dir = "~/.cache/sparse_embed"
  config.split_seed = 0
  config.counts = (943, 1_682, 100_000)  # users, items, ratings; () to take other files
  config.num_workers = 0

  config.query = ("history",)
  config.candidate = ("item", "genres")
  config.share_history = False
  config.history = 32
  config.eval_history = 256
  config.dim = 64
  config.query_hidden = ()
  config.candidate_hidden = ()
  config.dropout = 0.0
  config.normalize = True
  config.temperature = 0.3

  config.logq = 1.0  # how much of the correction; 0 is none
  config.remove_accidental_hits = True
  config.hard_negatives = 0
  config.queue = 0
  config.frequency = ml_collections.ConfigDict()
  config.frequency.buckets = 0  # 0: one for every item
  config.frequency.rate = 0.02
  config.negatives = ml_collections.ConfigDict()
  config.negatives.number = 0
  config.negatives.distribution = "uniform"
  config.negatives.power = 0.75

  config.table = ml_collections.ConfigDict()
  config.table.optimizer = "adam"
  config.table.sharding = "mod"
  config.table.init_scale = 0.1
  config.table.learning_rate = 1e-2
  config.table.weight_decay = 0.0
  config.learning_rate = 3e-3
  config.weight_decay = 0.0
  config.warmup_steps = 100
  config.final_rate = 0.1

  config.seed = 0
  config.batch_size = 1024
  config.eval_batch_size = 512
  config.steps = 710  # ten epochs at most
  config.log_every = 71
  config.eval_every = 71  # an epoch
  config.checkpoint_every = 0
  config.select = "valid_recall@100"
  config.patience = 2
  config.pipelined = False  # look up each batch during the step before it

  config.examples = "rows"
  config.exclude_seen = True
  config.ks = (10, 100)
  config.ann = False
  config.baseline = ml_collections.ConfigDict()
  config.baseline.select = "recall@100"
  config.baseline.ease_l2 = (50.0, 200.0, 500.0)

  if mode == "smoke":
    config.history = 8
    config.batch_size = 64
    config.eval_batch_size = 64
    config.negatives.number = 16
    config.steps = 6
    config.warmup_steps = 2
    config.log_every = 2
    config.eval_every = 3
  return config
