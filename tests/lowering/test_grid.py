"""Codes are those of the simulation, and equal for layers that read equal inputs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import BITS, Residual
from tests.models import simulated
from torchq import QuantConfig, QuantDescriptor, Rule
from torchq.lowering import Int8Layer
from torchq.lowering.check import forced_pairs
from torchq.lowering.qparams import ByteQParams
from torchq.nn import TensorQuantizer

DESCRIPTORS = [
    QuantDescriptor(8),
    QuantDescriptor(8, narrow_range=True),
    QuantDescriptor(8, unsigned=True),
    QuantDescriptor(5),
    QuantDescriptor(4, unsigned=True),
    QuantDescriptor(8, scale_amax=0.5),
]


def qparams_of(quantizer: TensorQuantizer) -> ByteQParams:
    qparams = ByteQParams.of(quantizer)
    assert isinstance(qparams, ByteQParams)
    return qparams


def check_codes(quantizer: TensorQuantizer, *beyond: float) -> ByteQParams:
    """Compare codes with the simulation at ties, where a product with 1 / scale would differ."""
    qparams = qparams_of(quantizer)
    codes = torch.arange(-300, 301).float()
    near = [(codes + offset) * qparams.scale for offset in (0.0, 0.3, -0.3, 0.5)]
    x = torch.cat([*near, torch.tensor(beyond)])
    actual = qparams.quantize(x)
    assert actual.dtype is torch.uint8
    assert torch.equal(qparams.dequantize(actual), quantizer(x))
    return qparams


@pytest.mark.parametrize("descriptor", DESCRIPTORS, ids=str)
@pytest.mark.parametrize("amax", [1.0, 0.37, 3.515625, 250.0, 2.0**-24])
def test_codes_are_those_of_the_simulation(
    descriptor: QuantDescriptor, amax: float
) -> None:
    quantizer = TensorQuantizer(descriptor)
    quantizer.set_amax(amax)
    check_codes(quantizer, *((-torch.inf, torch.inf) if amax > 2.0**-24 else ()))


@pytest.mark.parametrize("zero_point", range(0, 256, 51))
def test_codes_with_a_zero_point_are_too(zero_point: int) -> None:
    quantizer = TensorQuantizer(QuantDescriptor(unsigned=True, symmetric=False))
    quantizer.set_range(-float(zero_point), 255.0 - zero_point)
    assert check_codes(quantizer) == ByteQParams(1.0, zero_point, 0, 255)


def test_dead_ranges_are_exact_zeros() -> None:
    quantizer = TensorQuantizer(QuantDescriptor(symmetric=False, amin=0.0, amax=0.0))
    assert qparams_of(quantizer) == ByteQParams(1.0, 0, 0, 0)


@pytest.mark.parametrize(
    "bounds",
    [
        (0.0, float("inf")),
        (0.0, 6.0),
        (-1.0, 1.0),
        (0.25, 0.5),
        (2.0, 1e9),
        (-1e9, -2.0),
    ],
)
@pytest.mark.parametrize("keep_zero", [False, True])
def test_clamping_before_and_after_rounding_agree(
    bounds: tuple[float, float], keep_zero: bool
) -> None:
    quantizer = TensorQuantizer(QuantDescriptor(8))
    quantizer.set_amax(1.0)
    qparams = qparams_of(quantizer)
    clamped = qparams.clamped(*bounds, keep_zero=keep_zero)
    x = torch.linspace(-3, 3, 997)
    assert torch.equal(
        clamped.dequantize(clamped.quantize(x)),
        qparams.dequantize(qparams.quantize(x.clamp(*bounds))),
    )
    assert clamped.zero_point == (0 if bounds[0] >= 0 and not keep_zero else 128)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    ).eval()


def images(generator: torch.Generator) -> Tensor:
    return torch.rand(4, 3, 12, 12, generator=generator) * 3 - 0.6


def quantized(generator: torch.Generator, **fields: Any) -> nn.Module:
    model = net()
    input = QuantDescriptor(**{"symmetric": False, **fields})
    weight = QuantDescriptor(
        BITS, axis=0, power_of_two=bool(fields.get("power_of_two"))
    )
    rules = [
        Rule(f"type:{t}", input=input, weight=weight) for t in ("Conv2d", "Linear")
    ]
    return simulated(
        model,
        [images(generator)],
        QuantConfig(tuple(rules)),
    )


@pytest.mark.parametrize(
    "fields",
    [{"unsigned": True}, {"unsigned": False}, {"num_bits": 5}, {"power_of_two": True}],
    ids=str,
)
def test_integer_layers_compute_the_simulation(
    fields: dict[str, Any], generator: torch.Generator
) -> None:
    model = quantized(generator, **fields)
    x = images(generator)
    deployed = torchq.deploy(model, x)
    layers = [m for m in deployed.modules() if isinstance(m, Int8Layer)]
    assert len(layers) == 3
    zero_points = {layer.input_qparams.zero_point for layer in layers}
    assert not zero_points <= {0, 128}
    # float32 sums in another order than the simulation's: a code may differ, not more.
    limit = 2 * float(model[6].input_quantizer.scale)
    assert float((deployed(x) - model(x)).detach().abs().max()) < limit


class Gated(nn.Module):
    """A mobile block: pointwise, depthwise, squeeze and excitation, and a linear head with GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Conv2d(3, 24, 1)
        self.each = nn.Conv2d(24, 24, 3, padding=1, groups=24)
        self.squeeze = nn.Conv2d(24, 24, 1)
        self.narrow = nn.Conv2d(24, 16, 1)
        self.wide = nn.Linear(16, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.hardswish(self.each(nn.functional.silu(self.widen(x))))
        x = x * self.squeeze(nn.functional.adaptive_avg_pool2d(x, 1)).sigmoid()
        x = self.narrow(x).flatten(2).transpose(1, 2)
        return self.head(nn.functional.gelu(self.wide(x)))


def share_off(model: nn.Module, simulated: nn.Module, x: Tensor) -> float:
    """The share of codes that differ by one when layers read equal inputs; infinite for more."""
    off = count = 0
    for _, got, want in forced_pairs(model, simulated, x):
        if got.dtype is torch.uint8:
            difference = (got.int() - want.int()).abs()
            if int(difference.max()) > 1:
                return float("inf")
            off, count = off + int(difference.sum()), count + got.numel()
        else:
            assert (got - want).norm() < 1e-4 * want.norm()
    return off / count


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("unsigned", "most"),
    [(False, 1e-5), ("auto", 2e-5)],
)
@pytest.mark.parametrize("network", [Residual, Gated])
def test_one_code_in_1e5_differs_by_one(
    network: type[nn.Module], unsigned: bool | str, most: float
) -> None:
    """Unsigned codes are twice as fine, so that twice as many values lie next to a tie."""
    torch.manual_seed(0)
    model = network().eval()
    x = torch.randn(32, 3, 48, 48)
    if network is Residual:
        torchq.fuse_(model, x)
    simulated(
        model,
        [x],
        torchq.recipes.integer(BITS, 8, unsigned=unsigned),
        target="tensorrt",
    )
    int8 = torchq.deploy(model, target="torch")
    assert share_off(int8, model, x) <= most
    # The order matters: a bias that is a tenth of a code off is seen in the layer behind it.
    layers = [
        m for m in int8.modules() if isinstance(m, Int8Layer) and m.output_qparams
    ]
    layers[0].bias = layers[0].bias + 0.1 * layers[0].output_qparams.scale
    assert share_off(int8, model, x) > 100 * most
