"""The pages of the documentation: their code runs, their links lead somewhere, and a script writes
their figures."""

import json
import re
import statistics
import urllib.parse

import figures
import pytest
from pages import DOCS, ROOT, blocks, run

PAGES = [  # not what a build puts there
  page.relative_to(DOCS).as_posix()
  for page in sorted(DOCS.rglob("*.md"))
  if page.relative_to(DOCS).parts[0] not in ("_build", "colabs")
]
# Read on GitHub alone; Sphinx checks the links of the others.
OUTSIDE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("recipes/*/README.md"))]
STATING = [ROOT / "README.md", *ROOT.glob("recipes/*/README.md"), *ROOT.glob("configs/*/*.py")]


@pytest.mark.ci
@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks(page))])
def test_the_code_runs(page, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  run(page)


@pytest.mark.ci
def test_the_examples_of_the_readme_run():
  scope = {}
  examples = re.findall(r"```python\n(.*?)```", OUTSIDE[0].read_text(), re.DOTALL)
  for example in examples:
    exec(compile(example, "README.md", "exec"), scope)
  untouched = scope["model"].embed.variables["movie"]["accumulators"][0]
  assert (untouched == untouched[0]).all()
  assert scope["model"].embed(scope["batch"])["watched"].shape == (2, 64)


def prose(path):
  return re.sub(r"^( *)(```|~~~|:::).*?^\1\2", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(path):
  """What the headings of a page are called in links on GitHub."""
  headings = re.findall(r"^#+ +(.*)$", prose(path), re.MULTILINE)
  plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).strip().lower() for heading in headings]
  return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def test_links_and_names_of_files_lead_somewhere():
  broken = []
  for page in OUTSIDE:
    found = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    found += re.findall(r"(?:src|href)=\"([^\"]+)\"", prose(page))
    for link in found:
      name, _, anchor = urllib.parse.unquote(link).partition("#")
      path = page.parent / name if name else page
      if re.match(r"[a-z]+:", link):
        continue
      if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
        broken.append((page.name, link))
  written = re.findall(r"--out=(\S+)", OUTSIDE[0].read_text())
  for path in re.findall(r"--config=(\S+?\.py)", OUTSIDE[0].read_text()):
    if not (ROOT / path).exists() and path not in written:
      broken.append(("README.md", path))
  for page in [*OUTSIDE, *(DOCS / name for name in PAGES)]:
    folders = (ROOT, ROOT / "embed", ROOT / "tests", ROOT / "recipes", page.parent)
    for name in re.findall(r"`([a-z_]+/[a-z0-9_/]+\.py)[`:]", page.read_text()):
      if not any((folder / name).exists() for folder in folders):
        broken.append((page.name, name))
  assert not broken


@pytest.mark.ci
def test_tables_of_figures_are_those_of_the_result_files():
  stale = [path for path, text in figures.expected().items() if path.read_text() != text]
  assert not stale, "run `python docs/figures.py`"
  text = (DOCS / "performance.md").read_text()
  changed = text.replace("| sgd | **", "| sgd | **9")
  assert changed != text
  assert figures.written(changed) == text
  with pytest.raises(KeyError, match="unknown"):
    figures.written("<!-- figures: unknown -->\n<!-- end figures -->")


@pytest.mark.ci
def test_means_are_those_of_the_committed_runs():
  """Of every metric over the seeds of every committed run."""
  runs, means = {}, set()
  for path in (DOCS / "results").glob("*_[0-9].json"):
    runs.setdefault(path.stem[:-2], []).append(json.loads(path.read_text())["metrics"])
  for seeds in runs.values():
    for name in seeds[0] if len(seeds) > 1 else ():
      values = [metrics[name] for metrics in seeds if name in metrics]
      numbers = (statistics.fmean(values), statistics.stdev(values))
      means.add(" ± ".join(f"{number:.4f}".removeprefix("0") for number in numbers))
  for page in STATING:
    stated = re.findall(r"\.\d{4} ± \.\d{4}", page.read_text().replace("\u00a0", " "))
    assert set(stated) <= means, page


def test_the_mean_and_the_best():
  assert figures.spread([0.1, 0.2, 0.3]) == ".2000\u00a0±\u00a0.1000"
  assert figures.best_is_bold([".31", "about .30", "too large"], least=False)[0] == "**.31**"
  assert figures.best_is_bold([".31", ".30"], least=True) == [".31", "**.30**"]
