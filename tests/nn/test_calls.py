"""Function calls with weights in the forwards of foreign classes are quantized at the call."""

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from tests.models import Conv1D, Projection
from tests.onnx.exported import run_file
from torchq import QuantDescriptor
from torchq.errors import QuantizationError
from torchq.functional import fake_quantize, reduce_amax
from torchq.nn import TensorQuantizer

pytestmark = [  # What torch 2.9 says about itself.
    pytest.mark.filterwarnings(
        "ignore:.*Function'> should not be instantiated:DeprecationWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:Skipping serialization of skipfiles_inline:UserWarning"
    ),
]


class SameConv(nn.Conv2d):
    """As timm's Conv2dSame: the padding depends on the size of the input."""

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.size()[-2:]
        pad = [(-(-size // 2) - 1) * 2 + 3 - size for size in (height, width)]
        x = F.pad(
            x,
            [
                pad[1] // 2,
                pad[1] - pad[1] // 2,
                pad[0] // 2,
                pad[0] - pad[0] // 2,
            ],
        )
        return F.conv2d(x, self.weight, self.bias, 2, 0, self.dilation, self.groups)


class StandardizedConv(nn.Conv2d):
    """As timm's StdConv2d: the weight is standardised before the convolution."""

    def forward(self, x: Tensor) -> Tensor:
        weight = F.batch_norm(
            self.weight.reshape(1, self.out_channels, -1),
            None,
            None,
            training=True,
            eps=1e-6,
        ).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class GainedConv(nn.Conv2d):
    """As timm's ScaledStdConv2d: the weight has a learned gain, its forward an attribute."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.full((self.out_channels, 1, 1, 1), 0.7))
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * F.conv2d(x, self.weight * self.gain, self.bias)


class CastingLinear(nn.Linear):
    """As timm.layers.Linear: the weight is cast to the dtype of the input."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(dtype=input.dtype), bias=self.bias)


def weight_of(module: nn.Module) -> Tensor:
    """Return what the call of the float module uses as weight."""
    if isinstance(module, StandardizedConv):
        flat = module.weight.reshape(1, module.out_channels, -1)
        flat = F.batch_norm(flat, None, None, training=True, eps=1e-6)
        return flat.reshape_as(module.weight)
    if isinstance(module, GainedConv):
        return module.weight * module.gain
    return module.kernel if isinstance(module, Projection) else module.weight  # type: ignore[return-value]


Compute = Callable[[nn.Module, Tensor, Tensor], Tensor]

#: name -> (module, shape of the input, axis of the output channels, the call on (module, x, w)).
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, Compute]] = {
    "same": (
        lambda: SameConv(3, 4, 3),
        (2, 3, 8, 8),
        0,
        lambda m, x, w: F.conv2d(F.pad(x, [0, 1, 0, 1]), w, m.bias, 2),
    ),
    "standardized": (
        lambda: StandardizedConv(3, 4, 3),
        (2, 3, 8, 8),
        0,
        lambda m, x, w: F.conv2d(x, w, m.bias),
    ),
    "gained": (
        lambda: GainedConv(3, 4, 3),
        (2, 3, 8, 8),
        0,
        lambda m, x, w: F.conv2d(x, w, m.bias),
    ),
    "casting": (
        lambda: CastingLinear(5, 4),
        (6, 5),
        0,
        lambda m, x, w: F.linear(x, w, m.bias),
    ),
    "conv1d": (lambda: Conv1D(4, 5), (2, 3, 5), 1, lambda m, x, w: x @ w + m.bias),
    "operator": (Projection, (2, 3, 5), 1, lambda m, x, w: x @ w),
}


@pytest.fixture(params=CASES, ids=str)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def quantized(name: str) -> tuple[nn.Module, Any, Tensor]:
    """Return a float module, its quantized copy, and an input."""
    torch.manual_seed(0)
    make, shape, _, _ = CASES[name]
    plain = make()
    x = torch.randn(shape)
    module = copy.deepcopy(plain)
    report = torchq.quantize_(module, example=x)
    assert len(report.replaced) == 1
    assert not report.skipped
    return plain, module, x


def test_the_call_is_quantized(name: str) -> None:
    plain, module, x = quantized(name)
    _, _, axis, compute = CASES[name]
    granularity = QuantDescriptor(axis=axis).granularity
    weight = weight_of(plain)
    weight = fake_quantize(
        weight, reduce_amax(weight, granularity), granularity=granularity
    )
    inner = fake_quantize(x, reduce_amax(x))
    # Both sides make the same call on the same numbers; a product may be summed in another order.
    torch.testing.assert_close(
        module(x), compute(plain, inner, weight), rtol=1e-6, atol=1e-6
    )
    assert not torch.equal(module(x), plain(x))
    with torchq.disabled(module):
        assert torch.equal(module(x), plain(x))


def test_gradients_reach_parameters(name: str) -> None:
    plain, module, x = quantized(name)
    x, y = x.clone().requires_grad_(), x.clone().requires_grad_()
    with torchq.disabled(module):
        module(x).square().sum().backward()
    plain(y).square().sum().backward()
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
    for (path, got), expected in zip(
        module.named_parameters(), plain.parameters(), strict=True
    ):
        assert torch.equal(got.grad, expected.grad), path
    module.zero_grad()
    module(x.detach()).square().sum().backward()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters()
    )


def test_names_ranges_and_modes(name: str) -> None:
    """Its quantizers stand where those of a layer stand; calibration finds both ranges."""
    plain, module, x = quantized(name)
    torchq.calibrate(module, [x], progress=False)
    names = {n for n, m in module.named_modules() if isinstance(m, TensorQuantizer)}
    assert names == {"input_quantizer", "weight_quantizer"}
    weight = weight_of(plain).detach()
    axis = CASES[name][2]
    amax = reduce_amax(weight, QuantDescriptor(axis=axis).granularity)
    assert torch.equal(module.weight_quantizer.amax, amax)
    assert module.weight_quantizer.name == "weight_quantizer"


@pytest.mark.sample(3)
def test_exports_to_onnx(name: str, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    _, module, x = quantized(name)
    torchq.calibrate(module.eval(), [x], progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torchq.export_onnx(module, x, tmp_path / "m.onnx")
    kinds = [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node]
    assert kinds.count("DequantizeLinear") == 2
    (got,) = run_file(tmp_path / "m.onnx", x, optimize=True)
    expected = module(x).detach()
    # A tie of a code may round the other way in the standardisation that the file repeats.
    assert (got - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.eight_bit_products
def test_deploys_on_an_integer_kernel(name: str) -> None:
    _, module, x = quantized(name)
    model = nn.Sequential(module).eval()
    torchq.calibrate(model, [x], progress=False)
    deployed = torchq.deploy(model, x)
    (row,) = torchq.summary(deployed).layers
    # Products of matrices stay simulated, and say so.
    if name in (
        "conv1d",
        "operator",
    ):
        assert "kernels compute linear layers and convolutions" in row.note
    else:
        assert row.layer in ("Int8Linear", "Int8Conv")
    alone = torchq.deploy(model)
    rows = torchq.summary(alone).layers
    assert [row.note for row in rows] == [
        "only an example shows what its function calls do"
    ]
    torch.testing.assert_close(
        alone(x),
        model(x).detach(),
        rtol=1e-5,
        atol=1e-5,
    )
    for batch in (x, torch.cat([x, x])):
        torch.testing.assert_close(
            deployed(batch), model(batch).detach(), rtol=1e-5, atol=1e-5
        )


def test_weight_formats_and_blocks() -> None:
    """Blocks of a rule for linear layers follow the axis that the call sums over."""
    weight = torchq.QuantDescriptor(4, block_size=128)
    config = torchq.QuantConfig((torchq.Rule("*", weight=weight),))
    module = Conv1D(4, 256)
    x = torch.randn(3, 256)
    torchq.quantize_(module, config, example=x)
    layer = nn.Linear(256, 4)
    with torch.no_grad():
        layer.weight.copy_(module.weight.t())
        layer.bias.zero_()
    torchq.quantize_(layer, config)
    torch.testing.assert_close(
        module(x),
        layer(x),
        rtol=1e-5,
        atol=1e-5,
    )


def test_attributes_stay_alive() -> None:
    _, module, x = quantized("gained")
    before = module(x)
    module.factor = 3.0
    assert torch.equal(module(x), 3.0 * before)


def test_a_forward_that_makes_other_calls_is_an_error() -> None:
    class Switching(nn.Conv2d):
        twice = False

        def forward(self, x: Tensor) -> Tensor:
            y = F.conv2d(x, 2 * self.weight)
            return F.conv2d(x, 3 * self.weight) + y if self.twice else y

    module = Switching(3, 4, 3)
    x = torch.randn(1, 3, 8, 8)
    torchq.quantize_(module, example=x)
    module(x)
    module.twice = True
    with pytest.raises(
        QuantizationError, match=r"Switching: its forward calls conv2d with a wei"
    ):
        module(x)


class Loops(nn.Module):
    """Multiplies by as many weights as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = nn.ParameterList(torch.randn(4, 4) for _ in range(3))
        self.bias_like = nn.Parameter(torch.randn(4, 4))
        self.rounds = 2
        self.other = False

    def forward(self, x: Tensor) -> Tensor:
        if self.other:
            return x @ self.bias_like
        for kernel in list(self.kernels)[: self.rounds]:
            x = F.linear(x, kernel)
        return x


def test_a_model_planned_on_one_branch_refuses_weights_of_the_other() -> None:
    module = Loops()
    x = torch.randn(2, 4)
    torchq.quantize_(module, example=x)
    assert [call.site for call in module.torchq_calls] == [
        "@linear0",
        "@linear0#1",
        "@0",
    ]
    module.rounds = 1
    kernel = module.kernels[0]
    call = module.kernels_0_call
    expected = F.linear(
        call.input_quantizer(x),
        call.weight_quantizer(kernel),
    )
    assert torch.equal(module(x), expected)
    for attribute, value, site in (("rounds", 3, "@linear0#2"), ("other", True, "@0")):
        module.rounds, module.other = 2, False
        setattr(module, attribute, value)
        for twin in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            with pytest.raises(
                QuantizationError, match=rf"with a weight at {site}, which it did"
            ):
                twin(x)


def test_a_weight_that_is_cast_later_is_quantized_too() -> None:
    module = CastingLinear(5, 4, bias=False)
    x = torch.randn(6, 5)
    torchq.quantize_(module, example=x)
    expected = module(x)
    torch.testing.assert_close(
        module(x.double()), expected.double(), rtol=1e-6, atol=1e-6
    )
