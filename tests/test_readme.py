"""The README's example runs as it stands, and its commands name what exists."""

import pathlib
import re

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()


def test_the_examples_run(capsys):
  scope = {}
  for example in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
    exec(compile(example, "README.md", "exec"), scope)
  assert float(scope["loss"]) > 0
  untouched = scope["model"].embed.variables["movie"]["accumulators"][0]
  assert (untouched == untouched[0]).all()
  assert scope["layer"](scope["batch"])["watched"].shape == (2, 64)
  assert scope["plan"]["movie"].strategy == "div"
  assert "on each of 8 devices" in capsys.readouterr().out


def test_paths_exist():
  root = pathlib.Path(__file__).parents[1]
  for path in re.findall(r"--config=(\S+?\.py)", README):
    assert (root / path).exists(), path
  for path in re.findall(r"\]\((?!http)([^)#]+)\)", README):
    assert (root / path).exists(), path
