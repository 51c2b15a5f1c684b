"""The README's example runs as it stands, and its commands name what exists."""

import collections
import itertools
import json
import pathlib
import re
import statistics

import pages
import pytest

NO_BREAK = "\u00a0"
ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
STATING = [ROOT / "README.md", *ROOT.glob("recipes/*/README.md"), *ROOT.glob("configs/*/*.py")]


@pytest.mark.full
def test_the_examples_run(capsys):
  scope = {}
  for example in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
    exec(compile(example, "README.md", "exec"), scope)
  assert float(scope["loss"]) > 0
  untouched = scope["model"].embed.variables["movie"]["accumulators"][0]
  assert (untouched == untouched[0]).all()
  assert scope["model"].embed(scope["batch"])["watched"].shape == (2, 64)
  assert scope["plan"]["movie"].strategy == "div"
  assert "on each of 8 devices" in capsys.readouterr().out


def test_paths_exist():
  written = re.findall(r"--out=(\S+)", README)  # by a command of the page
  for path in re.findall(r"--config=(\S+?\.py)", README):
    assert (ROOT / path).exists() or path in written, path
  for path in re.findall(r"\]\((?!http)([^)#]+)\)", README):
    assert (ROOT / path).exists(), path


def means():
  """Mean and standard deviation of every metric over the seeds of every committed run."""
  runs = collections.defaultdict(list)
  for path in (ROOT / "docs" / "results").glob("*_[0-9].json"):
    runs[path.stem[:-2]].append(json.loads(path.read_text())["metrics"])
  for seeds in runs.values():
    for name in seeds[0]:
      values = [metrics[name] for metrics in seeds]
      if len(values) > 1:
        yield spread(values)


def spread(values):
  """The mean, and the standard deviation where there are several values."""
  numbers = [statistics.fmean(values), *([statistics.stdev(values)] if len(values) > 1 else [])]
  return " ± ".join(f"{number:.4f}".removeprefix("0") for number in numbers)


@pytest.mark.parametrize("path", STATING, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_means_are_those_of_the_committed_runs(path):
  stated = re.findall(r"\.\d{4} ± \.\d{4}", path.read_text().replace(NO_BREAK, " "))
  assert stated or path.name != "README.md"
  assert not set(stated) - set(means())


def tables(text):
  """The rows of the Markdown tables of a text, cells below an empty one filled from above."""
  for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in block.splitlines()]
    for above, row in itertools.pairwise(rows):
      row[:2] = [cell or over for cell, over in zip(row, above[:2], strict=False)]
    yield rows[0], rows[2:]


# Where the rows of the two tables of results are from: files, metrics, baseline.
RUNS = {
  ("MovieLens 1M as clicks", "DCN-V2"): "movielens1m_dcnv2",
  ("MovieLens 1M as clicks", "DLRM"): "movielens1m_dlrm",
  ("Criteo, 10,000 rows", "DCN-V2"): "criteo_sample",
  ("synthetic", "DLRM"): "synthetic",
  ("MovieLens 1M, RecBole's protocol", "two towers"): "two_tower_movielens1m",
  ("MovieLens 100K, tutorials' protocol", "two towers"): "two_tower_movielens100k_seen",
  ("Gowalla, LightGCN's split", "two towers"): "two_tower_gowalla",
  ("Beauty, S3-Rec's file", "SASRec"): "sequence_beauty_sasrec",
  ("Beauty, S3-Rec's file", "HSTU"): "sequence_beauty_hstu",
  ("Beauty, BERT4Rec's file", "SASRec"): "sequence_beauty_bert4rec_sasrec",
  ("MovieLens 1M, SASRec's file", "SASRec"): "sequence_movielens1m_sasrec",
  ("MovieLens 1M, SASRec's file", "BERT4Rec"): "sequence_movielens1m_bert4rec",
}
METRICS = {"AUC": "auc", "log loss": "logloss", "top-100 accuracy": "recall@100"}


def test_every_figure_of_a_result_is_that_of_the_committed_runs():
  seen = set()
  for marker in ("clicks", "rankings"):
    text = README.split(f"<!-- {marker} -->")[1].split("<!-- end -->")[0]
    ((header, rows),) = tables(text)
    for data, model, metric, reached, _, baseline in rows:
      stem = RUNS[data, model]
      paths = sorted((ROOT / "docs" / "results").glob(f"{stem}_[0-9].json"))
      runs = [json.loads(p.read_text()) for p in paths or [ROOT / f"docs/results/{stem}.json"]]
      name = f"test_{METRICS.get(metric, metric.lower())}"
      plain = lambda cell: cell.replace("**", "").replace(NO_BREAK, " ")
      assert plain(reached) == spread([run["metrics"][name] for run in runs]), (data, metric)
      scores = [run["baselines"].get(header[-1], {}).get(name) for run in runs]
      wanted = "too large" if scores[0] is None else spread(scores[:1])
      assert plain(baseline) == wanted, (data, metric)
      seen.add((data, model))
  assert seen == set(RUNS)


def test_a_cell_has_one_figure_and_the_best_of_a_row_is_bold():
  figure = r"(about )?\.\d{2,4}(\u00a0±\u00a0\.\d{4})?"
  checked = 0
  for header, rows in tables(README):
    for row in rows if "reached" in header else ():
      cells = [cell for cell in row[3:] if cell not in ("", "too large")]
      means = []
      for cell in cells:
        assert re.fullmatch(figure, cell.replace("**", "")), cell
        means.append(float(re.search(r"\.\d+", cell)[0]))
      best = (min if row[2].endswith("loss") else max)(means)
      assert [cell.startswith("**") for cell in cells] == [mean == best for mean in means], row
      checked += 1
  assert checked >= 20


def test_speed_is_that_of_the_file():
  contenders, wanted = ("ours", "fbgemm", "torch", "dense jax"), []
  for name, of in pages.result("step.json")["results"].items():
    cells = [[] for _ in contenders]
    for figure in ("best_ms", "median_ms"):
      times = [of.get(each, {}).get(figure, float("inf")) for each in contenders]
      for i, time in enumerate(times):
        ratio = time / times[0]
        cell = f"{ratio:.{1 if ratio < 10 else 0}f}" if i else pages.short(time)
        cells[i] += [] if time == float("inf") else [f"**{cell}**" if time == min(times) else cell]
    ours, *peers = (" / ".join(cell) for cell in cells)
    wanted.append([name, ours, *(f"{cell} x" if cell else "" for cell in peers)])
  section = README.split("## Speed")[1].split("\n## ")[0]
  assert [rows for _, rows in tables(section.replace(NO_BREAK, " "))] == [wanted]
