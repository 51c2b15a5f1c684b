"""The notebooks: each runs from top to bottom, and what is committed is what a run left."""

import builtins
import os
import pathlib
import re
import sys
import types

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

from colabs import address, execute

PATHS = sorted(execute.HERE.glob("*.ipynb"))
each = pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])


def read(path):
  return nbformat.read(path, as_version=4)


def code(notebook):
  return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook):
  return [output for cell in code(notebook) for output in cell.outputs]


def kinds(notebook):
  """What each cell shows: the kinds of its outputs, and of which formats they are.

  Both streams of a cell are first: which of them comes before the other is a race.
  """
  return [
    sorted({out.name for out in cell.outputs if out.output_type == "stream"})
    + [sorted(out.data) for out in cell.outputs if "data" in out]
    for cell in code(notebook)
  ]


def texts(notebook):
  """What each cell says, without what differs between runs and machines.

  Those are numbers, how wide they are printed, and the stars beside suggestions that were right.
  """
  number = r"[-+]?\d+([.,]\d+)*\.?(e[-+]?\d+)?[kMG%]?|\b(nan|inf)\b"
  said = []
  for cell in code(notebook):
    for name in ("stdout", "stderr"):
      said.append("".join(out.text for out in cell.outputs if out.get("name") == name))
    said += [out.data.get("text/plain", "") for out in cell.outputs if "data" in out]
  return [re.sub(r"[\s*]+", " ", re.sub(number, " # ", text)).strip() for text in said]


@pytest.mark.full
@each
def test_it_runs(path, tmp_path):
  """On a machine with one device, as most are. It shows and says what is committed."""
  ran, committed = execute.execute(path, tmp_path), read(path)
  assert kinds(ran) == kinds(committed)
  assert texts(ran) == texts(committed)


def test_text_that_went_stale_is_found_and_other_numbers_are_not():
  def says(text):
    stream = nbformat.v4.new_output("stream", text=text)
    return texts(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=[stream])]))

  assert says("loss 0.7, 1,004.6k B, [ 8 nan]\n") == says("loss -1.25e-3,  2.0M B, [71  -3.]\n")
  assert says("loss 0.7 in 3 steps") != says("error 0.7 in 3 steps")
  assert says("ids [1 2]") != says("ids [1 2 3]")


@each
def test_its_outputs_are_of_one_run(path):
  notebook = read(path)
  nbformat.validate(notebook)
  counts = [cell.execution_count for cell in code(notebook)]
  assert counts == list(range(1, len(counts) + 1))
  for output in outputs(notebook):
    assert output.output_type != "error"
    warned = re.search(r".*(Warning|WARNING|Traceback).*", output.get("text", ""))
    assert not warned, warned[0]


@each
def test_it_ends_in_a_picture(path):
  last = code(read(path))[-1]
  assert any("image/png" in output.get("data", ()) for output in last.outputs)


@each
def test_the_file_is_as_the_script_writes_it(path, tmp_path):
  """So that a diff shows what has changed: no times, no ids drawn anew, no editor's settings."""
  copy = tmp_path / path.name
  nbformat.write(execute.cleaned(read(path)), copy)
  assert copy.read_text() == path.read_text()


@each
def test_it_names_no_folder_of_ours_and_no_host_of_packages(path):
  text = re.sub(r'"image/png": "[^"]*"', "", path.read_text())  # letters that may spell anything
  for pattern in (r"(?<![\w.])/(work|tmp|home|root|Users)/", r"pypi|pythonhosted|conda\.anaconda"):
    found = re.search(f".*({pattern}).*", text)
    assert not found, found[0]


@each
def test_it_has_a_title_and_says_where_to_go_on(path):
  first, *_, last = read(path).cells
  assert first.cell_type == last.cell_type == "markdown"
  assert re.match(r"# \w", first.source)
  links = re.findall(r"\]\((?!http)([^)#]+)\)", last.source)
  assert links
  for link in links:
    assert (path.parent / link).exists(), link


class Shell:
  """What a cell does to the shell, written down; of it all, only folders and `cd` are real."""

  def __init__(self):
    self.lines = []

  def run_line_magic(self, name, line, *_):
    self.lines.append(f"{name} {line}")
    if name == "cd":
      os.chdir(line.split()[-1])

  def system(self, line):
    self.lines.append(line)
    if line.startswith("git clone"):
      make_checkout(pathlib.Path(line.split()[-1]))

  getoutput = system

  @property
  def installs(self):
    return [line for line in self.lines if re.match(r"pip .*install", line)]


def make_checkout(folder):
  (folder / "colabs").mkdir(parents=True)
  (folder / "pyproject.toml").touch()


@pytest.fixture
def run_first_cell(monkeypatch, tmp_path):
  """Runs a notebook's first cell, `import embed` failing, if so asked, until it is installed."""

  def run(path, folder, missing, repository=""):
    shell, really_import = Shell(), builtins.__import__

    def fake_import(name, *args, **kwargs):
      if name.split(".")[0] == "embed" and missing and not shell.installs:
        raise ModuleNotFoundError("No module named 'embed'", name="embed")
      return really_import(name, *args, **kwargs)

    monkeypatch.chdir(folder)
    monkeypatch.setenv("XLA_FLAGS", "")  # to be put back: a notebook may set it
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(builtins, "__import__", fake_import)
    notebook = read(path)
    address.stamp_notebook(notebook, repository, path.name)
    source = TransformerManager().transform_cell(code(notebook)[0].source)
    exec(compile(source, path.name, "exec"), {"get_ipython": lambda: shell})
    return shell

  return run


@pytest.mark.parametrize("missing", [True, False], ids=["missing", "there"])
@each
def test_the_first_cell_installs_what_is_missing(path, missing, tmp_path, run_first_cell):
  """In a checkout."""
  make_checkout(tmp_path)
  shell = run_first_cell(path, tmp_path / "colabs", missing)
  assert len(shell.lines) == len(shell.installs) == missing
  for line in shell.installs:
    target = re.search(r"([^\s\"'\[]+)(\[\w+\])?[\"']?$", line)[1]
    assert (pathlib.Path(target) / "pyproject.toml").exists(), line


@each
def test_the_first_cell_clones_where_there_is_no_checkout(path, tmp_path, run_first_cell):
  """As on Colab: a notebook by itself in a folder."""
  (tmp_path / "content").mkdir()
  shell = run_first_cell(path, tmp_path / "content", missing=True, repository="an-address")
  assert shell.lines == [
    "git clone --quiet {REPOSITORY} sparse-embed",  # the real shell puts the variable in
    "cd -q sparse-embed/colabs",
    'pip install --quiet --editable "..[recipes]"',
  ]
  assert pathlib.Path("../pyproject.toml").exists()


@each
def test_the_first_cell_asks_for_the_repository_to_clone(path, tmp_path, run_first_cell):
  (tmp_path / "content").mkdir()
  with pytest.raises(AssertionError, match="Set REPOSITORY"):
    run_first_cell(path, tmp_path / "content", missing=True)


@each
def test_the_address_is_that_of_pyproject(path):
  notebook = read(path)
  address.stamp_notebook(notebook, address.repository(), path.name)
  assert notebook == read(path), "run python colabs/address.py"


@each
def test_an_address_is_written_once_and_taken_out_again(path):
  notebook, before = read(path), read(path)
  address.stamp_notebook(before, "", path.name)
  for _ in range(2):
    address.stamp_notebook(notebook, "https://github.com/someone/a-fork", path.name)
  title, cell = notebook.cells[0].source.split("\n\n"), code(notebook)[0].source
  link = f"https://colab.research.google.com/github/someone/a-fork/blob/main/colabs/{path.name}"
  assert title[1].endswith(f"]({link})")
  assert sum("colab-badge" in part for part in title) == 1
  assert cell.count('REPOSITORY = "https://github.com/someone/a-fork"  # for Colab') == 1
  nbformat.validate(notebook)
  address.stamp_notebook(notebook, "https://git.example.org/x", path.name)
  assert "colab-badge" not in notebook.cells[0].source  # Colab opens notebooks of GitHub alone
  address.stamp_notebook(notebook, "", path.name)
  assert notebook == before


def test_pages_have_the_address_of_pyproject():
  for page in ("colabs/README.md", "docs/tpu_pods.md"):
    text = (address.ROOT / page).read_text()
    assert address.stamp_text(text, address.repository()) == text, "run python colabs/address.py"
    with_it = address.stamp_text(text, "https://github.com/someone/a-fork")
    assert address.stamp_text(with_it, "https://github.com/someone/a-fork") == with_it
    assert with_it.count("colab-badge") == (len(PATHS) if "colabs" in page else 0)
    assert ("git clone https://github.com/someone/a-fork sparse_embed" in with_it) == (
      "tpu_pods" in page
    )
    assert address.stamp_text(with_it, address.repository()) == text


def test_the_address_is_read_from_one_place(tmp_path):
  pyproject = tmp_path / "pyproject.toml"
  for text, wanted in (
    ("", ""),
    ('Repository = "https://github.com/a/b.git"', "https://github.com/a/b"),
  ):
    pyproject.write_text(f"[project]\nname = 'x'\n[project.urls]\n{text}\n")
    assert address.repository(pyproject) == wanted


RECIPES = [path for path in PATHS if "from recipes import" in path.read_text()]


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_a_notebook_about_a_recipe_says_where_recipes_are(path, tmp_path, monkeypatch):
  """An `embed` by itself, as from a wheel, has no recipes beside it."""
  monkeypatch.setattr(sys, "path", list(sys.path))
  (cell,) = (cell for cell in code(read(path)) if "sys.path.append" in cell.source)
  namespace = {"embed": types.SimpleNamespace(__file__=str(tmp_path / "embed" / "__init__.py"))}
  with pytest.raises(ModuleNotFoundError, match=r"Recipes are imported from a checkout"):
    exec(cell.source, namespace)
  assert str(tmp_path) not in sys.path

  (tmp_path / "recipes").mkdir()
  exec(cell.source, namespace)
  assert sys.path[-1] == str(tmp_path)


def test_the_pictures_are_of_one_style():
  """Transparent, in a grey for light and for dark pages: by the same lines everywhere."""
  sources = ["\n".join(cell.source for cell in code(read(path))) for path in PATHS]
  block = re.compile(r"GREY = .*?axes\.spines\.right[^\n]*", re.DOTALL)
  assert len({block.search(source)[0] for source in sources}) == 1
  for source in sources:
    assert "facecolor=" not in source
