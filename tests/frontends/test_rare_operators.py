"""Operators that few files hold: against ONNX Runtime, and on the road to a quantized file."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchq
from tests.frontends.onnx_writer import Writer, assert_agrees
from torchq.frontends.onnx.converters.bits import shifted, unsigned

_SIZES = (np.uint16, np.uint32, np.uint64)


def activations() -> Any:
    """Write functions of single elements between convolutions."""
    w = Writer(18)
    y = w.conv(w.input("x", ["n", 3, 17, 17]), 3, 8)
    y = w.node("Selu", y, alpha=1.5, gamma=1.2)
    y = w.node("Asinh", w.node("Sinh", w.conv(y, 8, 8)))
    y = w.node("Acosh", w.node("Cosh", y))
    y = w.node("Shrink", w.conv(y, 8, 8), lambd=0.3, bias=0.1)
    y = w.node("Atanh", w.node("Tanh", y))
    half = w.node("Mul", w.node("Tanh", y), w.constant(0.5))
    y = w.node("Add", w.node("Acos", half), w.node("Asin", half))
    return w.model(w.conv(y, 8, 4))


FILES: dict[str, Callable[[], Any]] = {
    "activations": activations,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FILES)
def test_files_are_quantized_for_a_runtime(name: str, tmp_path: Path) -> None:
    """What the file holds beside its layers stays float, and comes out as it was."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(count, 3, 17, 17, generator=generator) for count in (2, 3)]
    model = assert_agrees(FILES[name](), {"x": batches[0]})
    config = torchq.recipes.int8(reduce_range=True)
    torchq.quantize_(model, config, target="onnxruntime", example=batches[0])
    torchq.calibrate(model, batches, progress=False)
    with warnings.catch_warnings():
        # Of convolutions that return floats.
        warnings.simplefilter("ignore", UserWarning)
        path = tmp_path / "m.onnx"
        torchq.export_onnx(model, batches[0], path, target="onnxruntime")
    report = torchq.verify_onnx(model, path, batches)
    assert report.ok, report


def whole_numbers(dtype: Any, least: int = 0) -> np.ndarray:
    """Return numbers of all sizes, and the largest ones."""
    dtype = np.dtype(dtype).type
    generator = np.random.default_rng(0)
    bits = 8 * np.dtype(dtype).itemsize
    numbers = generator.integers(0, np.iinfo(dtype).max, 500, dtype, endpoint=True)
    numbers >>= generator.integers(0, bits, 500).astype(dtype)
    numbers[:3] = np.iinfo(dtype).max, np.iinfo(dtype).max // 2, 1
    return np.maximum(generator.permutation(numbers), dtype(least))


ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.floor_divide,
    "Mod": np.mod,
    "Equal": np.equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Max": np.maximum,
    "Min": np.minimum,
}


@pytest.mark.parametrize("dtype", _SIZES)
@pytest.mark.parametrize("kind", ARITHMETIC)
def test_unsigned_integers_are_computed_as_numpy_does(kind: str, dtype: Any) -> None:
    a, b = whole_numbers(dtype), np.roll(whole_numbers(dtype, least=1), 7)
    got = unsigned(kind, torch.from_numpy(a), torch.from_numpy(b))
    expected = ARITHMETIC[kind](a, b)
    assert got.numpy().dtype == expected.dtype
    assert np.array_equal(got.numpy(), expected)


@pytest.mark.parametrize("dtype", [np.uint8, *_SIZES, np.int8, np.int64])
@pytest.mark.parametrize("left", [True, False])
def test_bits_are_shifted_as_numpy_does(left: bool, dtype: Any) -> None:
    """NumPy fills with the sign, and gives 0 or the sign for counts beyond the width."""
    numbers = whole_numbers(f"u{np.dtype(dtype).itemsize}").view(dtype)
    width = 8 * np.dtype(dtype).itemsize
    counts = np.arange(len(numbers)).astype(dtype) % dtype(width + 2)
    got = shifted(torch.from_numpy(numbers), torch.from_numpy(counts), left)
    function = np.left_shift if left else np.right_shift
    assert np.array_equal(got.numpy(), function(numbers, counts))
