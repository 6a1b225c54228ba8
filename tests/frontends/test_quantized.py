"""Quantized files: their ranges become quantizers, and the same codes come out again."""

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchq
from tests.frontends.onnx_writer import Writer
from torchq import QuantConfig, QuantDescriptor, Rule
from torchq.errors import FrontendError
from torchq.formats import INT8, UINT8
from torchq.nn import TensorQuantizer

onnx = pytest.importorskip("onnx", reason="writes the files")
helper = onnx.helper
numpy_helper = onnx.numpy_helper


class Residual(nn.Module):
    """Two convolutions beside a skip connection, then a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = (nn.Conv2d(i, 8, 3, padding=1) for i in (8, 8, 8))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        x = (x + self.b(self.a(x).relu())).relu()
        return self.head(x.mean((2, 3)))


@pytest.mark.slow
def test_zero_points_survive_the_way_there_and_back(tmp_path: Path) -> None:
    # Few scales have no float32 range, and come back one unit off.
    torch.manual_seed(0)
    model = Residual().eval()
    x = torch.randn(4, 8, 8, 8)
    torchq.quantize_(model, torchq.recipes.int8(symmetric=False))
    torchq.calibrate(model, [x], progress=False)
    torchq.export_onnx(model, x, tmp_path / "one.onnx")
    read = torchq.from_onnx(tmp_path / "one.onnx")
    own = model.a.input_quantizer
    assert isinstance(own, TensorQuantizer)
    actual = [q for q in read.modules() if isinstance(q, TensorQuantizer)]
    assert any(
        all(map(torch.equal, q.calculate_qparams(), own.calculate_qparams()))
        for q in actual
    )
    assert torch.equal(read(x), model(x))
    torchq.export_onnx(read, x, tmp_path / "two.onnx")
    assert contents(tmp_path / "two.onnx") == contents(tmp_path / "one.onnx")


def contents(path: Path) -> Counter[bytes]:
    return Counter(
        numpy_helper.to_array(t).tobytes() for t in onnx.load(path).graph.initializer
    )


SINGLE = torchq.runtimes.TensorRt(precision="float32")


@pytest.mark.sample(1)
@pytest.mark.parametrize("target", [None, SINGLE, "openvino"], ids=str)
def test_codes_survive_the_way_there_and_back(target: Any, tmp_path: Path) -> None:
    model = Residual().eval()
    x = torch.randn(4, 8, 8, 8)
    options: dict[str, Any] = {} if target is None else {"target": target}
    torchq.quantize_(model, **({} if target is None else {**options, "example": x}))
    torchq.calibrate(model, [x], progress=False)
    torchq.export_onnx(model, x, tmp_path / "one.onnx", **options)
    read = torchq.from_onnx(tmp_path / "one.onnx")
    assert isinstance(read.get_submodule("a"), torchq.nn.QuantConv2d)
    if target is None:
        assert torch.equal(read(x), model(x))
    # A model that was read keeps its codes, for any target.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*quantized for no target")
        torchq.export_onnx(read, x, tmp_path / "two.onnx", **options)
    assert contents(tmp_path / "two.onnx") == contents(tmp_path / "one.onnx")


def quantize_pair(zero_point: int, dtype: torch.dtype) -> Any:
    """Return a file that quantizes and dequantizes its input with scale 0.5."""
    w = Writer(13)
    pair = w.weight(torch.tensor(0.5)), w.weight(torch.tensor(zero_point, dtype=dtype))
    codes = w.node("QuantizeLinear", w.input("x", [4]), *pair)
    return w.model(w.node("DequantizeLinear", codes, *pair))


@pytest.mark.parametrize(
    ("zero_point", "dtype", "format"),
    [
        *(
            (0, torch.int8, INT8),
            (128, torch.uint8, INT8),
            (0, torch.uint8, UINT8),
        ),
        *((3, torch.uint8, UINT8), (-7, torch.int8, INT8)),
    ],
)
def test_pairs_become_quantizers(
    zero_point: int, dtype: torch.dtype, format: Any
) -> None:
    read = torchq.from_onnx(quantize_pair(zero_point, dtype))
    low = torch.iinfo(dtype).min
    high = torch.iinfo(dtype).max
    x = torch.tensor([-1e3, 0.3, 0.6, 1e3], requires_grad=True)
    y = read(x)
    bounds = ((low - zero_point) * 0.5, (high - zero_point) * 0.5)
    expected = (x.detach() / 0.5).round().mul(0.5).clamp(*bounds)
    assert torch.equal(y.detach(), expected)
    y.sum().backward()
    inside = (x.detach() >= bounds[0]) & (x.detach() <= bounds[1])
    assert torch.equal(x.grad, inside.float())  # trainable: straight through
    quantizers = [m for m in read.modules() if isinstance(m, torchq.TensorQuantizer)]
    assert [q.descriptor.format for q in quantizers] == [format]


@pytest.mark.sample(1)
@pytest.mark.parametrize("unsigned", [False, True], ids=["int4", "uint4"])
def test_weights_of_four_bits_keep_their_codes(unsigned: bool, tmp_path: Path) -> None:
    four = onnx.TensorProto.UINT4 if unsigned else onnx.TensorProto.INT4
    codes = np.arange(15).reshape(5, 3) - (0 if unsigned else 7)
    weight = helper.make_tensor(
        "codes",
        four,
        [5, 3],
        codes.flatten(),
    )
    w = Writer(21)
    w.initializers.append(weight)
    values = w.node(
        "DequantizeLinear", "codes", w.weight(torch.tensor([0.5, 0.25, 2])), axis=1
    )
    y = w.node("MatMul", w.input("x", [2, 5]), values)
    read = torchq.from_onnx(w.model(y))
    x = torch.randn(2, 5)
    expected = x @ torch.tensor(codes * [0.5, 0.25, 2.0], dtype=torch.float32)
    torch.testing.assert_close(read(x), expected)
    (quantizer,) = (m for m in read.modules() if isinstance(m, TensorQuantizer))
    assert quantizer.descriptor.format.name == ("uint4" if unsigned else "int4")
    assert quantizer.calculate_qparams()[0].flatten().tolist() == [0.5, 0.25, 2.0]
    torchq.export_onnx(read, x, tmp_path / "again.onnx", opset=21, dynamic_batch=False)
    stored = onnx.load(tmp_path / "again.onnx").graph.initializer
    actual = [
        numpy_helper.to_array(t).astype(int) for t in stored if t.data_type == four
    ]
    assert sorted(codes.flatten()) in [sorted(array.flatten()) for array in actual]
    weight.raw_data = b"\0" * 7
    with pytest.raises(
        FrontendError, match="holds 7 bytes; expected 8 for 15 numbers of 4 bits"
    ):
        torchq.from_onnx(w.model(y))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "symmetric", [True, False], ids=["int4", "uint4 with zero points"]
)
def test_weights_in_blocks_keep_their_codes(symmetric: bool, tmp_path: Path) -> None:
    weight = QuantDescriptor(
        4, block_size=16, symmetric=symmetric, unsigned=not symmetric
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(48, 6), torch.nn.ReLU(), torch.nn.Linear(6, 16)
    )
    torch.nn.init.uniform_(model[0].weight, -0.3, 0.1)
    torchq.quantize_(
        model.eval(),
        QuantConfig((Rule("0", weight=weight),)),
    )
    x = torch.randn(4, 48)
    torchq.calibrate(model, [x], progress=False)
    files = [tmp_path / "first.onnx", tmp_path / "again.onnx"]
    torchq.export_onnx(model, x, files[0], opset=21)
    read = torchq.from_onnx(files[0])
    torchq.export_onnx(read, x, files[1], opset=21)
    assert torch.equal(read(x), model(x))
    actual = read.get_submodule("0").weight_quantizer
    assert actual.descriptor == model[0].weight_quantizer.descriptor
    assert actual.amax.shape == (6, 3)
    four = (onnx.TensorProto.INT4, onnx.TensorProto.UINT4)
    stored = [
        [t.raw_data for t in onnx.load(path).graph.initializer if t.data_type in four]
        for path in files
    ]
    assert sorted(stored[0]) == sorted(stored[1])
    assert len(stored[0]) == (1 if symmetric else 2)
