"""Trains TorchRec's DLRM on MovieLens 100k, and writes it, its scores and how it goes on.

    python tests/parity/make_dlrm.py FOLDER  # the unpacked archive, with u.data

The file has the weights, the state of the tables' optimizer, the scores of made-up clicks
(`parity_problem.clicks`), and the losses of 100 more steps on such clicks, in three orders.
"""

import copy
import pathlib
import sys

import numpy as np
import torch
import torchrec
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "support"))
import parity_problem as problem  # noqa: E402


def movielens(folder, epochs=2):
  """Batches of ratings: a click is a 4 or a 5; dense are the time of day and of the survey."""
  users, items, ratings, seconds = np.loadtxt(folder / "u.data", np.int64).T
  dense = np.stack([seconds % 86400 / 86400, (seconds - seconds.min()) / np.ptp(seconds)], axis=1)
  draw = np.random.default_rng(0)
  for _ in range(epochs):
    for rows in np.array_split(draw.permutation(len(users)), len(users) // problem.CLICKS):
      labels = (ratings[rows] >= 4).astype(np.float32)
      yield users[rows] - 1, items[rows] - 1, dense[rows].astype(np.float32), labels


class Trainer:
  def __init__(self):
    torch.manual_seed(0)
    tables = [
      EmbeddingBagConfig(
        name=name, embedding_dim=problem.CLICK_DIM, num_embeddings=rows, feature_names=[name]
      )
      for name, rows in (("user", problem.USERS), ("item", problem.ITEMS))
    ]
    sizes = [16, problem.CLICK_DIM]
    self.model = DLRM(EmbeddingBagCollection(tables=tables), problem.DENSE, sizes, [16, 1])
    of_tables = [p for name, p in self.model.named_parameters() if "embedding_bags" in name]
    others = [p for name, p in self.model.named_parameters() if "embedding_bags" not in name]
    self.optimizers = [RowWiseAdagrad(of_tables, lr=0.05), torch.optim.SGD(others, lr=0.05)]

  def scores(self, users, items, dense):
    ids, offsets = np.concatenate([users, items]), np.arange(2 * len(users) + 1)
    jagged = KeyedJaggedTensor(["user", "item"], torch.tensor(ids), offsets=torch.tensor(offsets))
    return self.model(torch.tensor(dense), jagged)[:, 0]

  def step(self, users, items, dense, labels):
    for optimizer in self.optimizers:
      optimizer.zero_grad()
    scores = self.scores(users, items, dense)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, torch.tensor(labels))
    loss.backward()
    for optimizer in self.optimizers:
      optimizer.step()
    return loss.item()


def main(folder):
  trainer = Trainer()
  losses = [trainer.step(*batch) for batch in movielens(pathlib.Path(folder))]
  print("MovieLens", np.mean(losses[:50]), np.mean(losses[-50:]))
  arrays = {f"model/{key}": x.numpy().copy() for key, x in trainer.model.state_dict().items()}
  states = trainer.optimizers[0].state_dict()["state"].values()
  arrays |= {f"sum/{i}": state["sum"].numpy().copy() for i, state in enumerate(states)}
  users, items, dense, _ = next(problem.clicks(0, 1))
  arrays["scores"] = trainer.scores(users, items, dense).detach().numpy()
  trained = copy.deepcopy(trainer)
  for seed in (1, 2, 3):
    again = copy.deepcopy(trained)
    arrays[f"losses/{seed}"] = np.array([again.step(*b) for b in problem.clicks(seed, 100)])
    print(seed, arrays[f"losses/{seed}"][[0, -1]])
  versions = {"torchrec": torchrec.__version__, "torch": torch.__version__}
  np.savez_compressed(HERE / "dlrm.npz", **arrays, **versions)
  print({key: x.shape for key, x in arrays.items()}, versions)


if __name__ == "__main__":
  main(sys.argv[1])
