"""The pages of the documentation: their code runs, their links lead somewhere, and a script writes
their figures."""

import re
import urllib.parse

import figures
import pytest
from pages import DOCS, ROOT, blocks, run

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


@pytest.mark.ci
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


def test_tables_of_figures_are_those_of_the_result_files():
  stale = [page for page in figures.PAGES if figures.written(page.read_text()) != page.read_text()]
  assert not stale, "run `python docs/figures.py`"


def test_a_figure_that_differs_is_written_anew():
  text = (DOCS / "performance.md").read_text()
  assert figures.written(text.replace("| sgd | **", "| sgd | **9")) == text
  with pytest.raises(KeyError, match="unknown"):
    figures.written("<!-- figures: unknown -->\n<!-- end figures -->")


def test_the_mean_and_the_best():
  assert figures.spread([0.1, 0.2, 0.3]) == ".2000\u00a0±\u00a0.1000"
  assert figures.best_is_bold([".31", "about .30", "too large"], least=False)[0] == "**.31**"
  assert figures.best_is_bold([".31", ".30"], least=True) == [".31", "**.30**"]


def test_the_chart_has_every_point():
  points = figures.result("step_grid.json")["points"]
  svg = (DOCS / "images" / "speed.svg").read_text()
  drawn = re.findall(r">([^<>]+)</text>", svg)
  assert f"ours ahead, of {len(points)}, by" in drawn
  for name in points[0]["results"]:
    for kind in figures.TIMES:
      assert str(sum(x <= 1 for x in figures.ratios(points, name, kind))) in drawn
  dots = re.findall(r'<use [^>]*style="fill: #(?:2f7ce0|cf6a12)"', svg)
  assert len(dots) == len(points) * len(points[0]["results"])
