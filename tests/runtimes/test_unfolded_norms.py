"""Exports say what a runtime does with BatchNorms behind quantized layers."""

import warnings
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import torchq
from tests.fusion.common import randomized

X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def trained(target: str) -> nn.Module:
    """Return eight convolutions with norms behind them, as training leaves them."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for index in range(8):
        layers += [
            nn.Conv2d(3 if index == 0 else 4, 4, 1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
        ]
    model = randomized(nn.Sequential(*layers, nn.Conv2d(4, 2, 1)))
    torchq.qat.prepare(model, [X], target=target, progress=False)
    return model.eval()


def integer_weights(path: Path) -> int:
    stored = onnx.load(path).graph.initializer
    return sum(tensor.data_type in (2, 3) and len(tensor.dims) > 1 for tensor in stored)


FOLLOWS = "as a BatchNorm follows: 8 layers, 0, 3, 6, 9, 12, 15 and 2 more"
SAID = {
    "onnxruntime": f"computed in float, {FOLLOWS}",
    "openvino": f"computed on integers, with a factor and an offset in float, {FOLLOWS}",
    "tensorrt": f"left for TensorRT to fuse, which was not run here, {FOLLOWS}",
}


@pytest.mark.parametrize("target", SAID)
def test_the_export_says_first_what_runs_in_float_and_that_fusing_mends_it(
    target: str, tmp_path: Path
) -> None:
    model = trained(target)
    path = tmp_path / "m.onnx"
    with pytest.warns(
        UserWarning, match="fuse_.model.eval.., example. folds it"
    ) as caught:
        torchq.export_onnx(model, X, path, dynamo=False, progress=False)
    sentences = str(caught[0].message).splitlines()
    assert SAID[target] in sentences[1]
    # Nothing else is said of them, as it would be for want of a quantizer behind each.
    assert not any(
        f"- {layer}: its output" in str(sentences) for layer in range(0, 24, 3)
    )
    torchq.fuse_(model, X, progress=False)
    with warnings.catch_warnings(record=True) as later:
        warnings.simplefilter("always")
        torchq.export_onnx(model, X, path, dynamo=False, progress=False)
    assert not any("BatchNorm" in str(warning.message) for warning in later)
    # It returns floats.
    assert integer_weights(path) == (8 if target == "onnxruntime" else 9)


@pytest.mark.parametrize("target", SAID)
def test_a_fold_that_was_refused_is_not_advised_again(
    target: str, tmp_path: Path
) -> None:
    model = trained(target)
    with torch.no_grad():
        model[1].weight[0] = torch.nan
    report = torchq.fuse_(model, X, progress=False)
    (refusal,) = report.refused
    assert (refusal.name, len(report.fused)) == ("1", 7)
    path = tmp_path / "m.onnx"
    with pytest.warns(UserWarning, match="BatchNorm follows: 1 layers, 0;") as caught:
        torchq.export_onnx(model, X, path, dynamo=False, progress=False)
    (said,) = [
        " ".join(str(w.message).split()) for w in caught if "0;" in str(w.message)
    ]
    assert (
        "torchq.fuse_ refused it, and print(torchq.fuse_(model.eval(), example)) says"
        in said
    )
    assert "folds it" not in said
    again = torchq.fuse_(model, X, progress=False)
    assert [(r.name, r.reason) for r in again.refused] == [("1", refusal.reason)]


@pytest.mark.slow
def test_inspecting_and_deploying_say_it_too(tmp_path: Path) -> None:
    model = trained("onnxruntime")
    path = tmp_path / "m.onnx"
    with pytest.warns(UserWarning, match="as a BatchNorm follows: 8 layers"):
        torchq.export_onnx(model, X, path, dynamo=False, progress=False)
    report = torchq.inspect_onnx(path)
    assert report.norms == tuple(str(3 * index) for index in range(8))
    assert SAID["onnxruntime"] in str(report).replace("\n", " ")
    with pytest.warns(
        UserWarning, match="deploy: .* computed in float, as a BatchNorm follows"
    ):
        torchq.deploy(model, X, target="onnxruntime", progress=False)
    torchq.fuse_(model, X, progress=False)
    with pytest.warns(UserWarning, match="24: its output is not quantized"):
        torchq.export_onnx(model, X, path, dynamo=False, progress=False)
    assert torchq.inspect_onnx(path).norms == ()
