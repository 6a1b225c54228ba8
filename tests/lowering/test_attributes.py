"""Deployed layers stay what code around them expects: attributes, hooks, computed weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune, spectral_norm, weight_norm

import torchq
from tests.lowering.common import calibrated, sqnr
from torchq.lowering import Int8Conv, Int8Linear


class Patches(nn.Module):
    """Casts its input to the dtype of a weight, as the patch embeddings of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, 8, 4, stride=4)
        self.projection.f = -1  # type: ignore[assignment]
        self.head = nn.Linear(8, 5)

    def forward(self, pixels: Tensor) -> Tensor:
        if pixels.shape[1] != 3:
            raise ValueError("expected three channels")
        x = self.projection(pixels.to(self.projection.weight.dtype)).flatten(2).mean(-1)
        return self.head(x.view(-1, self.head.in_features))


X = torch.linspace(-1, 2, 4 * 3 * 64).reshape(4, 3, 8, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_code_that_reads_the_weight_sees_floating_point(dtype: torch.dtype) -> None:
    x = X.to(dtype)
    model = calibrated(Patches().to(dtype), x)
    int8 = torchq.deploy(model, x)
    layer = int8.projection
    assert isinstance(layer, Int8Conv)
    assert isinstance(int8.head, Int8Linear)
    assert layer.weight.dtype is dtype
    assert layer.weight_codes.dtype is torch.int8
    # Equal but for the rounding of code * scale to the dtype, which the simulation does once too.
    assert torch.equal(
        layer.weight, model.projection.weight_quantizer(model.projection.weight)
    )
    assert sqnr(int8(x).float(), model(x).float()) > (
        40 if dtype is torch.float32 else 30
    )  # bf16 itself rounds to 8 bits


@pytest.mark.parametrize("seed", range(4))
def test_layers_of_bfloat16_agree_whatever_computes_it(seed: int) -> None:
    """CPUs with instructions for it round elsewhere, and one code in ten is another one."""
    torch.manual_seed(seed)
    x = X.to(torch.bfloat16)
    model = calibrated(Patches().to(torch.bfloat16), x)
    assert isinstance(torchq.deploy(model, x).head, Int8Linear)


def test_plain_attributes_stay() -> None:
    int8 = torchq.deploy(calibrated(Patches(), X), X)
    assert (int8.projection.f, int8.projection.kernel_size, int8.head.in_features) == (
        -1,
        (4, 4),
        8,
    )


def test_a_layer_with_a_hook_keeps_it_and_simulates() -> None:
    seen = []
    model = calibrated(Patches(), X)
    model.head.register_forward_hook(lambda *_: seen.append(1))
    int8 = torchq.deploy(model)
    int8(X)
    assert seen == [1]
    assert isinstance(int8.projection, Int8Conv)
    assert isinstance(int8.head, torchq.nn.QuantLinear)
    assert "it has a forward hook" in str(torchq.summary(int8))


pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")

D = torchq.QuantDescriptor
#: Coarse weights, so that a weight that is not rounded is far off.
WEIGHT = D(3, axis=0)
INT8 = D(8)
FP8 = D((4, 3))
HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "prune twice": lambda layer: [
        prune.random_unstructured(layer, "weight", 0.3) for _ in "ab"
    ],
    "prune the bias": lambda layer: prune.l1_unstructured(layer, "bias", 0.5),
    "own hook": lambda layer: double_before_calls(layer),
}


def double_before_calls(layer: Any) -> None:
    """Let a hook of a user compute the weight before a call."""
    layer.source = layer.weight.detach().clone()
    layer.register_forward_pre_hook(double)


def double(layer: nn.Module, args: Any) -> None:
    """Compute the weight before a call."""
    with torch.no_grad():
        layer.weight.copy_(2 * layer.source)  # type: ignore[operator, union-attr]


def config(input: torchq.QuantDescriptor) -> torchq.QuantConfig:
    return torchq.recipes.int8().with_rules(
        torchq.Rule(nn.Conv2d, input=input, weight=WEIGHT)
    )


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("input", [INT8, FP8], ids=["kernel", "simulated"])
def test_the_weight_stays_quantized(hook: str, input: torchq.QuantDescriptor) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
    )
    x = torch.randn(2, 3, 9, 9)
    HOOKS[hook](model[2])
    calibrated(model, x, config(input))
    keys = list(model.state_dict())
    int8 = torchq.deploy(model, x)
    assert list(model.state_dict()) == keys  # the model keeps its hooks
    # Float32 sums differ in their last bits.
    torch.testing.assert_close(
        int8(x),
        model(x),
        rtol=1e-5,
        atol=1e-5,
    )
    kernels = sum(isinstance(m, Int8Conv) for m in int8.modules())
    stays = hook == "own hook"
    assert kernels == (0 if input is FP8 else 2 - stays)


def test_a_parametrized_weight_is_rounded_at_every_call() -> None:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
    )
    x = torch.randn(2, 3, 9, 9)
    torchq.quantize_(model.eval(), config(FP8))
    layer = model[2]
    parametrize.register_parametrization(layer, "weight", Double())
    torchq.calibrate(model, [x], progress=False)
    torch.testing.assert_close(
        torchq.deploy(model)(x),
        model(x),
        rtol=1e-5,
        atol=1e-5,
    )
