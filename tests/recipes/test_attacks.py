"""Names from others, in configs that `describe` writes and in pages, are text and no code."""

import pathlib
import runpy

from cases import each

from recipes import describe

ROOT = pathlib.Path(__file__).parents[2]
MARKS = "\u202e\u2066"  # turn the direction of writing


def write_table(path, header="city"):
  lines = [f"{i % 2},c{i % 7}" for i in range(400)]
  path.write_text("\n".join([f"clicked,{header}", *lines]) + "\n")
  return path


NAMES = {
  "closed": 'day """;open("ran", "w");""" .csv',
  "lines": 'a\n"""\nopen("ran", "w")\n"""\n.csv',
  "backslash": '\\"""\nopen("ran", "w")#.csv',
  "single": "a'''\nopen('ran', 'w')\n'''.csv",
  "direction": f"a{MARKS}b.csv",
}


def test_names_are_no_code(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)

  def check(name, is_column):
    column = name.replace('"', '""').replace(".csv", "")
    table = write_table(pathlib.Path("t.csv" if is_column else name), f'"{column}"')
    pathlib.Path("my.py").unlink(missing_ok=True)
    try:
      describe.main([str(table), "--label=clicked", "--out=my.py"])
    except SystemExit:  # a header over several lines is refused
      assert is_column
      assert not pathlib.Path("my.py").exists()
      return
    text = pathlib.Path("my.py").read_text()
    assert all(char.isprintable() or char == "\n" for char in text)
    config = runpy.run_path("my.py")["get_config"]()
    assert not pathlib.Path("ran").exists()
    assert is_column or config["files"] == name

  each(
    {f"{key}, {of}": (NAMES[key], of == "column") for key in NAMES for of in ("file", "column")},
    check,
  )


def test_no_page_names_a_package_that_an_index_may_give_to_others():
  pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/**/*")]
  text = {path: path.read_text() for path in pages if path.suffix in (".md", ".py")}
  assert not [path for path, each in text.items() if "pip install sparse-embed" in each]
  assert not [path for path, each in text.items() if "pip install 'sparse-embed" in each]
