"""Names of dimensions that are terms, as torch writes them."""

import pytest

from torchq.onnx.dimensions import length_of

LENGTHS = {"batch": 4, "length": 12, "a.b": 7}


@pytest.mark.parametrize(
    ("term", "length"),
    [
        ("length", 12),
        ("a.b", 7),
        ("batch*length", 48),
        ("2*length + 1", 25),
        ("((length - 3)//2)", 4),
        ("CeilToInt(FloatTrueDiv(ToFloat(-2*length), -1.0))", 24),
        ("Max(1, Min(batch, length)) - -batch", 8),
        ("length % 5", 2),
        # What is no term of these names, or no length.
        ("unk__0", None),
        ("unk__0*batch", None),
        ("batch - length", None),
        ("length/5", None),
        ("length/(batch - 4)", None),
        ("exit()", None),
        ("batch.real", None),
        ("9**9**9", None),
        ("1e999", None),
        ("-" * 9999 + "1", None),
        ("(", None),
        ("", None),
    ],
)
def test_a_term_stands_for_a_length_or_for_none(term: str, length: int | None) -> None:
    assert length_of(term, LENGTHS) == length
