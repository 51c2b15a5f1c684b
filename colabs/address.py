"""Writes the project's address into the notebooks, with a badge that opens each of them in Colab.

The address is set in one place, `Repository` under `[project.urls]` in pyproject.toml. Then

    python colabs/address.py

writes it wherever a file has to have it: in the first code cell of every notebook, which installs
from it in Colab, under the title of the notebook, in `colabs/README.md` and in `docs/shard.md`.
Without an address it takes them out again.
"""

import pathlib
import re
import tomllib

import nbformat

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "colabs").glob("*.ipynb"))
BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
BRANCH = "main"


def repository(pyproject: pathlib.Path = ROOT / "pyproject.toml") -> str:
  """Returns the address of the project's git repository; "" if it has none yet."""
  urls = tomllib.loads(pyproject.read_text())["project"].get("urls", {})
  return urls.get("Repository", "").removesuffix("/").removesuffix(".git")


def badge(address: str, name: str) -> str:
  """Returns the badge of a notebook in Markdown; "" where Colab cannot read the address."""
  owner = address.removeprefix("https://github.com/")
  if owner == address:
    return ""
  link = f"https://colab.research.google.com/github/{owner}/blob/{BRANCH}/colabs/{name}"
  return f"[![Open in Colab]({BADGE})]({link})"


def stamp_notebook(notebook: nbformat.NotebookNode, address: str, name: str) -> None:
  """Writes an address into a notebook, in place.

  Raises:
    ValueError: the notebook has no line for it.
  """
  title = notebook.cells[0]
  heading, _, rest = title.source.partition("\n")
  rest = _without_badges(rest).lstrip("\n")
  title.source = "\n\n".join(filter(None, [heading, badge(address, name), rest]))
  cell = next(cell for cell in notebook.cells if cell.cell_type == "code")
  line = f'REPOSITORY = "{address}"'
  cell.source, count = re.subn(r'^REPOSITORY = ".*?"', line, cell.source, flags=re.MULTILINE)
  if count != 1:
    raise ValueError(f'{name}: the first code cell needs one line `REPOSITORY = ""`')


def stamp_text(text: str, address: str) -> str:
  """Returns a page with the address in its commands, and badges in its table of notebooks."""
  text = re.sub(r"git clone \S+", f"git clone {address or 'REPOSITORY'}", _without_badges(text))
  linked = lambda row: f"{row[0]} {badge(address, row[1])}".rstrip()
  return re.sub(r"(?m)^\| \[\w+\]\((\w+\.ipynb)\)", linked, text)


def _without_badges(text: str) -> str:
  return re.sub(r" ?\[!\[Open in Colab\]\(\S*\)\]\(\S*\)", "", text)


def main() -> None:
  address = repository()
  for path in NOTEBOOKS:
    notebook = nbformat.read(path, as_version=4)
    stamp_notebook(notebook, address, path.name)
    nbformat.write(notebook, path)
  for path in (ROOT / "colabs" / "README.md", ROOT / "docs" / "shard.md"):
    path.write_text(stamp_text(path.read_text(), address))
  print(address or "pyproject.toml has no Repository under [project.urls]: addresses taken out")


if __name__ == "__main__":
  main()
