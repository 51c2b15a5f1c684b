"""Predictions for rows as they are: files, bad rows, unknown and missing values, new users."""

import csv
import dataclasses
import gzip
import io
import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import refused

from recipes import predict, serving
from recipes.errors import UserError
from recipes.serving import rows as rows_lib
from recipes.tables.formats import Format
from recipes.tables.transforms import Transforms

HEADER = "clicked,price,age,city,shop,tags,part"


def answers(trained, file, **options):
  """Returns header and rows that the command writes, and its notes."""
  out = io.StringIO()
  notes = predict.predict(str(trained.served), str(file), out, **options)
  header, *rows = csv.reader(io.StringIO(out.getvalue(), newline=""))
  return header, rows, notes


def scores_of(trained, text, folder, **options):
  file = folder / "rows.csv"
  file.write_text(text)
  header, rows, _ = answers(trained, file, **options)
  assert header[-1] == "score"
  return [row[-1] for row in rows]


# --- files ----------------------------------------------------------------------------------------


def test_columns_come_in_any_order_with_others_and_without_label_weight_and_split(clicks, tmp_path):
  plain = scores_of(clicks, f"{HEADER}\n1,4.5,30,c1,s2,t1|t2,test\n", tmp_path)
  other = scores_of(clicks, "tags;shop;note;city;age;price\nt1|t2;s2;x, y;c1;30;4.5\n", tmp_path)
  assert plain == other
  assert 0 < float(plain[0]) < 1
  assert len(plain[0].replace("0.", "")) >= 7  # significant digits


def test_rows_keep_their_order_and_text_over_many_chunks(clicks, tmp_path, monkeypatch):
  monkeypatch.setattr("recipes.serving.rows._CHUNK", 7)
  lines = [f' {i}.50 ,030,"c{i % 9}, of\n""x""",s1,,{i}' for i in range(50)]
  (tmp_path / "rows.csv").write_text("\n".join(["price,age,city,shop,tags,id", *lines]) + "\n")
  header, rows, notes = answers(clicks, tmp_path / "rows.csv")
  assert header == ["price", "age", "city", "shop", "tags", "id", "score"]
  expected = [[f" {i}.50 ", "030", f'c{i % 9}, of\n"x"', "s1", "", str(i)] for i in range(50)]
  assert [row[:-1] for row in rows] == expected
  assert notes[0] == "50 rows"


def test_parquet_gzip_and_python_rows_have_the_same_scores(clicks, tmp_path):
  rows = {
    "price": [1.5, None, 7.0],
    "age": [20, 30, None],
    "city": ["c1", None, "c3"],
    "shop": ["s1", "s2", "nowhere"],
    "tags": [["t1", "t2"], [], ["t3"]],
  }
  pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
  text = "price,age,city,shop,tags\n1.5,20,c1,s1,t1|t2\n,30,,s2,\n7,NA,c3,nowhere,t3\n"
  with gzip.open(tmp_path / "rows.csv.gz", "wt") as file:
    file.write(text)
  model = clicks.answering
  expected = model.predict(rows)
  header, stored, _ = answers(clicks, tmp_path / "rows.parquet")
  assert header == [*rows, "score"]
  assert stored[0][:-1] == ["1.5", "20", "c1", "s1", "t1|t2"]
  np.testing.assert_allclose([float(row[-1]) for row in stored], expected, rtol=1e-6)
  _, packed, _ = answers(clicks, tmp_path / "rows.csv.gz")
  np.testing.assert_allclose([float(row[-1]) for row in packed], expected, rtol=1e-6)
  by_row = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
  np.testing.assert_array_equal(model.predict(by_row), expected)
  np.testing.assert_array_equal(model.predict(pa.table(rows)), expected)
  assert model.predict({name: [] for name in rows}).shape == (0,)


UNREADABLE = [
  ("", "is empty"),
  ("price,age,citi,shop,tags\n1,2,3,4,5\n", "no column 'city'.* did you mean 'citi'"),
  ("price,price,city,shop,tags\n1,2,3,4,5\n", "two columns 'price'"),
  (f"{HEADER}\n1,1,30,c,s,t,x\n1,x1,30,c,s,t,x\n", "row 2, column 'price': 'x1' is no number"),
  (f"{HEADER}\n1,1,30,c,s\n", "line 2 has too few fields for 7 columns"),
  (f'{HEADER}\n1,1,30,"c,s,t,x\n', "a quote that is not closed"),
  (f"{HEADER}\n1,2,30,c,s,t,x\n".encode("utf-16-le"), "has NUL bytes"),
  (b"PAR1\x15\x04\n,,,\n", r"is a Parquet file"),
  (gzip.compress(b"price\n1\n", mtime=0), "is compressed with gzip"),
  (f"{HEADER}\n1,1,30,caf\udce9,s,t,x\n", "line 2 is not utf-8"),
]


def test_rows_that_cannot_be_read_are_a_line_that_says_where(clicks, tmp_path):
  file = tmp_path / "rows.csv"

  def call(text):
    file.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogateescape"))
    predict.predict(str(clicks.served), str(file), io.StringIO())

  one_line = [(text, rf"^[^\n]*{message}[^\n]*$") for text, message in UNREADABLE]
  refused(one_line, call, UserError)


def test_bad_rows_can_be_skipped_and_keep_their_place(clicks, tmp_path):
  lines = ["1,1,30,c1,s1,t1,x", "1,x1,30,c1,s1,t1,x", "1,1,30,c1,s1,t1,x"]
  text = "\n".join([HEADER, *lines]) + "\n"
  scores = scores_of(clicks, text, tmp_path, on_bad_row="skip")
  assert scores[0] == scores[2] != scores[1] == ""
  _, _, notes = answers(clicks, tmp_path / "rows.csv", on_bad_row="skip")
  assert "1 cannot be read" in notes[1]


def test_a_parquet_file_of_predictions(clicks, tmp_path):
  rows = {"price": [1.5, None], "age": [20, 30], "city": ["c1", "c3"], "shop": ["s1", "s2"]}
  pq.write_table(pa.table(rows | {"tags": [["t1"], []]}), tmp_path / "rows.parquet")
  predict.predict(str(clicks.served), str(tmp_path / "rows.parquet"), str(tmp_path / "o.parquet"))
  written = pq.read_table(tmp_path / "o.parquet")
  assert written.column_names == [*rows, "tags", "score"]
  assert written["tags"].to_pylist() == [["t1"], []]
  expected = clicks.answering.predict(rows | {"tags": [["t1"], []]})
  np.testing.assert_array_equal(written["score"].to_numpy(), expected)
  lines = [f'{{"price": {p or "null"}, "age": {a}, "city": "{c}", "shop": "{s}", "tags": {t}}}\n'
           for p, a, c, s, t in zip(*rows.values(), ['["t1"]', "[]"], strict=True)]  # fmt: skip
  (tmp_path / "rows.jsonl").write_text("".join(lines))
  _, answered, _ = answers(clicks, tmp_path / "rows.jsonl")
  assert [float(row[-1]) for row in answered] == expected.tolist()


# --- unknown and missing values -------------------------------------------------------------------


def test_unknown_and_missing_values_are_what_their_columns_declare(clicks):
  model = clicks.answering
  row = {"price": 5.0, "age": 30, "city": "c1", "shop": "s1", "tags": "t1"}
  score = lambda **changes: float(model.predict([row | changes])[0])
  # The cross has the city too: its hash differs, and so both of these rows leave it out.
  assert score(city="new", shop=None) == score(city="other", shop=None)  # one row of the table
  assert score(city="new", shop=None) != score(city=None, shop=None)
  assert score(shop="new", city=None) == score(shop=None, city=None)  # oov=0: no vector
  assert score(price=None) == score(price="") == score(price="NA") != score()
  assert score(tags="never") != score(tags="")
  assert score(age=None) != score(age=30)


def test_unknown_and_missing_values_are_counted_by_column(clicks, tmp_path):
  seen = {"price": 5.0, "age": 30, "city": "c1", "shop": "s1", "tags": "t1|t2"}
  rows = [
    seen,
    seen | {"city": "Oslo"},
    seen | {"city": "Rome", "tags": "t1|never|never"},
    seen | {"city": None, "shop": "nowhere", "age": None},
    seen | {"tags": "", "price": None},
  ]
  scored = clicks.answering.score(rows)
  assert scored.unknown == {"city": 2, "tags": 1, "shop": 1}
  assert scored.missing == {"city": 1, "age": 1, "tags": 1, "price": 1}
  np.testing.assert_array_equal(scored.scores, clicks.answering.predict(rows))
  bad = clicks.answering.score([seen | {"city": "Oslo", "price": "x"}], on_bad_row="skip")
  assert (bad.unknown, bad.missing, bad.is_bad.tolist()) == ({}, {}, [True])
  assert np.isnan(bad.scores).all()
  texts = [",".join("" if x is None else str(x) for x in row.values()) for row in rows]
  (tmp_path / "rows.csv").write_text("\n".join([",".join(seen), *texts]) + "\n")
  _, _, notes = answers(clicks, tmp_path / "rows.csv")
  assert notes[1].endswith("unknown values by column: city 2, shop 1, tags 1")
  assert "missing values by column" in notes[2]


@pytest.mark.ci
def test_every_feature_is_encoded_once(clicks, towers, monkeypatch):
  models = clicks.answering, towers.answering
  encoded, ids = [], Transforms.ids
  monkeypatch.setattr(Transforms, "ids", lambda *given: encoded.append(given[2]) or ids(*given))
  row = {"price": [1.0], "age": [30], "city": ["c1"], "shop": ["s1"], "tags": ["t1"]}
  models[0].predict(row)
  assert sorted(encoded) == ["age", "city", "shop", "tags"]
  encoded.clear()
  models[1].recommend({"who": ["u1"], "country": ["k1"]}, top=1)
  assert encoded == ["country"]


def test_written_scores_are_the_numbers_themselves(clicks):
  logits = np.array([17.0, 25.0, 37.0, 200.0, -104.0, 0.1], np.float32)
  program = lambda arrays, inputs: np.resize(logits, 16)
  model = serving.ClickModel(dataclasses.replace(clicks.answering.served, program=program))
  row = {"price": 5.0, "age": 30, "city": "c1", "shop": "s1", "tags": "t1"}
  scores = model.predict([row] * 6)
  assert ((scores > 0) & (scores < 1)).all()
  np.testing.assert_allclose(1 - scores[:2], np.exp(-logits[:2].astype(float)), rtol=1e-4)
  np.testing.assert_allclose(scores[4], np.exp(-104.0))
  dots = np.array([1 / 3, 0.1], np.float32)
  written = rows_lib.texts_of(pa.table({"scores": scores[:2], "dots": dots}))
  assert [float(text) for text in written["scores"].to_pylist()] == scores[:2].tolist()
  assert np.array_equal(np.array(written["dots"].to_pylist(), np.float32), dots)
  assert written["dots"][1].as_py() == "0.1"


@pytest.mark.ci
def test_a_user_is_known_by_id_feature_or_history(towers):
  model = towers.answering
  known, new = model.recommend([{"who": "u3"}]), model.recommend([{"who": "new", "country": "k3"}])
  # u3 is of k3 and has a history.
  assert not known.is_popular[0]
  assert not new.is_popular[0]
  assert not np.allclose(known.scores, new.scores, equal_nan=True)
  nobody = model.recommend({"who": ["new", None, "u3"], "country": ["nowhere", None, None]}, top=3)
  # An unknown country has the row of its table that all of them share.
  assert nobody.is_popular.tolist() == [False, True, False]
  assert np.isnan(nobody.scores[1]).all()
  np.testing.assert_allclose(nobody.scores[2], known.scores[0, :3], rtol=1e-5)
  # The last column of the candidates is the popularity that scores have, of all interactions.
  liked, texts = np.load(towers.served / "candidates.npy")[:, -1], model._items.texts
  assert nobody.items[1].tolist() == [texts[i] for i in np.argsort(-liked, kind="stable")[:3]]
  # A feature in the row takes the place of the one that training has stored.
  other = model.recommend([{"who": "u3", "country": "k5"}])
  same = model.recommend([{"who": "u3", "country": "k3"}])
  assert not np.allclose(other.scores, known.scores, equal_nan=True)
  np.testing.assert_array_equal(same.scores, known.scores)


@pytest.mark.ci
def test_ids_are_cut_by_the_pattern_of_their_column(towers):
  model = towers.answering
  items = [model._items.texts[i] for i in model._history[:3]]
  asked = [{"who": "u3"}, {"who": "new", "history": items}]
  expected = model.recommend(asked)
  patterns = {"user": r"user (\w+)", "item": r"item (\w+)"}
  kinds = {  # as if they had been declared so
    name: dataclasses.replace(kind, pattern=patterns[kind.kind]) if kind.kind in patterns else kind
    for name, kind in model.served.kinds.items()
  }
  model = serving.Recommender(dataclasses.replace(model.served, kinds=kinds))
  both = [
    {"who": "user u3"},
    {"who": "new", "history": [f"item {i}" for i in items[:2]] + items[2:]},
  ]
  np.testing.assert_array_equal(model.recommend(both).items, expected.items)
  assert model.recommend([{"who": "user nobody"}]).is_popular[0]


@pytest.mark.ci
def test_a_history_in_the_row_replaces_the_stored_one(towers):
  model = towers.answering
  stored = model._history[model._offsets[3] : model._offsets[4]]
  texts = [model._items.texts[i] for i in stored]
  by_user = model.recommend([{"who": model._users.texts[3]}], top=13)
  assert not set(texts) & set(by_user.items[0])
  assert by_user.items[0, -len(texts) :].tolist() == [None] * len(texts)  # fewer than top
  assert np.isnan(by_user.scores[0, -len(texts) :]).all()
  own = model.recommend([{"who": model._users.texts[3], "history": texts}], top=13)
  np.testing.assert_array_equal(own.items, by_user.items)
  new = model.recommend({"history": [f"{texts[0]}| {texts[1]} |unheard of", "unheard of"]}, top=13)
  assert new.num_unknown_items == 2
  assert new.is_popular.tolist() == [False, True]
  assert not set(texts[:2]) & set(new.items[0])
  assert [item is None for item in new.items[0]] == [False] * 11 + [True] * 2


@pytest.mark.ci
def test_repeats_are_recommended_if_training_said_so(sequences):
  model = sequences.answering
  answer = model.recommend([{"who": "u3"}, {"history": "i1|i2"}, {"who": "new"}], top=13)
  assert [sum(item is not None for item in row) for row in answer.items] == [13, 13, 13]
  assert answer.is_popular.tolist() == [False, False, True]
  # The encoder sees the order.
  turned = model.recommend([{"history": "i2|i1"}], top=13)
  assert not np.allclose(np.sort(turned.scores[0]), np.sort(answer.scores[1]), equal_nan=True)


@pytest.mark.ci
def test_recommendations_are_columns_of_raw_ids_scores_and_titles(towers, tmp_path):
  (tmp_path / "rows.csv").write_text("who,note\nu3,a\nnew,b\n")
  header, rows, notes = answers(towers, tmp_path / "rows.csv", top=2)
  assert header == ["who", "note", "item_1", "score_1", "title_1", "item_2", "score_2", "title_2"]
  assert [row[:2] for row in rows] == [["u3", "a"], ["new", "b"]]
  assert rows[0][4] == f"No. {rows[0][2][1:]}, the film"
  assert float(rows[0][3]) >= float(rows[0][6])
  assert rows[1][3] == rows[1][6] == ""
  assert "1 without a known user" in notes[1]


@pytest.mark.ci
def test_what_no_model_can_answer_is_said(clicks, towers, tmp_path):
  (tmp_path / "rows.csv").write_text("note\nx\n")
  with pytest.raises(UserError, match="none of the columns who, country, history"):
    answers(towers, tmp_path / "rows.csv")
  with pytest.raises(UserError, match="--top is for"):
    answers(clicks, tmp_path / "rows.csv", top=3)
  with pytest.raises(UserError, match=r"has no served\.json"):
    serving.load(tmp_path)


@pytest.mark.ci
def test_a_top_beyond_the_items_is_refused(towers, tmp_path):
  (tmp_path / "rows.csv").write_text("who\nu3\n")
  call = lambda top: answers(towers, tmp_path / "rows.csv", top=top)
  refused([(top, f"top is {top}: choose 1 to 13") for top in (0, 14)], call, UserError)


@pytest.mark.ci
def test_a_run_in_place_of_an_export_is_answered_by_what_works(clicks, tmp_path):
  run = clicks.copy(tmp_path)
  with pytest.raises(UserError, match=r"has no served\.json: `(.*)` writes") as caught:
    serving.load(run)
  command = re.search("`(.*)`", str(caught.value))[1].split()
  assert command[:3] == ["python", "-m", "recipes.export"]
  assert command[3:] == [str(run), f"--out={run / 'served'}"]
  shutil.copytree(clicks.served, run / "served")
  with pytest.raises(UserError, match=f"but {run / 'served'} has one"):
    serving.load(run)


def test_a_line_that_names_a_column_is_a_header(tmp_path):
  def names(text):
    (tmp_path / "rows.csv").write_text(text)
    format = Format(names=("user", "item", "time"))
    (table,) = rows_lib.of_file(str(tmp_path / "rows.csv"), format, ())
    return table.column_names, len(table)

  assert names("session,User,item,x\ns1,u1,i1,1\n") == (["session", "User", "item", "x"], 1)
  assert names("history\n1|2|3\n4|5|6\n") == (["history"], 2)
  assert names("u1,i1,3\nu2,i2,2\n") == (["user", "item", "time"], 2)
  assert names("u1,History,3\nu2,Art,4\n") == (["user", "item", "time"], 2)
