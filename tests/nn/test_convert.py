"""convert_, revert_ and the registry.

The cases are refusals, weight_norm, fused transformer layers and legacy checkpoints.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from torchq import QuantDescriptor
from torchq.errors import ConfigError, QuantizationError
from torchq.functional import fake_quantize, reduce_amax
from torchq.nn import (
    QUANTIZED,
    QuantLinear,
    QuantModule,
    TensorQuantizer,
    convert_,
    is_weight_quantizer,
    register,
    revert_,
)

INT8 = QuantDescriptor()
ROWS = QuantDescriptor(axis=0)


class OwnLinear(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


def with_forward() -> nn.Module:
    module = nn.Linear(2, 2)
    module.forward = lambda x: x  # type: ignore[method-assign]
    return module


def with_attribute() -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight_quantizer = nn.Identity()  # type: ignore[assignment]
    return module


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            nn.ReLU,
            r"torch.nn.modules.activation.ReLU: has no quantized twin; expected "
            r"one of the registered classes. See torchq.nn.register",
        ),
        (lambda: OwnLinear(2, 2), "OwnLinear: has no quantized twin"),
        (lambda: QuantLinear(2, 2), "QuantLinear: has no quantized twin"),
        (with_forward, "Linear: forward was replaced on the instance; expected the class's own"),
        (with_attribute, "Linear: has weight_quantizer already; expected a float module"),
    ],
)
def test_refusals_change_nothing(make: Any, text: str) -> None:
    module = make()
    before = (type(module), dict(vars(module)), list(module.state_dict()))
    with pytest.raises(QuantizationError, match=text):
        convert_(module, input=INT8, weight=INT8)
    assert (type(module), dict(vars(module)), list(module.state_dict())) == before


def test_a_failure_half_way_is_undone() -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="unknown calibration method"):
        convert_(module, input=INT8, weight=QuantDescriptor(calib_method="nonsense"))
    assert type(module) is nn.Linear and list(module.children()) == []
    assert type(convert_(module, input=INT8)) is QuantLinear


def test_none_leaves_a_tensor_alone(generator: torch.Generator) -> None:
    x, plain = torch.randn(3, 4, generator=generator), nn.Linear(4, 2)
    module = convert_(copy.deepcopy(plain), weight=ROWS)
    assert type(module.input_quantizer) is nn.Identity
    assert list(module.state_dict()) == ["weight", "bias", "weight_quantizer.amax"]
    rows = fake_quantize(
        plain.weight, reduce_amax(plain.weight, ROWS.granularity), granularity=ROWS.granularity
    )
    assert torch.equal(module(x), nn.functional.linear(x, rows, plain.bias))
    only_input = convert_(copy.deepcopy(plain), input=INT8)
    assert list(only_input.quantized_weights()) == []  # type: ignore[operator]
    assert torch.equal(only_input(x), plain(fake_quantize(x, x.abs().max())))


def test_quantized_weights() -> None:
    module = QuantLinear(4, 2)
    assert [(q, w is module.weight) for q, w in module.quantized_weights()] == [
        (module.weight_quantizer, True)
    ]
    assert is_weight_quantizer(module, module.weight_quantizer) and not is_weight_quantizer(
        module, module.input_quantizer
    )


def test_quantizers_are_where_the_weight_is() -> None:
    module = convert_(nn.Linear(2, 2, device="meta").eval(), input=INT8, weight=ROWS)
    assert module.input_quantizer.amax.is_meta and module.weight_quantizer.amax.is_meta  # type: ignore[union-attr]
    assert not module.input_quantizer.training  # type: ignore[union-attr]


def test_legacy_checkpoint_of_a_module() -> None:
    """pytorch-quantization writes ``_input_quantizer._amax``.

    Every legacy shape of a per-channel amax is taken.
    """
    for shape in ((), (1,), (8,), (8, 1, 1, 1)):
        module = convert_(nn.Conv2d(3, 8, 3), input=INT8, weight=ROWS)
        state = {k: v for k, v in module.state_dict().items() if "quantizer" not in k}
        state |= {
            "_input_quantizer._amax": torch.tensor(2.0),
            "_weight_quantizer._amax": torch.full(shape, 0.5),
        }
        nn.Sequential(module).load_state_dict(
            {f"0.{key}": value for key, value in state.items()}, strict=True
        )
        assert module.input_quantizer.amax.item() == 2.0  # type: ignore[union-attr, operator]
        expected = convert_(copy.deepcopy(revert_(copy.deepcopy(module))), input=INT8, weight=ROWS)  # type: ignore[arg-type]
        expected.input_quantizer.set_amax(2.0)  # type: ignore[union-attr, operator]
        expected.weight_quantizer.set_amax(torch.full((8, 1, 1, 1), 0.5))  # type: ignore[union-attr, operator]
        x = torch.randn(1, 3, 5, 5)
        assert torch.equal(module(x), expected(x))


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_old_style_weight_norm(norm: Any, generator: torch.Generator) -> None:
    """The hook computes the weight from its parts at each call.

    That effective weight is quantized, also with freshly loaded parts.
    """
    x = torch.randn(2, 3, 6, 6, generator=generator)
    plain, other = norm(nn.Conv2d(3, 4, 3)).eval(), norm(nn.Conv2d(3, 4, 3)).eval()
    other.load_state_dict(plain.state_dict())
    model = nn.Sequential(other)
    assert [d.name for d in torchq.quantize_(model).replaced] == ["0"]
    with torchq.disabled(model):
        assert torch.equal(model(x), plain(x))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "weight" in name:
                parameter.mul_(
                    torch.linspace(1, 3, parameter.shape[0]).view(-1, *[1] * (parameter.dim() - 1))
                )
    torchq.calibrate(model, [x], progress=False)
    model(x)
    weight = model[0].weight.detach()
    assert torch.equal(model[0].weight_quantizer.amax, reduce_amax(weight, ROWS.granularity))
    model(x).sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options).eval()


@pytest.mark.parametrize(
    "options",
    [{}, {"activation": "gelu"}, {"norm_first": True}, {"activation": nn.SiLU()}],
    ids=str,
)
def test_transformer_layer_does_not_bypass_its_children(
    options: dict[str, Any], generator: torch.Generator
) -> None:
    """torch's fast path, in eval mode without gradients, would read weights past quantizers."""
    x, model = torch.randn(2, 5, 8, generator=generator), layer(**options)
    with torch.no_grad():
        torchq.quantize_(model)
        quantized = model(x)
        with torchq.disabled(model, "linear1"):
            assert not torch.equal(model(x), quantized)
        with torchq.disabled(model):
            off = model(x)
        torchq.restore_(model)
        expected = model(x)
    assert type(model) is nn.TransformerEncoderLayer
    assert model.activation_relu_or_gelu == layer(**options).activation_relu_or_gelu
    # the fused kernel adds in another order: float32 tolerance
    torch.testing.assert_close(off, expected)
    assert torch.equal(off, model(x.requires_grad_()).detach()) or not torch.equal(off, quantized)


def test_register_checks_its_class() -> None:
    with pytest.raises(
        ConfigError,
        match=r"OwnLinear\): got .*Linear; expected a subclass of QuantModule and of it",
    ):
        register(OwnLinear)(nn.Linear)  # type: ignore[type-var]
    with pytest.raises(
        ConfigError,
        match=r"quantized twin of torch.nn.modules.linear.Linear is registered already, "
        r"as .*QuantLinear",
    ):
        register(nn.Linear)(QuantLinear)
    assert OwnLinear not in QUANTIZED


class QuantOwnLinear(QuantModule, OwnLinear):
    """Its twin, for the test below."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            nn.functional.linear(
                self.input_quantizer(x), self.weight_quantizer(self.weight), self.bias
            )
            + 1
        )


def test_a_registered_class_is_swapped() -> None:
    x, model = torch.randn(3, 2), nn.Sequential(OwnLinear(2, 2))
    expected = model(x)
    config = torchq.QuantConfig((torchq.Rule("*", input=INT8, weight=ROWS),))
    register(OwnLinear)(QuantOwnLinear)
    try:
        assert [d.name for d in torchq.quantize_(model, config).replaced] == ["0"]
    finally:
        QUANTIZED.remove(OwnLinear)
    assert isinstance(model[0], QuantOwnLinear) and not torch.equal(model(x), expected)
    with torchq.disabled(model):
        assert torch.equal(model(x), expected)
    torchq.restore_(model)
    assert type(model[0]) is OwnLinear


def test_direct_construction_takes_descriptors() -> None:
    module = torchq.nn.QuantConv2d(
        3,
        4,
        3,
        padding=1,
        input_descriptor=QuantDescriptor(4),
        weight_descriptor=QuantDescriptor(4, axis=0),
    )
    assert (
        isinstance(module.input_quantizer, TensorQuantizer)
        and module.input_quantizer.descriptor.num_bits == 4
    )
    assert module(torch.randn(1, 3, 4, 4)).shape == (1, 4, 4, 4)
    assert (
        "QuantConv2d(\n  3, 4, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1)\n"
        "  (input_quantizer): TensorQuantizer(int4" in repr(module)
    )
    assert math.isfinite(module(torch.zeros(1, 3, 4, 4)).sum().item())
