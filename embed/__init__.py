"""SparseEmbed: sharded embedding tables with table-aware sparse optimizers for Flax NNX.

The public API is `__all__`, here and in the modules `checkpoint`, `deltas` and `transforms`.
Everything else may change from one version to the next.
"""

from embed import checkpoint, deltas, transforms
from embed.config import DynamicVocabulary, FeatureConfig, TableConfig
from embed.dynamic_vocabulary import Vocabulary
from embed.export import Exported, export
from embed.gradients import Grads, RowGrads, accumulate, clip_by_global_norm, global_norm
from embed.importers import Imported, from_tpu_embedding, import_variables
from embed.initializers import row_wise
from embed.inputs import Padded, Ragged, Sparse, raw_ids, to_padded, validate
from embed.layer import Residual, SparseEmbed
from embed.model_optimizer import Optimizer, jit_step
from embed.optimizers import (
  RowOptimizer,
  Slot,
  adagrad,
  adagrad_momentum,
  adam,
  bias_corrected,
  custom_optimizer,
  from_optax,
  frozen,
  ftrl,
  rowwise_adagrad,
  sgd,
)
from embed.planning import Plan, StackCost, TablePlan, plan
from embed.serving_lookup import serving_lookup
from embed.tpu_embedding.config_spec import EmbeddingConfigSpec
from embed.value_and_grad import value_and_grad
from embed.variables import Report, SlotVariable, Table

__all__ = [
  "DynamicVocabulary",
  "EmbeddingConfigSpec",
  "Exported",
  "FeatureConfig",
  "Grads",
  "Imported",
  "Optimizer",
  "Padded",
  "Plan",
  "Ragged",
  "Report",
  "Residual",
  "RowGrads",
  "RowOptimizer",
  "Slot",
  "SlotVariable",
  "Sparse",
  "SparseEmbed",
  "StackCost",
  "Table",
  "TableConfig",
  "TablePlan",
  "Vocabulary",
  "accumulate",
  "adagrad",
  "adagrad_momentum",
  "adam",
  "bias_corrected",
  "checkpoint",
  "clip_by_global_norm",
  "custom_optimizer",
  "deltas",
  "export",
  "from_optax",
  "from_tpu_embedding",
  "frozen",
  "ftrl",
  "global_norm",
  "import_variables",
  "jit_step",
  "plan",
  "raw_ids",
  "row_wise",
  "rowwise_adagrad",
  "serving_lookup",
  "sgd",
  "to_padded",
  "transforms",
  "validate",
  "value_and_grad",
]

__version__ = "0.1.0"
