"""A table as interactions: who had what and when, by hand, for two towers and for sequences."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import each, refused
from small_tables import completed, write_csv

from recipes.errors import UserError
from recipes.sequence import data as sequence
from recipes.tables.transforms import Entities
from recipes.two_tower import data as two_tower

HEADER = ("who", "what", "when", "stars", "age", "genres", "name")
ROWS = [
  ("ann", "heat", "2024-01-03", 5, 30, "crime|drama", "Heat"),
  ("ann", "cube", "2024-01-01", 4, 30, "scifi", "Cube"),
  ("bob", "cube", "2024-01-02", 1, 50, "scifi", "Cube"),
  ("ann", "cube", "2024-01-05", 5, 30, "scifi", "Cube"),
  ("bob", "ran", "2024-01-04", 4, 50, "drama", "Ran"),
  ("ann", "ran", "2024-01-04", 5, 30, "drama", "Ran"),
  ("bob", "heat", "2024-01-09", 5, 50, "crime|drama", "Heat"),
  ("bob", "tron", "2024-01-08", 5, 50, "scifi", "Tron"),
]
COLUMNS = {
  "who": "user",
  "what": "item",
  "when": "time",
  "age": {"kind": "category", "min_count": 1, "side": "user"},
  "genres": {"kind": "bag", "min_count": 1, "max_length": 2, "side": "item"},
  "name": "title",
}
LOADERS = {"two_tower": two_tower, "sequence": sequence}


def load(recipe, tmp_path, rows=ROWS, columns=COLUMNS, header=HEADER, **given):
  path = write_csv(tmp_path / "log.csv", header, rows)
  config = completed(recipe, tmp_path / "cache", **{"files": str(path), "columns": columns} | given)
  return LOADERS[recipe].load(config)


def pairs(loaded, split):
  users = Entities.load(loaded.serve, "users").texts
  items = Entities.load(loaded.serve, "items").texts
  rows = slice(*loaded.splits[split])
  codes = zip(loaded.columns["user"][rows], loaded.columns["item"][rows], strict=True)
  return {(users[user], items[item]) for user, item in codes}


def test_the_last_item_of_each_user_is_tested(tmp_path):
  loaded = load("two_tower", tmp_path)
  # Ann's second visit of cube is merged with the first.
  assert pairs(loaded, "train") == {("ann", "cube"), ("bob", "cube"), ("bob", "ran")}
  assert pairs(loaded, "valid") == {("ann", "heat"), ("bob", "tron")}
  assert pairs(loaded, "test") == {("ann", "ran"), ("bob", "heat")}


@pytest.mark.ci
def test_an_item_that_nobody_chose_is_not_numbered(tmp_path):
  header = (*HEADER, "bought")
  unwanted = ("bob", "void", "2024-01-02", 1, 50, "scifi", "Void", 0)
  rows = [(*ROWS[0], 1), unwanted, *((*row, 1) for row in ROWS[1:])]
  loaded = load("two_tower", tmp_path, rows, COLUMNS | {"bought": "label"}, header)
  items = Entities.load(loaded.serve, "items")
  assert sorted(items.texts) == ["cube", "heat", "ran", "tron"]
  assert dict(zip(items.texts, items.titles, strict=True))["tron"] == "Tron"


def test_repeats_are_kept_where_they_can_be_recommended(tmp_path, capsys):
  loaded = load("two_tower", tmp_path, exclude_seen=False)
  assert pairs(loaded, "test") == {("ann", "cube"), ("bob", "heat")}
  assert ("ann", "cube") in pairs(loaded, "train")
  assert "1 of 8 interactions repeat an earlier one" in capsys.readouterr().err


def test_times_with_fractions_keep_their_order(tmp_path):
  rows = [("ann", f"i{time}", f"{time}") for time in (1.5, 1.9, 1.1, 1.0)]
  loaded = load(
    "sequence", tmp_path, rows, {"u": "user", "i": "item", "t": "time"}, ("u", "i", "t")
  )
  items = Entities.load(loaded.serve, "items").texts
  assert [items[i] for i in loaded.columns["items"]] == ["i1.0", "i1.1", "i1.5", "i1.9"]


def test_features_and_titles(tmp_path):
  loaded = load("two_tower", tmp_path)
  users, items = (Entities.load(loaded.serve, name) for name in ("users", "items"))
  ages = dict(zip(users.texts, loaded.columns["user_0"].tolist(), strict=True))
  assert sorted(ages.values()) == [0, 1]
  assert dict(zip(items.texts, items.titles, strict=True))["ran"] == "Ran"
  (genres,) = loaded.features["item"]
  assert genres.valency == 2
  bags = dict(zip(items.texts, loaded.columns["item_0"].tolist(), strict=True))
  # Training rows have ran and cube: 0 is drama, 1 scifi, and 2 the row of crime, which is unknown.
  assert bags["ran"] == [0, -1]
  assert bags["heat"] == [2, 0]
  assert bags["cube"] == bags["tron"] == [1, -1]


def test_sequences_are_in_the_order_of_time(tmp_path):
  loaded = load("sequence", tmp_path)
  users, items = (Entities.load(loaded.serve, name).texts for name in ("users", "items"))
  offsets = loaded.columns["offsets"]
  histories = {
    user: [items[i] for i in loaded.columns["items"][offsets[n] : offsets[n + 1]]]
    for n, user in enumerate(users)
  }
  assert histories == {"ann": ["cube", "heat", "ran"], "bob": ["cube", "ran", "tron", "heat"]}
  kept = load("sequence", tmp_path, exclude_seen=False)
  assert len(kept.columns["items"]) == 8


def test_rows_with_lists_of_items(tmp_path):
  rows = [("ann", "cube heat ran"), ("bob", "cube ran tron heat")]
  columns = {"who": "user", "what": {"kind": "item", "separator": " "}}
  listed = load("sequence", tmp_path, rows=rows, columns=columns, header=("who", "what"))
  logged = load("sequence", tmp_path)
  np.testing.assert_array_equal(listed.columns["offsets"], logged.columns["offsets"])
  texts = lambda loaded: [
    Entities.load(loaded.serve, "items").texts[i] for i in loaded.columns["items"]
  ]
  assert texts(listed) == texts(logged)


@pytest.mark.ci
def test_parquet_lists_without_users(tmp_path):
  path = tmp_path / "histories.parquet"
  pq.write_table(pa.table({"basket": [["a", "b", "c"], ["b", "c", "a", "d"]]}), path)
  columns = {"basket": {"kind": "sequence"}}
  loaded = sequence.load(completed("sequence", tmp_path / "c", files=str(path), columns=columns))
  assert loaded.lengths.tolist() == [3, 4]
  assert loaded.num_items == 4


def test_only_positive_rows_are_interactions(tmp_path, capsys):
  columns = COLUMNS | {"stars": {"kind": "label", "at_least": 4}}
  loaded = load("two_tower", tmp_path, columns=columns)
  whole = set().union(*(pairs(loaded, split) for split in loaded.splits))
  assert ("bob", "cube") not in whole
  assert len(whole) == 6
  assert "7 of 8 rows are positive" in capsys.readouterr().err


def test_files_for_the_splits(tmp_path):
  given = {
    "train": str(write_csv(tmp_path / "a.csv", HEADER, ROWS[:5])),
    "valid": str(write_csv(tmp_path / "b.csv", HEADER, ROWS[5:6])),
    "test": str(write_csv(tmp_path / "c.csv", HEADER, ROWS[6:])),
  }
  loaded = load("two_tower", tmp_path, files=given)
  assert pairs(loaded, "test") == {("bob", "heat"), ("bob", "tron")}
  both = {"train": [given["train"], given["valid"]], "test": given["test"]}
  refit = load("two_tower", tmp_path, files=both, split={"valid": 0.0}, select="")
  assert pairs(refit, "train") == pairs(loaded, "train") | pairs(loaded, "valid")
  assert refit.splits["valid"][0] == refit.splits["valid"][1]


def test_a_pair_of_two_files_trains(tmp_path):
  given = {
    "train": str(write_csv(tmp_path / "a.csv", HEADER, ROWS[:6])),
    "test": str(write_csv(tmp_path / "b.csv", HEADER, [ROWS[0], *ROWS[6:]])),
  }
  loaded = load("two_tower", tmp_path, files=given, split={"valid": 0.0}, select="")
  assert ROWS[0][:2] in pairs(loaded, "train")
  assert ROWS[0][:2] not in pairs(loaded, "test")


def test_what_cannot_be_trained_is_refused(tmp_path):
  cases = [
    ({"rows": [*ROWS, ("", *ROWS[0][1:])]}, r"log.csv, row 9, column 'who'.*no value"),
    ({"rows": [*ROWS, (*ROWS[0][:2], "soon", *ROWS[0][3:])]}, r"row 9, column 'when'.*'soon'"),
    ({"columns": {"who": "user"}}, "no column is declared as 'item'"),
    ({"columns": {"what": "item"}}, "no column is declared as 'user'"),
    ({"core": 9}, "no interaction is left"),
    ({"split": {"by": "random"}}, "config.split.by is 'random'"),
  ]
  refused(cases, lambda given: load("two_tower", tmp_path, **given), UserError)


def test_sequences_hold_out_the_last_items_only(tmp_path):
  with pytest.raises(UserError, match=r"--config.split.by=last"):
    load("sequence", tmp_path, split={"by": "time"})


def test_features_are_fitted_on_what_training_has(tmp_path):
  rows = [(*row[:5], "new" if row[1] in ("heat", "tron") else row[5], row[6]) for row in ROWS]
  items = Entities.load(load("two_tower", tmp_path, rows=rows).serve, "items")
  assert items.transforms.vocabularies["genres"] == ("drama", "scifi")


@pytest.mark.ci
def test_towers_have_all_features_but_the_user(tmp_path):

  def check(timed):
    from recipes.two_tower import model

    columns = {name: kind for name, kind in COLUMNS.items() if timed or kind != "time"}
    loaded = load("two_tower", tmp_path, columns=columns)
    config = model.with_all_features(completed("two_tower", tmp_path, columns=columns), loaded)
    assert config.query == ("history", "age")
    assert config.candidate == ("item", "genres")

  each([(case,) for case in [True, False]], check)


def test_sequences_need_a_user_with_three_items(tmp_path):
  with pytest.raises(UserError, match="no user has three items"):
    load("sequence", tmp_path, rows=ROWS[:2])


def test_rows_of_a_user_are_in_the_order_of_time_where_later_ones_are_held_out(tmp_path):
  days = np.random.default_rng(0).permutation(400)
  rows = [(f"u{day % 7}", f"i{day}", f"{day}") for day in days.tolist()]
  columns = {"u": "user", "i": "item", "t": "time"}
  for given in ({}, {"split": {"by": "time"}}):
    loaded = load("two_tower", tmp_path, rows, columns, ("u", "i", "t"), **given)
    items = [int(text[1:]) for text in Entities.load(loaded.serve, "items").texts]
    when = np.array(items)[loaded.columns["item"]]
    assert loaded.meta["ordered"]
    history = np.array(items)[np.load(loaded.serve / "history.npy")]  # of serving
    ends = np.load(loaded.serve / "history_offsets.npy")[1:-1]
    assert all((np.diff(of_user) > 0).all() for of_user in np.split(history, ends))
    for start, stop in loaded.splits.values():
      same = np.diff(loaded.columns["user"][start:stop]) == 0
      assert (np.diff(when[start:stop])[same] > 0).all()
  assert not load("two_tower", tmp_path, rows, columns, ("u", "i", "t"), split={"by": "user"}).meta[
    "ordered"
  ]


def test_users_of_skipped_rows_alone_are_not_there(tmp_path):
  recipe = "two_tower"
  rows = [
    ("eve", "heat", "yesterday", 1, 20, "", ""),
    *ROWS,
    ("NA", "ran", "2024-01-01", 1, 2, "", ""),
  ]
  loaded = load(recipe, tmp_path, rows, on_bad_row="skip")
  users = Entities.load(loaded.serve, "users")
  assert users.texts == ["ann", "bob"]
  assert users.ids["age"].tolist() == [0, 1]
  with pytest.raises(UserError, match="column 'who': 'NA' has no value"):
    load(recipe, tmp_path, rows[1:])
