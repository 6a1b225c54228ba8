"""Tools that fold BatchNorms themselves take the quantizers of their results along."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import torchq
from tests.models import simulated
from torchq.workflow.lost_norms import check_norms

X = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def trained() -> nn.Sequential:
    """Return a network whose plan has a quantizer of the result of each BatchNorm."""
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    behind = [nn.Upsample(scale_factor=2), nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 1)]
    net = nn.Sequential(*layers, *behind).eval()
    simulated(net, [X], target="onnxruntime", example=X)
    assert hasattr(net[1], "output_quantizer")
    return net


def replace_norm(net: nn.Sequential) -> None:
    net[1] = nn.Identity()


def delete_norm(net: nn.Sequential) -> None:
    delattr(net, "1")


@pytest.mark.parametrize("fold", [replace_norm, delete_norm])
@pytest.mark.parametrize("is_part", [False, True])
def test_a_norm_that_another_tool_has_folded_is_missed(
    fold: Callable[[nn.Sequential], None], is_part: bool, tmp_path: Path
) -> None:
    net = trained()
    model = nn.Sequential(net) if is_part else net
    check_norms("here", model)
    fold(net)
    path = "0.1" if is_part else "1"
    text = (
        rf"export_onnx: {path}: got no BatchNorm, whose result was.*call torchq\.fuse_"
    )
    with pytest.raises(torchq.errors.QuantizationError, match=text):
        torchq.export_onnx(model, X, tmp_path / "net.onnx", target=None, progress=False)
    assert not list(tmp_path.iterdir())


def test_a_fold_of_our_own_is_none_that_is_missed() -> None:
    net = trained()
    assert torchq.fuse_(net, X, progress=False).applied
    check_norms("here", net)
    torchq.restore_(net)
    check_norms("here", net)
