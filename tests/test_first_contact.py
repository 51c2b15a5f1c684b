"""What a newcomer meets: the list of what there is, wrong flags, and where results are."""

import hashlib
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest
from recipe_runs import write_run

from recipes import __main__ as listing
from recipes import catalogue, files, main

ROOT = pathlib.Path(__file__).parents[1]
RECIPES = sorted(path.parent.name for path in (ROOT / "recipes").glob("*/train.py"))
CONFIGS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").glob("*/*.py"))


def python(*argv, cwd=ROOT):
  """Runs a command of a checkout; returns its exit status and the lines of both its streams."""
  environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
  done = subprocess.run(
    [sys.executable, *argv], cwd=cwd, env=environment, capture_output=True, text=True, check=False
  )
  return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


def test_every_recipe_and_config_is_listed_with_one_line(monkeypatch, tmp_path, capsys):
  monkeypatch.chdir(tmp_path)
  listing.main([])
  lines = capsys.readouterr().out.splitlines()
  commands = [line.split()[2] for line in lines if line.startswith("python -m recipes.")]
  programs = ["minimal", "describe", "config", "days", "sweep", "baselines", "evaluate", "export"]
  programs += ["predict", "report", "semantic_ids", "aot"]
  assert commands == [f"recipes.{name}" for name in [*RECIPES, *programs]]
  rows = [line for line in lines if line.startswith("  configs/")]
  assert [re.match(r"  ([^\[ ]+)", row)[1] for row in rows] == CONFIGS
  for recipe in RECIPES:
    own = [re.match(r"  (\S+ +)(\S.*\.)$", row) for row in rows if f"/{recipe}/" in row]
    assert len({row.start(2) for row in own}) == 1, "not aligned"
  assert "  configs/dlrm/criteo_kaggle.py[:sample|smoke]  DCN-V2 on Criteo" in "\n".join(rows)


def test_the_list_imports_no_jax():
  code = "import sys; from recipes import __main__ as m; m.main([]); print('jax' in sys.modules)"
  assert python("-c", code)[1][-1] == "False"


@pytest.mark.parametrize(
  ("wanted", "hint"), [("dlmr", "did you mean dlrm?"), ("nosuch", "there are dlrm, sequence")]
)
def test_a_recipe_that_does_not_exist(wanted, hint, capsys):
  with pytest.raises(SystemExit, match="2"):
    listing.main([wanted])
  assert hint in capsys.readouterr().err


@pytest.mark.parametrize("path", CONFIGS)
def test_modes_are_those_that_change_a_config(path):
  spec = importlib.util.spec_from_file_location("config", ROOT / path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  modes = catalogue.modes(ROOT / path)
  assert "smoke" in modes
  assert all(module.get_config(mode) != module.get_config() for mode in modes)


MISTAKES = {
  "--confg=configs/dlrm/synthetic.py": "Did you mean: config",
  "--config=configs/dlrm/movilens1m.py": "did you mean configs/dlrm/movielens1m.py?",
  "--config=beauty": "did you mean configs/sequence/beauty.py?",
  "--config=nosuch.py": "`python -m recipes` lists them",
  "--config=configs/dlrm/synthetic.py:smok": "did you mean 'smoke'?",
  "--config=configs/sequence/synthetic.py": "`python -m recipes.sequence`",
  "--config.batchsize=1": "did you mean 'batch_size'?",
  "--config.tabel.learning_rate=1": "config has no setting 'tabel'; did you mean 'table'?",
  "--config.table.lr=1": "config.table has no setting 'lr'; there are: init_scale, ",
  "--config.steps.x=1": "config.steps has no setting 'x'; there are: none",
  "--config.batch_size=abc": "'abc'",
  "synthetic.py": "settings are given as --config",
}


@pytest.mark.parametrize("argument", MISTAKES)
def test_a_wrong_flag_is_one_line_that_suggests_the_right_one(argument):
  status, out, err = python("-m", "recipes.dlrm", argument)
  assert status != 0
  assert not out
  assert len(err) == 1
  assert MISTAKES[argument] in err[0]


PROGRAM = """
import sys
from recipes import main
def run(recipe, config, workdir):
  print(config.num_users, workdir)
  {body}
sys.argv[1:] = {argv}
main.program(run, recipe="sequence")()
"""


def test_configs_are_found_from_any_folder(tmp_path):
  for argv in ([], ["--config", "configs/sequence/synthetic.py", "--config.num_users=20_000"]):
    code = PROGRAM.format(body="sys.exit(0)", argv=argv)
    status, out, err = python("-c", code, cwd=tmp_path)
    assert (status, out) == (0, ["20000 runs/sequence"]), err


def test_our_errors_are_one_line_and_bugs_keep_their_traceback():
  ours = "import pathlib; from recipes import files; "
  ours += "files.require(pathlib.Path('none'), 'x.csv', hint='Fetch it.')"
  status, _, err = python("-c", PROGRAM.format(body=ours, argv=[]))
  assert status == 1
  assert len(err) == 2
  assert err[0] == "configs/sequence/synthetic.py -> runs/sequence"
  assert err[1].startswith("error: none has no x.csv. Fetch it.")
  slip = f"exec(compile('a, b = 1,', {str(main.__file__)!r}, 'exec'))"  # in a file of ours
  for body, argv in ((ours, ["--verbosity=1"]), ("int('x')", []), ("{}['x']", []), (slip, [])):
    status, _, err = python("-c", PROGRAM.format(body=body, argv=argv))
    assert status == 1
    assert any(line.startswith("Traceback") for line in err)


def test_ctrl_c_is_no_traceback():
  for raised, said in (
    ("KeyboardInterrupt", "stopped before the first step; the same command begins again"),
    ("errors.Stopped('stopped at step 3')", "stopped at step 3"),
  ):
    body = f"from recipes import errors; raise {raised}"
    status, _, err = python("-c", PROGRAM.format(body=body, argv=[]))
    assert (status, err[1:]) == (130, ["", said])


def test_what_the_machine_refuses_is_one_line():
  body = "import errno; raise OSError(errno.{}, 'Refused', 'x/y')"
  for code, hint in (("ENOSPC", "Free some space; the same command"), ("EROFS", "--workdir and")):
    status, _, err = python("-c", PROGRAM.format(body=body.format(code), argv=[]))
    assert (status, len(err)) == (1, 2)
    assert err[1].startswith(f"error: Refused: x/y. {hint}")


@pytest.mark.ci
def test_a_librarys_error_about_a_setting_is_one_line():
  body = "exec('from recipes import errors\\nwith errors.from_settings(): embed.adam(\"x\")')"
  status, _, err = python("-c", PROGRAM.format(body="import embed; " + body, argv=[]))
  assert status == 1
  assert err[1].startswith("error: "), err


def test_a_run_ends_with_where_its_results_are(tmp_path, capsys, monkeypatch):
  folder = write_run(tmp_path / "a")
  main._show(pathlib.Path(folder))
  wanted = [f"results: {folder}/result.json", f"curves:  python -m recipes.report {folder}"]
  assert capsys.readouterr().out.split("\n") == ["", *wanted, ""]
  monkeypatch.setattr("sys.stdout.isatty", lambda: True)
  main._show(pathlib.Path(folder))
  shown = capsys.readouterr().out.splitlines()
  assert "loss / steps" in shown[1]
  assert shown[-2:] == wanted


def test_a_digest_reads_all_of_a_file(tmp_path, monkeypatch):
  monkeypatch.setattr(files, "_BLOCK", 7)
  (tmp_path / "x").write_bytes(bytes(range(100)))
  assert files.digest(tmp_path / "x") == hashlib.sha256(bytes(range(100))).hexdigest()
