"""Predictions for rows as they are: files, bad rows, unknown and missing values, new users."""

import csv
import dataclasses
import gzip
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import refused
from served_models import LOG, run_of, write_log

from recipes import export, predict, serving
from recipes.errors import UserError
from recipes.tables.transforms import Transforms

HEADER = "clicked,price,age,city,shop,tags,part"
ROWS = {
  "price": [1.5, None, 7.0],
  "age": [20, 30, None],
  "city": ["c1", None, "c3"],
  "shop": ["s1", "s2", "nowhere"],
  "tags": [["t1", "t2"], [], ["t3"]],
}


def answers(trained, file, **options):
  """Returns header and rows that the command writes, and its note."""
  out = io.StringIO()
  note = predict.predict(str(trained.served), str(file), out, **options)
  header, *rows = csv.reader(io.StringIO(out.getvalue(), newline=""))
  return header, rows, note


def scores_of(trained, file, content=None):
  if content is not None:
    file.write_text(content)
  header, rows, _ = answers(trained, file)
  assert header[-1] == "score"
  return [float(row[-1]) for row in rows]


# --- files ----------------------------------------------------------------------------------------


def test_columns_come_in_any_order_with_others_and_without_label_weight_and_split(clicks, tmp_path):
  file = tmp_path / "rows.csv"
  plain = scores_of(clicks, file, f"{HEADER}\n1,4.5,30,c1,s2,t1|t2,test\n")
  other = scores_of(clicks, file, "tags;shop;note;city;age;price\nt1|t2;s2;x, y;c1;30;4.5\n")
  assert plain == other
  assert 0 < plain[0] < 1


def test_rows_keep_their_order_and_text_over_many_chunks(clicks, tmp_path, monkeypatch):
  monkeypatch.setattr("recipes.serving.rows._CHUNK", 7)
  lines = [f' {i}.50 ,030,"c{i % 9}, of\n""x""",s1,,{i}' for i in range(50)]
  (tmp_path / "rows.csv").write_text("\n".join(["price,age,city,shop,tags,id", *lines]) + "\n")
  header, rows, note = answers(clicks, tmp_path / "rows.csv")
  assert header == ["price", "age", "city", "shop", "tags", "id", "score"]
  expected = [[f" {i}.50 ", "030", f'c{i % 9}, of\n"x"', "s1", "", str(i)] for i in range(50)]
  assert [row[:-1] for row in rows] == expected
  assert note == "50 rows"


def test_all_kinds_of_files_and_of_python_rows_have_the_same_scores(clicks, tmp_path):
  expected = clicks.answering.predict(ROWS)
  pq.write_table(pa.table(ROWS), tmp_path / "rows.parquet")
  with gzip.open(tmp_path / "rows.csv.gz", "wt") as file:
    file.write("price,age,city,shop,tags\n1.5,20,c1,s1,t1|t2\n,30,,s2,\n7,NA,c3,nowhere,t3\n")
  by_row = [dict(zip(ROWS, values, strict=True)) for values in zip(*ROWS.values(), strict=True)]
  (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in by_row))
  for name in ("rows.parquet", "rows.csv.gz", "rows.jsonl"):
    np.testing.assert_array_equal(scores_of(clicks, tmp_path / name), expected)
  for rows in (by_row, pa.table(ROWS)):
    np.testing.assert_array_equal(clicks.answering.predict(rows), expected)
  assert clicks.answering.predict({name: [] for name in ROWS}).shape == (0,)
  out = str(tmp_path / "out.parquet")
  predict.main([str(clicks.served), str(tmp_path / "rows.parquet"), f"--out={out}"])
  written = pq.read_table(out)
  assert written.column_names == [*ROWS, "score"]
  assert written["tags"].to_pylist() == ROWS["tags"]
  np.testing.assert_array_equal(written["score"].to_numpy(), expected)


UNREADABLE = [
  ("", "is empty"),
  ("price,age,citi,shop,tags\n1,2,3,4,5\n", "no column 'city'.* did you mean 'citi'"),
  ("price,price,city,shop,tags\n1,2,3,4,5\n", "two columns 'price'"),
  (f"{HEADER}\n1,1,30,c,s,t,x\n1,x1,30,c,s,t,x\n", "row 2, column 'price': 'x1' is no number"),
  (f"{HEADER}\n1,1,30,c,s\n", "line 2 has too few fields for 7 columns"),
  (f"{HEADER}\n1,1,30,caf\udce9,s,t,x\n", "cannot be read .*utf-8"),
]


def test_rows_that_cannot_be_read_are_a_line_that_says_where(clicks, tmp_path):
  file = tmp_path / "rows.csv"

  def call(text):
    file.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogateescape"))
    predict.predict(str(clicks.served), str(file), io.StringIO())

  one_line = [(text, rf"^[^\n]*{message}[^\n]*$") for text, message in UNREADABLE]
  refused(one_line, call, UserError)
  (tmp_path / "rows.jsonl").write_text('{"price": 1}\n[2]\n')
  with pytest.raises(UserError, match=r"rows\.jsonl, row 2 is no JSON object"):
    answers(clicks, tmp_path / "rows.jsonl")


# --- clicks ---------------------------------------------------------------------------------------


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


@pytest.mark.ci
def test_every_feature_is_encoded_once(clicks, towers, monkeypatch):
  models = clicks.answering, towers.answering
  encoded, ids = [], Transforms.ids
  monkeypatch.setattr(Transforms, "ids", lambda *given: encoded.append(given[2]) or ids(*given))
  models[0].predict(ROWS)
  assert sorted(encoded) == ["age", "city", "shop", "tags"]
  encoded.clear()
  models[1].recommend({"who": ["u1"], "country": ["k1"]}, top=1)
  assert encoded == ["country"]


def test_written_scores_are_the_numbers_themselves(clicks):
  logits = np.array([17.0, 25.0, 37.0, 200.0, -104.0, 0.1], np.float32)
  model = serving.ClickModel(
    dataclasses.replace(clicks.answering.served, run=lambda inputs: np.resize(logits, 16))
  )
  scores = model.predict({name: 2 * values for name, values in ROWS.items()})
  assert ((scores > 0) & (scores < 1)).all()
  np.testing.assert_allclose(1 - scores[:2], np.exp(-logits[:2].astype(float)), rtol=1e-4)
  np.testing.assert_allclose(scores[4], np.exp(-104.0))
  dots = np.array([1 / 3, 0.1], np.float32)
  written = predict.texts_of(pa.table({"scores": scores[:2], "dots": dots}))
  assert [float(text) for text in written[0].to_pylist()] == scores[:2].tolist()
  assert np.array_equal(np.array(written[1].to_pylist(), np.float32), dots)
  assert written[1][1].as_py() == "0.1"


# --- recommendations ------------------------------------------------------------------------------


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


def recommended(model, rows, top=13, **lists):
  """Returns the recommended items of each row, without blanks."""
  items = model.recommend(rows, top=top, **lists).items
  return [[item for item in row if item is not None] for row in items]


@pytest.mark.ci
def test_items_are_allowed_and_denied_in_a_row_and_in_all(sequences, towers, monkeypatch):
  model, user = sequences.answering, {"who": "u3"}
  (ranked,) = recommended(model, [user])
  assert len(ranked) == 13
  of = lambda row, **lists: recommended(model, [user | row], **lists)[0]
  few, others = ranked[4:8], ranked[6:10]
  for given in (few, "|".join(few), [*few, "unheard of"]):
    assert of({"allow": given}) == few
    assert of({"deny": given}) == [item for item in ranked if item not in few]
  assert of({}, allow=few) == of({"allow": "", "deny": None}, allow=few) == few
  assert of({}, allow=[], deny=few) == of({"allow": []}) == of({"allow": "unheard of"}) == []
  assert of({"allow": few}, allow=others) == few[2:]
  assert of({"deny": few}, deny=others) == ranked[:4] + ranked[10:]
  assert of({"allow": few, "deny": few[:1]}, deny=few[1:2]) == few[2:]
  assert recommended(model, [user | {"allow": few}, user], top=2) == [few[:2], ranked[:2]]
  # The most popular items are those of rows without any known value.
  popular, of_new = recommended(model, [{"who": "new"}])[0], {"who": "new", "allow": few}
  assert recommended(model, [of_new], deny=few[:1])[0] == [i for i in popular if i in few[1:]]
  # What a user has had is not recommended, though it is allowed.
  seen = [towers.answering._items.texts[i] for i in towers.answering._history[:4]]
  assert recommended(towers.answering, {"history": [seen], "allow": [[*seen, "i99"]]}) == [["i99"]]
  with pytest.raises(UserError, match="allow is 'i1': give a list"):
    model.recommend([user], allow="i1")
  monkeypatch.setattr(model, "_declared", {"deny"})
  with pytest.raises(UserError, match="declared it as something else: leave it out"):
    model.recommend([user | {"deny": few}])


@pytest.mark.ci
def test_lists_of_a_thousand_users_are_those_of_brute_force_by_exported_vectors(tmp_path):
  file, ranks = write_log(tmp_path / "log.csv"), {"ks": (5,), "select": "valid_ndcg@5"}
  table = {"files": str(file), "columns": LOG, "batch_size": 64, "dim": 8} | ranks
  run_of("two_tower", table, tmp_path / "run")
  paths = {name: tmp_path / f"{name}.parquet" for name in ("vectors", "user-vectors")}
  options = [f"--{name}={path}" for name, path in paths.items()]
  export.main([str(tmp_path / "run"), f"--out={tmp_path / 'served'}", *options])
  model, draw = serving.load(tmp_path / "served"), np.random.default_rng(0)
  stored = [pq.read_table(path) for path in paths.values()]
  items, users = (table["id"].to_pylist()[:1000] for table in stored)
  vectors, queries = (np.array(table["vector"].to_pylist(), np.float32)[:1000] for table in stored)
  assert stored[0].schema.field("vector").type == pa.list_(pa.float32())
  scores = queries @ vectors.T
  for user in range(1000):
    scores[user, model._history[model._offsets[user] : model._offsets[user + 1]]] = -np.inf
  drawn = np.argsort(draw.random(scores.shape), axis=1)
  lists = {("allow", n): drawn[:, :n] for n in (1, 10, len(items))} | {("deny", 3): drawn[:, 3:]}
  for (name, _), chosen in lists.items():
    is_listed = np.zeros(scores.shape, bool)
    np.put_along_axis(is_listed, chosen, True, axis=1)
    wanted = np.sort(np.where(is_listed == (name == "allow"), scores, -np.inf))[:, :-11:-1]
    rows = {"who": users, name: [[items[i] for i in row] for row in chosen]}
    answers = model.recommend(rows)
    np.testing.assert_array_equal(np.equal(answers.items, None), wanted == -np.inf)
    found = np.nan_to_num(answers.scores, nan=-np.inf)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    for row, kept in zip(answers.items, rows[name], strict=True):
      assert all((item in kept) == (name == "allow") for item in row if item is not None)


@pytest.mark.ci
@pytest.mark.parametrize("of", ["item", "user"])
def test_those_alike_have_the_largest_cosines(of, towers):
  model = towers.answering
  ids, vectors = model.vectors(of)
  unit = vectors[:, :-1] / np.linalg.norm(vectors[:, :-1], axis=1, keepdims=True)
  cosines = unit @ unit.T - 9 * np.eye(len(ids))
  answers = model.similar([ids[7], "unheard of", ids[2]], of, top=5)
  for row, place in ((0, 7), (2, 2)):
    assert answers.items[row].tolist() == [ids[i] for i in np.argsort(-cosines[place])[:5]]
    np.testing.assert_allclose(answers.scores[row], np.sort(cosines[place])[:-6:-1], rtol=1e-5)
  assert answers.items[1].tolist() == [None] * 5
  assert np.isnan(answers.scores[1]).all()
  alone = model.similar(ids[:1], of, top=len(ids))  # all but itself
  assert sorted(alone.items[0, :-1]) == sorted(ids[1:])
  assert alone.items[0, -1] is None
  with pytest.raises(UserError, match="side is 'film': choose 'item' or 'user'"):
    model.similar(ids, "film")


@pytest.mark.ci
def test_lists_and_those_alike_by_the_command(towers, tmp_path):
  (tmp_path / "rows.csv").write_text("who,deny\nnew,i3\nnew,\n")
  (tmp_path / "allow.txt").write_text("i3\r\n i5 \n\nunheard of\n")
  options = {"top": 2, "allow": str(tmp_path / "allow.txt")}
  header, rows, _ = answers(towers, tmp_path / "rows.csv", **options)
  assert header[:3] == ["who", "deny", "item_1"]
  assert [{row[2], row[5]} for row in rows] == [{"i5", ""}, {"i3", "i5"}]
  (tmp_path / "ids.csv").write_text("what,note\ni3,a\nunheard of,b\n")
  header, rows, note = answers(towers, tmp_path / "ids.csv", top=1, similar="item")
  assert header == ["what", "note", "item_1", "score_1", "title_1"]
  assert rows[0][2] == towers.answering.similar(["i3"], top=1).items[0, 0]
  assert rows[1][2:] == ["", "", ""]
  assert note == "2 rows, 1 without scores: an unknown id"
  header, _, _ = answers(towers, tmp_path / "rows.csv", top=1, similar="user")
  assert header == ["who", "deny", "user_1", "score_1"]
  with pytest.raises(UserError, match="no column 'who', with the raw ids"):
    answers(towers, tmp_path / "ids.csv", similar="user")
  with pytest.raises(UserError, match="leave out --allow and --deny"):
    answers(towers, tmp_path / "ids.csv", similar="item", deny="x")
  with pytest.raises(UserError, match="cannot be read"):
    answers(towers, tmp_path / "rows.csv", deny=str(tmp_path / "ids.txt"))


@pytest.mark.ci
def test_recommendations_are_columns_of_raw_ids_scores_and_titles(towers, tmp_path):
  (tmp_path / "rows.csv").write_text("who,note\nu3,a\nnew,b\n")
  header, rows, note = answers(towers, tmp_path / "rows.csv", top=2)
  assert header == ["who", "note", "item_1", "score_1", "title_1", "item_2", "score_2", "title_2"]
  assert [row[:2] for row in rows] == [["u3", "a"], ["new", "b"]]
  assert rows[0][4] == f"No. {rows[0][2][1:]}, the film"
  assert float(rows[0][3]) >= float(rows[0][6])
  assert rows[1][3] == rows[1][6] == ""
  assert note.startswith("2 rows, 1 without scores")


@pytest.mark.ci
def test_what_no_model_can_answer_is_said(clicks, towers, tmp_path):
  (tmp_path / "rows.csv").write_text("note\nx\n")
  with pytest.raises(UserError, match="none of the columns who, country, history"):
    answers(towers, tmp_path / "rows.csv")
  for options in ({"top": 3}, {"allow": "x"}, {"deny": "x"}, {"similar": "item"}):
    with pytest.raises(UserError, match=f"--{next(iter(options))} is for"):
      answers(clicks, tmp_path / "rows.csv", **options)
  for top in (0, 14):
    with pytest.raises(UserError, match=f"top is {top}: choose 1 to 13"):
      towers.answering.recommend([{"who": "u3"}], top=top)
  with pytest.raises(UserError, match=r"has no served\.json.*recipes\.export RUN --out=FOLDER"):
    serving.load(tmp_path)
