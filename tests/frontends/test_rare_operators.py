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
from torchq.errors import FrontendError
from torchq.frontends.onnx.converters.bits import shifted, unsigned
from torchq.frontends.onnx.converters.layers import deformed
from torchq.frontends.onnx.converters.signals import dft

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


def poolings() -> Any:
    """Write what segmenters hold: places of maxima, undone poolings and blocks."""
    w = Writer(18)
    y = w.conv(w.input("x", ["n", 3, 17, 17]), 3, 8, stride=2)
    window = {"kernel_shape": [3, 3], "strides": [3, 3]}
    pooled, places = w.node("MaxPool", y, outputs=2, **window)
    back = w.node("MaxUnpool", w.conv(pooled, 8, 8), places, **window)
    y = w.conv(w.node("LpNormalization", back, axis=1), 8, 8)
    y = w.node("LpPool", y, kernel_shape=[2, 2], strides=[2, 2], p=2, pads=[0, 1, 1, 1])
    rows = w.node("Reshape", y, w.constant([0, 8, -1]))
    sizes = w.constant([5, 5]), w.constant([2, 1])
    return w.model(w.node("Col2Im", rows, *sizes, strides=[1, 1], pads=[1, 0, 0, 0]))


def deformable() -> Any:
    """Write a deformable convolution with masks, as detectors and views from above hold it."""
    w = Writer(19)
    y = w.conv(w.input("x", ["n", 3, 17, 17]), 3, 8, stride=2)
    offsets = w.conv(y, 8, 2 * 2 * 9)
    masks = w.node("Sigmoid", w.conv(y, 8, 2 * 9))
    weights = w.random(8, 4, 3, 3, name="deformed.weight"), w.random(8)
    parts = y, weights[0], offsets, weights[1], masks
    y = w.node("DeformConv", *parts, pads=[1, 1, 1, 1], offset_group=2, group=2)
    return w.model(w.conv(y, 8, 4))


def spectra() -> Any:
    """Write spectra of rows, and a transform of them, before convolutions."""
    w = Writer(20)
    rows = w.node("Reshape", w.input("x", ["n", 3, 17, 17]), w.constant([0, -1, 1]))
    step, length = w.constant(8), w.constant(32)
    window = w.constant(torch.hann_window(32).tolist())
    y = w.node("STFT", rows, step, window, length)
    y = w.conv(w.node("Transpose", y, perm=[0, 3, 1, 2]), 2, 8)
    pairs = w.node("Unsqueeze", y, w.constant([-1]))
    y = w.node("DFT", pairs, "", w.constant(-2), onesided=1)
    y = w.node("ReduceL2", y, w.constant([-1]), keepdims=0)
    return w.model(w.conv(y, 8, 4))


def recurrent(
    w: Writer, kind: str, x: str, sizes: tuple[int, int], **options: Any
) -> Any:
    """Write a recurrent layer of (inputs, hidden) with random weights; return its outputs."""
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind] * sizes[1]
    directions = 2 if options.get("direction") == "bidirectional" else 1
    lengths = options.pop("lengths", "")
    shapes = (gates, sizes[0]), (gates, sizes[1]), (2 * gates,)
    weights = [w.random(directions, *shape) for shape in shapes]
    if options.pop("computed", False):
        one = w.input("one", [1])
        weights = [w.node("Mul", part, one) for part in weights]
    outputs = 3 if kind == "LSTM" else 2
    options["hidden_size"] = sizes[1]
    return w.node(kind, x, *weights, lengths, outputs=outputs, **options)


def backwards() -> Any:
    """Write recurrent layers over the rows of an image, backwards and of other lengths."""
    w = Writer(18)
    y = w.conv(w.input("x", ["n", 3, 17, 17]), 3, 8, stride=2)
    rows = w.node(
        "Transpose", w.node("ReduceMean", y, w.constant([3])), perm=[2, 0, 1, 3]
    )
    rows = w.node("Squeeze", rows, w.constant([3]))
    y = recurrent(w, "LSTM", rows, (8, 6), direction="reverse")[0]
    y = w.node("Squeeze", y, w.constant([1]))
    y = recurrent(w, "RNN", y, (6, 5), direction="reverse")[0]
    return w.model(
        w.node("MatMul", w.node("Squeeze", y, w.constant([1])), w.random(5, 4))
    )


def attention() -> Any:
    """Write attention whose mask and past are left out, before lengths of the keys."""
    w = Writer(24)
    y = w.conv(w.input("x", ["n", 3, 17, 17]), 3, 8, stride=4)
    y = w.node(
        "Transpose", w.node("Reshape", y, w.constant([0, 8, 25])), perm=[0, 2, 1]
    )
    parts = [w.node("MatMul", y, w.random(8, 8)) for _ in range(3)]
    heads = {"q_num_heads": 2, "kv_num_heads": 2}
    size = w.node("Slice", w.node("Shape", y), w.constant([0]), w.constant([1]))
    lengths = w.node("Expand", w.constant([20]), size)
    y = w.node("Attention", *parts, "", "", "", lengths, **heads)
    return w.model(w.node("MatMul", y, w.random(8, 4)))


FILES: dict[str, Callable[[], Any]] = {
    "activations": activations,
    "attention": attention,
    "backwards": backwards,
    "deformable": deformable,
    "poolings": poolings,
    "spectra": spectra,
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


POOLINGS: dict[str, dict[str, Any]] = {
    "pads": {"pads": [1, 0, 0, 2]},
    "ceil": {"ceil_mode": 1, "strides": [2, 3]},
    "column major": {"storage_order": 1, "pads": [1, 1, 1, 1]},
    "dilated": {"dilations": [2, 1], "auto_pad": "VALID"},
}


@pytest.mark.parametrize("name", POOLINGS)
@pytest.mark.parametrize("sizes", [(7,), (7, 9), (5, 7, 6)])
def test_places_of_maxima(name: str, sizes: tuple[int, ...]) -> None:
    w = Writer(18)
    options = dict(POOLINGS[name])
    spatial = len(sizes)
    for key in ("strides", "dilations"):
        options[key] = (options.get(key, [1, 1]) + [1])[:spatial]
    if "pads" in options:
        options["pads"] = [1] * spatial + [0] * spatial
    x = w.input("x", [2, 3, *sizes])
    results = w.node("MaxPool", x, outputs=2, kernel_shape=[3] * spatial, **options)
    values = torch.randn(2, 3, *sizes, generator=torch.Generator().manual_seed(1))
    assert_agrees(w.model(results[0], (results[1], torch.int64)), {"x": values})


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("in_order", [0, 1])
def test_unique_entries(axis: int | None, in_order: int) -> None:
    w = Writer(18)
    options = {} if axis is None else {"axis": axis}
    parts = w.node(
        "Unique", w.input("x", [6, 2]), outputs=4, sorted=in_order, **options
    )
    places = [(part, torch.int64) for part in parts[1:]]
    numbers = [[2, 1], [2, 1], [0, 3], [2, 1], [0, 1], [0, 3]]
    x = torch.tensor(numbers, dtype=torch.float32)
    assert_agrees(w.model(parts[0], *places), {"x": x})


@pytest.mark.parametrize("operator", ["ScatterND", "ScatterElements"])
@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_reductions_of_what_is_written(operator: str, reduction: str) -> None:
    w = Writer(18)
    places = [[1, 2], [-1, 0], [1, 2]]
    updates = [3.0, -0.5, 0.25]
    if operator == "ScatterElements":
        places, updates = [[1, 0, -1], [1, 0, 1]], [[3.0, -0.5, 0.25], [2.0, 1.0, 1.0]]
    if reduction == "none":
        places = [[1, 2], [-1, 0], [0, 2]] if operator == "ScatterND" else [[1, 0, -1]]
        updates = updates if operator == "ScatterND" else updates[:1]
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(2))
    parts = w.input("x", [2, 3]), w.constant(places), w.constant(updates)
    assert_agrees(w.model(w.node(operator, *parts, reduction=reduction)), {"x": x})


#: An operator, its opset, the sizes of what it reads, and its attributes; a number is an input of
#: one whole number, and None one that is left out.
OPERATORS: list[tuple[str, int, list[Any], dict[str, Any]]] = [
    *(("Hardmax", o, [[2, 3, 4]], a) for o in (11, 13) for a in ({}, {"axis": 1})),
    *(("LpNormalization", 17, [[2, 3, 4]], {"p": p, "axis": 1}) for p in (1, 2)),
    *(("GlobalLpPool", 17, [[2, 3, 4, 5]], {"p": p}) for p in (1, 2, 3)),
    *(("EyeLike", 17, [[3, 4]], {"k": k}) for k in (-2, 0, 1)),
    *(("Shrink", 17, [[40]], a) for a in ({}, {"lambd": 1.0, "bias": -0.5})),
    *(("Selu", 17, [[40]], a) for a in ({}, {"alpha": 2.0, "gamma": 3.0})),
    ("Det", 17, [[2, 3, 3, 3]], {}),
    *(
        ("CumSum", 17, [[3, 4], 1], {"exclusive": e, "reverse": r})
        for e in (0, 1)
        for r in (0, 1)
    ),
    *(
        ("LpPool", o, [[2, 3, 7, 8]], {"kernel_shape": [3, 2], **a})
        for o, a in (
            (11, {"auto_pad": "SAME_LOWER", "strides": [2, 1]}),
            (11, {"pads": [1, 0, 2, 1], "p": 3}),
            (18, {"ceil_mode": 1, "strides": [2, 3]}),
            (18, {"dilations": [2, 1], "p": 1}),
        )
    ),
    *(
        ("DeformConv", 19, [[2, 4, 8, 9], [6, 4 // g, 3, 3], [2, 18 * n, h, w]], a)
        for g, n, h, w, a in (
            (2, 1, 6, 7, {"group": 2}),
            (1, 2, 8, 9, {"offset_group": 2, "pads": [1, 1, 1, 1]}),
            (1, 1, 3, 4, {"strides": [2, 2]}),
            (1, 1, 4, 7, {"dilations": [2, 1]}),
        )
    ),
    *(("DFT", 17, [[2, 8, 6, 1]], {"axis": 1, "onesided": o}) for o in (0, 1)),
    *(("DFT", 20, [[2, 8, 6, p], None, 1], {"inverse": p - 1}) for p in (1, 2)),
    *(("STFT", 17, [[2, 40, 1], 8, [16]], {"onesided": o}) for o in (0, 1)),
    ("STFT", 17, [[2, 40, 1], 8, None, 16], {}),
]


@pytest.mark.parametrize("case", OPERATORS, ids=str)
def test_single_operators(case: Any) -> None:
    op_type, opset, sizes, options = case
    generator = torch.Generator().manual_seed(6)
    w = Writer(opset)
    feeds = {}
    names = []
    for number, part in enumerate(sizes):
        if isinstance(part, list):
            feeds[f"x{number}"] = torch.randn(part, generator=generator)
            names.append(w.input(f"x{number}", part))
        else:
            names.append("" if part is None else w.constant(part))
    assert_agrees(w.model(w.node(op_type, *names, **options)), feeds)


def test_an_unpooling_to_another_shape_is_refused() -> None:
    w = Writer(18)
    x, places = w.input("x", [1, 1, 2, 2]), w.constant([[[[5, 7], [13, 15]]]])
    window = {"kernel_shape": [2, 2], "strides": [2, 2]}
    y = w.node("MaxUnpool", x, places, w.constant([1, 1, 5, 5]), **window)
    with pytest.raises(FrontendError, match=r"output shape is \[1, 1, 5, 5\]"):
        torchq.from_onnx(w.model(y))


@pytest.mark.parametrize("size", [(1, 6), (5, 7)])
@pytest.mark.parametrize("is_far", [False, True])
def test_deformable_windows_against_torchvision(
    size: tuple[int, int], is_far: bool
) -> None:
    ops = pytest.importorskip("torchvision.ops", reason="is the reference")
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 4, *size, generator=generator)
    weight = torch.randn(6, 4, 3, 2, generator=generator)
    window = {"stride": (1, 2), "padding": (1, 2), "dilation": (1, 2)}
    out = ((size[0] + 2 - 3) + 1, (size[1] + 4 - 2 - 1) // 2 + 1)
    offset = torch.randn(2, 2 * 2 * 6, *out, generator=generator)
    offset = offset * 20 if is_far else offset
    mask = torch.rand(2, 2 * 6, *out, generator=generator)
    expected = ops.deform_conv2d(x, offset, weight, None, mask=mask, **window)
    sizes = (3, 2), (1, 2), (1, 2), (1, 2, 1, 2)
    windows = deformed(x, offset, mask, *sizes, 2)
    got = torch.nn.functional.conv2d(windows, weight, stride=(3, 2))
    assert torch.allclose(got, expected, rtol=1e-5, atol=1e-5)


def transforms() -> Any:
    """Yield inputs and options of DFT: real and complex, whole and onesided, cut and filled."""
    for axis, length in ((-2, None), (1, None), (1, 5), (-2, 11)):
        for parts, inverse, onesided in ((1, 0, 0), (1, 0, 1), (2, 0, 0), (2, 1, 0)):
            yield axis, length, parts, inverse, onesided
    yield 1, None, 2, 1, 1
    yield -2, 9, 2, 1, 1


@pytest.mark.parametrize("options", list(transforms()), ids=str)
def test_transforms_are_those_of_numpy(options: Any) -> None:
    axis, length, parts, inverse, onesided = options
    x = torch.randn(2, 8, 6, parts, generator=torch.Generator().manual_seed(4)).double()
    numbers = x[..., 0].numpy() + (1j * x[..., 1].numpy() if parts == 2 else 0)
    place = axis + 1 if axis < 0 else axis
    kind = ("i" if inverse else "") + ("rfft" if onesided else "fft")
    expected = getattr(np.fft, kind)(
        numbers.real if kind == "rfft" else numbers, length, place
    )
    got = dft(x, length, axis, bool(inverse), bool(onesided)).numpy()
    found = got[..., 0] + (1j * got[..., 1] if got.shape[-1] == 2 else 0)
    assert np.allclose(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("lengths", ["none", "whole", "given"])
@pytest.mark.parametrize("computed", [False, True])
def test_recurrent_layers(
    kind: str, direction: str, lengths: str, computed: bool
) -> None:
    w = Writer(14)
    x = w.input("x", [5, 3, 4])
    options: dict[str, Any] = {"direction": direction, "computed": computed}
    feeds = {"x": torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(5))}
    if computed:
        feeds["one"] = torch.ones(1)
    if lengths == "whole":
        options["lengths"] = w.constant([5, 5, 5], torch.int32)
    if lengths == "given":
        options["lengths"] = w.input("lengths", [3], torch.int32)
        feeds["lengths"] = torch.tensor([5, 2, 3], dtype=torch.int32)
    if kind == "GRU":
        options["linear_before_reset"] = 1
    read = assert_agrees(w.model(*recurrent(w, kind, x, (4, 6), **options)), feeds)
    is_layer = any(isinstance(module, torch.nn.RNNBase) for module in read.modules())
    assert is_layer == (lengths != "given" and not computed)


@pytest.mark.parametrize("operator", ["RandomNormalLike", "Bernoulli"])
def test_random_results_are_refused(operator: str) -> None:
    w = Writer(18)
    y = w.node(operator, w.input("x", [2, 3]))
    with pytest.raises(FrontendError, match=f"{operator} .*its results are random"):
        torchq.from_onnx(w.model(y))


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
