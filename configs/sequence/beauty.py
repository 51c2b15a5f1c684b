"""SASRec and HSTU on Amazon Beauty, S3-Rec's file, your own copy.

5-core, leave one out, full ranking.

Reproduces: HR@10 / NDCG@10 of SASRec .0605 / .0318 (BCE, as published with S3-Rec's file), and
  .0921 / .0531 with sampled softmax; HSTU .0704 / .0389, .0788 / .0439 recomputed.
Cost: SASRec 102 to 105 s a seed on 2 CPU cores, HSTU 150 to 174 s on 2 shared ones, 2026-11-21.
Number: test HR@10 / NDCG@10 of SASRec .0892 ± .0010 / .0552 ± .0006, of HSTU .0866 ± .0006 /
  .0535 ± .0001, mean of seeds 0, 1, 2 with the standard deviation; EASE .0699 / .0386, popularity
  .0115 / .0055. The epoch and the settings were chosen on validation NDCG@10, the settings with
  SASRec, among ten for the two Beauty files, test scores being printed beside.
Command: python -m recipes.sequence --config=configs/sequence/beauty.py --config.data_dir=<folder> \
           --workdir=runs/beauty_0 --config.model=sasrec --config.seed=0
"""

import ml_collections


def get_config(mode: str = "") -> ml_collections.ConfigDict:
  """Returns the settings; mode "smoke" is a run of seconds."""
  config = ml_collections.ConfigDict()

  config.dataset = "file"
  config.data_dir = ""  # the folder that holds data_file
  config.data_file = "Beauty.txt"
  config.layout = "lines"
  config.counts = (22_363, 12_101, 198_502)  # users, items, interactions; () to take any file
  config.source = "https://github.com/RUCAIBox/CIKM2020-S3Rec (data/Beauty.txt)"
  config.cache_dir = "~/.cache/sparse_embed"
  config.num_workers = 0

  config.model = "sasrec"  # or hstu, bert4rec
  config.dim = 64
  config.blocks = 1
  config.heads = 1
  config.max_length = 50
  config.positions = "end"
  config.dropout = 0.3
  config.mask_rate = 0.2

  config.loss = "sampled_softmax"
  config.negatives = ml_collections.ConfigDict()
  config.negatives.number = 512
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
  config.batch_size = 32  # packed rows, 1,600 places
  config.eval_batch_size = 512
  config.steps = 4_800  # 60 epochs
  config.log_every = 80  # an epoch
  config.eval_every = 800
  config.checkpoint_every = 0
  config.select = "valid_ndcg@10"
  config.patience = 0
  config.pipelined = False  # look up each batch during the step before it
  config.ks = (5, 10)
  config.exclude_seen = True  # leave out of a ranking what the user has had

  config.baseline = ml_collections.ConfigDict()
  config.baseline.ease_l2 = 50.0  # its penalty; 0 leaves it out

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
