"""The node cases and networks of the onnx package: what is converted computes what it should."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import torchq
from torchq.errors import FrontendError
from torchq.frontends.onnx.reader import tensor_of

onnx = pytest.importorskip("onnx", reason="the package onnx carries the cases")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the cases are made by code that overflows on purpose
    from onnx.backend.test.case.node import collect_testcases

    CASES = {case.name: case for case in collect_testcases(None)}

DATA = Path(onnx.__file__).parent / "backend" / "test" / "data"
#: Two units in the last place: softmax and products are rounded at other places in the reference.
HALF_PRECISION = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
#: How many cases of onnx 1.23 are converted: rare operators are refused by name. A new version of
#: onnx brings more.
CONVERTED = 1350


def as_tensor(value: Any) -> Tensor:
    """Return an array or message of a case as a tensor."""
    if hasattr(value, "data_type"):
        return tensor_of(value, None, "case")
    if isinstance(value, Tensor):
        return value
    array = np.array(value)
    codes = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
    codes |= {"float8_e5m2": torch.float8_e5m2, "float8_e4m3fnuz": torch.float8_e4m3fnuz}
    codes |= {"float8_e5m2fnuz": torch.float8_e5m2fnuz}
    if array.dtype.name in codes:
        bits = array.view(f"int{8 * array.dtype.itemsize}")
        return torch.from_numpy(bits).view(codes[array.dtype.name])
    return torch.from_numpy(array)


def check(got: Tensor, expected: Any, rtol: float, atol: float) -> None:
    wanted = as_tensor(expected)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    rtol = max(rtol, HALF_PRECISION.get(got.dtype, 0.0))
    torch.testing.assert_close(got.double(), wanted.double(), rtol=rtol, atol=atol, equal_nan=True)


def run(model: Any, data: Sequence[Any], rtol: float, atol: float) -> None:
    for inputs, outputs in data:
        results = model(*[as_tensor(value) for value in inputs])
        results = results if isinstance(results, tuple) else (results,)
        for got, expected in zip(results, outputs, strict=True):
            check(got, expected, rtol, atol)


def outcome(name: str) -> str:
    """Return "refused" or "right"; anything else raises."""
    case = CASES[name]
    try:
        model = torchq.from_onnx(case.model)
    except FrontendError:
        return "refused"
    with torch.no_grad():
        run(model, case.data_sets, case.rtol, case.atol)
    return "right"


def test_no_case_is_wrong_and_most_are_converted() -> None:
    wrong, right = [], 0
    for name in CASES:
        try:
            right += outcome(name) == "right"
        except Exception as error:  # gathered, so that one failure does not hide the others
            wrong.append(f"{name}: {type(error).__name__}: {error}"[:200])
    assert wrong == []
    assert right >= CONVERTED * len(CASES) // 1884


#: Operators that have a case each; a network of any toolkit before may hold them.
USUAL = """Abs Add And ArgMax Attention AveragePool BatchNormalization Cast Clip Concat Constant
    ConstantOfShape Conv ConvTranspose Cos DepthToSpace Div Elu Equal Erf Exp Expand Flatten Floor
    GRU Gather GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalMaxPool Greater HardSigmoid
    HardSwish Identity InstanceNormalization LSTM LayerNormalization LeakyRelu Less Log LogSoftmax
    MatMul Max MaxPool Min Mul Neg NonMaxSuppression NonZero Not OneHot PRelu Pad Pow Range
    Reciprocal ReduceL2 ReduceMax ReduceMean ReduceSum Relu Reshape Resize RoiAlign ScatterElements
    ScatterND Shape Sigmoid Sin Slice Softmax Softplus SpaceToDepth Split Sqrt Squeeze Sub Sum Tan
    Tanh Tile TopK Transpose Unsqueeze Where"""


@pytest.mark.parametrize("op_type", USUAL.split())
def test_usual_operators_are_converted(op_type: str) -> None:
    nodes = ((name, node) for name, case in CASES.items() for node in case.model.graph.node)
    assert any(outcome(name) == "right" for name, node in nodes if node.op_type == op_type)


@pytest.mark.parametrize("kind", ["lstm", "gru", "roialign", "resize", "nonmaxsuppression"])
def test_every_case_of_sequences_and_detectors_is_converted(kind: str) -> None:
    outcomes = {name: outcome(name) for name in CASES if name.startswith(f"test_{kind}")}
    assert set(outcomes.values()) == {"right"}, outcomes


def test_a_wrong_result_would_be_noticed() -> None:
    case = CASES["test_relu"]
    model = torchq.from_onnx(CASES["test_sigmoid"].model)
    with pytest.raises(AssertionError):
        run(model, case.data_sets, case.rtol, case.atol)


def stored(folder: Path, kind: str) -> list[Tensor]:
    paths = sorted(folder.glob(f"{kind}_*.pb"), key=lambda path: int(path.stem.split("_")[-1]))
    return [
        tensor_of(onnx.TensorProto.FromString(path.read_bytes()), None, "data") for path in paths
    ]


@pytest.mark.parametrize(
    "folder",
    [
        path
        for kind in ("pytorch-converted", "pytorch-operator")
        for path in sorted((DATA / kind).iterdir())
        if "multiparam" not in path.name
    ],
    ids=lambda path: path.name,
)
def test_models_that_pytorch_wrote(folder: Path) -> None:
    model = torchq.from_onnx(folder / "model.onnx")
    for data in sorted(folder.glob("test_data_set_*")):
        inputs = stored(data, "input")[: len(model.input_names)]
        run(model, [(inputs, stored(data, "output"))], rtol=1e-3, atol=1e-5)


def test_slopes_of_each_channel_of_opset_6_are_refused() -> None:
    """Their first size is that of the channels, which onnx.version_converter does not see."""
    with pytest.raises(FrontendError, match="opset 6, where a PRelu has a slope of each channel"):
        torchq.from_onnx(DATA / "pytorch-converted" / "test_PReLU_2d_multiparam" / "model.onnx")


@pytest.mark.parametrize(
    "path", sorted((DATA / "light").glob("*.onnx")), ids=lambda path: path.stem
)
def test_light_networks(path: Path) -> None:
    """Against ONNX Runtime: all weights of these files are the same number."""
    runtime = pytest.importorskip("onnxruntime", reason="is the reference")
    model = torchq.from_onnx(path)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (name,) = model.input_names
    shape = next(info.shape for info in session.get_inputs() if info.name == name)
    x = torch.rand(shape)
    expected = torch.from_numpy(session.run(None, {name: x.numpy()})[0])
    with torch.no_grad():
        got = model(x)
    assert float((got - expected).abs().max() / expected.abs().max()) <= 1e-5
