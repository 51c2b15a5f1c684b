"""Writes what torch, FBGEMM and TorchRec make of the problem in tests/support/parity_problem.py.

    python tests/parity/make_torch.py  # with torch, fbgemm-gpu-cpu and torchrec installed

torch's sparse optimizers run on `EmbeddingBag(sparse=True)`. Those that take dense gradients alone
run twice: "dense" on the whole table, in which untouched rows move too, and by default with a
parameter for each row, which torch leaves alone where it has no gradient.
"""

import pathlib
import sys

import fbgemm_gpu
import numpy as np
import torch
import torch.nn.functional as F
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
  ComputeDevice,
  SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "support"))
import parity_problem as problem  # noqa: E402

SPARSE = {
  "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
  "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
  "sparse_adam": lambda p: torch.optim.SparseAdam(p, lr=0.01),
}
PER_ROW = {
  "adam": lambda p: torch.optim.Adam(p, lr=0.01),
  "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
  "adagrad_l2": lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1),
  "sgd_l2": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
  "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
  "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
  "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9),
}


def embedding_bag(step, weight, kind, sparse=False, max_norm=None):
  ids, weights, splits = step.bags()
  return F.embedding_bag(
    torch.tensor(ids),
    weight,
    torch.tensor(splits[:-1]),
    mode=problem.combiner(kind),
    sparse=sparse,
    max_norm=max_norm,
    per_sample_weights=None if weights is None else torch.tensor(weights),
  )


def torch_whole(make, kind, sparse, max_norm=None):
  weight = torch.nn.Parameter(torch.tensor(problem.table()))
  optimizer = make([weight])
  for step in problem.steps(kind):
    optimizer.zero_grad()
    act = embedding_bag(step, weight, kind, sparse, max_norm)
    (act * torch.tensor(step.cotangents)).sum().backward()
    optimizer.step()
  return weight.detach().numpy()


def torch_per_row(make, kind):
  rows = [torch.nn.Parameter(torch.tensor(row)) for row in problem.table()]
  optimizer = make(rows)
  for step in problem.steps(kind):
    optimizer.zero_grad()
    act = embedding_bag(step, torch.stack(rows), kind)
    (act * torch.tensor(step.cotangents)).sum().backward()
    touched = set(step.ids.ravel().tolist())
    for i, row in enumerate(rows):
      if i not in touched:
        row.grad = None
    optimizer.step()
  return np.stack([row.detach().numpy() for row in rows])


def fbgemm(kind, **arguments):
  """The table after training.

  FBGEMM 1.9.0 takes weight_decay (either mode) and max_norm on CPU and ignores them.
  """
  tables = fbgemm_tables(problem.combiner(kind) == "mean", **arguments)
  for step in problem.steps(kind):
    ids, weights, splits = (x if x is None else torch.tensor(x) for x in step.bags())
    act = tables(ids, splits, per_sample_weights=weights)
    (act * torch.tensor(step.cotangents)).sum().backward()
  return tables.split_embedding_weights()[0].detach().numpy()


def fbgemm_weighted_mean(**arguments):
  """Activations of a mean with weights, before training.

  The gradients of this mode are not divided by the count on CPU, so that they are none of its
  activations; they are not compared.
  """
  step = next(problem.steps("weighted"))
  ids, weights, splits = map(torch.tensor, step.bags())
  act = fbgemm_tables(True, **arguments)(ids, splits, per_sample_weights=weights)
  return act.detach().numpy()


def fbgemm_tables(mean, **arguments):
  tables = SplitTableBatchedEmbeddingBagsCodegen(
    [(problem.V, problem.D, EmbeddingLocation.HOST, ComputeDevice.CPU)],
    weights_precision=SparseType.FP32,
    output_dtype=SparseType.FP32,
    pooling_mode=PoolingMode.MEAN if mean else PoolingMode.SUM,
    **arguments,
  )
  tables.split_embedding_weights()[0].copy_(torch.tensor(problem.table()))
  return tables


def torchrec_rowwise(kind):
  pooling = PoolingType.MEAN if problem.combiner(kind) == "mean" else PoolingType.SUM
  config = EmbeddingBagConfig(
    name="t", embedding_dim=problem.D, num_embeddings=problem.V, feature_names=["f"],
    pooling=pooling,
  )  # fmt: skip
  bags = EmbeddingBagCollection(tables=[config], is_weighted=kind == "weighted")
  (weight,) = bags.parameters()
  weight.data.copy_(torch.tensor(problem.table()))
  optimizer = RowWiseAdagrad([weight], lr=0.1)
  for step in problem.steps(kind):
    ids, weights, splits = (x if x is None else torch.tensor(x) for x in step.bags())
    optimizer.zero_grad()
    jagged = KeyedJaggedTensor(["f"], ids, weights, offsets=splits)
    (bags(jagged)["f"] * torch.tensor(step.cotangents)).sum().backward()
    optimizer.step()
  return weight.detach().numpy()


def save(name, arrays, **versions):
  np.savez_compressed(HERE / f"{name}.npz", **arrays, **versions, torch=torch.__version__)
  print(name, len(arrays), versions)


def main():
  arrays = {}
  for kind in problem.KINDS:
    for name, make in SPARSE.items():
      arrays[f"{name}/{kind}"] = torch_whole(make, kind, sparse=True)
    for name, make in PER_ROW.items():
      arrays[f"{name}/{kind}"] = torch_per_row(make, kind)
    arrays[f"max_norm/{kind}"] = torch_whole(SPARSE["sgd"], kind, sparse=False, max_norm=1.0)
  save("torch", arrays)

  rowwise, adagrad = EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.EXACT_ADAGRAD
  cases = {
    "sgd": {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1},
    "adagrad": {"optimizer": adagrad, "learning_rate": 0.1, "eps": 1e-3},
    "rowwise_adagrad": {"optimizer": rowwise, "learning_rate": 0.1},
  }
  arrays = {
    f"{name}/{kind}": fbgemm(kind, **cases[name]) for kind in problem.KINDS for name in cases
  }
  arrays["weighted_mean"] = fbgemm_weighted_mean(**cases["sgd"])
  save("fbgemm", arrays, fbgemm=fbgemm_gpu.__version__)

  arrays = {f"rowwise_adagrad/{kind}": torchrec_rowwise(kind) for kind in problem.KINDS}
  save("torchrec", arrays, torchrec=torchrec.__version__)


if __name__ == "__main__":
  main()
