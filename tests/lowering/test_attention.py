"""Attention with integer projections against the simulation in float64."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import torchq
from tests.lowering.common import BITS, recipe, sqnr
from tests.models import Parts, simulated
from tests.nn.test_attention import (
    MASKS,
    OPTIONS,
    Seq2Seq,
    attention,
    batch,
    quantize_products,
    tokens,
)
from torchq.lowering import DeployedMultiheadAttention, DynamicInt8Linear, Int8Linear

D = torchq.QuantDescriptor
NESTED = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors:UserWarning"
)


def calibrated(
    model: nn.Module, *inputs: Any, products: bool = False, **descriptors: Any
) -> Any:
    """``model`` with its attention quantized and calibrated on one call."""
    rule = torchq.Rule(
        nn.MultiheadAttention,
        **(descriptors or {"input": D(), "weight": D(BITS, axis=0)}),
    )
    torchq.quantize_(model.eval(), torchq.QuantConfig((rule,)))
    if products:
        quantize_products(model)
    torchq.calibrate(
        model, [inputs], forward=lambda module, given: module(*given), progress=False
    )
    return model


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("masks", MASKS, ids=range(len(MASKS)))
def test_the_layer_equals_its_simulation(
    options: dict[str, Any], masks: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    module = attention(**options)
    inputs = tokens(module)
    model = calibrated(module, *inputs)
    int8 = torchq.deploy(model)
    assert isinstance(int8, DeployedMultiheadAttention)
    wide = {
        name: mask.double()
        if isinstance(mask, Tensor) and mask.dtype is torch.float32
        else mask
        for name, mask in masks.items()
    }
    expected = copy.deepcopy(model).double()(*(x.double() for x in inputs), **wide)
    actual = int8(*inputs, **masks)
    assert actual[0].dtype is torch.float32
    assert actual[0].shape == expected[0].shape
    # One code of the output projection, next to a tie, can change.
    flip = float(model.out_input_quantizer.scale) * float(
        model.out_proj.weight.detach().abs().max()
    )
    torch.testing.assert_close(
        actual[0].double(),
        expected[0],
        rtol=0,
        atol=1e-5 + flip,
    )
    assert (actual[1] is None) == (expected[1] is None)
    if actual[1] is not None:  # behind integers without a tie: float32 alone
        torch.testing.assert_close(
            actual[1].double(),
            expected[1],
            rtol=0,
            atol=1e-5,
        )


@pytest.mark.parametrize(
    ("descriptors", "kind"),
    [
        (
            {"input": D(axis=(0, 1), dynamic=True), "weight": D(BITS, axis=0)},
            DynamicInt8Linear,
        ),
        ({"input": D(), "weight": D(BITS)}, Int8Linear),
    ],
    ids=str,
)
def test_projections_are_lowered_and_products_simulated(
    descriptors: dict[str, Any], kind: type
) -> None:
    x = torch.randn(2, 5, 12)
    model = calibrated(
        attention(batch_first=True), x, x, x, products=kind is Int8Linear, **descriptors
    )
    int8 = torchq.deploy(model)
    assert sum(type(m) is kind for m in int8.children()) == 4
    for need_weights in (True, False):
        # A code of one of the operands next to a tie may move by one.
        assert sqnr(int8(x, x, x, need_weights=need_weights)[0], model(x, x, x)[0]) > 35
    simulated = "both products, their quantized operands simulated"
    row = torchq.summary(int8).layers[0]
    assert (row.kernel, row.note == simulated) == ("float", kind is Int8Linear)


def test_what_has_no_kernel_keeps_simulating_and_says_why() -> None:
    x = torch.randn(2, 5, 12)
    model = calibrated(
        attention(batch_first=True), x, x, x, input=D(16), weight=D(BITS, axis=0)
    )
    int8 = torchq.deploy(model)
    assert torch.equal(
        int8(x, x, x)[0],
        model(x, x, x)[0],
    )
    (row,) = torchq.summary(int8).layers
    assert (
        row.note == "projection of the query: format int16 has no 8-bit integer kernel"
    )


@NESTED
def test_transformers_of_torch_run_the_projections() -> None:
    """torch's encoder would take a fused kernel in eval mode, past the projections."""
    given = batch()
    model = Seq2Seq(True).eval()
    simulated(model, [given], recipe())
    int8 = torchq.deploy(model, given)
    with torch.no_grad():
        expected = model(**given)
        actual = int8(**given)
        assert sqnr(actual[~given["pad"]], expected[~given["pad"]]) > 40
        layers = [m for m in int8.modules() if isinstance(m, Int8Linear)]
        assert len(layers) == 4 * 4 + (2 + 2 + 2)
        for layer in layers:
            scale = layer.weight_scale
            layer.weight_scale = torch.zeros_like(scale)
            assert not torch.equal(int8(**given), actual)
            layer.weight_scale = scale


class Block(Parts):
    """Traceable."""

    def forward(self, x: Tensor) -> Tensor:
        return self.after(torch.relu(self.attention(x, x, x, need_weights=False)[0]))


def test_it_is_one_node_of_a_trace() -> None:
    x = torch.randn(2, 5, 12)
    model = Block(
        attention=attention(batch_first=True, add_bias_kv=True), after=nn.Linear(12, 12)
    ).eval()
    simulated(model, [x], recipe())
    int8 = torchq.deploy(model, x)
    assert isinstance(int8, fx.GraphModule)
    assert "attention" in {node.target for node in int8.graph.nodes}
    assert sqnr(int8(x), model(x)) > 40


@NESTED
def test_empty_and_bad_inputs() -> None:
    x = torch.randn(2, 5, 12)
    int8 = torchq.deploy(calibrated(attention(batch_first=True), x, x, x))
    assert int8(*[torch.randn(0, 4, 12)] * 3)[0].shape == (0, 4, 12)
    nested = torch.nested.nested_tensor([torch.randn(3, 12), torch.randn(2, 12)])
    with pytest.raises(
        torchq.errors.QuantizationError, match="got a nested tensor; expected a"
    ):
        int8(nested, nested, nested)
    with pytest.raises(
        torchq.errors.QuantizationError, match="got is_causal without attn_mask"
    ):
        int8(x, x, x, is_causal=True)
