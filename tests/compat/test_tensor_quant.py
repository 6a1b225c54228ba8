"""Descriptors and the errors of the functions."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import torchq
from torchq.compat.pytorch_quantization import tensor_quant, utils
from torchq.compat.pytorch_quantization.tensor_quant import QuantDescriptor

DESCRIPTORS: list[dict[str, Any]] = [
    {},
    {
        "num_bits": 2,
        "name": "a",
        "fake_quant": True,
        "axis": (1, 2),
        "amax": 3.1415926536,
    },
    {"num_bits": 2, "amax": 0.1, "unsigned": True},
    {"num_bits": (4, 3)},
    {"axis": 0, "calib_method": "histogram", "narrow_range": True},
    {"amax": [1.3, 1.4], "axis": (0,), "scale_amax": 0.5},
    {"learn_amax": True, "fake_quant": False},
]


@pytest.mark.parametrize("keywords", DESCRIPTORS, ids=str)
def test_descriptor_round_trips(keywords: dict[str, Any]) -> None:
    pytest.importorskip("yaml")
    first = QuantDescriptor(**keywords)
    for second in (
        QuantDescriptor(**first.dict()),
        QuantDescriptor.from_yaml(first.to_yaml()),
        copy.deepcopy(first),
        pickle.loads(pickle.dumps(first)),
    ):
        assert first == second
        assert str(first) == str(second) == repr(first)
    other = QuantDescriptor(**{**keywords, "num_bits": 5})
    assert first != other
    assert first != "a descriptor"


def test_descriptor_reads_what_the_original_wrote() -> None:
    pytest.importorskip("yaml")
    message = "amax: 3.1415927410125732\naxis:\n- 1\n- 2\nname: a\nnum_bits: 2\n"
    expected = QuantDescriptor(2, "a", axis=(1, 2), amax=3.1415926536)
    assert QuantDescriptor.from_yaml(message) == expected


def test_descriptor_properties() -> None:
    descriptor = QuantDescriptor()
    expected = {
        "num_bits": 8,
        "name": None,
        "fake_quant": True,
        "axis": None,
        "amax": None,
    }
    expected |= {"learn_amax": False, "scale_amax": None, "calib_method": "max"}
    expected |= {"unsigned": False, "narrow_range": False}
    assert {name: getattr(descriptor, name) for name in expected} == expected
    for amax in (0.7, [1.3, 1.4], np.array([2.0])):
        actual = QuantDescriptor(amax=amax).amax
        assert isinstance(actual, np.ndarray)
        assert actual.dtype == np.float32
        np.testing.assert_array_equal(actual, np.float32(amax))
    assert QuantDescriptor(np.int64(4)).num_bits == 4
    assert QuantDescriptor(axis=(0, 1, 3)).axis == (0, 1, 3)
    with pytest.raises(AttributeError):
        descriptor.num_bits = 4  # type: ignore[misc]
    with pytest.raises(TypeError, match="unhashable"):
        hash(descriptor)


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        ({"amax": "oops"}, TypeError, "amax must be float, list or ndarray"),
        (
            {"amax": "oops", "learn_amax": True},
            TypeError,
            "amax must be float, list or ndarray",
        ),
        ({"amax": torch.tensor(1.0)}, TypeError, "must be float, list or ndarray"),
        (
            {"axis": (1, 2), "learn_amax": True},
            TypeError,
            "axis is ignored and must be None",
        ),
        ({"num_bits": (5, 2)}, TypeError, r"num_bits: got \(5, 2\)"),
        ({"num_bits": (7, 3)}, TypeError, r"num_bits: got \(7, 3\)"),
        ({"num_bits": 8.0}, TypeError, "num_bits: got 8.0; expected an integer"),
        ({"num_bits": -1}, ValueError, "num_bits: got -1"),
        ({"name": 3}, TypeError, "name must be a string or None"),
        ({"oops": 1}, TypeError, r"Unused keys: got \['oops'\]"),
    ],
)
def test_descriptor_errors(
    keywords: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        QuantDescriptor(**keywords)
    assert isinstance(caught.value, torchq.errors.TorchqError)


CHANNELS = {"CONV": 0, "CONVTRANSPOSE": 1}
PREDEFINED: dict[str, int | None] = {"PER_TENSOR": None, "LINEAR_WEIGHT_PER_ROW": 0}
PREDEFINED |= {
    f"{kind}{d}D_WEIGHT_PER_CHANNEL": axis
    for kind, axis in CHANNELS.items()
    for d in (1, 2, 3)
}


@pytest.mark.parametrize(("name", "axis"), PREDEFINED.items())
def test_predefined(name: str, axis: int | None) -> None:
    assert getattr(tensor_quant, f"QUANT_DESC_8BIT_{name}") == QuantDescriptor(
        8, axis=axis
    )
    assert (
        QuantDescriptor(8, unsigned=True)
        == tensor_quant.QUANT_DESC_UNSIGNED_8BIT_PER_TENSOR
    )


def test_errors_of_tensor_quant() -> None:
    x = torch.tensor([-1.0, 0.5])
    with pytest.raises(TypeError, match="Negative values encountered"):
        tensor_quant.tensor_quant(x, torch.tensor(1.0), 8, True)
    with pytest.raises(ValueError, match="Negative values in amax"):
        tensor_quant.tensor_quant(x, torch.tensor(-1.0))
    for amax in (-1.0, torch.tensor([1.0, -1.0])):
        with pytest.raises(
            ValueError, match="fake_tensor_quant: Negative values in amax"
        ):
            tensor_quant.fake_tensor_quant(x, amax)
    with pytest.raises(ValueError, match="scale is too large for FP16"):
        tensor_quant.tensor_quant(
            x.half(),
            torch.tensor(1e-4).half(),
        )
    with pytest.raises(NotImplementedError, match="got E=5, M=2; expected E=4, M=3"):
        tensor_quant.scaled_e4m3(x, None, 5, 2)
    with pytest.raises(ValueError, match="1 bits"):
        tensor_quant.fake_tensor_quant(x, 1.0, 1)
    for function in (tensor_quant.tensor_quant, tensor_quant.fake_tensor_quant):
        with pytest.raises(
            TypeError, match=r"got a tensor of torch.int32; expected a floating"
        ):
            function(torch.ones(2, dtype=torch.int32), 1.0)


def test_empty_tensors_pass() -> None:
    x = torch.empty(0, 3)
    assert tensor_quant.tensor_quant(x, torch.tensor(1.0), 8, True)[0].shape == (0, 3)
    assert tensor_quant.fake_tensor_quant(x, torch.tensor(1.0)).shape == (0, 3)
    assert tensor_quant.scaled_e4m3(x).shape == (0, 3)


def test_function_classes_can_be_applied() -> None:
    x = torch.linspace(-1, 1, 5, requires_grad=True)
    amax = torch.tensor(0.7)
    fake = tensor_quant.fake_tensor_quant(x, amax)
    assert tensor_quant.FakeTensorQuantFunction.apply(x, 0.7).equal(fake)
    assert tensor_quant.LegacyFakeTensorQuantFunction.apply(x, amax).equal(fake)
    codes, scale = tensor_quant.TensorQuantFunction.apply(x, amax, 8, False)
    assert codes.equal(tensor_quant.tensor_quant(x, amax)[0])
    assert not scale.requires_grad
    assert tensor_quant.ScaledE4M3Function.apply(x).equal(tensor_quant.scaled_e4m3(x))
    affine = tensor_quant.FakeAffineTensorQuantFunction.apply(x, -amax, amax)
    assert affine.equal(tensor_quant.fake_affine_tensor_quant(x, -amax, amax))
    (codes.sum() + affine.sum()).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 2, 2, 2, 0]


@pytest.mark.parametrize("keepdims", [True, False])
@pytest.mark.parametrize(
    "axis", [None, 0, -1, (1, 2, 3), (0, 3), [0, 1, 3, 4], (), (0, 1, 2, 3, 4)], ids=str
)
def test_reduce_amax(axis: Any, keepdims: bool) -> None:
    x = torch.randn(
        2, 3, 2, 5, 3, generator=torch.Generator().manual_seed(0), requires_grad=True
    )
    actual = utils.reduce_amax(x, axis=axis, keepdims=keepdims)
    axes = (
        None if axis is None or len(np.atleast_1d(axis)) == 5 else np.atleast_1d(axis)
    )
    axes = None if axes is None else tuple(axes.astype(int))
    expected = np.max(
        np.abs(x.detach().numpy()), axes, keepdims=keepdims and axes is not None
    )
    np.testing.assert_array_equal(actual.numpy(), expected)
    assert actual.shape == expected.shape
    assert not actual.requires_grad


def test_reduce_amax_takes_integers_and_refuses_too_many_axes() -> None:
    assert utils.reduce_amax(torch.tensor([-3, 2])).item() == 3
    with pytest.raises(ValueError, match="Cannot reduce more axes"):
        utils.reduce_amax(
            torch.zeros(2, 2),
            axis=(0, 1, 2),
        )
