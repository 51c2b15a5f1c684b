"""A full ranking of one example after another, for the metrics to equal."""

import math


def slow_ranking(scores, relevant, seen, ks):
  """The metrics of one example after another, in plain Python: ties go to the lower id."""
  sums, examples = {}, 0
  for row, right, out in zip(scores, relevant, seen, strict=True):
    if not right:
      continue
    examples += 1
    ranked = sorted(
      (item for item in range(len(row)) if item not in out), key=lambda i: (-row[i], i)
    )
    places = [place for place, item in enumerate(ranked, start=1) if item in right]
    for k in ks:
      hits = [place for place in places if place <= k]
      ideal = sum(1 / math.log2(place + 1) for place in range(1, min(k, len(right)) + 1))
      values = {
        "recall": len(hits) / len(right),
        "ndcg": sum(1 / math.log2(place + 1) for place in hits) / ideal,
        "hr": float(bool(hits)),
        "precision": len(hits) / k,
      }
      for name, value in values.items():
        sums[f"{name}@{k}"] = sums.get(f"{name}@{k}", 0) + value
    first = places[0] if places and places[0] <= max(ks) else math.inf
    sums["mrr"] = sums.get("mrr", 0) + 1 / first
  return {name: value / examples for name, value in sums.items()}
