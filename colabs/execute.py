"""Runs notebooks from top to bottom and keeps their outputs: what is committed comes from here.

    python colabs/execute.py                   # all of them
    python colabs/execute.py quickstart.ipynb  # some

A notebook runs in an empty folder, with the packages of this checkout as a wheel installs them, on
the CPU.
"""

import os
import pathlib
import sys
import tempfile

import nbclient
import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

HERE = pathlib.Path(__file__).resolve().parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def installed(folder: pathlib.Path) -> pathlib.Path:
  """Returns a folder to import from, with links to what `pip install` would copy there.

  Recipes and configs are called `embed.recipes` and `embed.configs` in it.
  """
  (folder / "embed").mkdir(parents=True)
  root = HERE.parent
  for source in (*(root / "embed").iterdir(), root / "recipes", root / "configs"):
    (folder / "embed" / source.name).symlink_to(source)
  return folder


def execute(path: pathlib.Path, folder: str | pathlib.Path) -> nbformat.NotebookNode:
  """Returns a notebook as a run leaves it.

  Args:
    path: the notebook, which stays as it is.
    folder: where it runs.

  Raises:
    nbclient.exceptions.CellExecutionError: a cell raised.
  """
  notebook = nbformat.read(path, as_version=4)
  # Without folders to look for kernels in there is one, that of the running interpreter.
  specs = KernelSpecManager(kernel_dirs=[])
  client = nbclient.NotebookClient(
    notebook,
    km=AsyncKernelManager(kernel_name=KERNEL["name"], kernel_spec_manager=specs),
    timeout=600,
    record_timing=False,
    coalesce_streams=True,
    extra_arguments=["--log-level=ERROR"],
    resources={"metadata": {"path": str(folder)}},
  )
  environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "MPLBACKEND")}
  environment |= {
    "PYTHONPATH": str(installed(pathlib.Path(folder) / ".packages")),
    "JAX_PLATFORMS": "cpu",
    "IPYTHONDIR": str(pathlib.Path(folder) / ".ipython"),  # nobody's settings and start-up files
  }
  # Given a manager, the client leaves it to its owner to stop the kernel.
  return client.execute(env=environment, cleanup_kc=True)


def cleaned(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
  """Without what differs from run to run, or from one program that edits notebooks to another."""
  notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
  notebook.nbformat_minor = 5
  for i, cell in enumerate(notebook.cells):
    cell.id, cell.metadata = f"cell-{i}", {}
  return notebook


def main(names: list[str]) -> None:
  for path in [HERE / name for name in names] or sorted(HERE.glob("*.ipynb")):
    with tempfile.TemporaryDirectory() as folder:
      nbformat.write(cleaned(execute(path, folder)), path)
    print(path.name)


if __name__ == "__main__":
  main(sys.argv[1:])
