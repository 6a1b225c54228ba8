"""Scenarios of numerics and training.

S25 (DDP) is in tests/qat, S27 in tests/functional/test_gradients.py.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.models import ConvNet, image_batches, simulated
from torchq import QuantConfig, TensorQuantizer

# torch 2.9: dynamo makes an object of every autograd.Function that it meets, and torch warns of it
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*Function'> should not be instantiated:DeprecationWarning"
)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("recipe", ["int8", "w4a4", "fp8", "mxfp8", "nvfp4"])
def test_s24_autocast_trains(recipe: str) -> None:
    """Train in bfloat16 on the CPU, in float16 with a GradScaler on a GPU.

    amax, weights and gradients stay float32.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    model = ConvNet().to(device)
    torchq.quantize_(model, torchq.recipes.by_name(recipe))
    data = [x.to(device) for x in image_batches()]
    with torch.autocast(device, dtype):
        torchq.calibrate(model, data, progress=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
    for x in data:
        optimizer.zero_grad()
        with torch.autocast(device, dtype):
            y = model(x)
            loss = y.float().square().mean()
        assert y.dtype is dtype
        assert bool(loss.isfinite())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all(
        p.grad is not None
        and p.grad.dtype is torch.float32
        and bool(p.grad.isfinite().all())
        for p in model.parameters()
    )
    assert all(
        q.amax.dtype is torch.float32
        for q in model.modules()
        if isinstance(q, TensorQuantizer)
    )


def step(
    model: nn.Module, x: Tensor, call: nn.Module
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output of one training step and the gradients."""
    model.zero_grad()
    y = call(x)
    y.square().mean().backward()
    return y.detach(), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def assert_compiled_trains_equally(model: nn.Module, x: Tensor) -> None:
    """Compile as one graph, in float64: a code that flipped would differ by 1e-2, not by 1e-9."""
    y, grads = step(model, x, model)
    compiled_y, compiled_grads = step(
        model, x, torch.compile(model, fullgraph=True, backend="aot_eager")
    )  # type: ignore[arg-type]
    torch.testing.assert_close(compiled_y, y, rtol=1e-9, atol=1e-12)
    assert grads.keys() == compiled_grads.keys()
    assert len(grads) > 0
    for name, grad in grads.items():
        torch.testing.assert_close(
            compiled_grads[name],
            grad,
            rtol=1e-7,
            atol=1e-10,
            msg=lambda text, name=name: f"{name}: {text}",
        )


# Learned, and in blocks; int8 is the test below.
@pytest.mark.parametrize(
    "recipe",
    [
        "w4a4",
        pytest.param("mxfp8", marks=pytest.mark.slow),
        pytest.param("nvfp4", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("fresh_dynamo")
def test_s26_compiled_whole_equals_eager(recipe: str) -> None:
    model = simulated(
        ConvNet().double().train(),
        image_batches(dtype=torch.float64),
        torchq.recipes.by_name(recipe),
    )
    assert_compiled_trains_equally(model, image_batches(dtype=torch.float64)[0])


def test_s28_frozen_batchnorm_and_its_settings() -> None:
    """The swap leaves eps and momentum alone; frozen statistics stay through ``model.train()``."""
    model = ConvNet()
    torchq.quantize_(model, QuantConfig(torchq.recipes.int8().rules))
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {(m.eps, m.momentum) for m in norms} == {(1e-3, 0.03)}
    torchq.calibrate(model, image_batches(), progress=False)
    torchq.qat.freeze_bn_(model)
    before = [m.running_mean.clone() for m in norms if m.running_mean is not None]
    model.train()
    model(image_batches()[0]).square().mean().backward()
    assert all(
        torch.equal(m.running_mean, b) for m, b in zip(norms, before, strict=True)
    )  # type: ignore[arg-type]
