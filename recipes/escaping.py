"""Text from data where it leaves the program: on a terminal, and in a page."""


def terminal(text: object) -> str:
  r"""Returns text that a terminal shows and does not obey; lines are kept.

  Control characters, and what has no shape of its own, such as marks that turn the direction of
  writing, become escapes of Python.

  >>> print(terminal("price\x1b]52;c;aGk=\x07\n1"))
  price\x1b]52;c;aGk=\x07
  1
  """
  keep = lambda char: char.isprintable() or char == "\n"
  return "".join(c if keep(c) else c.encode("unicode_escape").decode() for c in str(text))


_MARKUP = str.maketrans({char: f"&#{ord(char)};" for char in "&<>|`*[]\\$"})


def markdown(text: object) -> str:
  r"""Returns text that a page of Markdown shows as it is, on one line.

  >>> markdown("<script>|[a](b)\n# c")
  '&#60;script&#62;&#124;&#91;a&#93;(b)\\n# c'
  """
  shown = str(text).translate(_MARKUP).replace("\n", "\\n")
  return "".join(c if c.isprintable() or c == "\u00a0" else ascii(c)[1:-1] for c in shown)
