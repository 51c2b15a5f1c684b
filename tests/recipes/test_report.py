"""Tables of finished runs: means and spreads by hand, and what is one row."""

import pathlib

from recipe_runs import write_run

from recipes import report

RESULTS = pathlib.Path(__file__).parents[2] / "docs" / "results"


def lines(*runs):
  """The cells of each line, blocks one after the other."""
  text = report.report(runs).replace(" ± ", "±")
  return [line.replace("item kNN", "kNN").split() for line in text.splitlines() if line]


def test_seeds_of_one_config_are_one_row(tmp_path):
  runs = [
    write_run(tmp_path / f"mine_{seed}", seed=seed, recall=recall, data_dir=f"/d{seed}")
    for seed, recall in ((0, 0.1), (1, 0.2), (2, 0.3))
  ]
  assert lines(*runs) == [
    ["two_tower", "on", "gowalla"],
    ["test", "recall@10", "mrr"],
    ["mine", "0.2000±0.1000", "0.2500"],
    ["popularity", "0.0416", "0.1250"],
  ]


def test_other_settings_are_other_rows_and_other_data_other_tables(tmp_path):
  runs = [
    write_run(tmp_path / "a", exclude_seen=True),
    write_run(tmp_path / "b", exclude_seen=False, recall=0.4, popular=0.01),
    write_run(tmp_path / "c" / "a", exclude_seen=False, dim=9),
    write_run(tmp_path / "d", recipe="sequence", dataset="file", data_file="Beauty.txt"),
  ]
  found = lines(*runs)
  first = ["two_tower", "test", "a", "popularity", "b", "popularity", runs[2]]
  assert [line[0] for line in found] == [*first, "sequence", "test", "d", "popularity"]
  assert (found[3][1], found[5][1]) == ("0.0416", "0.0100")  # measured in another way


def test_committed_results_are_read(capsys):
  """As the page of recipes has them."""
  report.main([str(path) for path in sorted(RESULTS.glob("two_tower_movielens1m_?.json"))])
  shown = capsys.readouterr().out.splitlines()
  assert shown[2].split()[1:4] == ["0.2113", "±", "0.0007"]
  assert [line.split("  ")[0] for line in shown[3:]] == ["popularity", "item kNN", "EASE"]
