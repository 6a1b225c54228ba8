"""``deploy(model, example)`` compares its result with the simulation."""

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import calibrated, recipe, sqnr
from tests.models import simulated
from torchq import QuantDescriptor, TensorQuantizer
from torchq.errors import ExportError
from torchq.lowering import api
from torchq.lowering.check import ReferenceCheck
from torchq.runtimes import Torch


@pytest.fixture
def images() -> Tensor:
    return torch.randn(4, 3, 16, 16)


class Evasive(nn.Module):
    """Computes something else while it is traced."""

    def __init__(self, factor: float = 5) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * (1 if type(x) is Tensor else self.factor)


def test_an_example_shows_a_trace_that_went_wrong(images: Tensor) -> None:
    model = calibrated(Evasive(), images)
    with pytest.raises(
        torchq.errors.ExportError,
        match=r"deploy: result 0 has relative error 4 against the simulation; expected at most 0.1"
        r". Given the inputs .*. Pass target=torchq.runtimes.Torch\(fuse=False\)",
    ):
        torchq.deploy(model, images)
    assert (
        sqnr(
            torchq.deploy(model, images, target=Torch(fuse=False))(images),
            model(images),
        )
        > 40
    )


class Failing(Evasive):
    """Can be traced, but its trace cannot run."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y if type(x) is Tensor else y.missing()  # type: ignore[operator]


def test_a_trace_that_cannot_run_is_an_error_that_says_what_helps(
    images: Tensor,
) -> None:
    model = calibrated(Failing(), images)
    message = r"the deployed model raises AttributeError: .*missing.*Pass target=.*\(fuse=False\)"
    with pytest.raises(torchq.errors.ExportError, match=message):
        torchq.deploy(model, images)


def test_a_gain_is_an_error_however_few_the_bits(images: Tensor) -> None:
    """With 2 bits it is less than what quantization itself makes."""
    model = calibrated(Evasive(1.01), images)
    message = r"given the inputs of the simulation, result 0 differs, for the example"
    with pytest.raises(torchq.errors.ExportError, match=message):
        torchq.deploy(model, images)
    coarse = model
    torchq.restore_(coarse)
    weight = torchq.QuantDescriptor(2, axis=0)
    simulated(
        coarse,
        [images],
        torchq.QuantConfig(
            (torchq.Rule("*", input=torchq.QuantDescriptor(8), weight=weight),)
        ),
    )
    with pytest.raises(torchq.errors.ExportError, match=message):
        torchq.deploy(coarse, images)


class Amplifying(nn.Module):
    """A model that turns one code of its second layer into most of the result.

    Inputs and weights are multiples of their scales: quantization itself changes nothing.

    Args:
        flip: what tracing adds to the input of the second layer, in codes.
    """

    def __init__(self, flip: Tensor) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 1, 1, bias=False)
        self.second = nn.Conv2d(1, 1, 1, bias=False)
        for layer in (self.first, self.second):
            nn.init.ones_(layer.weight)
        self.register_buffer("flip", flip)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if type(y) is not Tensor:
            y = y + self.flip
        return torch.relu(self.second(y) - 126.5) * 1e3 + 1


def amplifying(flipped: int) -> tuple[nn.Module, Tensor]:
    """The calibrated model, whose first ``flipped`` codes fall the other way; and its input."""
    x = torch.arange(256.0).remainder(127).view(1, 1, 16, 16)
    flip = torch.zeros(256)
    flip[126] = 1
    flip[: max(0, flipped - 1)] = 1
    model = Amplifying(flip.view(1, 1, 16, 16)).eval()
    torchq.quantize_(model, recipe())
    for layer in (model.first, model.second):
        layer.input_quantizer.set_amax(127.0)
        layer.weight_quantizer.set_amax(torch.ones(1, 1, 1, 1))
    return model, x


def test_a_tie_that_the_model_amplifies_is_no_error() -> None:
    model, x = amplifying(1)
    with pytest.warns(
        UserWarning, match="every layer agrees when given the same input"
    ) as warned:
        int8 = torchq.deploy(model, x)
    assert warned[0].filename == __file__
    assert not torch.allclose(int8(x), model(x), rtol=0.5)


def test_a_layer_that_computes_something_else_is_named() -> None:
    model, x = amplifying(200)
    message = r"Given the inputs of the simulation, the input of second differs, .*. Pass target=.*"
    with pytest.raises(torchq.errors.ExportError, match=message):
        torchq.deploy(model, x)


class Faking(nn.Module):
    """Returns zeros, and one more of them while it is traced, or as many tensors."""

    def __init__(self, extra: float, more: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.extra = extra
        self.more = more

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.conv(x) * 0
        return (y,) if type(y) is Tensor else (y + self.extra,) * (1 + self.more)


@pytest.mark.parametrize(
    ("extra", "more", "expected"),
    [
        (1.0, 0, "result 0 has relative error inf against the simulation"),
        (0.0, 1, r"the model returns 2 tensors; expected 1\. Given the inputs"),
    ],
)
def test_results_that_cannot_be_compared_are_errors(
    images: Tensor, extra: float, more: int, expected: str
) -> None:
    model = calibrated(Faking(extra, more), images)
    with pytest.raises(torchq.errors.ExportError, match=expected):
        torchq.deploy(model, images)


def test_inputs_that_a_simulation_has_rounded_already_are_compared_as_codes() -> None:
    class Branches(nn.Module):
        """Cannot be traced, so that its layers read floats on the engine."""

        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(3, 8, 1)
            self.b = nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return h + self.b(h) if h.shape[1] == 8 else h

    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    model = Branches().eval()
    # Evaluation computes codes as ONNX Runtime does, on the range of larger images.
    torchq.quantize_(model, recipe(), target="onnxruntime", example=x, progress=False)
    torchq.calibrate(model, [x * 8], progress=False)
    int8 = torchq.deploy(model, x, target="torch", progress=False)
    # A code that falls the other way at a tie is a step of 255.
    assert sqnr(int8(x), model(x)) > 40


def test_codes_of_either_sign_that_are_concatenated_are_read_with_all_their_bounds() -> (
    None
):
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(3, 8, 1)
            self.b = nn.Conv2d(3, 8, 1)
            self.c = nn.Conv2d(16, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(torch.cat([self.a(x).relu(), self.b(x)], 1))

    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    int8 = torchq.deploy(calibrated(Joined(), x), x, target="torch", progress=False)
    bounds = int8.c.input_qparams
    assert (bounds.quant_min, bounds.quant_max) == (0, 255)


def test_an_error_of_the_code_is_no_overflow_of_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(3, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            assert isinstance(self.a, nn.Conv2d), "a convolution of torch is wanted"
            return self.a(x) if x.shape[1] == 3 else x

    monkeypatch.setattr(api, "saturates", lambda: True)
    x = torch.randn(2, 3, 8, 8)
    model = calibrated(Looks(), x, torchq.recipes.int8())
    with (
        pytest.warns(UserWarning, match="can overflow"),
        pytest.raises(ExportError, match="raises AssertionError: a conv") as error,
    ):
        torchq.deploy(model, x, target="torch", progress=False)
    assert "overflow" not in str(error.value)


class Coarse(nn.Module):
    """Two bits, so that a value that falls the other way is a large part of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.quantizer = TensorQuantizer(QuantDescriptor(num_bits=2))
        self.quantizer.set_amax(torch.tensor(1.0))
        self.order = self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.quantizer(self.order * x)


def test_what_ties_explain_is_told_from_a_fault() -> None:
    simulated, other_order, damaged = Coarse(), Coarse(), Coarse()
    other_order.order = damaged.order = 1 + 1e-6
    damaged.gain = 4.0
    # 0.5 lies between the codes 0 and 1.
    at_ties = ReferenceCheck(simulated, torch.tensor([0.5, 0.5, 1.0, 0.0]))
    assert "relative error 1.4" in at_ties.difference(other_order, 0.1)
    assert not at_ties.unexplained(other_order, 0.1)
    assert "relative error 6.4" in at_ties.unexplained(damaged, 0.1)
    # No tie explains results of another shape.
    cut = nn.Sequential(Coarse(), nn.Unflatten(0, (2, 2)))
    assert "has shape (2, 2)" in at_ties.unexplained(cut, 0.1)
    # No tie excuses the same fault here.
    elsewhere = ReferenceCheck(simulated, torch.tensor([0.4, 0.6, 1.0, 0.0]))
    assert not elsewhere.difference(other_order, 0.1)
    assert "relative error 3" in elsewhere.unexplained(damaged, 0.1)
