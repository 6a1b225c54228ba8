"""A forward is known by the structure of its source, in every version of Python."""

import ast
import hashlib

import pytest

from torchq.graph.code import source_text

#: Spellings that ``ast.unparse`` and ``ast.dump`` show in other ways by version.
FORMS = r'''
def texts(self, x):
    """A docstring that is not part of it."""
    name = f"{self.name!r:>{self.width}}" 'and "quotes"' f'{x=} {{}}'
    return self.rows[name] + x


def slices(self, x, *rest, scale: float = 1e-3, **options):
    a, (b, *c) = x[..., None, 1:2, ::-1], x.chunk(2)
    return (a, b), *c, rest, options, scale


def loops(self, x):
    y = [i * 2 for i in x for j in i if j if i]
    while (n := len(y)) > 10 and not x:
        y = y[:n // 2]
    else:
        del y[0]
    return {k: v for k, v in zip(x, y)}, {*y}, (z for z in y)


def exceptions(self, x):
    try:
        return self.a(x)
    except (ValueError, TypeError) as error:
        raise RuntimeError("no") from error
    finally:
        self.count += 1


def nested(self, x: "Tensor") -> "Tensor":
    def inner(y: int, /, z=lambda u, *v: u @ v[0], *, w=None) -> None:
        nonlocal x
        x = y if z else -w ** 2
        return inner
    return inner(x, w=not x)


def numbers(self, x):
    return x + 0.1 + 1e300 * 10 + 0x10 + 1_000 + 2j + True + None + ... - b"\x00\xff".count(b"a")


def contexts(self, x):
    with torch.no_grad(), torch.autocast("cpu") as a, self.lock:
        assert x.dim() == 4, "é and \u2028"
    for i, layer in enumerate(self.layers):
        if i in (1, 2): continue
        x = layer(x) if i % 2 else x
        break
    return x


def matches(self, x):
    match x:
        case [a, *_] if a:
            return a
        case {"k": 1 | 2, **rest}:
            return rest
        case nn.Module(weight=w) | None:
            pass
        case _:
            return x


def operators(self, x, y):
    x += y
    x.add_(y).mul_(2)
    x[1] = y = x is not y
    return -x + ~y << 2 >= 1 < x or x @ y // 3 % 4 ^ 5 | 6 & 7, x < y <= 3, a if b else (c, d)


class Inner:
    """With a docstring."""
    size: int = 3

    @property
    def rows(self):
        yield from self.items
        return (yield)
'''

#: What Python 3.10.13, 3.11.7, 3.12.1 and 3.13.0 all gave.
DIGESTS = {
    "texts": "2c2d6bff386d00c3f3a0f4346a926f6f",
    "slices": "cbe00e4a73ebd9363e11ce663ad19b12",
    "loops": "94e917cdd78bbfe73c7198abef262633",
    "exceptions": "c3089524bcbdc128bfe266044252fbe7",
    "nested": "7c75aca5aa4afc0a196df57804d281fd",
    "numbers": "04086d5922d469e5a7394ba52891997d",
    "contexts": "dad9f2612d2f5a396aec0d2e1ac09299",
    "matches": "303b49e8ca8f1ef29b32aff613e08c51",
    "operators": "72bf2ce855ce599f9e5836dbeb0671f7",
    "Inner": "53476d5492e93eabd2fad76a7da29f6e",
}
TREES = {tree.name: tree for tree in ast.parse(FORMS).body}  # type: ignore[attr-defined]


def digest(tree: ast.AST) -> str:
    return hashlib.sha256(source_text(tree).encode()).hexdigest()[:32]


@pytest.mark.parametrize("name", TREES)
def test_a_source_has_one_digest_in_every_version_of_python(name: str) -> None:
    assert digest(TREES[name]) == DIGESTS[name]


@pytest.mark.parametrize(
    ("source", "is_same"),
    [
        ("def f(x):\n    return x + 1", True),
        ("def f(x):\n    'What it does.'\n    # why\n    return (x + 1)", True),
        ("def f(x: int) -> int: return x+1", True),
        ("def f(x):\n    return x + 2", False),
        ("def f(x):\n    return x - 1", False),
        ("def f(x):\n    return x + 1.0", False),
        ("def f(x):\n    return x + ''", False),
        ("def f(x, y=1):\n    return x + 1", False),
        ("def f(x):\n    x\n    return x + 1", False),
    ],
)
def test_what_changes_a_source_changes_its_digest(source: str, is_same: bool) -> None:
    known = digest(ast.parse("def f(x):\n    return x + 1").body[0])
    assert (digest(ast.parse(source).body[0]) == known) is is_same
