"""Command line of the recipe; `--helpfull` lists the flags."""

from recipes import main


def _run(config, workdir: str) -> None:
  from recipes.sequence import train

  train.run(config, workdir)


_program = main.program("sequence", _run)

if __name__ == "__main__":
  _program()
