"""Calibration as users meet it: unused branches, poisoned batches, dead channels, resuming."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.errors import CalibrationError

METHODS = ("max", "moving_average", "percentile", "mse", "entropy")


class Branched(nn.Module):
    """An auxiliary head that runs only in training, and a head of the input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 4, 3, padding=1)
        self.aux = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
        self.head = nn.Conv2d(4, 2, 1)
        self.use_aux = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).relu()
        out = self.head(x)
        return out + self.aux(x) if self.use_aux else out


@pytest.fixture
def model() -> Branched:
    model = Branched()
    torchq.quantize_(model)
    return model


@pytest.fixture
def data(generator: torch.Generator) -> list[Tensor]:
    return [torch.randn(2, 3, 8, 8, generator=generator) for _ in range(3)]


def ranges(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: q.amax.clone()
        for name, q in model.named_modules()
        if isinstance(q, torchq.TensorQuantizer)
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_unseen_quantizers_are_named_and_only_those(model: Branched, data: list[Tensor]) -> None:
    with pytest.raises(CalibrationError) as caught:
        torchq.calibrate(model, data, progress=False)
    text = str(caught.value)
    assert "aux.0.input_quantizer, aux.2.input_quantizer in 3 batches" in text
    assert "head" not in text
    assert "body" not in text


def test_unseen_branches_can_stay_float(model: Branched, data: list[Tensor]) -> None:
    torchq.calibrate(model, data, on_unseen="disable", progress=False)
    seen: list[Tensor] = []
    model.aux[0].input_quantizer.register_forward_hook(
        lambda module, args, out: seen.append(args[0] - out)
    )
    model.use_aux = True
    assert model(data[0]).isfinite().all()
    assert seen[0].count_nonzero() == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_poisoned_quantizer_is_named_and_the_others_keep_their_ranges(
    method: str, value: float, data: list[Tensor]
) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.good, self.bad = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.good(x) + self.bad(torch.where(x > 2, value, x))

    model = Two()
    torchq.quantize_(model)
    with pytest.raises(
        CalibrationError,
        match=r"bad\.input_quantizer: .*got NaN or infinite values in 1 of 2 batches",
    ) as caught:
        torchq.calibrate(
            model, [torch.ones(2, 4), torch.full((2, 4), 3.0)], method=method, progress=False
        )
    assert "good" not in str(caught.value)
    assert model.good.input_quantizer.calibrated
    assert not model.bad.input_quantizer.calibrated


@pytest.mark.parametrize("method", METHODS)
def test_training_works_after_calibrating_in_inference_mode(
    method: str, model: Branched, data: list[Tensor]
) -> None:
    with torch.inference_mode():
        torchq.calibrate(model, data, method=method, on_unseen="disable", progress=False)
    assert not any(amax.is_inference() for amax in ranges(model).values())
    model(data[0]).sum().backward()
    assert model.body.weight.grad is not None
    assert model.body.weight.grad.isfinite().all()


@pytest.mark.parametrize("method", METHODS)
def test_batches_in_inference_mode_do_not_matter_either(
    method: str, model: Branched, data: list[Tensor]
) -> None:
    with torch.inference_mode():
        frozen = [x.clone() for x in data]
    torchq.calibrate(model, frozen, method=method, on_unseen="disable", progress=False)
    assert not any(amax.is_inference() for amax in ranges(model).values())


@pytest.mark.parametrize("method", METHODS)
def test_dead_channels_and_dead_activations_give_zero_and_finite_gradients(method: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight[1] = 0
        model[0].bias.fill_(-100.0)
    torchq.quantize_(model)
    torchq.calibrate(model, [torch.ones(2, 4)], method=method, progress=False)
    assert model[2].input_quantizer.amax.item() == 0.0
    assert (model[2].input_quantizer.scale > 0).all()
    assert (model[0].weight_quantizer.scale > 0).all()
    assert model[0].weight_quantizer(model[0].weight)[1].count_nonzero() == 0
    x = torch.ones(2, 4, requires_grad=True)
    out = model(x)
    out.sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()


def test_resuming_keeps_ranges_with_one_warning_unless_forced(
    model: Branched, data: list[Tensor]
) -> None:
    torchq.calibrate(model, data, on_unseen="disable", progress=False)
    resumed = Branched()
    torchq.quantize_(resumed)
    resumed.load_state_dict(model.state_dict())
    for name in ("aux.0", "aux.2"):
        resumed.get_submodule(name).input_quantizer.mode = "off"
    before = ranges(resumed)
    assert same(before, ranges(model))
    wider = [10 * x for x in data]
    with pytest.warns(UserWarning, match="are calibrated already and keep their ranges") as caught:
        torchq.calibrate(resumed, wider, progress=False)
    assert len(caught) == 1
    assert same(ranges(resumed), before)
    torchq.calibrate(resumed, wider, force=True, progress=False)
    assert torch.equal(resumed.body.input_quantizer.amax, 10 * before["body.input_quantizer"])


def test_weights_with_mse_are_searched_directly(generator: torch.Generator) -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(8, 64, generator=generator))
    torchq.quantize_(model, torchq.recipes.integer(4, 4, weight_method="mse"))
    torchq.calibrate(model, None, progress=False)
    quantizer = model[0].weight_quantizer
    descriptor = quantizer.descriptor
    assert torch.equal(
        quantizer.amax,
        torchq.calib.search_range(model[0].weight, descriptor.format, descriptor.granularity).high,
    )
    model[0].weight.data[3, 4] = torch.nan
    with pytest.raises(
        CalibrationError, match=r"0\.weight_quantizer: search_range: got NaN or infinite values"
    ):
        torchq.calibrate(model, None, force=True, progress=False)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_leaves_everything_as_it_was(
    error: type[BaseException], model: Branched, data: list[Tensor]
) -> None:
    def interrupted() -> Iterator[Tensor]:
        yield data[0]
        raise error

    before = {
        name: q.mode for name, q in model.named_modules() if isinstance(q, torchq.TensorQuantizer)
    }
    model.train()
    with pytest.raises(error):
        torchq.calibrate(model, interrupted(), progress=False)
    found = {name: q for name, q in model.named_modules() if isinstance(q, torchq.TensorQuantizer)}
    assert model.training and before == {name: q.mode for name, q in found.items()}
    assert not any(q.calibrated or q.calibrator for q in found.values())
    torchq.calibrate(model, data, on_unseen="disable", progress=False)  # again, without a warning
    assert model.head.weight_quantizer.calibrated


def test_tensors_that_cannot_be_observed_are_named(model: Branched) -> None:
    quantizer = model.head.input_quantizer
    quantizer.start_calibration()
    with pytest.raises(
        CalibrationError,
        match=r"^head.input_quantizer: MaxCalibrator.collect: got a tensor of torch.int64",
    ):
        quantizer(torch.ones(2, 2, dtype=torch.int64))
