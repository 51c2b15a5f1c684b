"""The pages of the documentation: their code runs, their links lead somewhere, their figures are
those of the files they name."""

import re
import urllib.parse

import pytest
from pages import DOCS, ROOT, blocks, result, run, short

PAGES = [  # not what a build puts there
  page.relative_to(DOCS).as_posix()
  for page in sorted(DOCS.rglob("*.md"))
  if page.relative_to(DOCS).parts[0] not in ("_build", "colabs")
]
LINKING = [
  *(DOCS / page for page in PAGES),
  ROOT / "README.md",
  ROOT / "CONTRIBUTING.md",
  *sorted(ROOT.glob("recipes/*/README.md")),
]


# Run there, with more to say about the outcome.
ELSEWHERE = {"moving/tpu_embedding.md": "test_migrating.py", "serving.md": "serving/test_export.py"}
HERE = [page for page in PAGES if any(blocks(page)) and page not in ELSEWHERE]


@pytest.mark.full
@pytest.mark.parametrize("page", HERE)
def test_the_code_runs(page, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  run(page)


# ------------------------------------------------------------------------------------- links


def prose(path):
  return re.sub(r"^( *)(```|~~~|:::).*?^\1\2", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", LINKING, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_that_a_page_names_are_there(path):
  folders = (ROOT, ROOT / "embed", ROOT / "tests", ROOT / "recipes", path.parent)
  named = re.findall(r"`([a-z_]+/[a-z0-9_/]+\.py)[`:]", path.read_text())
  assert not {name for name in named if not any((at / name).exists() for at in folders)}


def anchors(path):
  """What the headings of a page are called in links, on GitHub and on the site."""
  found = []
  for heading in re.findall(r"^#+ +(.*)$", prose(path), re.MULTILINE):
    heading = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)
    name = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
    found.append(f"{name}-{found.count(name)}" if name in found else name)
  return found


def contents(path):
  """What the tables of contents of a page list."""
  trees = re.findall(r"^```{toctree}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
  return [line for tree in trees for line in tree.split("\n") if line and line[0] != ":"]


def links(path):
  """Links, images, cards and contents of a page that lead to other files, or within this one."""
  found = re.findall(r"\]\(([^)\s]+)\)", prose(path))
  found += re.findall(r"(?:src|href)=\"([^\"]+)\"", prose(path))
  found += re.findall(r"^:link: (\S+)$", path.read_text(), re.MULTILINE)
  return [link for link in found + contents(path) if not re.match(r"[a-z]+:", link)]


def target(path, link):
  """The file behind a link; the site takes documents by name, and a copy of the notebooks."""
  name = urllib.parse.unquote(link.partition("#")[0])
  where = (path.parent / name).resolve() if name else path
  if where.is_relative_to(DOCS / "colabs"):
    where = ROOT / where.relative_to(DOCS)
  candidates = [where, *(where.with_name(where.name + end) for end in (".md", ".rst", ".ipynb"))]
  return next((candidate for candidate in candidates if candidate.exists()), None)


@pytest.mark.parametrize("path", LINKING, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
  broken = []
  for link in links(path):
    found, anchor = target(path, link), link.partition("#")[2]
    if found is None or (anchor and found.suffix == ".md" and anchor not in anchors(found)):
      broken.append(link)
  assert not broken


def test_every_page_is_in_the_contents():
  index = DOCS / "index.md"
  listed = {target(index, name) for name in contents(index)} | {index}
  missing = [page for page in PAGES if DOCS / page not in listed and not page.startswith("api/")]
  assert not missing


# ----------------------------------------------------------------------------------- figures


def table(title):
  """The rows of the table under a heading of the page on speed, as lists of cells."""
  section = (DOCS / "performance.md").read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
  rows = [line.split("|")[1:-1] for line in section.split("\n") if line.startswith("| ")]
  return [[cell.strip() for cell in row] for row in rows[1:]]


FIGURES = ("best_ms", "median_ms")
PEERS = ("torch", "fbgemm")


def time_of(measured, contender, figure):
  """A contender's time or None; a peer's with the number of threads that is better for it."""
  variants = [
    of[figure]
    for label, of in measured.items()
    if label == contender or (contender in PEERS and label.startswith(f"{contender}, "))
    if isinstance(of, dict) and figure in of  # the others say how busy the machine was
  ]
  return min(variants) if variants else None


def row_of_times(measured, contenders):
  """Best and median of each contender, the least of all bold."""
  cells = []
  for contender in contenders:
    parts = []
    for figure in FIGURES:
      times = [time_of(measured, each, figure) for each in contenders]
      mine = time_of(measured, contender, figure)
      least = min(x for x in times if x is not None)
      if mine is not None:
        parts.append(f"**{short(mine)}**" if mine == least else short(mine))
    cells.append(" / ".join(parts))
  return cells


def test_step():
  results = result("step.json")["results"]
  contenders = ("ours", "fbgemm", "torch", "ours, XLA", "dense jax")
  wanted = [[name, *row_of_times(of, contenders)] for name, of in results.items()]
  assert table("One step of one table on CPU")[: len(wanted)] == wanted
  assert not any(of["busy"] for of in results.values())
  steps = [of for name, of in results.items() if name != "lookup"]
  more = [round(100 * (of["ours, whole model"]["ratio_to_ours"] - 1)) for of in steps]
  by_xla = [of["ours, XLA"]["ratio_to_ours"] for of in steps]
  page, readme = (
    " ".join(path.read_text().replace("\n> ", "\n").split())
    for path in (DOCS / "performance.md", ROOT / "README.md")
  )
  longer = f"a step takes {min(more)} to {max(more)} % longer"
  assert longer in page
  assert longer in readme
  assert f"it takes {min(by_xla):.1f} to {max(by_xla):.1f} times as long" in readme


def ratios(points, name, figure):
  """Ours against the fastest peer at every point of the grid."""
  found = []
  for point in points:
    of = point["results"][name]
    times = [time_of(of, peer, figure) for peer in PEERS]
    found.append(time_of(of, "ours", figure) / min(x for x in times if x is not None))
  return found


def test_the_grid():
  points = result("step_grid.json")["points"]
  text = " ".join((DOCS / "performance.md").read_text().replace("\n> ", "\n").split())
  wanted = []
  for name in points[0]["results"]:
    both = [ratios(points, name, figure) for figure in FIGURES]
    ahead = [f"{sum(x <= 1 for x in values)} of {len(points)}" for values in both]
    wanted.append([name, *ahead, *(f"{min(v):.2f} to {max(v):.2f}" for v in both)])
  rows = table("One step of one table on CPU")
  assert rows[-len(wanted) :] == wanted
  assert not any(of["busy"] for point in points for of in point["results"].values())
  lost = {  # as the pages say
    (name, figure): [
      (point, ratio)
      for point, ratio in zip(points, ratios(points, name, figure), strict=True)
      if ratio > 1
    ]
    for name in points[0]["results"]
    for figure in FIGURES
  }
  assert {key for key, found in lost.items() if found} == {
    ("lookup", "best_ms"), ("lookup", "median_ms"), ("rowwise_adagrad", "median_ms")
  }  # fmt: skip
  lookups = lost["lookup", "best_ms"]
  assert {point["dim"] for point, _ in lookups} == {64, 128}
  assert f"{len(lookups)} of {len(points)} points" in text
  spread = [round(100 * (ratio - 1)) for _, ratio in lookups]
  assert f"by {min(spread)} to {max(spread)} %" in text
  slower = lost["lookup", "median_ms"]
  small = [point for point in points if point["ids"] == 4096]
  assert [point for point, _ in slower if point["ids"] == 4096] == small
  assert f"by the median at {len(slower)} points, among them all {len(small)} with 4,096" in text
  assert sorted(round(100 * (r - 1)) for _, r in lost["rowwise_adagrad", "median_ms"]) == [2, 3]
  readme = " ".join((ROOT / "README.md").read_text().split())
  assert (
    f"at {len(lookups)} of {len(points)} of these by the best time, by {min(spread)} to "
    f"{max(spread)} %, and at {len(slower)} by the median"
  ) in readme
  assert "FBGEMM is 2 to 3 % faster in row-wise Adagrad at two of them" in readme


def test_the_chart_has_every_point():
  points = result("step_grid.json")["points"]
  svg = (DOCS / "images" / "speed.svg").read_text()
  drawn = re.findall(r">([^<>]+)</text>", svg)
  assert f"ours ahead, of {len(points)}, by" in drawn
  for name in points[0]["results"]:
    for figure in FIGURES:
      assert str(sum(x <= 1 for x in ratios(points, name, figure))) in drawn
  dots = re.findall(r'<use [^>]*style="fill: #(?:2f7ce0|cf6a12)"', svg)
  assert len(dots) == len(points) * len(points[0]["results"])


def test_a_whole_model():
  points = result("dlrm.json")["points"]
  contenders = ("ours", "fbgemm", "torch", "ours, XLA")
  assert table("A whole model on CPU") == [
    [f"{of['dim']}, {of['batch']:,}", *row_of_times(of["results"], contenders)] for of in points
  ]
  first = [of["first_step_s"] for of in points]
  spread = lambda times: (round(min(times)), round(max(times)))  # seconds, as the page says
  assert spread([of["ours"] for of in first]) == (6, 9)
  assert spread([of[peer] for of in first for peer in PEERS]) == (1, 4)


def test_vocabulary():
  small_pages, large_pages = (
    result(f"{name}.json")["results"] for name in ("vocabulary", "vocabulary_large_pages")
  )
  cells = lambda of: [*map(short, of["best_ms"]), f"{of['ratio_of_best']:.1f}"]
  times = [
    [name, who, *cells(of[who]), *cells(large_pages[name][who])]
    for name, of in small_pages.items()
    for who in ("ours", *PEERS)
    if who in of
  ]
  memory = [
    [name, f"{of['table_and_slots_mib']:,.0f}", f"{of['peak_beyond_mib']:.0f}"]
    for name, of in small_pages.items()
  ]
  heading = ["", "table and slots, MiB", "memory beyond them, MiB"]
  assert table("A larger vocabulary") == [*times, heading, *memory]


def test_compiled_ahead_of_time():
  mib = lambda x, form=",.0f": f"{x / 2**20:{form}}"
  rows = {
    "chips": lambda of: str(of["devices"]),
    "tables and slots, MiB": lambda of: mib(of["tables"]["sharded"], ",.1f"),
    "against rows x (dim + slots) x 4 bytes / chips": (
      lambda of: f"{of['tables']['deviation_percent']:+.4f} %"
    ),
    "arguments, MiB": lambda of: mib(of["memory"]["arguments"]),
    "of them written in place, MiB": lambda of: mib(of["memory"]["aliased"]),
    "temporaries, MiB": lambda of: mib(of["memory"]["temporaries"]),
    "needed of the available memory": (
      lambda of: f"{100 * of['memory']['needed'] / of['memory']['available']:.1f} %"
    ),
    "compiled in, s": lambda of: f"{of['compile_seconds']:.0f}",
  }
  names = ("aot_criteo_1tb", "aot_criteo_1tb_sparse_core", "aot_criteo_1tb_h100")
  found = [of for name in names for of in result(f"{name}.json").values()]
  assert table("Compiled for pods") == [[n, *map(f, found)] for n, f in rows.items()]


def test_a_run():
  found = result("loop.json")["examples_per_second"]
  both = lambda of, show: " / ".join(show(of[figure]) for figure in ("best", "median"))
  assert table("A run on CPU") == [
    [
      name,
      both(of, lambda x: f"{x['step']:,.0f}"),
      both(of, lambda x: f"{x['loop']:,.0f}"),
      both(of, lambda x: f"{x['loop'] / x['step']:.0%}"),
      both(of, lambda x: f"{x['input'] / x['step']:.1f}"),
    ]
    for name, of in found.items()
  ]
  assert all(of["busy_cores"] < 0.1 for of in found.values())
  assert min(of["median"]["input"] / of["median"]["step"] for of in found.values()) > 8


def test_weak_scaling():
  wanted = [
    [
      str(of["chips"]),
      f"{(of['sent_bytes']['ids'] + of['sent_bytes']['rows']) / 2**20:.0f}",
      f"{of['rows_over_least']:.2f}",
      f"{of['extra_rounds_bytes'] / 2**20:.0f}",
    ]
    for of in result("weak_scaling.json")["results"]
  ]
  assert table("More chips, the same batch for each") == wanted
