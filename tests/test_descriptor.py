"""QuantDescriptor: fields, validation, round trips, equality."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from torchq import QuantDescriptor, descriptor
from torchq.errors import ConfigError
from torchq.formats import E4M3, E8M0, INT8, PerAxis, PerBlock, PerTensor, integer

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
    {"calib_method": "percentile", "calib_options": {"percentile": 99.9, "num_bins": 128}},
    {"unsigned": True},
    {"narrow_range": True},
    {"block_size": 32},
    {"block_size": 32, "block_axis": 0},
    {"block_size": 16, "scale_format": "e4m3", "num_bits": (2, 1)},
    {"dynamic": True},
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
    assert QuantDescriptor.from_json(d.to_json()) == d
    assert set(d.to_dict()) == set(given)
    assert json.loads(json.dumps(d.to_dict())) == d.to_dict()
    assert eval(repr(d), {"QuantDescriptor": QuantDescriptor}) == d
    assert d.replace() == d and hash(d.replace()) == hash(d)


@pytest.mark.parametrize("given", FIELDS, ids=str)
def test_yaml_round_trip(given: dict[str, Any]) -> None:
    yaml = pytest.importorskip("yaml")
    d = QuantDescriptor(**given)
    assert QuantDescriptor.from_dict(yaml.safe_load(yaml.safe_dump(d.to_dict()))) == d


def test_defaults() -> None:
    d = QuantDescriptor()
    assert d.to_dict() == {} and repr(d) == "QuantDescriptor()"
    assert (d.format, d.granularity, d.block_scale_format) == (INT8, PerTensor(), None)
    assert QuantDescriptor(8, "x").name == "x"


def test_derived_properties() -> None:
    assert QuantDescriptor(4, unsigned=True).format == integer(4, unsigned=True)
    assert QuantDescriptor(4, narrow_range=True).format == integer(4, narrow=True)
    assert QuantDescriptor((4, 3)).format == E4M3
    assert QuantDescriptor(axis=1).granularity == PerAxis((1,))
    assert QuantDescriptor(block_size=32, block_axis=1).granularity == PerBlock(32, 1)
    assert QuantDescriptor(block_size=32, scale_format="e8m0").block_scale_format == E8M0


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
    assert len(set(same)) == 1 and same[0].amax == ((1.0,), (2.5,))
    assert same[0] != QuantDescriptor(axis=0, amax=[[1.0], [2.0]])
    assert QuantDescriptor(amax=torch.tensor(3.0)).amax == 3.0
    assert QuantDescriptor() != "int8" and QuantDescriptor() != None  # noqa: E711
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
        ({"num_bits": "8"}, r"num_bits: got '8' \(str\)"),
        ({"num_bits": (3, 4)}, r"num_bits: got \(3, 4\); expected \(4, 3\), \(5, 2\)"),
        ({"num_bits": (4, 3, 1)}, r"num_bits: got \(4, 3, 1\)"),
        ({"num_bits": 0}, "got 0 bits; expected 2 to 16 for signed integers"),
        ({"num_bits": -1}, "got -1 bits"),
        ({"num_bits": 1}, "got 1 bits; expected 2 to 16"),
        ({"num_bits": 17}, "got 17 bits"),
        (
            {"num_bits": (4, 3), "unsigned": True},
            "got unsigned=True, narrow_range=False; expected neither for a floating-point format",
        ),
        ({"name": 3}, "name: got 3; expected str or NoneType"),
        ({"fake_quant": 1}, "fake_quant: got 1; expected bool"),
        ({"learn_amax": None}, "learn_amax: got None; expected bool"),
        ({"unsigned": "yes"}, "unsigned: got 'yes'; expected bool"),
        ({"narrow_range": 0}, "narrow_range: got 0; expected bool"),
        ({"dynamic": 1}, "dynamic: got 1; expected bool"),
        ({"calib_method": None}, "calib_method: got None; expected str"),
        ({"axis": "0"}, "axis: got '0'; expected None, an integer or distinct integers"),
        ({"axis": ()}, r"axis: got \(\); expected"),
        ({"axis": (0, 0)}, r"axis: got \(0, 0\); expected"),
        ({"axis": 0.5}, "axis: got 0.5"),
        ({"axis": True}, "axis: got True"),
        (
            {"amax": "1"},
            r"amax: got '1' \(str\); expected a number, a sequence, an array or a tensor",
        ),
        ({"amax": True}, r"amax: got True \(bool\)"),
        ({"amax": -1.0}, "amax: got -1.0; expected a finite number >= 0"),
        ({"amax": [1.0, float("inf")]}, "amax: got inf; expected a finite number"),
        ({"amax": float("nan")}, "amax: got nan"),
        ({"scale_amax": 0}, "scale_amax: got 0; expected a finite number > 0"),
        ({"scale_amax": float("inf")}, "scale_amax: got inf"),
        ({"scale_amax": "2"}, "scale_amax: got '2'"),
        ({"block_size": 0}, "block_size: got 0; expected at least 1"),
        ({"block_size": 2.0}, "block_size: got 2.0; expected an integer"),
        ({"block_axis": None}, "block_axis: got None; expected an integer"),
        ({"block_size": 32, "axis": 0}, r"block_size=32 with axis=\(0,\): expected one of them"),
        ({"scale_format": "e8m0"}, "scale_format='e8m0' without block_size: expected a block_size"),
        (
            {"scale_format": "e9m9", "block_size": 32},
            "unknown format 'e9m9'; expected one of: .*'e8m0'",
        ),
        ({"dynamic": True, "amax": 1.0}, "dynamic: got amax or learn_amax too; expected neither"),
        ({"dynamic": True, "learn_amax": True}, "dynamic: got amax or learn_amax too"),
        (
            {"scale_range_grad": True},
            "scale_range_grad: got learn_amax=False; expected learn_amax=True",
        ),
        ({"calib_options": 3}, "calib_options: got 3; expected a mapping of keyword arguments"),
        (
            {"calib_options": {"percentile": [1]}},
            "calib_options: got .*; expected a mapping of keyword arguments",
        ),
    ],
    ids=str,
)
def test_errors(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        QuantDescriptor(**given)


def test_unknown_keys_and_bad_json() -> None:
    with pytest.raises(
        ConfigError,
        match=r"QuantDescriptor: got unknown keys \['bits'\]; expected some of \['amax', 'axis'",
    ):
        QuantDescriptor.from_dict({"bits": 8})
    with pytest.raises(ConfigError, match="QuantDescriptor: got unknown keys"):
        QuantDescriptor.from_dict({"_": 1})
    with pytest.raises(ConfigError, match="QuantDescriptor: not JSON"):
        QuantDescriptor.from_json("{")
    with pytest.raises(ConfigError, match=r"QuantDescriptor: got a list; expected a mapping"):
        QuantDescriptor.from_json("[1]")


def test_predefined_descriptors() -> None:
    """A transposed convolution's output channels are on axis 1 of its weight."""
    names = [name for name in descriptor.__all__ if name.startswith("QUANT_DESC_")]
    axes = {name: getattr(descriptor, name).axis for name in names}
    assert len(names) == 9
    for name, axis in axes.items():
        expected = None if name.endswith("PER_TENSOR") else (1,) if "TRANSPOSE" in name else (0,)
        assert axis == expected, name
        assert getattr(descriptor, name).num_bits == 8
    assert descriptor.QUANT_DESC_UNSIGNED_8BIT_PER_TENSOR.unsigned
