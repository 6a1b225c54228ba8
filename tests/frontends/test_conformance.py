"""The node cases and networks of the onnx package: what is converted computes what it should."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import torchq
from torchq.errors import FrontendError

onnx = pytest.importorskip("onnx", reason="the package onnx carries the cases")
pytest.importorskip("onnxruntime", reason="is the reference of light networks")
from benchmarks import conformance_onnx as conformance  # noqa: E402

DATA = Path(onnx.__file__).parent / "backend" / "test" / "data"
#: How many cases of onnx 1.23 are converted: rare operators are refused by name. A new version of
#: onnx brings more.
CONVERTED = 1620


@functools.cache
def cases() -> dict[str, Any]:
    """Return the cases by name; making them takes seconds, which a collection need not wait for."""
    return conformance.cases()


@functools.cache
def verdict(name: str) -> str:
    """Return "right" or "refused"; of anything else the reason too."""
    actual = conformance.outcome_of(cases()[name])
    kind = str(actual["outcome"])
    return kind if kind != "wrong" else f"wrong: {actual['reason']}"


@pytest.mark.parametrize(
    "step", [pytest.param(1, marks=pytest.mark.slow, id="all"), 12]
)
def test_no_case_is_wrong_and_most_are_converted(step: int) -> None:
    actual = {name: verdict(name) for name in list(cases())[::step]}
    assert {
        name: message
        for name, message in actual.items()
        if message not in ("right", "refused")
    } == {}
    # One in twelve is as often converted as all are, but for a few.
    least = CONVERTED / 1884 if step == 1 else 0.9 * CONVERTED / 1884
    assert list(actual.values()).count("right") >= int(least * len(actual))


#: Operators that have a case each; a network of any toolkit before may hold them.
USUAL = """Abs Acos Acosh Add And ArgMax Asin Asinh Atanh Attention AveragePool
    BatchNormalization BitCast BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast Clip
    Col2Im Compress Concat Constant ConstantOfShape Conv ConvTranspose Cos Cosh CumProd CumSum
    DFT DeformConv DepthToSpace Det Div Elu Equal Erf Exp Expand EyeLike Flatten Floor GRU
    Gather GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalMaxPool Greater
    HardSigmoid HardSwish Hardmax Identity InstanceNormalization IsInf LSTM LayerNormalization
    LeakyRelu Less Log LogSoftmax Loop LpNormalization LpPool MatMul Max MaxPool MaxUnpool
    MelWeightMatrix Min Mod Mul Neg NonMaxSuppression NonZero Not OneHot PRelu Pad Pow
    QLinearConv QLinearMatMul RNN Range Reciprocal ReduceL2 ReduceMax ReduceMean ReduceSum
    Relu Reshape Resize ReverseSequence RoiAlign STFT Scan ScatterElements ScatterND Selu
    Shape Shrink Sigmoid Sin Sinh Slice Softmax Softplus SpaceToDepth Split Sqrt Squeeze Sub
    Sum Tan Tanh TensorScatter Tile TopK Transpose Unique Unsqueeze Where"""


@pytest.mark.parametrize("op_type", USUAL.split())
def test_usual_operators_are_converted(op_type: str) -> None:
    nodes = (
        (name, node) for name, case in cases().items() for node in case.model.graph.node
    )
    assert any(
        verdict(name) == "right" for name, node in nodes if node.op_type == op_type
    )


#: What the names of cases begin with, of which none is refused.
WHOLE = """acos add_ asin atan attention basic_deform bitcast bitshift bitwise col2im compress
    cosh cumprod deform det_ dft eyelike gru hardmax isinf l1norm l2norm linear_attention
    loop11 lpnorm lppool lstm maxpool mod_ nonmaxsuppression qlinear resize reversesequence
    rms_ rnn roialign rotary scan9 scatter selu shrink simple_rnn sinh stft tensorscatter
    unique_"""


@pytest.mark.parametrize("kind", WHOLE.split())
def test_every_case_of_some_operators_is_converted(kind: str) -> None:
    actual = {
        name: verdict(name) for name in cases() if name.startswith(f"test_{kind}")
    }
    assert set(actual.values()) == {"right"}, actual


def test_a_wrong_result_would_be_noticed() -> None:
    case: Any = cases()["test_relu"]
    actual = conformance.outcome(
        cases()["test_sigmoid"].model, case.data_sets, case.rtol, case.atol
    )
    assert actual["outcome"] == "wrong"
    assert "largest error" in actual["reason"]
    assert "for torch.int64" in conformance.difference(
        torch.ones(2), torch.tensor([1, 1]), 0, 0
    )


@pytest.mark.parametrize("kind", ["pytorch-converted", "pytorch-operator"])
def test_models_that_pytorch_wrote(kind: str) -> None:
    actual = {row["name"]: row for row in conformance.stored_models(kind)}
    wrong = [row for row in actual.values() if row["outcome"] != "right"]
    assert len(actual) > 30
    assert all(
        "multiparam" in row["name"] and row["outcome"] == "refused" for row in wrong
    ), wrong


def test_slopes_of_each_channel_of_opset_6_are_refused() -> None:
    """Their first size is that of the channels, which onnx.version_converter does not see."""
    with pytest.raises(
        FrontendError, match="opset 6, where a PRelu has a slope of each channel"
    ):
        torchq.from_onnx(
            DATA / "pytorch-converted" / "test_PReLU_2d_multiparam" / "model.onnx"
        )


@pytest.mark.parametrize(
    ("names", "count"),
    [("light_s*", 2), pytest.param("*", 9, marks=pytest.mark.slow, id="all")],
)
def test_light_networks(names: str, count: int) -> None:
    """Against ONNX Runtime: all weights of these files are the same number."""
    rows = list(conformance.light_networks(names))
    assert len(rows) >= count
    assert max(row["error"] for row in rows) <= 1e-5
