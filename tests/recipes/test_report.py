"""The page of results: means and spreads by hand, what is one entry, and curves over steps."""

import pathlib
import re

import pytest
from recipe_runs import write_run

from recipes import errors, report

RESULTS = pathlib.Path(__file__).parents[2] / "docs" / "results"


def columns(page):
  """What the tables say of each model or baseline."""
  plain = lambda cell: cell.replace("\u00a0", " ").replace("**", "").strip()
  found = {}
  for block in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
    lines = [[plain(cell) for cell in line[1:-1].split("|")] for line in block.splitlines()]
    del lines[1]  # the rule under the header
    found |= {label: cells for label, *cells in zip(*lines, strict=True)}
  return found


def page_of(*folders):
  return report.markdown(report.collect([report.load(folder) for folder in folders]), "X", "x.png")


def test_seeds_of_one_config_are_one_column(tmp_path):
  for seed, recall, seconds in ((0, 0.1, 10), (1, 0.2, 20), (2, 0.3, 30)):
    changes = {"recall": recall, "seconds": seconds, "data_dir": f"/d{seed}"}
    write_run(tmp_path / "three" / f"seed_{seed}", seed=seed, **changes)
  report.main([str(tmp_path / "three"), f"--out={tmp_path / 'page' / 'all'}", "--title=Seeds"])
  page = (tmp_path / "page" / "all.md").read_text()
  found = columns(page)
  assert found[""] == ["seeds", "recall@10", "mrr", "seconds"]
  assert found["three"] == ["0, 1, 2", "0.2000 ± 0.1000", "0.2500", "20 ± 10"]
  assert found["popularity"] == ["", "0.0416", "0.1250", ""]
  assert re.findall(r"^#+ .*", page, re.MULTILINE) == ["# Seeds", "## two_tower on gowalla"]
  assert "`train.txt` " + "ab" * 32 in page
  assert "1 x cpu (2 host cores)" in page
  assert "![" in page
  image = tmp_path / "page" / re.search(r"\((\S+\.png)\)", page).group(1)
  assert image.read_bytes().startswith(b"\x89PNG")


def test_other_settings_are_other_columns_and_other_data_other_tables(tmp_path):
  runs = [
    write_run(tmp_path / "a", negatives={"number": 5}),
    write_run(tmp_path / "b", negatives={"number": 7}, recall=0.4),
    write_run(tmp_path / "c" / "a", negatives={"number": 9}),
    write_run(tmp_path / "d", recipe="sequence", dataset="file", data_file="Beauty.txt"),
  ]
  page = page_of(*runs)
  titles = re.findall(r"^## (.*)$", page, re.MULTILINE)
  assert titles == ["sequence on Beauty.txt", "two_tower on gowalla"]
  found = columns(page)
  assert found["b"][1] == "0.4000"
  assert {"a", runs[2], "d"} <= set(found)
  assert "Settings that differ, in the order of the models: `negatives.number` 5, 7, 9." in page
  assert len(report.draw(report.collect(list(map(report.load, runs)))).axes) == 4


def test_a_baseline_is_a_column_of_its_own_where_it_was_measured_otherwise(tmp_path):
  runs = [
    write_run(tmp_path / "a", remove_seen=True),
    write_run(tmp_path / "b", remove_seen=False, popular=0.01),
  ]
  found = columns(page_of(*runs))
  assert (found["popularity (a)"][1], found["popularity (b)"][1]) == ("0.0416", "0.0100")


def without_validation(folder):
  path = pathlib.Path(folder) / "metrics.jsonl"
  lines = [line for line in path.read_text().splitlines() if "valid" not in line]
  path.write_text("\n".join(lines) + "\n")
  return folder


def test_a_run_without_validation_has_no_curve_of_it_and_no_panel(tmp_path):
  without = without_validation(write_run(tmp_path / "a", select="", refit=True))
  runs = [report.load(without), report.load(write_run(tmp_path / "b", refit=False))]
  lines = lambda runs: {
    axis.get_title(loc="left"): len(axis.lines) for axis in report.draw(report.collect(runs)).axes
  }
  names = [f"two_tower on gowalla\n{name}" for name in ("training loss", "valid_ndcg@10")]
  assert lines(runs) == dict(zip(names, (2, 2), strict=True))
  assert lines(runs[:1]) == {names[0]: 1}


PAGES = {
  "two_tower": "Results: two towers",
  "sequence": "Results: next items",
}


def test_the_pages_are_those_of_the_committed_runs():
  for name, title in PAGES.items():
    page = (RESULTS / f"{name}.md").read_text()
    paths = [p for p in RESULTS.glob(f"{name}_*.json") if not p.stem.endswith("search")]
    tables = report.collect([report.load(path) for path in sorted(paths)])
    assert report.markdown(tables, title, f"{name}.png") == page


def test_one_run_is_shown_and_its_page_lies_in_its_folder(tmp_path, capsys):
  folder = write_run(tmp_path / "a")
  report.main([folder])
  shown = capsys.readouterr().out.splitlines()
  assert [line.split() for line in shown[:4]] == [
    ["two_tower", "on", "gowalla"],
    ["seeds", "recall@10", "mrr", "seconds"],
    ["a", "0", "0.2000", "0.2500", "10"],
    ["popularity", "0.0416", "0.1250"],
  ]
  assert shown[-2:] == [f"{folder}/report.md", f"{folder}/report.png"]
  assert (tmp_path / "a" / "report.md").read_text().startswith("# a\n\n![")


@pytest.mark.ci
def test_runs_that_have_been_trained_are_tables_of_their_recipes(
  clicks, towers, sequences, tmp_path
):
  runs = [trained.workdir for trained in (clicks, towers, sequences)]
  report.write(runs, tmp_path / "page")
  page = (tmp_path / "page.md").read_text()
  assert f"| {towers.result['metrics']['test_mrr']:.4f} |" in page.replace("**", "")
  assert page.count("\n## ") == 3


def test_what_is_no_run_is_named(tmp_path):
  with pytest.raises(errors.MissingFileError, match="give the workdirs of runs that have ended"):
    report.load(tmp_path)
