"""Plain data is read, or refused with one named error."""

import pytest

from torchq.errors import ConfigError
from torchq.utils import check_fields, parse_json, short_repr


def test_short_repr_is_short_and_never_fails() -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    assert short_repr("a" * 100) == "'" + "a" * 76 + "..."
    assert short_repr(10**5000) == "a value of type int that cannot be printed"
    assert short_repr(nested) == "a value of type list that cannot be printed"


def test_json_values() -> None:
    assert parse_json('{"a": [1, 2.5, null, true, "x"]}', "here") == {
        "a": [1, 2.5, None, True, "x"]
    }
    with pytest.raises(
        ConfigError, match=r"here: got the keys \['b'\] twice; expected once"
    ):
        parse_json('{"a": {"b": 1, "c": 2, "b": 3}}', "here")


def test_fields() -> None:
    assert check_fields({"a": 1}, "here", known=["b", "a"], required=["a"]) == {"a": 1}
    with pytest.raises(
        ConfigError, match=r"here: got a list; expected a mapping with some of"
    ):
        check_fields([1], "here", known=["a"])
    with pytest.raises(
        ConfigError, match=r"here: got unknown keys \['c', 3\]; expected some of"
    ):
        check_fields(
            {3: 1, "c": 2, "a": 3},
            "here",
            known=["a"],
        )
    with pytest.raises(ConfigError, match=r"here: got {'a': 1}; expected a 'b'"):
        check_fields(
            {"a": 1},
            "here",
            known=["a", "b"],
            required=["b"],
        )
