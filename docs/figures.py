"""Writes the tables of figures in the pages, from the result files.

    python docs/figures.py          # writes them
    python docs/figures.py --check  # writes nothing, and exits with 1 if a page differs

A table stands between `<!-- figures: NAME -->` and `<!-- end figures -->`. NAME is a key of
`FIGURES`; the function behind it reads `docs/results` and returns the Markdown in between. The
functions of `CHARTS` draw the files of `docs/images` that it names.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
PAGES = (
  ROOT / "README.md",
  *sorted((ROOT / "recipes").rglob("README.md")),
  *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts),
)
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end figures -->)", re.DOTALL)


def result(name: str) -> Any:
  """Returns a file of `docs/results`."""
  return json.loads((RESULTS / name).read_text())


def table(header: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
  """Returns a Markdown table whose first columns hold words, and the others figures."""
  alignment = [":--"] * words + ["--:"] * (len(header) - words)
  lines = [" | ".join(cells) for cells in (header, alignment, *rows)]
  return "".join(f"| {line} |\n" for line in lines)


def origin(of: dict[str, Any], files: Sequence[str], *packages: str) -> str:
  """Returns the line under a table: hardware, versions, date and files."""
  versions = ", ".join(f"{name} {of['versions'][name]}" for name in packages)
  links = ", ".join(f"`docs/results/{name}`" for name in files)
  return (
    f"\n{of['cores']} cores of {of['cpu']}, otherwise idle; {versions}; {of['date']}; {links}.\n"
  )


# ------------------------------------------------------------------------------ model quality

# Data, model and runs; then metric, its name in the files, and the best published figure.
CLICKS: tuple[tuple[str, str, str, tuple[tuple[str, str, str], ...]], ...] = (
  (
    "MovieLens 1M as clicks", "DCN-V2", "movielens1m_dcnv2",
    (("AUC", "auc", ".8998"), ("log loss", "logloss", ".3119")),
  ),
  (
    "MovieLens 1M as clicks", "DLRM", "movielens1m_dlrm",
    (("AUC", "auc", ""), ("log loss", "logloss", "")),
  ),
  (
    "Criteo, 10,000 rows", "DCN-V2", "criteo_sample",
    (("AUC", "auc", ""), ("log loss", "logloss", "")),
  ),
  ("synthetic", "DLRM", "synthetic", (("AUC", "auc", ""), ("log loss", "logloss", ""))),
)  # fmt: skip
RANKINGS: tuple[tuple[str, str, str, tuple[tuple[str, str, str], ...]], ...] = (
  (
    "MovieLens 1M, RecBole's protocol", "two towers", "two_tower_movielens1m",
    (("Recall@10", "recall@10", ".1997"), ("NDCG@10", "ndcg@10", ".2700")),
  ),
  (
    "MovieLens 100K, tutorials' protocol", "two towers", "two_tower_movielens100k_seen",
    (("top-100 accuracy", "recall@100", "about .30"),),
  ),
  (
    "Gowalla, LightGCN's split", "two towers", "two_tower_gowalla",
    (("Recall@20", "recall@20", ".1872"), ("NDCG@20", "ndcg@20", ".1557")),
  ),
  (
    "Gowalla, LightGCN's split", "two towers", "two_tower_gowalla_64",
    (("Recall@20", "recall@20", ".1872"), ("NDCG@20", "ndcg@20", ".1557")),
  ),
  (
    "Beauty, S3-Rec's file", "SASRec", "sequence_beauty_sasrec",
    (("HR@10", "hr@10", ".0921"), ("NDCG@10", "ndcg@10", ".0531")),
  ),
  (
    "Beauty, S3-Rec's file", "HSTU", "sequence_beauty_hstu",
    (("HR@10", "hr@10", ".0788"), ("NDCG@10", "ndcg@10", ".0439")),
  ),
  (
    "Beauty, BERT4Rec's file", "SASRec", "sequence_beauty_bert4rec_sasrec",
    (("HR@10", "hr@10", ".0533"), ("NDCG@10", "ndcg@10", ".0327")),
  ),
  (
    "MovieLens 1M, SASRec's file", "SASRec", "sequence_movielens1m_sasrec",
    (("HR@10", "hr@10", ".3152"), ("NDCG@10", "ndcg@10", ".1821")),
  ),
  (
    "MovieLens 1M, SASRec's file", "HSTU", "sequence_movielens1m_hstu",
    (("HR@10", "hr@10", ".3037"), ("NDCG@10", "ndcg@10", ".1719")),
  ),
)  # fmt: skip
# The four of the README, by their runs and the first metric.
CHOSEN = (
  "movielens1m_dcnv2",
  "two_tower_movielens1m",
  "two_tower_gowalla",
  "sequence_beauty_sasrec",
)


def runs(stem: str) -> list[dict[str, Any]]:
  """Returns the results of the seeds of a run, of which some have one file without a seed."""
  paths = sorted(RESULTS.glob(f"{stem}_[0-9].json")) or [RESULTS / f"{stem}.json"]
  return [json.loads(path.read_text()) for path in paths]


def spread(values: Sequence[float]) -> str:
  """Returns the mean, and `±` the standard deviation where there are several values."""
  numbers = [statistics.fmean(values), *([statistics.stdev(values)] if len(values) > 1 else [])]
  return "\u00a0±\u00a0".join(f"{number:.4f}".removeprefix("0") for number in numbers)


def best_is_bold(cells: Sequence[str], least: bool) -> list[str]:
  """Returns the cells with the best figure, or figures, in bold; others hold words or nothing."""
  figures = [re.search(r"\.\d+", cell) for cell in cells]
  means = [float(figure[0]) if figure else None for figure in figures]
  best = (min if least else max)(mean for mean in means if mean is not None)
  return [f"**{cell}**" if mean == best else cell for cell, mean in zip(cells, means, strict=True)]


def quality(specs: Any, baseline: str, missing: str) -> Iterable[list[str]]:
  """Yields data, model, metric, reached, published and the baseline, for each metric of a run."""
  above = None
  for data, model, stem, metrics in specs:
    of_seeds = runs(stem)
    for i, (metric, name, published) in enumerate(metrics):
      key = f"test_{name}"
      theirs = of_seeds[0]["baselines"].get(baseline, {}).get(key)
      cells = [
        spread([run["metrics"][key] for run in of_seeds]),
        published,
        missing if theirs is None else spread([theirs]),
      ]
      words = [data if data != above else "", model if i == 0 else "", metric]
      above = data
      yield [*words, *best_is_bold(cells, metric.endswith("loss"))]


def clicks() -> str:
  header = ("data", "model", "metric", "reached", "published", "logistic regression")
  return table(header, quality(CLICKS, "logistic regression", ""), words=3)


def with_width(specs: Any) -> list[tuple[Any, ...]]:
  """Returns the specs with the width of the runs' vectors beside the model's name."""
  configs = [runs(stem)[0]["config"] for _, _, stem, _ in specs]
  widths = [config.get("dim", config.get("embedding_dim")) for config in configs]  # its older name
  return [
    (data, f"{model}, {width}", stem, metrics)
    for (data, model, stem, metrics), width in zip(specs, widths, strict=True)
  ]


def rankings() -> str:
  header = ("data", "model, width", "metric", "reached", "best published", "EASE")
  return table(header, quality(with_width(RANKINGS), "EASE", "too large"), words=3)


def chosen() -> str:
  header = ("data", "model, width", "metric", "reached", "best published")
  first = [(*spec[:3], spec[3][:1]) for spec in (*CLICKS, *RANKINGS) if spec[2] in CHOSEN]
  rows = [row[:5] for row in quality(with_width(first), "", "")]
  return table(header, rows, words=3)


# -------------------------------------------------------------------------------------- speed

PEERS = ("torch", "fbgemm")
TIMES = ("best_ms", "median_ms")


def short(x: float) -> str:
  """Returns three digits of a time in milliseconds."""
  return f"{x:.2f}" if x < 10 else f"{x:.1f}" if x < 100 else f"{x:.0f}"


def time_of(measured: dict[str, Any], contender: str, kind: str) -> float | None:
  """Returns a contender's time, ms; a peer's with the number of threads that is better for it."""
  variants = [
    of[kind]
    for label, of in measured.items()
    if label == contender or (contender in PEERS and label.startswith(f"{contender}, "))
    if isinstance(of, dict) and kind in of  # the others tell how busy the machine was
  ]
  return min(variants, default=None)


def row_of_times(
  measured: dict[str, Any], contenders: Sequence[str], kinds: Sequence[str] = TIMES
) -> list[str]:
  """Returns `best / median` of each contender, or times of other kinds, the fastest in bold."""
  cells: list[list[str]] = [[] for _ in contenders]
  for kind in kinds:
    times = [time_of(measured, contender, kind) for contender in contenders]
    least = min(time for time in times if time is not None)
    for cell, time in zip(cells, times, strict=True):
      if time is not None:
        cell.append(f"**{short(time)}**" if time == least else short(time))
  return [" / ".join(cell) for cell in cells]


def speed() -> str:
  measured = result("step.json")
  header = ("", "ours, ms", "FBGEMM CPU, ms", "torch `EmbeddingBag(sparse=True)`, ms")
  contenders = ("ours", "fbgemm", "torch")
  rows = ([name, *row_of_times(of, contenders)] for name, of in measured["results"].items())
  return table(header, rows) + origin(measured, ["step.json"], "jax", "torch", "fbgemm-gpu-cpu")


def step() -> str:
  measured = result("step.json")
  header = (
    "", "ours", "FBGEMM CPU", "torch `EmbeddingBag(sparse=True)`"
  )  # fmt: skip
  contenders = ("ours", "fbgemm", "torch")
  rows = [[name, *row_of_times(of, contenders)] for name, of in measured["results"].items()]
  steps = [of for name, of in measured["results"].items() if name != "lookup"]
  longer = [round(100 * (of["ours, whole model"]["ratio_to_ours"] - 1)) for of in steps]
  return (
    table(header, rows)
    + "\nThrough `embed.value_and_grad` and `embed.Optimizer`, a step takes up to "
    f"{max(longer)} % longer.\n" + origin(measured, ["step.json"], "jax", "torch", "fbgemm-gpu-cpu")
  )


ON_GPU = ("ours", "ours, jit_step", "FBGEMM", "torch", "plain JAX")


def on_gpu() -> Any:
  """Returns the steps on a GPU; None until they have been timed."""
  return result("step_gpu.json") if (RESULTS / "step_gpu.json").exists() else None


def step_gpu(sizes: int | None = None) -> str:
  """Returns the steps on a GPU of the first sizes, or a sentence until they have been timed."""
  if (measured := on_gpu()) is None:
    return "This version has not been timed on a GPU.\n"
  rows = []
  for of in measured["points"][:sizes]:
    size = f"{of['vocabulary']:,} x {of['dim']}, {of['ids']:,} ids"
    for name, times in of["results"].items():
      rows.append([size, name, *row_of_times(times, ON_GPU, ("in_a_row_ms", "each_ms"))])
      size = ""
  versions = ", ".join(f"{x} {measured['versions'][x]}" for x in ("jax", "torch", "fbgemm-gpu"))
  return (
    table(("table", "step", *ON_GPU), rows, words=2)
    + f"\n{measured['device']}, driver {measured['driver']}; {versions}; {measured['date']}; "
    "`docs/results/step_gpu.json`.\n"
  )


def speed_gpu() -> str:
  """Returns the first size of `step_gpu`, with a line above a table."""
  above = "On a GPU, in milliseconds of a step among many / of a step that is waited for:\n\n"
  return above * bool(on_gpu()) + step_gpu(sizes=1)


def steps_chart() -> str:
  """Returns the step of one table as bars, drawn for 360 pixels; on a GPU, once timed there."""
  if timed := on_gpu():
    measured, kind, where = timed["points"][0], "in_a_row_ms", "a GPU"
    contenders = {"ours, jit_step": "ours", "FBGEMM": "FBGEMM", "torch": "torch"}
  else:
    measured, kind, where = result("step.json"), "median_ms", "a CPU"
    contenders = {"ours": "ours", "fbgemm": "FBGEMM", "torch": "torch"}
  times = {
    step: {
      name: time
      for contender, name in contenders.items()
      if (time := time_of(of, contender, kind)) is not None
    }
    for step, of in measured["results"].items()
    if step != "lookup"
  }
  longest = max(time for of in times.values() for time in of.values())
  lines, y = [], 0
  for step, of in times.items():
    y += 20
    lines.append(f'<text x="0" y="{y}" class="group">{step}</text>')
    for name, time in of.items():
      y, width = y + 19, 230 * time / longest
      lines.append(f'<text x="58" y="{y}" class="name">{name}</text>')
      lines.append(f'<rect x="65" y="{y - 11}" width="{width:.1f}" height="14" class="{name}"/>')
      lines.append(f'<text x="{70 + width:.1f}" y="{y}">{short(time)}</text>')
    y += 9
  words = "; ".join(
    f"{step}: " + ", ".join(f"{name} {short(time)}" for name, time in of.items())
    for step, of in times.items()
  )
  return CHART.format(height=y, where=where, words=words, bars="\n  ".join(lines))


# On the site the colors follow its theme; elsewhere, the system's.
CHART = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 360 {height}" class="chart" role="img">
  <title>Milliseconds of a training step of one table on {where}: {words}</title>
  <style>
    .chart {{
      --ink: var(--color-foreground-primary, #1f2328);
      font-family: var(--font-stack, system-ui, "Segoe UI", Helvetica, Arial, sans-serif);
    }}
    @media (prefers-color-scheme: dark) {{
      .chart {{ --ink: var(--color-foreground-primary, #e6edf3); }}
    }}
    .chart text {{ fill: var(--ink); font-size: 13px; }}
    .chart .group {{ font-weight: 600; }}
    .chart .name {{ text-anchor: end; }}
    .chart .ours {{ fill: #2f7ce0; }}
    .chart .FBGEMM, .chart .torch {{ fill: #8c959f; }}
  </style>
  {bars}
</svg>
"""


def chart_origin() -> str:
  """Returns the line under the chart: the step, the hardware and the file."""
  if of := on_gpu():
    name, size, where = "step_gpu.json", of["points"][0], of["device"]
  else:
    name, size = "step.json", (of := result("step.json"))
    where = f"{of['cores']} cores of {of['cpu']}"
  return (
    "One training step of a table, in milliseconds (lower is better): "
    f"{size['vocabulary']:,} rows of width {size['dim']}, {size['ids']:,} ids in bags of 8. "
    f"{where}; {of['date']}; `docs/results/{name}`.\n"
  )


def whole_model() -> str:
  measured = result("dlrm.json")
  header = ("dim, batch", "ours", "FBGEMM CPU", "torch `EmbeddingBag(sparse=True)`")
  contenders = ("ours", "fbgemm", "torch")
  rows = [
    [f"{of['dim']}, {of['batch']:,}", *row_of_times(of["results"], contenders)]
    for of in measured["points"]
  ]
  first = [of["first_step_s"] for of in measured["points"]]
  ours = [of["ours"] for of in first]
  peers = [of[peer] for of in first for peer in PEERS]
  return (
    table(header, rows) + f"\nThe first step, with compilation, takes {min(ours):.0f} to "
    f"{max(ours):.0f} seconds here, and {min(peers):.0f} to {max(peers):.0f} with the others.\n"
    + origin(measured, ["dlrm.json"], "jax", "torch", "fbgemm-gpu-cpu")
  )


def vocabulary() -> str:
  measured = result("vocabulary.json")
  header = ("", "", "100,000 rows, ms", "10,000,000 rows, ms", "times as long")
  cells = lambda of: [*map(short, of["best_ms"]), f"{of['ratio_of_best']:.1f}"]
  rows = [
    [name, contender, *cells(of[contender])]
    for name, of in measured["results"].items()
    for contender in ("ours", *PEERS)
    if contender in of
  ]
  return table(header, rows, words=2) + origin(measured, ["vocabulary.json"], "jax", "torch")


def admission() -> str:
  header = (
    "model", "rows", "step, ms", "step with admit, ms", "best step, ms", "best with admit, ms",
    "new ids a batch", "ids that had a row",
  )  # fmt: skip
  measured = result("admission.json")
  rows = [
    [
      "a table alone" if not of["layers"] else f"with layers of {of['layers']}",
      f"{of['capacity']:,}",
      *(short(of[f"{best}{key}"]) for best in ("", "best_") for key in ("step", "step_with_admit")),
      f"{of['admissions']:.0f}", f"{of['hit_rate']:.1%}",
    ]
    for of in measured["cost"]
  ]  # fmt: skip
  where = f"{measured['cores']} cores of {measured['cpu']}"
  load = f"load {measured['load']:.1f} of other processes"
  versions = f"jax {measured['versions']['jax']}; {measured['date']}; `docs/results/admission.json`"
  return table(header, rows, words=1) + f"\n{where}, {load}; {versions}.\n"


def drift() -> str:
  measured = result("drift.json")
  names = {"synthetic": "synthetic days", "movielens": "MovieLens 100K"}
  methods = [name for name in measured["synthetic"]["runs"] if name != "best possible"]
  words = {"lru": "dynamic, lru", "lfu": "dynamic, lfu", "hashed": "hashed", "static": "static"}
  rows = []
  for label in methods:
    method, share = label.split(", ")
    cells = []
    for name in names:
      aucs = [run["auc"] for run in measured[name]["runs"][label]]
      cells.append(f"{statistics.mean(aucs):.4f} ± {statistics.stdev(aucs):.4f}".replace("0.", "."))
    rows.append([words[method], "all" if share == "1/1" else share, *cells])
  header = ("table", "rows", *names.values())
  return table(header, rows, words=2) + origin(measured, ["drift.json"], "jax")


def pods() -> str:
  return _pods("aot_criteo_1tb", "aot_criteo_1tb_sparse_core", "aot_criteo_1tb_h100")


def _pods(*names: str) -> str:
  mib = lambda x, form=",.0f": f"{x / 2**20:{form}}"
  rows: dict[str, Callable[[Any], str]] = {
    "chips": lambda of: str(of["devices"]),
    "tables and slots, MiB": lambda of: mib(of["tables"]["sharded"], ",.1f"),
    "against rows x (dim + slots) x 4 bytes / chips": (
      lambda of: f"{100 * (of['tables']['sharded'] / of['tables']['expected'] - 1):+.4f} %"
    ),
    "arguments, MiB": lambda of: mib(of["memory"]["arguments"]),
    "of them written in place, MiB": lambda of: mib(of["memory"]["aliased"]),
    "temporaries, MiB": lambda of: mib(of["memory"]["temporaries"]),
    "a step sends, MiB": lambda of: mib(
      sum(each["sent"] * (each["count"] or 0) for each in of["collectives"])
    ),
    "needed of the available memory": (
      lambda of: f"{100 * of['memory']['needed'] / of['memory']['available']:.1f} %"
    ),
    "compiled in, s": lambda of: f"{of['compile_seconds']:.0f}",
  }
  columns = [
    (f"{target}{', SC' if 'sparse_core' in name else ''}", of)
    for name in names
    for target, of in result(f"{name}.json").items()
  ]
  header = ("", *(title for title, _ in columns))
  return table(header, ([name, *(show(of) for _, of in columns)] for name, show in rows.items()))


# --------------------------------------------------------------------------- models side by side

_SCORES = ("auc", "logloss")  # of a label


def histories() -> str:
  measured, names = result("histories.json"), (*_SCORES, "gauc")
  models = measured["results"]["MovieLens 100K"]
  rows = [[_scores(runs, f"test_{name}") for name in names] for runs in models.values()]
  seconds = [f"{statistics.fmean(run['seconds'] for run in runs):.0f}" for runs in models.values()]
  rows = [[*row, taken] for row, taken in zip(_bold(rows, names), seconds, strict=True)]
  header = ("the user's past", "AUC", "log loss", "GAUC", "seconds")
  named = ([model, *row] for model, row in zip(models, rows, strict=True))
  return table(header, named) + _busy(measured, "histories.json")


def first_config() -> str:
  measured, lines = result("first_config.json"), []
  for name, of in measured["tables"].items():
    models = [of["runs"]] + [
      [{"metrics": of["baselines"][each]}] for each in ("logistic regression", "LightGBM")
    ]
    auc, loss = (
      best_is_bold([_scores(runs, f"test_{x}") for runs in models], x == "logloss") for x in _SCORES
    )
    lines.append([name, f"{of['rows']:,}", *map(" / ".join, zip(auc, loss, strict=True))])
  header = ("table", "rows", "DCN-V2", "logistic regression", "LightGBM")
  return table(header, lines, words=1) + _busy(measured, "first_config.json")


def _scores(runs: Sequence[Any], metric: str) -> str:
  return spread([run["metrics"][metric] for run in runs])


def _bold(rows: Sequence[Sequence[str]], metrics: Sequence[str]) -> list[list[str]]:
  """Returns rows of scores with the best of each column in bold."""
  columns = zip(*rows, strict=True)
  bold = [best_is_bold(x, name == "logloss") for x, name in zip(columns, metrics, strict=True)]
  return [list(row) for row in zip(*bold, strict=True)]


def _busy(of: dict[str, Any], name: str) -> str:
  """Returns the line under a table that was measured beside other work."""
  cores = "1 core" if of["cores"] == 1 else f"{of['cores']} cores"
  where = f"{cores} of {of['cpu']}, shared with other work"
  return f"\n{where}; jax {of['versions']['jax']}; {of['date']}; `docs/results/{name}`.\n"


FIGURES: dict[str, Callable[[], str]] = {
  function.__name__: function
  for function in (
    clicks, rankings, chosen, speed, speed_gpu, step, step_gpu, whole_model,
    vocabulary, admission, drift, pods, histories, first_config,
    chart_origin,
  )
}  # fmt: skip
CHARTS: dict[str, Callable[[], str]] = {"steps.svg": steps_chart}


def written(text: str) -> str:
  """Returns a page with its tables as the result files have them.

  Raises:
    KeyError: a marker names no table.
  """
  return BLOCK.sub(lambda block: f"{block[1]}{FIGURES[block[2]]()}{block[3]}", text)


def expected() -> dict[Path, str]:
  """Returns the text of every page and chart, as the result files have it."""
  charts = {ROOT / "docs" / "images" / name: draw() for name, draw in CHARTS.items()}
  return charts | {page: written(page.read_text()) for page in PAGES}


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description="Writes the tables of figures in the pages.")
  parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
  check = parser.parse_args(argv).check
  stale = []
  for path, text in expected().items():
    if not path.exists() or path.read_text() != text:
      stale.append(path.relative_to(ROOT).as_posix())
      if not check:
        path.write_text(text)
  if stale:
    print(*(f"{'differs' if check else 'written'}: {name}" for name in stale), sep="\n")
  return int(check and bool(stale))


if __name__ == "__main__":
  sys.exit(main())
