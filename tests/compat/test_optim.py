"""Parameter groups, freezing, and weights quantized in place."""

from typing import Any

import pytest
import torch
from torch import nn

from torchq.compat.pytorch_quantization import nn as quant_nn
from torchq.compat.pytorch_quantization.optim import helper


def net() -> nn.ModuleDict:
    block = {
        "conv1": nn.Conv2d(2, 2, 1),
        "downsample": nn.Sequential(nn.Conv2d(2, 2, 1, bias=False), nn.BatchNorm2d(2)),
    }
    return nn.ModuleDict({"layer1": nn.ModuleDict(block), "fc": nn.Linear(2, 2)})


WEIGHTS = [
    f"layer1.{name}.weight" for name in ("conv1", "downsample.0", "downsample.1")
]
WEIGHTS += ["fc.weight"]


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["downsample.0.weight"], ["layer1.downsample.0.weight"]),
        (
            ["conv1", "fc"],
            ["layer1.conv1.weight", "layer1.conv1.bias", "fc.weight", "fc.bias"],
        ),
        (
            [r"downsample.*.weight$"],
            ["layer1.downsample.0.weight", "layer1.downsample.1.weight"],
        ),
        (["conv1.weight", "weight$"], WEIGHTS),
        (["downsample.*.wei$"], []),
    ],
)
def test_match_parameters(patterns: list[str], names: list[str]) -> None:
    model = net()
    known = {id(p): name for name, p in model.named_parameters()}
    assert [known[id(p)] for p in helper.match_parameters(model, patterns)] == names


def test_group_parameters_feed_an_optimizer() -> None:
    patterns = [["conv1.*weight"], ["downsample.*.weight"]]
    groups = helper.group_parameters(
        net(), patterns, [0.1, 0.01], [0.2, 0.02], [0.3, 0.03]
    )
    actual = [(g["lr"], g["momentum"], g["weight_decay"]) for g in groups]
    assert actual == [(0.1, 0.2, 0.3), (0.01, 0.02, 0.03)]
    optimizer = torch.optim.SGD(groups)
    assert [len(g["params"]) for g in optimizer.param_groups] == [1, 2]
    assert "lr" not in helper.group_parameters(net(), [["fc"]])[0]


@pytest.mark.parametrize(
    ("patterns", "options", "text"),
    [
        ([["a"], "b"], {}, "must be list of list of patterns"),
        ([["a"], ["b"]], {"lrs": [0.1]}, r"len\(lrs\) must match"),
        ([["a"], ["b"]], {"momentums": [0.1]}, r"len\(momentums\) must match"),
        ([["a"], ["b"]], {"weight_decays": [0.1]}, r"len\(weight_decays\) must match"),
    ],
)
def test_group_errors(patterns: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        helper.group_parameters(None, patterns, **options)  # type: ignore[arg-type]


def test_freeze_parameters() -> None:
    model = net()
    helper.freeze_parameters(model, ["downsample.0.weight", "fc"])
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == ["layer1.downsample.0.weight", "fc.weight", "fc.bias"]


def test_quant_weight_inplace() -> None:
    layers = quant_nn.QuantConv2d(2, 3, 3), quant_nn.QuantLinear(4, 5), nn.Linear(5, 5)
    model = nn.Sequential(*layers, quant_nn.QuantLSTM(2, 2))
    expected = [
        layer.weight_quantizer(layer.weight).detach().clone() for layer in model[:2]
    ]
    untouched = model[2].weight.detach().clone()
    parameters = list(model.parameters())
    helper.quant_weight_inplace(model)
    assert all(a.weight.equal(b) for a, b in zip(model[:2], expected, strict=True))
    assert model[2].weight.equal(untouched)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
