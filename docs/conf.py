"""The documentation site: `python -m sphinx -W --keep-going -n -b html docs docs/_build/html`."""

import importlib.metadata
import pathlib
import shutil
import tomllib

from ipython_pygments_lexers import IPython3Lexer

_HERE = pathlib.Path(__file__).parent

project = "SparseEmbed"
copyright = "The SparseEmbed authors"
release = importlib.metadata.version("sparse-embed")

extensions = [
  "myst_nb",
  "sphinx.ext.autodoc",
  "sphinx.ext.napoleon",
  "sphinx_copybutton",
  "sphinx_design",
]
exclude_patterns = ["_build", "colabs/README.md"]
html_theme = "furo"
# The address is set there; `python colabs/address.py` writes it into the notebooks.
_URLS = tomllib.loads((_HERE.parent / "pyproject.toml").read_text())["project"].get("urls", {})
if "Repository" in _URLS:
  _LINK = {"name": "Source", "url": _URLS["Repository"], "html": "source", "class": ""}
  html_theme_options = {"footer_icons": [_LINK]}
html_title = "SparseEmbed"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
pygments_dark_style = "github-dark"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the notebooks hold the outputs of a run; the tests execute them

default_role = "code"  # docstrings write code in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings say types; those of other projects would want inventories
maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_attr_annotations = False
napoleon_custom_sections = [("Attributes", "params_style")]  # "Variables" are nnx's here
toc_object_entries_show_parents = "hide"

copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

linkcheck_timeout = 20
linkcheck_allowed_redirects = {r"https://.*": r"https://.*"}  # readthedocs and doi forward


def _copy_notebooks(app) -> None:
  """Sphinx reads nothing outside its source folder."""
  target = _HERE / "colabs"
  shutil.rmtree(target, ignore_errors=True)
  shutil.copytree(_HERE.parent / "colabs", target)


def setup(app) -> None:
  app.add_lexer("python", IPython3Lexer)  # first cells of notebooks have `!` and `%`
  app.connect("builder-inited", _copy_notebooks)
