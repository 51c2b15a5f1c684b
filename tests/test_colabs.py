"""The notebooks: every week each runs from top to bottom; what is committed is what a run left."""

import builtins
import os
import re
import types

import matplotlib
import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

import recipes
from colabs import address, execute
from recipes import style

PATHS = sorted(execute.HERE.glob("*.ipynb"))
QUICKSTART = execute.HERE / "quickstart.ipynb"


def read(path):
  return nbformat.read(path, as_version=4)


def code(notebook):
  return [cell for cell in notebook.cells if cell.cell_type == "code"]


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


@pytest.mark.weekly  # each takes one or two minutes
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_it_runs(path, tmp_path):
  """On a machine with one device, as most are. It shows and says what is committed."""
  ran, committed = execute.execute(path, tmp_path), read(path)
  assert kinds(ran) == kinds(committed)
  assert texts(ran) == texts(committed)


@pytest.mark.ci
def test_what_is_committed_is_as_the_scripts_write_it(tmp_path):
  """Outputs of one run without a warning, the project's address, and no folder of a machine."""
  for path in PATHS:
    notebook = read(path)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in code(notebook)]
    assert counts == list(range(1, len(counts) + 1)), path
    for output in (output for cell in code(notebook) for output in cell.outputs):
      assert output.output_type != "error", path
      assert not re.search(r"Warning|WARNING|Traceback", output.get("text", "")), path
    copy = tmp_path / path.name
    nbformat.write(execute.cleaned(read(path)), copy)
    assert copy.read_text() == path.read_text()
    address.stamp_notebook(notebook, address.repository(), path.name)
    assert notebook == read(path), "run python colabs/address.py"
    text = re.sub(r'"image/png": "[^"]*"', "", path.read_text())  # letters that may spell anything
    assert not re.search(r"(?<![\w.])/(work|tmp|home|root|Users)/", text), path
    source = "\n".join(cell.source for cell in code(notebook))
    by_path = r"^ *(from|import) (recipes|configs)\b|sys\.path"  # which is not installed so
    assert not re.search(by_path, source, re.MULTILINE), path


def run_first_cell(monkeypatch, folder, missing, repository=""):
  """The lines that the quickstart's first cell gives to the shell.

  Imports of `missing` fail until there is one.
  """
  lines, variables, really_import = [], {}, builtins.__import__

  def fake_import(name, *args, **kwargs):
    if f"{name}.".startswith(f"{missing}.") and not lines:
      raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    # The name under which it is installed, where it may be another checkout's.
    return recipes if name == "embed.recipes" else really_import(name, *args, **kwargs)

  notebook = read(QUICKSTART)
  address.stamp_notebook(notebook, repository, QUICKSTART.name)
  source = TransformerManager().transform_cell(code(notebook)[0].source)
  run_line = lambda name, line, *_: lines.append(f"{name} {line}".format_map(variables))
  variables["get_ipython"] = lambda: types.SimpleNamespace(run_line_magic=run_line)
  with monkeypatch.context() as patch, matplotlib.rc_context():
    patch.chdir(folder)
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):  # to be put back: a notebook may set them
      patch.setenv(name, os.environ.get(name, ""))
    patch.setattr(builtins, "__import__", fake_import)
    exec(compile(source, QUICKSTART.name, "exec"), variables)
    assert matplotlib.rcParams["text.color"] == style.GREY
  return lines


@pytest.mark.ci
def test_the_first_cell_installs_what_is_missing(tmp_path, monkeypatch):
  """From a checkout, or from the repository where a notebook is by itself, as on Colab."""
  checkout, alone = tmp_path / "checkout" / "colabs", tmp_path / "alone"
  for folder in (checkout, alone):
    folder.mkdir(parents=True)
  (checkout.parent / "pyproject.toml").touch()
  for missing in ("embed", "embed.recipes"):  # of a library without recipes, only they are missing
    lines = run_first_cell(monkeypatch, checkout, missing, "an-address")
    assert lines == ['pip install --quiet "..[recipes]"']
  assert run_first_cell(monkeypatch, checkout, None, "an-address") == []
  lines = run_first_cell(monkeypatch, alone, "embed", "https://git.example.org/x")
  wanted = 'pip install --quiet "sparse-embed[recipes] @ git+https://git.example.org/x"'
  assert lines == [wanted]
  with pytest.raises(AssertionError, match="Set REPOSITORY"):
    run_first_cell(monkeypatch, alone, "embed")
  installs = [code(read(path))[0].source.partition("source = ")[2].split("%")[0] for path in PATHS]
  assert installs[0]
  assert len(set(installs)) == 1


@pytest.mark.ci
def test_an_address_is_written_once_and_taken_out_again():
  notebook, before = read(QUICKSTART), read(QUICKSTART)
  address.stamp_notebook(before, "", QUICKSTART.name)
  for _ in range(2):
    address.stamp_notebook(notebook, "https://github.com/someone/a-fork", QUICKSTART.name)
  link = "https://colab.research.google.com/github/someone/a-fork/blob/main/colabs/quickstart.ipynb"
  assert notebook.cells[0].source.count("colab-badge") == 1
  assert f"]({link})" in notebook.cells[0].source
  given = 'REPOSITORY = "https://github.com/someone/a-fork"  # for Colab'
  assert code(notebook)[0].source.count(given) == 1
  address.stamp_notebook(notebook, "https://git.example.org/x", QUICKSTART.name)
  assert "colab-badge" not in notebook.cells[0].source  # Colab opens notebooks of GitHub alone
  address.stamp_notebook(notebook, "", QUICKSTART.name)
  assert notebook == before


@pytest.mark.ci
def test_pages_have_the_address_of_pyproject(tmp_path):
  for page in ("colabs/README.md", "docs/shard.md"):
    text = (address.ROOT / page).read_text()
    assert address.stamp_text(text, address.repository()) == text, "run python colabs/address.py"
    with_it = address.stamp_text(text, "https://github.com/someone/a-fork")
    assert address.stamp_text(with_it, "https://github.com/someone/a-fork") == with_it
    assert with_it.count("colab-badge") == (len(PATHS) if "colabs" in page else 0)
    assert ("git clone https://github.com/someone/a-fork sparse_embed" in with_it) == (
      "shard" in page
    )
    assert address.stamp_text(with_it, address.repository()) == text
  pyproject = tmp_path / "pyproject.toml"
  for urls, wanted in (("", ""), ('Repository = "https://git.org/a/b.git"', "https://git.org/a/b")):
    pyproject.write_text(f"[project]\nname = 'x'\n[project.urls]\n{urls}\n")
    assert address.repository(pyproject) == wanted
