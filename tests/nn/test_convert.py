"""convert_, revert_ and the registry.

The cases are refusals, weight_norm, fused transformer layers and legacy checkpoints.
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from torchq import QuantDescriptor
from torchq.errors import ConfigError, QuantizationError
from torchq.functional import fake_quantize, reduce_amax
from torchq.nn import QUANTIZED, QuantLinear, QuantModule, convert_, register

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
            nn.Softplus,
            r"torch.nn.modules.activation.Softplus: has no quantized twin; expected "
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
    keys = ["weight", "bias", "output_gain", "output_shift", "weight_quantizer.amax"]
    assert list(module.state_dict()) == keys
    rows = fake_quantize(
        plain.weight, reduce_amax(plain.weight, ROWS.granularity), granularity=ROWS.granularity
    )
    assert torch.equal(module(x), nn.functional.linear(x, rows, plain.bias))
    only_input = convert_(copy.deepcopy(plain), input=INT8)
    assert list(only_input.quantized_weights()) == []  # type: ignore[operator]
    assert torch.equal(only_input(x), plain(fake_quantize(x, x.abs().max())))


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


def test_register_checks_its_class() -> None:
    text = r"OwnLinear\): got .*Linear; expected a subclass of QuantModule and of it"
    with pytest.raises(ConfigError, match=text):
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
