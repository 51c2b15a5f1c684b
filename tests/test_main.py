"""The commands of `python -m embed`: what they take; the tests of each are in tests/tools."""

import pytest

from embed import __main__ as program


def test_commands(capsys):
  for argv, message in (
    (["chekc"], "unknown command 'chekc': did you mean 'check'?"),
    (["train"], "unknown command 'train': there are check and inspect."),
    ([], "required: {check,inspect}"),
    (["inspect"], "required: path"),
  ):
    with pytest.raises(SystemExit) as error:
      program.main(argv)
    assert error.value.code == 2
    assert message in capsys.readouterr().err
