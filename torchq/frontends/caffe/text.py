"""The text format of protocol buffers, in which Caffe's networks are written."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchq.errors import FrontendError

#: A number, a flag, or text; names of enumerations are text too.
Scalar = float | bool | str
_DEEPEST = 32
_TOKEN = re.compile(
    r"""(?P<skip>\s+|\#[^\n]*)
      | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?f?(?![\w.]))
      | (?P<word>-?[A-Za-z_][\w.]*)
      | (?P<mark>[:{}<>\[\],;])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:([abfnrtv\\'\"])|([0-7]{1,3})|x([0-9a-fA-F]{1,2}))")
_ESCAPED = dict(zip("abfnrtv\\'\"", "\a\b\f\n\r\t\v\\'\"", strict=True))


class Message:
    """A message: the values of each field, in order.

    Attributes:
        values: scalars and messages by the name of their field.
    """

    def __init__(self) -> None:
        self.values: dict[str, list[Scalar | Message]] = {}

    def messages(self, name: str) -> list[Message]:
        """Return the messages of a field."""
        return [value for value in self.values.get(name, []) if isinstance(value, Message)]

    def message(self, name: str) -> Message:
        """Return the last message of a field, an empty one where there is none."""
        return (self.messages(name) or [Message()])[-1]

    def scalars(self, name: str) -> list[Scalar]:
        """Return the scalars of a field."""
        return [value for value in self.values.get(name, []) if not isinstance(value, Message)]

    def texts(self, name: str) -> list[str]:
        """Return the scalars of a field that are text."""
        return [value for value in self.scalars(name) if isinstance(value, str)]

    def text(self, name: str, default: str = "") -> str:
        """Return the last text of a field."""
        return (self.texts(name) or [default])[-1]


def parse_text(text: str, where: str) -> Message:
    """Return the message that a text describes.

    Args:
        text: the text format; comments begin with ``#``.
        where: how errors begin.

    Raises:
        FrontendError: the text is not in that format.

    Example:
        >>> parse_text('layer { name: "conv1" pad: 1 pad: 2 }', "net").message("layer").values
        {'name': ['conv1'], 'pad': [1.0, 2.0]}
    """
    parser = _Parser(text, where)
    return parser.message(end="", depth=0)


class _Parser:
    def __init__(self, text: str, where: str) -> None:
        self._where, self._text = where, text
        self._tokens = self._split()
        self._kind, self._token = next(self._tokens)

    def _split(self) -> Iterator[tuple[str, str]]:
        at = 0
        while at < len(self._text):
            found = _TOKEN.match(self._text, at)
            if found is None:
                self._at = at
                self._fail(f"got {self._text[at : at + 20]!r}")
            assert found is not None
            at = self._at = found.end()
            if found.lastgroup != "skip":
                yield str(found.lastgroup), found[0]
        yield "end", ""

    def _fail(self, text: str) -> None:
        line = self._text.count("\n", 0, self._at) + 1
        raise FrontendError(f"{self._where}, line {line}: {text}; expected `name: value`")

    def _next(self) -> str:
        token = self._token
        self._kind, self._token = next(self._tokens, ("end", ""))
        return token

    def message(self, end: str, depth: int) -> Message:
        """Return the fields up to the token ``end``."""
        if depth > _DEEPEST:
            self._fail(f"got messages inside each other, more than {_DEEPEST}")
        result = Message()
        while self._token != end or (self._kind == "end" and end):
            if self._kind != "word":
                self._fail(f"got {self._token or 'the end'!r}")
            values = result.values.setdefault(self._next(), [])
            colon = self._token == ":"
            if colon:
                self._next()
            if self._token == "[" and colon:
                self._list(values, depth)
            else:
                values.append(self._value(colon, depth))
            if self._token in (",", ";"):
                self._next()
        self._next()
        return result

    def _list(self, values: list[Scalar | Message], depth: int) -> None:
        self._next()
        while self._token != "]":
            values.append(self._value(True, depth))
            if self._token == ",":
                self._next()
        self._next()

    def _value(self, colon: bool, depth: int) -> Scalar | Message:
        if self._kind == "mark" and self._token in "{<":
            return self.message({"{": "}", "<": ">"}[self._next()], depth + 1)
        if not colon or self._kind in ("mark", "end"):
            self._fail(f"got {self._token or 'the end'!r}")
        if self._kind == "number":
            return float(self._next().rstrip("f"))
        if self._kind == "word":
            word = self._next()
            return {"true": True, "false": False}.get(word, word)
        text = ""
        while self._kind == "string":
            text += _unescaped(self._next()[1:-1])
        return text


def _unescaped(text: str) -> str:
    def plain(found: re.Match[str]) -> str:
        if found[1]:
            return _ESCAPED[found[1]]
        return chr(int(found[2], 8) if found[2] else int(found[3], 16))

    return _ESCAPE.sub(plain, text)
