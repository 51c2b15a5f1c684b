"""The page of results: means and spreads by hand, what is one row, and curves against time."""

import json
import re

import pytest

from recipes import report


def write_run(
  folder, *, recipe="two_tower", seed=0, recall=0.2, seconds=10.0, popular=0.0416, **config
):
  folder.mkdir(parents=True)
  config = {
    "dataset": "gowalla",
    "batch_size": 100,
    "select": "valid_ndcg@10",
    "seed": seed,
  } | config
  result = {
    "recipe": recipe, "config": config, "seed": seed, "steps": 40, "tested_step": 40,
    "seconds": seconds,
    "metrics": {"valid_recall@10": 0.5, "test_recall@10": recall, "test_mrr": 0.25},
    "baselines": {"popularity": {"test_recall@10": popular, "test_mrr": 0.125}},
    "device": {"kind": "cpu", "count": 1, "host_cores": 2, "platform": "cpu"},
    "versions": {"jax": "0.10", "flax": "0.12", "sparse-embed": "0.1"},
    "data_sha256": {"train.txt": "ab" * 32},
  }  # fmt: skip
  lines = [
    {"step": 10, "loss": 3.0, "examples_per_second": 500.0},
    {"step": 20, "loss": 2.0, "examples_per_second": 250.0},
    {"step": 20, "valid_ndcg@10": 0.3},
    {"step": 40, "loss": 1.0, "examples_per_second": 1000.0},
    {"step": 40, "valid_ndcg@10": 0.4},
  ]
  (folder / "result.json").write_text(json.dumps(result))
  (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  return str(folder)


def rows(page):
  cells = [
    [c.strip() for c in line[1:-1].split("|")] for line in page.splitlines() if line[:1] == "|"
  ]
  return {row[0]: row[1:] for row in cells}


def test_seeds_of_one_config_are_one_row(tmp_path):
  runs = [
    write_run(
      tmp_path / f"r{seed}", seed=seed, recall=recall, seconds=seconds, data_dir=f"/d{seed}"
    )
    for seed, recall, seconds in ((0, 0.1, 10), (1, 0.2, 20), (2, 0.3, 30))
  ]
  report.main([*runs, f"--out={tmp_path / 'page' / 'all'}", "--title=Three seeds"])
  page = (tmp_path / "page" / "all.md").read_text()
  found = rows(page)
  assert found[""] == ["seeds", "recall@10", "mrr", "seconds"]
  assert found["two_tower"] == ["0, 1, 2", "0.2000 ± 0.1000", "0.2500", "20 ± 10"]
  assert found["popularity"] == ["", "0.0416", "0.1250", ""]
  assert re.findall(r"^#+ .*", page, re.MULTILINE) == ["# Three seeds", "## two_tower on gowalla"]
  assert "`train.txt` " + "ab" * 32 in page
  assert "1 x cpu (2 host cores)" in page
  assert "![" in page
  image = tmp_path / "page" / re.search(r"\((\S+\.png)\)", page).group(1)
  assert image.read_bytes().startswith(b"\x89PNG")


def test_other_settings_are_other_rows_and_other_data_other_tables(tmp_path):
  runs = [
    write_run(tmp_path / "a", negatives={"number": 5}),
    write_run(tmp_path / "b", negatives={"number": 7}, recall=0.4),
    write_run(
      tmp_path / "c", recipe="sequence", dataset="file", data_file="Beauty.txt", model="sasrec"
    ),
  ]
  groups = report.grouped([report.load(run) for run in runs])
  assert report.names(groups) == [
    "two_tower negatives.number=5", "two_tower negatives.number=7", "sequence/sasrec"
  ]  # fmt: skip
  page = report.markdown(groups, "X", "x.png")
  assert re.findall(r"^## (.*)$", page, re.MULTILINE) == [
    "sequence on Beauty.txt",
    "two_tower on gowalla",
  ]
  assert rows(page)["two_tower negatives.number=7"][1] == "0.4000"
  assert len(report.draw(groups).axes) == 4


def test_a_baseline_is_a_row_of_its_own_where_it_was_measured_otherwise(tmp_path):
  runs = [
    write_run(tmp_path / "a", remove_seen=True),
    write_run(tmp_path / "b", remove_seen=False, popular=0.01),
  ]
  found = rows(report.markdown(report.grouped([report.load(run) for run in runs]), "X", "x.png"))
  assert found["popularity (two_tower remove_seen=True)"][1] == "0.0416"
  assert found["popularity (two_tower remove_seen=False)"][1] == "0.0100"


def test_curves_are_against_seconds_of_training(tmp_path):
  run = report.load(write_run(tmp_path / "a"))
  assert run.curve("loss") == ([2.0, 6.0, 8.0], [3.0, 2.0, 1.0])
  assert run.curve("valid_ndcg@10") == ([6.0, 8.0], [0.3, 0.4])


def test_a_run_without_validation_has_no_curve_of_it(tmp_path):
  folder = write_run(tmp_path / "a", select="", refit=True)
  path = tmp_path / "a" / "metrics.jsonl"
  lines = [line for line in path.read_text().splitlines() if "valid" not in line]
  path.write_text("\n".join(lines) + "\n")
  runs = [report.load(folder), report.load(write_run(tmp_path / "b", refit=False))]
  figure = report.draw(report.grouped(runs))
  assert figure.axes[1].get_ylabel() == "valid_ndcg@10"
  assert [len(line.get_xdata()) for line in figure.axes[1].lines] == [0, 2]


def test_one_run_is_shown_and_its_page_lies_in_its_folder(tmp_path, capsys, monkeypatch):
  folder = write_run(tmp_path / "a")
  report.main([folder])
  shown = capsys.readouterr().out.splitlines()
  assert [line.split() for line in shown[:4]] == [
    ["two_tower", "on", "gowalla"],
    ["seeds", "recall@10", "mrr", "seconds"],
    ["two_tower", "0", "0.2000", "0.2500", "10"],
    ["popularity", "0.0416", "0.1250"],
  ]
  assert shown[-2:] == [f"{folder}/report.md", f"{folder}/report.png"]
  assert (tmp_path / "a" / "report.md").read_text().startswith("# a\n\n![")
  assert "┌" not in "".join(shown)
  monkeypatch.setattr("sys.stdout.isatty", lambda: True)
  report.main([folder])
  assert capsys.readouterr().out.count("┌") == 2


def test_a_sketch_fits_a_terminal_and_rises_and_falls_as_the_curves_do(tmp_path):
  drawn = report.sketch(report.load(write_run(tmp_path / "a"))).splitlines()
  assert max(map(len, drawn)) <= 80
  assert "loss" in drawn[0]
  assert "valid_ndcg@10" in drawn[0]
  first, last = drawn[2], drawn[-3]
  split = first.index("│", first.index("│") + 1)  # where the left frame ends
  ink = lambda line: [at for at, cell in enumerate(line) if "▀" <= cell <= "▟" or cell == "▁"]
  assert min(ink(first)) < 3  # the loss starts at the top left
  assert max(ink(first)) > split  # the metric ends at the top right
  assert any(3 < at < split for at in ink(last))


def test_mistakes_are_named(tmp_path, capsys):
  def said(*argv):
    with pytest.raises(SystemExit, match="2"):
      report.main(argv)
    return capsys.readouterr().err

  first, again = write_run(tmp_path / "a"), write_run(tmp_path / "b")
  assert re.search(r"a and .*b are runs of one config and one seed", said(first, again))
  (tmp_path / "b" / "result.json").unlink()
  assert re.search(r"b has no result\.json: .* runs that have ended", said(str(tmp_path / "b")))
  assert f"did you mean {first}?" in said(first + "a")
  assert f"did you mean {first}?" in said(str(tmp_path))
  (tmp_path / "b" / "config.json").write_text("{}")
  assert "the run in " + again + " has not ended" in said(again)
