"""Gradient estimators: their forward, their gradient, and what they leave alone."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.models import ConvNet, image_batches
from torchq import QuantDescriptor, TensorQuantizer
from torchq.errors import ConfigError
from torchq.formats import by_bits
from torchq.qat import ESTIMATORS, Estimator, Grid, use_estimator_

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*Function'> should not be instantiated:DeprecationWarning"
)
HARD = ("ste", "ewgs", "dsq")
NOISY = ("stochastic", "noise", "qdrop")


def values() -> Tensor:
    """Return values inside and outside of four signed bits, none at a border of two codes."""
    return torch.linspace(-11.3, 11.4, 201, dtype=torch.float64)


def grid(bits: int = 4) -> Grid:
    format = by_bits(bits)
    bounds = (
        torch.tensor(float(b), dtype=torch.float64) for b in (format.quant_min, format.quant_max)
    )
    return Grid(format, *bounds)


def slope(name: str, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the codes of :func:`values` and the gradient of their sum."""
    v = values().requires_grad_()
    y = ESTIMATORS[name](v, grid(), **options)
    (found,) = torch.autograd.grad(y.sum(), v)
    return y.detach(), found


@pytest.mark.parametrize("name", HARD)
def test_hard_estimators_round(name: str) -> None:
    y, _ = slope(name)
    assert torch.equal(y, values().round().clamp(-8, 7))


def inside() -> Tensor:
    return (values() >= -8) & (values() <= 7)


def test_straight_through_passes_inside() -> None:
    _, found = slope("ste")
    assert torch.equal(found, inside().double())


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ewgs_scales_by_the_distance_to_the_code(sign: float) -> None:
    v = values().requires_grad_()
    y = ESTIMATORS["ewgs"](v, grid(), delta=0.3)
    (found,) = torch.autograd.grad(y, v, torch.full_like(y, 2 * sign))
    error = values() - values().round()
    torch.testing.assert_close(found, 2 * sign * (1 + 0.3 * sign * error) * inside())


def staircase(v: Tensor, sharpness: float) -> Tensor:
    middle = v.floor() + 0.5
    top = torch.tanh(torch.tensor(sharpness / 2, dtype=v.dtype))
    return (middle + torch.tanh(sharpness * (v - middle)) / (2 * top)).clamp(-8, 7)


@pytest.mark.parametrize("sharpness", [0.5, 5.0])
def test_the_gradient_of_the_soft_staircase_by_finite_differences(sharpness: float) -> None:
    y, found = slope("soft", sharpness=sharpness)
    torch.testing.assert_close(y, staircase(values().clamp(-8, 7), sharpness))
    _, dsq = slope("dsq", sharpness=sharpness)
    step = 1e-6
    ends = [staircase((values() + d).clamp(-8, 7), sharpness) for d in (step, -step)]
    expected = (ends[0] - ends[1]) / (2 * step)
    # A difference over 1e-6 of numbers below 8 in float64 is known to about 1e-9.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(dsq, expected, rtol=1e-6, atol=1e-8)


def test_a_sharp_staircase_rounds_and_a_flat_one_does_nothing() -> None:
    clamped = values().clamp(-8, 7)
    sharp, _ = slope("soft", sharpness=1000.0)
    flat, _ = slope("soft", sharpness=1e-4)
    far = (values() - values().floor() - 0.5).abs() > 0.01
    assert torch.allclose(sharp[far], clamped.round()[far])
    torch.testing.assert_close(flat, clamped, rtol=0, atol=1e-8)


def test_stochastic_rounding_is_right_on_average() -> None:
    torch.manual_seed(0)
    count = 20000
    v = torch.tensor([0.25, -1.9, 3.5], dtype=torch.float64).repeat(count, 1).requires_grad_()
    y = ESTIMATORS["stochastic"](v, grid())
    assert set(y[:, 0].tolist()) == {0.0, 1.0}
    # The mean of a coin of probability p has the deviation sqrt(p (1 - p) / count) <= 0.0036.
    torch.testing.assert_close(y.mean(0), v[0], rtol=0, atol=0.015)
    y.sum().backward()
    assert v.grad is not None and bool((v.grad == 1).all())


def test_noise_has_the_width_of_a_code() -> None:
    torch.manual_seed(0)
    v = torch.full((10000,), 2.0, dtype=torch.float64)
    error = ESTIMATORS["noise"](v, grid()) - v
    assert bool((error.abs() <= 0.5).all()) and error.abs().max() > 0.49
    torch.testing.assert_close(error.var().item(), 1 / 12, rtol=0.05, atol=0.0)
    assert ESTIMATORS["noise"](torch.full((100,), 9.0), grid()).max() <= 7


def test_qdrop_leaves_a_share_of_the_elements_float() -> None:
    torch.manual_seed(0)
    v = torch.full((10000,), 9.25, dtype=torch.float64).requires_grad_()
    y = ESTIMATORS["qdrop"](v, grid(), probability=0.25)
    assert set(y.tolist()) == {7.0, 9.25}
    dropped = (y == 9.25).double()
    torch.testing.assert_close(dropped.mean().item(), 0.25, rtol=0.0, atol=0.03)
    y.sum().backward()
    assert torch.equal(v.grad, dropped)


@pytest.mark.parametrize("unsigned", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("layout", [{}, {"axis": 0}, {"block_size": 4}])
def test_the_plain_estimator_equals_the_fast_form(
    unsigned: bool, symmetric: bool, layout: dict[str, Any]
) -> None:
    """Values and all gradients, also those of learned ranges."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 10, generator=generator)
    d = QuantDescriptor(
        4, unsigned=unsigned, symmetric=symmetric, learn_amax=True, scale_range_grad=True, **layout
    )
    found = []
    for delegate in (None, Estimator("ste")):
        quantizer = TensorQuantizer(d).train()
        quantizer.calibrate_on(0.6 * (x.abs() if unsigned and symmetric else x))
        quantizer.delegate = delegate
        leaf = x.clone().requires_grad_()
        y = quantizer(leaf)
        (y * torch.linspace(-1, 1, 30).view(3, 10)).sum().backward()
        found.append([y.detach(), leaf.grad, *(p.grad for p in quantizer.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_clipped_gradient_is_that_of_pact() -> None:
    """Choi et al. 2018, equation 3: 1 where the value is clipped above, else 0."""
    x = torch.tensor([-0.5, 0.3, 0.9, 1.2, 5.0])
    quantizer = TensorQuantizer(QuantDescriptor(4, unsigned=True, amax=1.0, learn_amax=True))
    quantizer.delegate = Estimator("ste", "clipped")
    leaf = x.clone().requires_grad_()
    quantizer(leaf).sum().backward()
    assert quantizer.amax.grad == 2.0
    assert leaf.grad is not None and leaf.grad.tolist() == [0, 1, 1, 0, 0]


@pytest.mark.parametrize("name", [*HARD, *NOISY, "soft"])
def test_outside_training_all_of_them_round(name: str) -> None:
    model = ConvNet().eval()
    torchq.quantize_(model, torchq.recipes.w4a4())
    torchq.calibrate(model, image_batches(), progress=False)
    x = image_batches()[0]
    expected = model(x)
    assert len(use_estimator_(model, name)) == 8
    assert torch.equal(model(x), expected)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), expected)
    model.train()
    assert not torch.equal(model(x), model.eval()(x))
    assert list(model.state_dict()) == list(copy.deepcopy(model).state_dict())


@pytest.mark.parametrize("name", [*HARD, *NOISY, "soft"])
def test_a_network_learns_with_each(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x, target = torch.randn(64, 8), torch.randn(64, 4)
    torchq.qat.prepare(model, [x], torchq.recipes.w4a4(first_last=None), progress=False)
    use_estimator_(model, name)
    model.train()
    optimizer = torch.optim.Adam(torchq.qat.param_groups(model, lr=0.01))
    before = (model.eval()(x) - target).square().mean().item()
    for _ in range(60):
        loss = (model.train()(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (model.eval()(x) - target).square().mean().item() < 0.8 * before


def test_one_decorator_adds_an_estimator() -> None:
    @ESTIMATORS.register("tenth")
    def tenth(v: Tensor, grid: Grid, *, share: float = 0.1) -> Tensor:
        return torchq.functional.straight_through(share * v, grid.snap(v))

    try:
        model = nn.Sequential(nn.Linear(2, 2))
        torchq.quantize_(model, torchq.recipes.w4a4(first_last=None))
        use_estimator_(model, "tenth", "*.input_quantizer", share=0.5)
        model.train()
        x = torch.ones(1, 2, requires_grad=True)
        model[0].input_quantizer(x).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [[0.5, 0.5]]
        assert use_estimator_(model, None) and model[0].input_quantizer.delegate is None
    finally:
        ESTIMATORS.remove("tenth")


def test_errors_change_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    torchq.quantize_(model)
    with pytest.raises(ConfigError, match="unknown gradient estimator 'nothing'; expected one of"):
        use_estimator_(model, "nothing")
    with pytest.raises(ConfigError, match=r"'ewgs'\): got the options delt; expected delta"):
        use_estimator_(model, "ewgs", delt=1)
    with pytest.raises(ConfigError, match="got range_gradient='half'"):
        use_estimator_(model, "ste", range_gradient="half")  # type: ignore[arg-type]
    model[1].input_quantizer.delegate = lambda x, quantizer: x
    with pytest.raises(ConfigError, match=r"1\.input_quantizer: got an estimator for a quantizer"):
        use_estimator_(model, "ste")
    assert model[0].input_quantizer.delegate is None
    eight = nn.Sequential(nn.Linear(2, 2))
    torchq.quantize_(eight, torchq.recipes.fp8())
    with pytest.raises(ConfigError, match=r"'dsq'\): got e4m3 for dsq; expected an integer"):
        use_estimator_(eight, "dsq")


@pytest.mark.parametrize(
    ("name", "option", "value", "ends"),
    [
        ("ewgs", "delta", float("nan"), "0 to 2"),
        ("soft", "sharpness", 0.0, "0.0001 to 1000"),
        ("dsq", "sharpness", -1.0, "0.0001 to 1000"),
        ("qdrop", "probability", 1.5, "0 to 1"),
    ],
)
def test_options_have_ends(name: str, option: str, value: float, ends: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    torchq.quantize_(model)
    with pytest.raises(ConfigError, match=f"got {option}={value}; expected a number from {ends}"):
        use_estimator_(model, name, **{option: value})
    assert all(q.delegate is None for q in model.modules() if isinstance(q, TensorQuantizer))


def test_the_generator_is_left_alone_by_the_choice() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    torchq.quantize_(model)
    before = torch.random.get_rng_state()
    use_estimator_(model, "noise")
    assert torch.equal(torch.random.get_rng_state(), before)


def test_it_compiles_as_one_graph() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4)).train()
    torchq.quantize_(model, torchq.recipes.w4a4(first_last=None))
    torchq.calibrate(model, [torch.randn(4, 4)], progress=False)
    use_estimator_(model, "dsq")
    x = torch.randn(4, 4)
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    torch._dynamo.reset()
