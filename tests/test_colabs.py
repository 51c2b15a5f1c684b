"""The notebooks: each runs from top to bottom, and what is committed is what a run left."""

import builtins
import pathlib
import re
import sys

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

from colabs import execute

PATHS = sorted(execute.HERE.glob("*.ipynb"))
each = pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])


def read(path):
  return nbformat.read(path, as_version=4)


def code(notebook):
  return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook):
  return [output for cell in code(notebook) for output in cell.outputs]


def kinds(notebook):
  """What each cell shows: the kinds of its outputs, and of which formats they are."""
  return [
    [(output.output_type, *sorted(output.get("data", ()))) for output in cell.outputs]
    for cell in code(notebook)
  ]


@each
def test_it_runs(path, tmp_path):
  """On a machine with one device, as most are. Its outputs are of the kinds committed."""
  ran = execute.execute(path, tmp_path)
  assert kinds(ran) == kinds(read(path))


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
  """What a cell does to the shell, written down."""

  def __init__(self):
    self.lines = []

  def run_line_magic(self, name, line, *_):
    self.lines.append(f"{name} {line}")

  def system(self, line):
    self.lines.append(line)

  getoutput = system

  @property
  def installs(self):
    return [line for line in self.lines if re.match(r"pip .*install", line)]


@pytest.mark.parametrize("place", ["missing", "there"])
@each
def test_the_first_cell_installs_what_is_missing(path, place, tmp_path, monkeypatch):
  """In a checkout, `import embed` failing until there was an installation, and as it is here."""
  shell, really_import = Shell(), builtins.__import__

  def fake_import(name, *args, **kwargs):
    if name.split(".")[0] == "embed" and place == "missing" and not shell.installs:
      raise ModuleNotFoundError("No module named 'embed'", name="embed")
    return really_import(name, *args, **kwargs)

  (tmp_path / "colabs").mkdir()
  (tmp_path / "pyproject.toml").touch()
  monkeypatch.chdir(tmp_path / "colabs")
  monkeypatch.setenv("XLA_FLAGS", "")  # to be put back: a notebook may set it
  monkeypatch.setattr(sys, "path", list(sys.path))
  monkeypatch.setattr(builtins, "__import__", fake_import)
  source = TransformerManager().transform_cell(code(read(path))[0].source)
  exec(compile(source, path.name, "exec"), {"get_ipython": lambda: shell})
  assert len(shell.installs) == (place == "missing")
  for line in shell.installs:
    target = re.search(r"([^\s\"'\[]+)(\[\w+\])?[\"']?$", line)[1]
    assert (pathlib.Path(target) / "pyproject.toml").exists(), line
