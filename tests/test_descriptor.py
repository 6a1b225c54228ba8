"""QuantDescriptor: fields, validation, round trips, equality."""

import dataclasses
import json
from typing import Any

import pytest
import torch

import torchq
from torchq import QuantDescriptor
from torchq.errors import ConfigError
from torchq.formats import (
    E4M3,
    E8M0,
    INT8,
    POWER_OF_TWO,
    PerAxis,
    PerBlock,
    PerTensor,
    integer_format,
)
from torchq.utils import parse_json, short_repr


def nested(depth: int) -> Any:
    """Return a number inside ``depth`` lists."""
    value: Any = 1.0
    for _ in range(depth):
        value = [value]
    return value


# One entry for each field, apart from its default.
FIELDS: list[dict[str, Any]] = [
    {"num_bits": 4},
    {"num_bits": (4, 3)},
    {"num_bits": [2, 1]},
    {"name": "activations"},
    {"fake_quant": False},
    {"axis": 0},
    {"axis": -1},
    {"axis": (0, 1)},
    {"axis": [0, 2]},
    {"amax": 1.5},
    {"amax": 0},
    {"amax": [1.0, 2.0], "axis": 0},
    {"amax": [[1.0], [0.1]], "axis": 0},
    {"learn_amax": True},
    {"learn_amax": True, "scale_range_grad": True},
    {"scale_amax": 0.9},
    {"calib_method": "entropy"},
    {
        "calib_method": "percentile",
        "calib_options": {"percentile": 99.9, "num_bins": 128},
    },
    {"unsigned": True},
    {"unsigned": "auto", "num_bits": 4},
    {"narrow_range": True},
    {"block_size": 32},
    {"block_size": 32, "block_axis": 0},
    {"block_size": 16, "scale_format": "e4m3", "num_bits": (2, 1)},
    {"axis": 0, "scale_format": "float16"},
    {"symmetric": False, "scale_format": "bfloat16"},
    {"dynamic": True},
    {"symmetric": False},
    {"symmetric": False, "unsigned": True, "amin": -0.17, "amax": 3},
    {"symmetric": False, "axis": 0, "amin": [-1.0, 0.0], "amax": [1.0, 2.0]},
    {"power_of_two": True},
    {"rounding": "half_away"},
    {
        "num_bits": 4,
        "axis": 1,
        "learn_amax": True,
        "scale_amax": 2,
        "narrow_range": True,
        "name": "w",
        "calib_method": "mse",
    },
]


def test_every_field_is_in_the_table() -> None:
    fields = {field.name for field in dataclasses.fields(QuantDescriptor)}
    assert {name for entry in FIELDS for name in entry} == fields


@pytest.mark.parametrize("given", FIELDS, ids=str)
def test_round_trips(given: dict[str, Any]) -> None:
    d = QuantDescriptor(**given)
    assert d != QuantDescriptor()
    assert QuantDescriptor.from_dict(d.to_dict()) == d
    assert set(d.to_dict()) == set(given)
    assert json.loads(json.dumps(d.to_dict())) == d.to_dict()
    assert eval(repr(d), {"QuantDescriptor": QuantDescriptor}) == d
    assert d.replace() == d
    assert hash(d.replace()) == hash(d)


def test_defaults() -> None:
    d = QuantDescriptor()
    assert d.to_dict() == {}
    assert repr(d) == "QuantDescriptor()"
    assert (d.format, d.granularity, d.block_scale_format) == (INT8, PerTensor(), None)
    assert QuantDescriptor(8, "x").name == "x"


def test_derived_properties() -> None:
    assert QuantDescriptor(4, unsigned=True).format == integer_format(4, unsigned=True)
    assert QuantDescriptor(4, unsigned="auto").format == integer_format(4)
    assert QuantDescriptor(4, narrow_range=True).format == integer_format(
        4, narrow=True
    )
    assert QuantDescriptor((4, 3)).format == E4M3
    assert QuantDescriptor(rounding="up").format == integer_format(8, rounding="up")
    assert QuantDescriptor(power_of_two=True).block_scale_format is POWER_OF_TWO
    assert QuantDescriptor(axis=1).granularity == PerAxis((1,))
    assert QuantDescriptor(block_size=32, block_axis=1).granularity == PerBlock(32, 1)
    assert (
        QuantDescriptor(block_size=32, scale_format="e8m0").block_scale_format == E8M0
    )


def test_text() -> None:
    assert str(QuantDescriptor()) == "int8 per-tensor max"
    assert (
        str(QuantDescriptor(4, axis=(0, 1), calib_method="mse", learn_amax=True))
        == "int4 axis=0,1 learned mse"
    )
    assert (
        str(QuantDescriptor((2, 1), block_size=16, scale_format="e4m3", dynamic=True))
        == "e2m1 block=16 scales=e4m3 dynamic"
    )
    assert (
        str(QuantDescriptor(block_size=8, fake_quant=False, scale_amax=0.5))
        == "int8 block=8 codes max scale_amax=0.5"
    )
    assert (
        str(
            QuantDescriptor(
                unsigned=True, symmetric=False, power_of_two=True, rounding="half_up"
            )
        )
        == "uint8 per-tensor asymmetric power-of-two half_up max"
    )
    assert str(QuantDescriptor(4, unsigned="auto")) == "int4 per-tensor or unsigned max"


def test_vector_amax_compares_and_hashes() -> None:
    """From a list, a tuple, a tensor or an array: the same value."""
    numpy = pytest.importorskip("numpy")
    values = [[1.0], [2.5]]
    same = [
        QuantDescriptor(axis=0, amax=v)
        for v in (
            values,
            ((1.0,), (2.5,)),
            torch.tensor(values),
            numpy.array(values, dtype="float32"),
        )
    ]
    assert len(set(same)) == 1
    assert same[0].amax == ((1.0,), (2.5,))
    assert same[0] != QuantDescriptor(axis=0, amax=[[1.0], [2.0]])
    assert QuantDescriptor(amax=torch.tensor(3.0)).amax == 3.0
    assert QuantDescriptor() != "int8"
    assert QuantDescriptor() != None  # noqa: E711
    assert len({QuantDescriptor(), QuantDescriptor(8), QuantDescriptor(4)}) == 2


def test_is_frozen_and_replaceable() -> None:
    d = QuantDescriptor()
    with pytest.raises(dataclasses.FrozenInstanceError):
        d.num_bits = 4  # type: ignore[misc]
    assert d.replace(num_bits=4, axis=0) == QuantDescriptor(4, axis=0)
    with pytest.raises(ConfigError, match="got 99 bits"):
        d.replace(num_bits=99)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"num_bits": 8.0},
            r"num_bits: got 8.0 \(float\); expected an integer or \(exponent, mantissa\) bits",
        ),
        ({"num_bits": True}, r"num_bits: got True \(bool\)"),
        ({"num_bits": (3, 4)}, r"num_bits: got \(3, 4\); expected \(4, 3\), \(5, 2\)"),
        ({"num_bits": 0}, "got 0 bits; expected 2 to 16 for signed integers"),
        ({"num_bits": 1}, "got 1 bits; expected 2 to 16"),
        (
            {"num_bits": (4, 3), "unsigned": True},
            "got unsigned=True, narrow_range=False; expected neither for a floating-point format",
        ),
        ({"name": 3}, "name: got 3; expected str or NoneType"),
        ({"fake_quant": 1}, "fake_quant: got 1; expected bool"),
        ({"unsigned": "yes"}, "unsigned: got 'yes'; expected bool or 'auto'"),
        (
            {"unsigned": "auto", "dynamic": True},
            "unsigned='auto': got dynamic, a fixed amax or",
        ),
        ({"calib_method": None}, "calib_method: got None; expected str"),
        (
            {"axis": "0"},
            "axis: got '0'; expected None, an integer or distinct integers",
        ),
        ({"axis": (0, 0)}, r"axis: got \(0, 0\); expected"),
        (
            {"amax": "1"},
            r"amax: got '1' \(str\); expected a number, a sequence, an array or a tensor",
        ),
        ({"amax": -1.0}, "amax: got -1.0; expected a finite number >= 0"),
        (
            {"amax": 1e39},
            r"amax: got 1e\+39; expected a finite number >= 0 that float32 can hold",
        ),
        ({"amax": 10**400}, r"amax: got 1000.*\.\.\.; expected a finite number"),
        (
            {"amax": 10**5000},
            "amax: got a value of type int that cannot be printed; expected",
        ),
        ({"amax": []}, "amax: got an empty sequence; expected a number or a sequence"),
        (
            {"amax": [[1.0], [1.0, 2.0]]},
            r"amax: got rows of different lengths in \[\[1.0\], ",
        ),
        (
            {"amax": nested(100_000)},
            "amax: got more than 8 dimensions; expected a number",
        ),
        ({"scale_amax": 0}, "scale_amax: got 0; expected a finite number > 0"),
        ({"scale_amax": 1e39}, r"scale_amax: got 1e\+39; expected a finite number"),
        (
            {"scale_amax": 2.0, "amax": [1.0, 3e38]},
            r"scale_amax: got 2 for amax up to 3e\+38; expected a product that float32 can hold",
        ),
        ({"block_size": 0}, "block_size: got 0; expected at least 1"),
        ({"block_size": 2.0}, "block_size: got 2.0; expected int or NoneType"),
        (
            {"block_size": 1 << 40},
            "block_size: got 1099511627776; expected .* at most 65536",
        ),
        ({"block_axis": None}, "block_axis: got None; expected int"),
        (
            {"block_size": 32, "axis": 0},
            r"block_size=32 with axis=\(0,\): expected one of them",
        ),
        (
            {"scale_format": "e8m0"},
            "scale_format='e8m0' without block_size: expected a block_size",
        ),
        (
            {"scale_format": "e9m9", "block_size": 32},
            "unknown format 'e9m9'; expected one of: .*'e8m0'",
        ),
        (
            {"dynamic": True, "amax": 1.0},
            "dynamic: got amax or learn_amax too; expected neither",
        ),
        (
            {"scale_range_grad": True},
            "scale_range_grad: got learn_amax=False; expected learn_amax=True",
        ),
        (
            {"calib_options": 3},
            "calib_options: got 3; expected a mapping of keyword arguments",
        ),
        (
            {"calib_options": {"percentile": [1]}},
            "calib_options: got .*; expected a mapping of keyword arguments",
        ),
        (
            {"rounding": "nearest"},
            "rounding: got 'nearest'; expected one of half_even, half_up",
        ),
        (
            {"symmetric": False, "num_bits": (4, 3)},
            "symmetric=False: got the float format",
        ),
        (
            {"symmetric": False, "unsigned": "auto"},
            "symmetric=False: got unsigned='auto'",
        ),
        (
            {"symmetric": False, "block_size": 16, "scale_format": "e4m3"},
            "symmetric=False: got scale_format='e4m3'; expected None",
        ),
        ({"symmetric": False, "amax": 1.0}, "amin: got amax alone; expected both ends"),
        (
            {"symmetric": False, "amin": -1.0},
            "amax: got amin alone; expected both ends",
        ),
        (
            {"amin": -1.0, "amax": 1.0},
            "amin: got symmetric=True; expected symmetric=False",
        ),
        (
            {"symmetric": False, "amin": 0.5, "amax": 1.0},
            "amin: got 0.5; expected a finite number <= 0 that float32 can hold",
        ),
        (
            {"symmetric": False, "amin": [-1.0, -1.0], "amax": 1.0},
            r"amin: got shape \(2,\) for amax of shape \(\); expected equal shapes",
        ),
        (
            {"power_of_two": True, "block_size": 16, "scale_format": "e8m0"},
            "power_of_two: got scale_format='e8m0' too; expected one of them",
        ),
        (
            {"calib_options": [("a", 1), ("a", 2)]},
            "calib_options: got .*; expected a mapping",
        ),
    ],
    ids=short_repr,
)
def test_errors(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        QuantDescriptor(**given)


def test_unknown_keys() -> None:
    with pytest.raises(
        ConfigError,
        match=r"QuantDescriptor: got unknown keys \['bits'\]; expected some of \['amax', 'amin'",
    ):
        QuantDescriptor.from_dict({"bits": 8})
    with pytest.raises(ConfigError, match="QuantDescriptor: got unknown keys"):
        QuantDescriptor.from_dict({"_": 1})


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[" * 100_000, r"QuantDescriptor: JSON that is nested too deeply"),
        (
            '{"amax": ' + "[" * 500 + "1" + "]" * 500 + "}",
            "amax: got more than 8 dimensions; expected a number",
        ),
        ('{"amax": NaN}', "amax: got nan; expected a finite number"),
        ('{"amax": 1' + "0" * 5000 + "}", "QuantDescriptor: not usable JSON"),
        ('{"unsigned": "false"}', "unsigned: got 'false'; expected bool"),
        ('{"num_bits": true}', r"num_bits: got True \(bool\); expected an integer"),
        ('{"amax": 1, "amax": 2}', r"QuantDescriptor: got the keys \['amax'\] twice"),
    ],
    ids=short_repr,
)
def test_json_of_any_kind_is_read_or_refused(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        QuantDescriptor.from_dict(parse_json(text, "QuantDescriptor"))


def test_the_largest_float32_is_a_range() -> None:
    largest = torch.finfo(torch.float32).max
    quantizer = torchq.TensorQuantizer(QuantDescriptor(amax=largest))
    assert quantizer.amax.item() == largest
