"""Attention with integer projections against the simulation in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import torchq
from tests.lowering.common import BITS, recipe, sqnr
from tests.nn.test_attention import MASKS, OPTIONS, Seq2Seq, attention, batch, tokens
from torchq.lowering import (
    DeployedMultiheadAttention,
    DynamicInt8Linear,
    Int8Linear,
)

D = torchq.QuantDescriptor


def calibrated(model: nn.Module, *inputs: Any, products: bool = False, **descriptors: Any) -> Any:
    """``model`` with its attention quantized and calibrated on one call."""
    rule = torchq.Rule(
        nn.MultiheadAttention, **(descriptors or {"input": D(), "weight": D(BITS, axis=0)})
    )
    torchq.quantize_(model.eval(), torchq.QuantConfig((rule,)))
    if products:
        model.quantize_products()  # type: ignore[operator]
    torchq.calibrate(model, [inputs], forward=lambda module, given: module(*given), progress=False)
    return model


def flip(module: Any) -> float:
    """Return the most that one code of the output projection, next to a tie, can change."""
    return float(module.out_input_quantizer.scale) * float(
        module.out_proj.weight.detach().abs().max()
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("masks", MASKS, ids=range(len(MASKS)))
def test_the_layer_equals_its_simulation(options: dict[str, Any], masks: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = attention(**options)
    inputs = tokens(module)
    model = calibrated(module, *inputs)
    int8 = torchq.deploy(model)
    assert isinstance(int8, DeployedMultiheadAttention) and list(int8.in_proj) == ["q", "k", "v"]
    wide = {
        name: mask.double() if isinstance(mask, Tensor) and mask.dtype is torch.float32 else mask
        for name, mask in masks.items()
    }
    expected = copy.deepcopy(model).double()(*(x.double() for x in inputs), **wide)
    found = int8(*inputs, **masks)
    assert found[0].dtype is torch.float32 and found[0].shape == expected[0].shape
    torch.testing.assert_close(found[0].double(), expected[0], rtol=0, atol=1e-5 + flip(model))
    assert (found[1] is None) == (expected[1] is None)
    if found[1] is not None:  # behind integers without a tie: float32 alone
        torch.testing.assert_close(found[1].double(), expected[1], rtol=0, atol=1e-5)


def test_inputs_on_one_grid_are_multiplied_at_once() -> None:
    a, b, c = (torch.randn(2, 5, 12) * scale for scale in (1, 2, 3))
    calls = [(a, a, a), (a, b, b), (a, a, b), (a, b, a), (a, b, c)]
    for inputs, names in zip(
        calls, (["qkv"], ["q", "kv"], ["qk", "v"], ["k", "qv"], ["q", "k", "v"]), strict=True
    ):
        model = calibrated(attention(batch_first=True), *inputs)
        int8 = torchq.deploy(model, inputs)
        assert sorted(int8.in_proj) == sorted(names)  # type: ignore[arg-type]
        for given in calls:  # other tensors than those of the calibration are right as well
            torch.testing.assert_close(
                int8(*given)[0], model(*given)[0], rtol=0, atol=1e-5 + flip(model)
            )


def test_the_operands_of_the_products_are_simulated() -> None:
    x = torch.randn(3, 9, 12)
    model = calibrated(attention(batch_first=True), x, x, x, products=True)
    int8 = torchq.deploy(model)
    for need_weights in (True, False):
        # A code of one of the operands next to a tie may move by one.
        assert sqnr(int8(x, x, x, need_weights=need_weights)[0], model(x, x, x)[0]) > 35
    assert sum(isinstance(m, torchq.TensorQuantizer) for m in int8.modules()) == 4
    row = torchq.summary(int8).layers[0]
    assert (row.kernel, row.note) == ("float", "both products, their quantized operands simulated")


@pytest.mark.parametrize(
    ("descriptors", "kind"),
    [
        ({"input": D(axis=(0, 1), dynamic=True), "weight": D(BITS, axis=0)}, DynamicInt8Linear),
        ({"input": D(), "weight": D(BITS)}, Int8Linear),
    ],
    ids=str,
)
def test_projections_are_lowered_as_linear_layers_are(
    descriptors: dict[str, Any], kind: type
) -> None:
    x = torch.randn(2, 5, 12)
    model = calibrated(attention(batch_first=True), x, x, x, **descriptors)
    int8 = torchq.deploy(model)
    assert {type(m) for m in [*int8.in_proj.values(), int8.out_proj]} == {kind}  # type: ignore[operator]
    assert sqnr(int8(x, x, x)[0], model(x, x, x)[0]) > 35


def test_what_has_no_kernel_keeps_simulating_and_says_why() -> None:
    x = torch.randn(2, 5, 12)
    model = calibrated(attention(batch_first=True), x, x, x, input=D(16), weight=D(BITS, axis=0))
    int8 = torchq.deploy(model)
    assert torch.equal(int8(x, x, x)[0], model(x, x, x)[0])
    (row,) = torchq.summary(int8).layers
    assert (row.kernel, row.note) == (
        "simulated",
        "projection of the query: format int16 has no 8-bit integer kernel",
    )


# --- models ------------------------------------------------------------------------------------


def deployed(model: nn.Module, given: Any) -> tuple[nn.Module, nn.Module]:
    torchq.quantize_(model.eval(), recipe())
    torchq.calibrate(model, [given], progress=False)
    return model, torchq.deploy(model, given)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("batch_first", [True, False])
def test_transformers_of_torch(batch_first: bool) -> None:
    """torch's encoder would take a fused kernel in eval mode, past the projections."""
    given = batch()
    if not batch_first:
        given["x"] = given["x"].transpose(0, 1)
    model, int8 = deployed(Seq2Seq(batch_first), given)
    with torch.no_grad():
        expected, found = model(**given), int8(**given)
        seen = ~given["pad"] if batch_first else ~given["pad"].T
        assert sqnr(found[seen], expected[seen]) > 40
        assert {row.kernel.partition(" ")[0] for row in torchq.summary(int8).layers} == {
            "onednn",
            "float",
        }
        layers = [m for m in int8.modules() if isinstance(m, Int8Linear)]
        assert len(layers) == 2 * 4 + (2 + 3 + 2)
        for layer in layers:
            scale, layer.weight_scale = layer.weight_scale, torch.zeros_like(layer.weight_scale)
            assert not torch.equal(int8(**given), found)
            layer.weight_scale = scale


class Block(nn.Module):
    """Traceable."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.attention, self.after = (
            nn.Linear(12, 12),
            attention(batch_first=True, add_bias_kv=True),
            nn.Linear(12, 12),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        return self.after(torch.relu(self.attention(y, y, y, need_weights=False)[0]))


def test_it_is_one_node_of_a_trace() -> None:
    x = torch.randn(2, 5, 12)
    model, int8 = deployed(Block(), x)
    assert isinstance(int8, fx.GraphModule) and "attention" in {
        node.target for node in int8.graph.nodes
    }
    assert sqnr(int8(x), model(x)) > 40


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_empty_and_bad_inputs() -> None:
    x = torch.randn(2, 5, 12)
    int8 = torchq.deploy(calibrated(attention(batch_first=True), x, x, x))
    assert int8(*[torch.randn(0, 4, 12)] * 3)[0].shape == (0, 4, 12)
    nested = torch.nested.nested_tensor([torch.randn(3, 12), torch.randn(2, 12)])
    with pytest.raises(
        torchq.errors.QuantizationError,
        match="DeployedMultiheadAttention: got a nested tensor; expected a padded one",
    ):
        int8(nested, nested, nested)
    with pytest.raises(
        torchq.errors.QuantizationError,
        match="DeployedMultiheadAttention: got is_causal without attn_mask; expected both",
    ):
        int8(x, x, x, is_causal=True)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    assert torch.equal(
        int8(x, x, x, attn_mask=causal, is_causal=True)[0], int8(x, x, x, attn_mask=causal)[0]
    )
