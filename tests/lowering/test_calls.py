"""Function calls with weights run on integer kernels while the forward around them goes on."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from tests.lowering.common import recipe
from torchq.lowering.calls import ProductCall
from torchq.runtimes import Torch

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


class Products(nn.Module):
    """Calls of linear layers, the last one with the weight of a child, and one without a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(8, 8))
        self.second = nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.randn(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.first, bias=self.bias).relu()
        x = torch.addmm(self.bias, x, self.second)
        return F.linear(x, self.head.weight, self.head.bias)


class Strided(nn.Conv2d):
    """A convolution whose stride may be changed after it was deployed."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, self.stride, padding=self.padding)


def quantized(model: nn.Module, x: Tensor) -> nn.Module:
    torchq.quantize_(model.eval(), recipe(), example=x)
    torchq.calibrate(model, [x], progress=False)
    return model


def kernels(model: nn.Module) -> list[str]:
    return [
        row.layer for row in torchq.summary(model).layers if row.kernel != "simulated"
    ]


def assert_agree(deployed: nn.Module, model: nn.Module, x: Tensor) -> None:
    # Float32 sums differ in their last bits, which may turn a code at a tie.
    with torch.no_grad():
        actual = deployed(x)
        expected = model(x)
    assert (actual - expected).norm() < 0.01 * expected.norm()


def test_calls_have_kernels_or_a_note_why_not() -> None:
    model = quantized(Products(), X)
    deployed = torchq.deploy(model, X)
    assert kernels(deployed) == ["Int8Linear"] * 2
    notes = {
        row.note for row in torchq.summary(deployed).layers if row.kernel == "simulated"
    }
    assert notes == {
        "its call of addmm has no integer kernel: kernels compute linear layers and convolutions"
    }
    assert_agree(deployed, model, X)


def test_a_call_with_other_options_is_simulated() -> None:
    image = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    model = quantized(nn.Sequential(Strided(3, 8, 3, padding=1)), image)
    deployed = torchq.deploy(model, image, target=Torch(fuse=False))
    assert kernels(deployed) == ["Int8Conv"]
    for either in (model, deployed):
        either[0].stride = (2, 2)  # type: ignore[index]
    assert deployed(image).shape == (2, 8, 5, 5)
    assert_agree(deployed, model, image)


def whole(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, whole])
def test_copies_keep_the_kernels(copied: Callable[[nn.Module], nn.Module]) -> None:
    deployed = torchq.deploy(quantized(Products(), X), X)
    twin = copied(deployed)
    assert kernels(twin) == kernels(deployed)
    assert torch.equal(twin(X), deployed(X))


@pytest.mark.eight_bit_products
def test_dynamic_ranges_have_kernels_too() -> None:
    model = Products().eval()
    torchq.quantize_(model, torchq.recipes.int8_dynamic(), example=X)
    deployed = torchq.deploy(model, X)
    assert kernels(deployed) == ["DynamicInt8Linear"] * 2
    assert_agree(deployed, model, X)


def test_a_kernel_is_called_for_the_call() -> None:
    """Without this, a deployed model that only simulates would pass the tests above."""
    deployed = torchq.deploy(quantized(Products(), X), X)
    calls: list[Tensor] = []
    for module in deployed.modules():
        if isinstance(module, ProductCall):
            module.kernel.register_forward_hook(lambda m, args, y: calls.append(y))
    deployed(X)
    assert len(calls) == 2


class Operators(nn.Module):
    """Products that no tracer of torch.fx can show: ``@`` of a proxy is no call of a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(8, 8))
        self.second = nn.Parameter(torch.randn(8, 4))
        self.between = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.between(x @ self.first).relu() @ self.second


@pytest.mark.parametrize("example", [X, None])
def test_a_trace_does_not_lose_the_quantization_of_operators(
    example: Tensor | None,
) -> None:
    torch.manual_seed(0)
    model = quantized(nn.Sequential(nn.Linear(8, 8), Operators(), nn.Linear(4, 4)), X)
    deployed = torchq.deploy(model, example)
    # A lost quantization changes results by 1.6 percent.
    torch.testing.assert_close(
        deployed(X),
        model(X).detach(),
        rtol=1e-5,
        atol=1e-5,
    )
