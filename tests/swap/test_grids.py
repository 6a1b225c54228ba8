"""The codes that a target has are in the plan, in the model, in files of `save`, and restored."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from torchq import QuantDescriptor
from torchq.nn import TensorQuantizer
from torchq.swap import plan_of

ZERO_POINTS = ("onnxruntime", "qnn")
IMAGES = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(0))


class Mixed(nn.Module):
    """Sums and joins of tensors with and without negative values, attention, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.join = nn.Conv2d(32, 16, 1)
        self.gate = nn.SiLU()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        y = F.hardswish(self.second(x))
        x = self.gate(self.join(torch.cat([x, y], 1)) + x).flatten(2).transpose(1, 2)
        return self.head(self.attention(x, x, x)[0].mean(1))


def planned(target: str | None, config: torchq.QuantConfig | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = Mixed().eval()
    config = config or torchq.recipes.int8()
    torchq.quantize_(model, config, target=target, example=IMAGES, progress=False)
    return model


def quantizer(model: nn.Module, path: str) -> TensorQuantizer:
    return model.get_submodule(path)  # type: ignore[return-value]


@pytest.mark.parametrize("target", ZERO_POINTS)
def test_what_may_be_negative_has_a_zero_point_and_the_rest_none(target: str) -> None:
    model = planned(target)
    plan = plan_of(model)
    signed = "first.input_quantizer"
    proved = "second.input_quantizer"
    # In the others it shares the range of the concatenation.
    if target == "onnxruntime":
        assert plan.decision("second").unsigned == ("input",)
        assert "input uint8 per-tensor max" in str(plan.decision("second"))
        assert quantizer(model, proved).descriptor == QuantDescriptor(unsigned=True)
    assert quantizer(model, signed).descriptor == QuantDescriptor(
        unsigned=True, symmetric=False
    )
    torchq.calibrate(model, [IMAGES], progress=False)
    low = IMAGES.min()
    high = IMAGES.max()
    assert (quantizer(model, signed).amin, quantizer(model, signed).amax) == (low, high)
    if target == "onnxruntime":
        assert quantizer(model, proved).qparams().zero_point == 0


@pytest.mark.parametrize("method", ["max", "percentile", "mse", "entropy"])
def test_data_without_negatives_have_the_scale_of_unsigned_codes(method: str) -> None:
    free, proved = (
        TensorQuantizer(QuantDescriptor(unsigned=True, symmetric=False)) for _ in "ab"
    )
    proved.keep_unsigned()
    assert proved.given_descriptor == free.given_descriptor
    assert proved.amin is None
    x = torch.randn(4096).relu()
    for q in (free, proved):
        q.start_calibration(method)
        q.observe(x)
        q.finish_calibration()
    assert free.qparams().zero_point == 0
    rel = 1e-3 if method == "mse" else 0  # which searches in other steps
    assert free.scale.item() == pytest.approx(proved.scale.item(), rel=rel, abs=0)


def test_learned_ranges_train_both_ends_but_not_a_proved_one() -> None:
    learned = QuantDescriptor(learn_amax=True)
    rule = torchq.Rule(
        "type:torch.nn.modules.conv.*", input=learned, weight=QuantDescriptor()
    )
    model = planned("onnxruntime", torchq.QuantConfig((rule,)))
    torchq.calibrate(model, [IMAGES], progress=False)
    model.train()(IMAGES).sum().backward()
    names = {
        n for n, p in model.named_parameters() if "input_q" in n and p.grad is not None
    }
    assert {"first.input_quantizer.amin", "first.input_quantizer.amax"} <= names
    assert {n for n in names if n.startswith("second")} == {
        "second.input_quantizer.amax"
    }


FIXED: list[dict[str, Any]] = [
    *(
        {"unsigned": "auto"},
        {"unsigned": True},
        {"unsigned": False, "symmetric": False},
    ),
    *({"narrow_range": True}, {"amax": 4.0}, {"dynamic": True}),
    *({"num_bits": (4, 3)}, {"num_bits": 16}),
]


@pytest.mark.parametrize("fields", FIXED, ids=str)
def test_what_a_rule_fixes_stays(fields: dict[str, Any]) -> None:
    given = QuantDescriptor(**fields)
    rule = torchq.Rule("first", input=given, weight=QuantDescriptor(axis=0))
    model = planned("onnxruntime", torchq.recipes.int8().with_rules(rule))
    assert quantizer(model, "first.input_quantizer").given_descriptor == given


def test_symmetric_ranges_are_asked_for_by_name() -> None:
    model = planned("onnxruntime", torchq.recipes.int8(symmetric=True))
    torchq.calibrate(model, [IMAGES], progress=False)
    actual = [q.descriptor for _, q in torchq.workflow.quantizers(model).items()]
    assert all(d.symmetric for d in actual)
    assert {d.unsigned for d in actual} == {
        True,
        False,
    }
    bits = torchq.recipes.integer(4, 4, symmetric=True)
    assert bits.rules[0].input.unsigned == "auto"


class Products(nn.Module):
    """Attention by both ways, and products of a tensor that a layer reads, or that is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        x = F.scaled_dot_product_attention(q, k, v)
        x = self.attention(x, x, x)[0]
        near = x.relu() @ x.transpose(-2, -1)
        return self.head(near @ x)


TOKENS = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))


def test_factors_have_no_zero_point_for_openvino(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Products().eval()
    torchq.quantize_(model, target="openvino", example=TOKENS, progress=False)
    plan = plan_of(model)
    signed = {d.name: d.signed for d in plan.replaced if d.signed}
    unsigned = {d.name: d.unsigned for d in plan.replaced if d.unsigned}
    assert signed == {
        "quant_attention": ("input", "key", "value"),
        "attention": ("key_heads", "query_heads", "value_heads"),
        "quant_matmul": ("other",),
        "quant_matmul_1": ("input", "other"),
    }
    assert unsigned == {"quant_matmul": ("input",)}
    torchq.calibrate(model, [TOKENS], correct=False, progress=False)
    for name, slots in signed.items():
        for slot in slots:
            one = quantizer(model, f"{name}.{slot}_quantizer")
            assert one.qparams().zero_point == 0
            assert one.descriptor == QuantDescriptor()
    # What a weight multiplies has a zero point.
    assert quantizer(model, "project.input_quantizer").qparams().zero_point != 0
    assert not quantizer(model, "head.input_quantizer").descriptor.symmetric
    file = tmp_path / "net.pt"
    torchq.save(model, file)
    loaded = torchq.load(Products().eval(), file)
    assert plan_of(loaded).decisions == plan.decisions
    assert torch.equal(loaded(TOKENS), model(TOKENS))


def test_factors_that_a_layer_reads_too_have_its_zero_point() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) @ x.transpose(-2, -1) + self.layer(x).sum()

    model = Both().eval()
    torchq.quantize_(model, target="openvino", example=TOKENS, progress=False)
    plan = plan_of(model)
    shared = quantizer(model, "quant_matmul.other_quantizer")
    assert shared is quantizer(model, "layer.input_quantizer")
    assert plan.decision("quant_matmul").signed == ("input",)
    assert not shared.descriptor.symmetric
