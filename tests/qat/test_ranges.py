"""Learned ranges: gradients against formula and differences, starts, and steps in the exponent."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.models import ConvNet, image_batches, simulated
from torchq import QuantDescriptor, TensorQuantizer
from torchq.errors import ConfigError
from torchq.qat import learn_ranges_, param_groups
from torchq.workflow import quantizers


def calibrated(recipe: torchq.QuantConfig | None = None) -> nn.Module:
    torch.manual_seed(0)
    return simulated(
        ConvNet().train(), image_batches(), recipe or torchq.recipes.integer(4, 4)
    )


@pytest.mark.parametrize("method", ["lsq", "pact"])
def test_ranges_become_parameters_and_nothing_else_changes(method: str) -> None:
    model = calibrated().eval()
    x = image_batches()[0]
    expected = model(x)
    keys = set(model.state_dict())
    assert len(learn_ranges_(model, method)) == 8
    assert torch.equal(model(x), expected)
    assert set(model.state_dict()) == keys
    ranges = [g for g in param_groups(model, lr=0.1) if g["name"] == "ranges"]
    assert len(ranges[0]["params"]) == 8
    model.train()(x).sum().backward()
    assert all(p.grad is not None for p in ranges[0]["params"])


def test_the_gradient_of_pact_is_that_of_clipped_values() -> None:
    """Choi et al. 2018, equation 3: 1 where the value is clipped above, else 0."""
    x = torch.tensor([-0.5, 0.3, 0.9, 1.2, 5.0])
    quantizer = TensorQuantizer(QuantDescriptor(4, unsigned=True, amax=1.0)).train()
    expected = quantizer(x)
    learn_ranges_(quantizer, "pact")
    leaf = x.clone().requires_grad_()
    y = quantizer(leaf)
    assert torch.equal(y, expected)
    y.sum().backward()
    # LSQ's factor of steps is one over the root of elements times largest code; amax is 15 steps.
    assert quantizer.amax.grad.item() == pytest.approx(2.0 * 15**2 / math.sqrt(5 * 15))
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [0, 1, 1, 0, 0]


def test_both_ends_are_learned() -> None:
    model = calibrated(torchq.recipes.integer(4, 4, unsigned=False)).eval()
    x = image_batches()[0]
    expected = model(x)
    names = learn_ranges_(model, "lsq+", "*.input_quantizer")
    assert names == ("stem.0.input_quantizer", "left.0.input_quantizer", *names[2:])
    # -8 * scale .. 7 * scale is the same grid with two ends.
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    model.train()(x).square().sum().backward()
    for name in names:
        quantizer = quantizers(model)[name]
        assert isinstance(quantizer.amin, nn.Parameter)
        assert quantizer.amin.grad is not None


def surrogate(
    x: Tensor, low: Tensor, high: Tensor, codes: int, error: Tensor
) -> Tensor:
    """Return what the straight-through estimator differentiates: rounding adds a constant.

    ``error`` is that of the codes at the point of the derivative, and 0 where values are clipped.
    """
    scale = (high - low) / codes
    return torch.minimum(torch.maximum(x, low), high) + error * scale


@pytest.mark.parametrize("layout", [{}, {"axis": 0}, {"block_size": 5}])
@pytest.mark.parametrize("end", ["amin", "amax"])
def test_gradients_of_both_ends_by_finite_differences(
    layout: dict[str, Any], end: str
) -> None:
    """In float64, of the surrogate whose zero point is not rounded either."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 10, generator=generator, dtype=torch.float64)
    d = QuantDescriptor(4, unsigned=True, symmetric=False, learn_amax=True, **layout)
    quantizer = TensorQuantizer(d)
    # Ends at whole multiples of the scale: the zero point rounds nothing.
    shape = d.granularity.amax_shape(x.shape)
    quantizer.set_range(
        torch.full(shape, -0.75),
        torch.full(shape, 1.125),
    )
    weight = torch.linspace(-1, 1, 20, dtype=torch.float64).view(2, 10)
    (quantizer(x) * weight).sum().backward()
    ends = {n: getattr(quantizer, n).detach().double() for n in ("amin", "amax")}

    def aligned(values: dict[str, Tensor]) -> list[Tensor]:
        return [d.granularity.align(values[n], x.shape) for n in ("amin", "amax")]

    parts = d.granularity.split(x)
    low, high = aligned(ends)
    scale = (high - low) / 15
    is_inside = (parts >= low) & (parts <= high)
    error = torch.where(is_inside, (parts / scale).round() - parts / scale, 0.0)
    step = 1e-6
    differences = []
    for index in range(ends[end].numel()):
        actual = []
        for delta in (step, -step):
            moved = {n: value.clone() for n, value in ends.items()}
            moved[end].view(-1)[index] += delta
            y = surrogate(parts, *aligned(moved), 15, error)
            actual.append((d.granularity.join(y, x.shape) * weight).sum())
        differences.append((actual[0] - actual[1]) / (2 * step))
    grad = getattr(quantizer, end).grad
    expected = torch.stack(differences).view_as(grad).float()
    # The gradient is float32, as the range is.
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)


def test_a_float_checkpoint_loads_strictly_into_learned_ranges() -> None:
    model = calibrated()
    for method in ("lsq", "lsq+"):
        learn_ranges_(model, method, "*.input_quantizer")
        before = {n: q.amax.detach().clone() for n, q in quantizers(model).items()}
        model.load_state_dict(ConvNet().state_dict(), strict=True)
        after = {n: q.amax for n, q in quantizers(model).items()}
        assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_learned_range_below_zero_is_exported_as_zeros(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    model = nn.Sequential(nn.Linear(4, 3)).eval()
    torchq.quantize_(model, torchq.recipes.w4a4(first_last=None))
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    torchq.calibrate(model, [x], correct=False, progress=False)
    with torch.no_grad():
        model[0].weight_quantizer.amax[1] = -0.2
        expected = model(x)
    assert torch.equal(
        expected[:, 1],
        model[0].bias[1].expand(2),
    )
    torchq.export_onnx(model, x, tmp_path / "model.onnx", progress=False, dynamo=False)
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    (actual,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    # One sum of four products in another order.
    torch.testing.assert_close(torch.from_numpy(actual), expected, rtol=1e-6, atol=1e-6)


ENDS = [(0.0,), (-0.3,), (0.0, 0.0), (-0.3, 0.3), (0.5, 0.0), (0.0, -0.5)]


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("ends", ENDS)
def test_a_range_that_was_driven_to_zero_recovers(
    backend: str, ends: tuple[float, ...]
) -> None:
    """Its gradient is the limit of a range that clips everything: it grows if that helps."""
    has_two = len(ends) == 2
    d = QuantDescriptor(4, unsigned=has_two, symmetric=not has_two, learn_amax=True)
    quantizer = TensorQuantizer(d)
    if has_two:
        quantizer.set_range(-1.0, 1.0)
    else:
        quantizer.set_amax(1.0)
    with torch.no_grad():
        for end, value in zip((quantizer.amax, quantizer.amin), ends, strict=False):
            end.fill_(value)
    optimizer = torch.optim.SGD(quantizer.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 64)
    with torchq.functional.kernels.use_backend(backend):
        for _ in range(80):
            loss = (quantizer(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert quantizer.amax > 0.5
    assert not has_two or quantizer.amin < -0.5


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_the_gradient_of_a_power_of_two_scale_is_that_of_tqt(backend: str) -> None:
    """Equations 6 to 8 of the paper in log2 of the range, divided by ``amax * ln 2``.

    The limits are those of the widened range, so values between it and amax are not clipped.
    """
    x = 1.5 * torch.randn(200, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    weight = torch.linspace(-1, 1, 200)
    quantizer = TensorQuantizer(
        QuantDescriptor(4, amax=1.3, learn_amax=True, power_of_two=True)
    )
    with torchq.functional.kernels.use_backend(backend):
        (quantizer(x) * weight).sum().backward()
    scale = 0.25
    low = -8
    high = 7  # 1.3 / 7 rounded up
    v = x.detach() / scale
    inside = (v >= low) & (v <= high)
    assert bool(((x.detach().abs() > 1.3) & inside).any())
    slope = torch.where(
        inside,
        v.round() - v,
        v.round().clamp(low, high),
    )
    expected = (weight * slope * scale * math.log(2)).sum() / (1.3 * math.log(2))
    torch.testing.assert_close(quantizer.amax.grad, expected)
    torch.testing.assert_close(x.grad, torch.where(inside, weight, 0.0))


def test_errors_change_nothing() -> None:
    model = simulated(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [torch.ones(1, 2)]
    )
    with pytest.raises(
        ConfigError, match=r"got method 'lsq2'; expected one of lsq, lsq\+, pact"
    ):
        learn_ranges_(model, "lsq2")
    model[1].input_quantizer.forget_amax()
    with pytest.raises(
        ConfigError, match=r"1\.input_quantizer: got learn_ranges_ for a range tha"
    ):
        learn_ranges_(model)
    assert not isinstance(model[0].input_quantizer.amax, nn.Parameter)
    model[0].input_quantizer.delegate = lambda x, quantizer: x
    with pytest.raises(
        ConfigError, match="got method 'pact' for a quantizer with a delegate"
    ):
        learn_ranges_(model, "pact", "0.input_quantizer")
