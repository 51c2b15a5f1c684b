"""DCN-V2 on Criteo's click logs of the Kaggle challenge of 2014, your own copy.

Reproduces: the setting of Naumov et al. 2019 (arXiv 1906.00091): seven days in the order of time,
  six to train, half of the last to validate and half to test. Not run: the full file is under a
  licence. For orientation, BARS (another, random split) has LR .7886, DLRM .8138, DCN-V2 .8142.
Mode "sample": the first 10,000 rows alone, chronological 70/10/20, as a test of the loader and of
  overfitting, not a benchmark: the standard error of its test AUC is .013.
Cost of "sample": half a minute on 2 cores, most of it compilation.
Number of "sample": DCN-V2 .7284 ± .0009 over seeds 0, 1, 2; logistic regression .7337. On so few
  rows the linear model is the better one.
Command: python -m recipes.dlrm --config=configs/dlrm/criteo_kaggle.py \
           --config.data_dir=<folder of train.txt> --workdir=runs/criteo
         python -m recipes.dlrm --config=configs/dlrm/criteo_kaggle.py:sample \
           --config.data_dir=<folder> --config.data_file=first10k.txt --workdir=runs/criteo_sample
"""

import ml_collections


def get_config(mode: str = "") -> ml_collections.ConfigDict:
  """Returns the settings; mode "sample" is for 10,000 rows, "smoke" is a run of seconds."""
  config = ml_collections.ConfigDict()

  config.dataset = "criteo"
  config.data_dir = ""  # the folder that holds data_file
  config.data_file = "train.txt"
  config.cache_dir = "~/.cache/sparse_embed"
  config.valid_fraction = 1 / 14
  config.test_fraction = 1 / 14
  config.vocabulary = "min_count"  # or "hash"
  config.min_count = 10
  config.hash_size = 200_000  # per feature
  config.num_workers = 0

  config.model = "dcnv2"
  config.dim = 16
  config.dlrm = ml_collections.ConfigDict()
  config.dlrm.bottom = (512, 256, 64)
  config.dlrm.top = (512, 256)
  config.dlrm.concat_tables = False
  config.dcnv2 = ml_collections.ConfigDict()
  config.dcnv2.bottom = ()
  config.dcnv2.cross_layers = 3
  config.dcnv2.rank = 0
  config.dcnv2.deep = (400, 400, 400)
  config.dcnv2.structure = "parallel"
  config.dropout = 0.0

  config.table = ml_collections.ConfigDict()
  config.table.optimizer = "adam"
  config.table.sharding = "mod"
  config.table.init_scale = 0.01
  config.table.learning_rate = 1e-3
  config.table.weight_decay = 0.0
  config.dense_optimizer = "adamw"
  config.learning_rate = 1e-3
  config.weight_decay = 0.0
  config.warmup_steps = 1_000
  config.final_rate = 0.0

  config.seed = 0
  config.batch_size = 4096
  config.eval_batch_size = 16_384
  config.steps = 9_592  # one epoch
  config.log_every = 100
  config.eval_every = 2_398
  config.checkpoint_every = 1_000
  config.select = "valid_auc"
  config.patience = 0
  config.pipelined = False  # look up each batch during the step before it

  config.baseline = ml_collections.ConfigDict()
  config.baseline.inverse_penalties = (0.03, 0.1)
  config.baseline.max_rows = 1_000_000

  if mode in ("sample", "smoke"):
    config.valid_fraction = 0.1
    config.test_fraction = 0.2
    config.dim = 4
    config.dlrm.bottom = (32,)
    config.dlrm.top = (32,)
    config.dcnv2.cross_layers = 1
    config.dcnv2.deep = (32,)
    config.dropout = 0.3
    config.table.learning_rate = 1e-2
    config.learning_rate = 3e-3
    config.weight_decay = 0.1
    config.warmup_steps = 0
    config.batch_size = 256
    config.eval_batch_size = 1_024
    config.steps = 140  # five epochs
    config.log_every = 14
    config.eval_every = 14
    config.checkpoint_every = 0
  if mode == "smoke":
    config.hash_size = 1_000
    config.batch_size = 64
    config.eval_batch_size = 128
    config.steps = 6
    config.log_every = 2
    config.eval_every = 3
  return config
