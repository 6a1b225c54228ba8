"""convert_, revert_ and the registry; subclasses, and layers with parametrizations of torch.

The cases are refusals, weight_norm, fused transformer layers and legacy checkpoints.
"""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import torchq
from tests.models import simulated
from torchq import QuantDescriptor
from torchq.errors import ConfigError, QuantizationError
from torchq.functional import fake_quantize, reduce_amax
from torchq.nn import (
    QUANTIZED,
    QuantConv2d,
    QuantLinear,
    QuantModule,
    QuantMultiheadAttention,
    convert_,
    quantized_as,
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
            nn.Softplus,
            r"torch.nn.modules.activation.Softplus: has no quantized twin; expected "
            r"one of the registered classes. See torchq.nn.register",
        ),
        (lambda: OwnLinear(2, 2), "OwnLinear: has no quantized twin"),
        (lambda: QuantLinear(2, 2), "QuantLinear: has no quantized twin"),
        (
            with_forward,
            "Linear: forward was replaced on the instance; expected the class's own",
        ),
        (
            with_attribute,
            "Linear: has weight_quantizer already; expected a float module",
        ),
    ],
)
def test_refusals_change_nothing(make: Any, text: str) -> None:
    module = make()
    before = (
        type(module),
        dict(vars(module)),
        list(module.state_dict()),
    )
    with pytest.raises(QuantizationError, match=text):
        convert_(module, input=INT8, weight=INT8)
    assert (
        type(module),
        dict(vars(module)),
        list(module.state_dict()),
    ) == before


def test_a_failure_half_way_is_undone() -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="unknown calibration method"):
        convert_(module, input=INT8, weight=QuantDescriptor(calib_method="nonsense"))
    assert type(module) is nn.Linear
    assert list(module.children()) == []
    assert type(convert_(module, input=INT8)) is QuantLinear


def test_none_leaves_a_tensor_alone(generator: torch.Generator) -> None:
    x = torch.randn(3, 4, generator=generator)
    plain = nn.Linear(4, 2)
    module = convert_(copy.deepcopy(plain), weight=ROWS)
    assert type(module.input_quantizer) is nn.Identity
    keys = ["weight", "bias", "output_gain", "output_shift", "weight_quantizer.amax"]
    assert list(module.state_dict()) == keys
    rows = fake_quantize(
        plain.weight,
        reduce_amax(plain.weight, ROWS.granularity),
        granularity=ROWS.granularity,
    )
    assert torch.equal(
        module(x),
        nn.functional.linear(x, rows, plain.bias),
    )
    only_input = convert_(copy.deepcopy(plain), input=INT8)
    assert list(only_input.quantized_weights()) == []  # type: ignore[operator]
    assert torch.equal(
        only_input(x),
        plain(fake_quantize(x, x.abs().max())),
    )


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_old_style_weight_norm(norm: Any, generator: torch.Generator) -> None:
    """The hook computes the weight from its parts at each call.

    That effective weight is quantized, also with freshly loaded parts.
    """
    x = torch.randn(2, 3, 6, 6, generator=generator)
    plain = norm(nn.Conv2d(3, 4, 3)).eval()
    other = norm(nn.Conv2d(3, 4, 3)).eval()
    other.load_state_dict(plain.state_dict())
    model = nn.Sequential(other)
    assert [d.name for d in torchq.quantize_(model).replaced] == ["0"]
    with torchq.disabled(model):
        assert torch.equal(model(x), plain(x))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "weight" in name:
                parameter.mul_(
                    torch.linspace(1, 3, parameter.shape[0]).view(
                        -1, *[1] * (parameter.dim() - 1)
                    )
                )
    torchq.calibrate(model, [x], progress=False)
    model(x)
    weight = model[0].weight.detach()
    assert torch.equal(
        model[0].weight_quantizer.amax, reduce_amax(weight, ROWS.granularity)
    )
    model(x).sum().backward()
    assert all(
        p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters()
    )


def test_register_checks_its_class() -> None:
    message = r"OwnLinear\): got .*Linear; expected a subclass of QuantModule and of it"
    with pytest.raises(ConfigError, match=message):
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
    x = torch.randn(3, 2)
    model = nn.Sequential(OwnLinear(2, 2))
    expected = model(x)
    config = torchq.QuantConfig((torchq.Rule("*", input=INT8, weight=ROWS),))
    register(OwnLinear)(QuantOwnLinear)
    try:
        assert [d.name for d in torchq.quantize_(model, config).replaced] == ["0"]
    finally:
        QUANTIZED.remove(OwnLinear)
    assert isinstance(model[0], QuantOwnLinear)
    assert not torch.equal(model(x), expected)
    with torchq.disabled(model):
        assert torch.equal(model(x), expected)
    torchq.restore_(model)
    assert type(model[0]) is OwnLinear


# --- subclasses ---------------------------------------------------------------------------------


class PlainConv(nn.Conv2d):
    """An empty subclass."""


class Stem(nn.Conv2d):
    """A subclass with a constructor, an initialisation and a method of its own."""

    def __init__(self, channels: int) -> None:
        super().__init__(3, channels, 3, padding=1)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def flops(self, size: int) -> int:
        return 9 * 3 * self.out_channels * size


class PlainAttention(nn.MultiheadAttention):
    """An empty subclass of a layer that reads the weight of its child."""


class Doubled(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OwnSeam(nn.Conv2d):
    def _conv_forward(
        self, input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        return super()._conv_forward(input, weight - weight.mean(), bias)


class Mixin:
    def forward(self, x: Tensor) -> Tensor:
        return x


class MixedIn(Mixin, nn.Linear):
    """Its forward comes from a class that is no module."""


class Tied(nn.Linear):
    """Its weight is computed."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return torch.eye(self.out_features, self.in_features)

    @weight.setter
    def weight(self, value: Any) -> None:
        pass

    def reset_parameters(self) -> None:
        pass


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (nn.Conv2d, nn.Conv2d),
        (PlainConv, nn.Conv2d),
        (Stem, nn.Conv2d),
        (PlainAttention, nn.MultiheadAttention),
        (Doubled, None),
        (OwnSeam, None),
        (MixedIn, None),
        (Tied, None),
        (nn.LazyConv2d, None),
        (torchq.nn.QuantConv2d, None),
        (nn.ReLU, nn.ReLU),
        (nn.Softplus, None),
    ],
)
def test_what_a_class_is_quantized_as(
    cls: type[nn.Module], expected: type | None
) -> None:
    assert quantized_as(cls) is expected


def test_a_subclass_is_quantized_as_its_base() -> None:
    stem = Stem(4)
    x = torch.randn(2, 3, 8, 8)
    plain = nn.Conv2d(3, 4, 3, padding=1)
    plain.load_state_dict(stem.state_dict())
    for module in (stem, plain):
        convert_(module, input=QuantDescriptor(), weight=QuantDescriptor(axis=0))
    assert isinstance(stem, QuantConv2d)
    assert isinstance(stem, Stem)
    assert stem.flops(2) == 216
    assert torch.equal(stem(x), plain(x))
    assert type(revert_(stem)) is Stem
    assert not list(stem.children())


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["deepcopy", "pickle"],
)
def test_copies(copied: Any) -> None:
    module = convert_(Stem(4), input=QuantDescriptor(4))
    x = torch.randn(2, 3, 8, 8)
    twin = copied(module)
    assert type(twin) is type(module)
    assert torch.equal(twin(x), module(x))


class Video(nn.Module):
    """A model whose layers are subclasses, in the way of torchvision's r3d_18."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Stem(4)
        self.conv = PlainConv(4, 4, 3)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.conv(self.stem(x)).mean((2, 3)))
        return out


def test_every_recipe_selects_them_by_their_base() -> None:
    report = torchq.plan(Video())
    assert [d.name for d in report.replaced] == [
        "stem",
        "conv",
        "head",
    ]
    assert not report.skipped
    assert report.replaced[0].class_name == "Stem"
    by_own_class = torchq.plan(Video(), exclude=f"type:{__name__}.Stem")
    assert [d.name for d in by_own_class.skipped] == ["stem"]
    by_base = torchq.plan(Video(), exclude="type:torch.nn.modules.conv.Conv2d")
    assert [d.name for d in by_base.skipped] == ["stem", "conv"]


@pytest.mark.eight_bit_products
def test_save_load_deploy(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Video().eval()
    x = torch.randn(4, 3, 8, 8)
    nn.init.normal_(model.stem.weight, std=0.2)
    simulated(model, [x])
    torchq.save(model, tmp_path / "m.pt")
    assert torch.equal(
        torchq.load(Video().eval(), tmp_path / "m.pt")(x),
        model(x),
    )
    kernels = {
        row.name: row.kernel for row in torchq.summary(torchq.deploy(model, x)).layers
    }
    assert "simulated" not in kernels.values()
    assert len(kernels) >= 3


def test_attention_is_quantized_with_its_output_projection() -> None:
    model = nn.Sequential(PlainAttention(4, 2))
    report = torchq.quantize_(model)
    assert [d.name for d in report.replaced] == ["0"]
    assert not report.skipped
    assert isinstance(model[0], QuantMultiheadAttention)


# --- parametrizations ----------------------------------------------------------------------------


X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Double(nn.Module):
    """A parametrization of somebody else."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


PARAMETRIZATIONS: dict[str, Callable[[nn.Module], object]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "own": lambda layer: parametrize.register_parametrization(
        layer, "weight", Double()
    ),
}


def network(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    for layer in (model[0], model[4]):
        PARAMETRIZATIONS[name](layer)
    return model.eval()


def quantized(name: str) -> nn.Sequential:
    model = network(name)
    report = torchq.quantize_(model)
    assert [d.name for d in report.replaced] == ["0", "4"]
    assert [d.name for d in report.skipped] == ["2"]  # the pool
    torchq.calibrate(model, [X], progress=False)
    return model


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_the_computed_weight_is_quantized(name: str) -> None:
    """It computes what the layer with the baked weight computes when that is quantized."""
    model = quantized(name)
    baked = network(name)
    for layer in (baked[0], baked[4]):
        parametrize.remove_parametrizations(layer, "weight")
    simulated(baked, [X])
    assert isinstance(model[0], QuantConv2d)
    assert isinstance(model[4], QuantLinear)
    assert torch.equal(model(X), baked(X))


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_restore_gives_the_parametrized_layer_back(name: str) -> None:
    model = quantized(name)
    floating = network(name)
    torchq.restore_(model)
    assert torch.equal(model(X), floating(X))
    assert parametrize.type_before_parametrizations(model[0]) is nn.Conv2d
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is nn.Conv2d
    torch.testing.assert_close(model(X), floating(X))


def test_torch_removes_the_parametrization_of_a_quantized_layer() -> None:
    model = quantized("weight_norm")
    expected = model(X)
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is QuantConv2d
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_files_and_copies(name: str, tmp_path: Path) -> None:
    model = quantized(name)
    assert torch.equal(
        copy.deepcopy(model)(X),
        model(X),
    )
    torchq.save(model, tmp_path / "model.pt")
    loaded = torchq.load(network(name), tmp_path / "model.pt").eval()
    assert torch.equal(loaded(X), model(X))


def test_the_originals_are_trained() -> None:
    model = quantized("weight_norm")
    model(X).square().sum().backward()
    gradients = {name for name, p in model.named_parameters() if p.grad is not None}
    assert gradients == {name for name, _ in model.named_parameters()}
    assert "0.parametrizations.weight.original1" in gradients


@pytest.mark.eight_bit_products
@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_integer_kernels_get_the_computed_weight(name: str) -> None:
    model = quantized(name)
    int8 = torchq.deploy(model, X)
    # Float32 sums differ in their last bits.
    torch.testing.assert_close(
        int8(X),
        model(X),
        rtol=1e-5,
        atol=1e-5,
    )
