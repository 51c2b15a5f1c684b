"""What a newcomer meets: the list of what there is, wrong flags, and where results are."""

import importlib.util
import pathlib
import re
import signal
import subprocess
import sys

import pytest
import ways
from absl import app, flags
from absl.testing import flagsaver

import embed
from recipes import __main__ as listing
from recipes import errors, files, main

ROOT = pathlib.Path(__file__).parents[2]
RECIPES = sorted(path.parent.name for path in (ROOT / "recipes").glob("*/train.py"))
pytestmark = pytest.mark.filterwarnings("ignore:.*load_module")  # of ml_collections
CONFIGS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").glob("*/*.py"))


def test_every_recipe_and_config_is_listed_with_one_line(monkeypatch, tmp_path, capsys):
  monkeypatch.chdir(tmp_path)
  listing.main()
  lines = capsys.readouterr().out.splitlines()
  commands = [line.split()[2] for line in lines if line.startswith("python -m recipes.")]
  programs = ["describe", "baselines", "evaluate", "export", "predict", "report"]
  assert commands == [f"recipes.{name}" for name in [*RECIPES, *programs]]
  rows = [line for line in lines if line.startswith("  configs/")]
  assert [re.match(r"  ([^\[ ]+)", row)[1] for row in rows] == CONFIGS
  (kaggle,) = (row for row in rows if "configs/dlrm/criteo_kaggle.py[:sample|smoke] " in row)
  assert "DCN-V2 on Criteo" in kaggle


def test_the_list_imports_no_jax():
  code = "import sys; from recipes import __main__ as m; m.main(); print('jax' in sys.modules)"
  done = subprocess.run(
    [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
  )
  assert done.stdout.splitlines()[-1] == "False"


def test_modes_are_those_that_change_a_config():
  for path in CONFIGS:
    spec = importlib.util.spec_from_file_location("config", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    modes = listing.modes(ROOT / path)
    assert "smoke" in modes, path
    assert all(module.get_config(mode) != module.get_config() for mode in modes), path


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
  """`command(recipe, run, *argv)`: the exit code or line, and the lines of both streams."""
  monkeypatch.chdir(tmp_path)
  handler = signal.getsignal(signal.SIGTERM)

  def call(recipe, run, *argv):
    names = list(flags.FLAGS)
    with monkeypatch.context() as patch, flagsaver.flagsaver():
      patch.setattr(sys, "argv", ["recipes", *argv])
      patch.setattr(app, "run", lambda main, flags_parser: main(flags_parser(sys.argv)))
      try:
        main.program(run, recipe=recipe)()
        code = 0
      except SystemExit as stop:
        code = stop.code
    for name in set(flags.FLAGS) - set(names):
      delattr(flags.FLAGS, name)
    printed = capsys.readouterr()
    return code, printed.out.splitlines(), printed.err.splitlines()

  yield call
  signal.signal(signal.SIGTERM, handler)


MISTAKES = {
  "--confg=configs/dlrm/synthetic.py": "Did you mean: config",
  "--config=nosuch.py": "`python -m recipes` lists the configs",
  "--config=configs/dlrm/synthetic.py:smok": "did you mean 'smoke'?",
  "--config=configs/sequence/synthetic.py": "config has no setting 'blocks'",
  "--config.batchsize=1": 'Did you mean "batch_size" instead of "batchsize"?',
  "--config.tabel.learning_rate=1": 'Did you mean "table" instead of "tabel"?',
  "--config.table.lr=1": "no setting 'lr' (recipes/dlrm/defaults.py lists them)",
  "--config.batch_size=abc": "'abc'",
  "synthetic.py": "settings are given as --config",
}


def test_a_wrong_flag_is_one_line_that_suggests_the_right_one(command):
  never = lambda *_: pytest.fail("a run began")
  for argument, hint in MISTAKES.items():
    line, out, err = command("dlrm", never, argument)
    assert hint in line, argument
    assert "\n" not in line
    assert (out, err) == ([], []), argument


def test_a_mistake_in_a_config_is_no_unknown_setting(command, tmp_path):
  config = tmp_path / "mine.py"
  config.write_text("def get_config():\n  return {'files': {}['ADS_FOLDER']}\n")
  line, *_ = command("dlrm", lambda *_: pytest.fail("a run began"), f"--config={config}")
  assert "mine.py" in line
  assert "KeyError: 'ADS_FOLDER'" in line
  assert "no setting" not in line


def test_configs_are_found_from_any_folder(command):
  def run(recipe, config, workdir):
    print(recipe, config.num_users, workdir)

  for argv in ([], ["--config", "configs/sequence/synthetic.py", "--config.num_users=20_000"]):
    code, out, err = command("sequence", run, *argv)
    assert (code, out) == (0, ["sequence 20000 runs/sequence"]), err


def raising(error):
  def run(*_):
    raise error

  return run


def test_our_errors_are_one_line_and_bugs_keep_their_traceback(command):
  missing = lambda *_: files.require(pathlib.Path("none"), "x.csv", hint="Fetch it.")
  code, _, err = command("sequence", missing)
  assert code.startswith("error: none has no x.csv. Fetch it.")
  assert err == ["configs/sequence/synthetic.py -> runs/sequence"]
  with pytest.raises(errors.MissingFileError):
    command("sequence", missing, "--verbosity=1")
  with pytest.raises(KeyError):
    command("sequence", raising(KeyError("x")))

  def refused_by_the_library(*_):
    with errors.from_settings():
      embed.adam("x")

  assert command("sequence", refused_by_the_library)[0].startswith("error: ")


def test_an_interrupt_is_no_traceback(command):
  begins_again = "stopped; the same command resumes from the last checkpoint"
  code, _, err = command("sequence", raising(KeyboardInterrupt()))
  assert (code, err[1:]) == (130, ["", begins_again])


@pytest.mark.parametrize("recipe", ["dlrm", *ways.ci("two_tower", "sequence")])
def test_training_imports_few_modules_and_nothing_that_prepares_data(recipe):
  """A stranger who opens train.py stands before these."""
  code = f"""import sys, recipes.{recipe}.train
print("duckdb" in sys.modules or "pyarrow" in sys.modules)
for name, module in sys.modules.items():
  if name.startswith("recipes."):
    print(module.__file__)
"""
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  prepares, *paths = done.stdout.splitlines()
  assert prepares == "False"
  modules = [path for path in map(pathlib.Path, paths) if path.name != "__init__.py"]
  assert len(modules) <= 24
  assert sum(len(path.read_text().splitlines()) for path in modules) <= 4_500
