"""The error of each layer: alone, and with all that came before it."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.models import ConvNet, Parts, StagedNet, image_batches, simulated
from tests.workflow.test_added_operators import Spectrum, sounds


def chain(count: int = 4, width: int = 16) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def vectors(width: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(32, width, generator=generator) for _ in range(2)]


def quantized(
    model: nn.Module, batches: list[Tensor], bits: int = 8, **options: int
) -> nn.Module:
    return simulated(model, batches, torchq.recipes.integer(bits, bits, **options))


def decibels(value: Tensor, reference: Tensor) -> float:
    noise = (value.double() - reference.double()).square().sum()
    return float(10 * torch.log10(reference.double().square().sum() / noise))


@torch.no_grad()
def test_local_and_accumulated_error_are_those_of_separate_runs() -> None:
    batches = vectors()
    model = quantized(chain(), batches)
    float_model = copy.deepcopy(model)
    torchq.restore_(float_model)
    inputs = torch.cat(batches)
    expected = inputs
    actual = inputs
    rows = torchq.layer_errors(model, batches, progress=False).rows
    for row, layer, float_layer in zip(rows, model, float_model, strict=True):
        local = layer(expected)
        expected, actual = float_layer(expected), layer(actual)
        # The sums are taken in float32 over 1024 elements.
        assert row.local_sqnr == pytest.approx(decibels(local, expected), abs=1e-3)
        assert row.sqnr == pytest.approx(decibels(actual, expected), abs=1e-3)
        cosine = torch.cosine_similarity(
            actual.flatten().double(), expected.flatten().double(), dim=0
        )
        assert row.cosine == pytest.approx(float(cosine), abs=1e-6)


def test_the_layer_where_the_error_is_born_is_told_from_those_that_pass_it_on() -> None:
    batches = vectors()
    model = chain(6)
    coarse = torchq.Rule(
        "2", input=torchq.QuantDescriptor(3), weight=torchq.QuantDescriptor(3)
    )
    simulated(model, batches, torchq.recipes.int8().with_rules(coarse), correct=False)
    report = torchq.layer_errors(model, batches, progress=False)
    assert report.worst[0].name == "2"
    born = {row.name: row.born for row in report.rows}
    assert born["2"] > 0.9
    assert all(born[later] < 0.1 for later in ("3", "4", "5"))
    assert report.rows[5].sqnr < 20 < report.rows[1].sqnr
    assert "most error is born in 2 " in str(report)


@torch.no_grad()
@pytest.mark.parametrize(
    ("channels", "compared"),
    [(60, 5), (128, 4)],
)
def test_large_outputs_are_compared_on_the_first_images(
    channels: int, compared: int
) -> None:
    """Expect about 2**18 elements of 1024 for each channel, and four images at least."""
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Conv2d(2, channels, 1),
        nn.AdaptiveAvgPool2d(1),
    )
    images = torch.randn(7, 2, 32, 32)
    quantized(model, [images], bits=4)
    seen: list[int] = []
    forward = model[0].forward

    def counted(x: Tensor) -> Tensor:
        seen.append(len(x))
        return forward(x)

    model[0].forward = counted
    few = torchq.layer_errors(model, [images], progress=False)
    assert seen == [7, compared, 7]
    del model[0].forward
    first = torchq.layer_errors(model, [images[:compared]], progress=False)
    assert few.rows[0] == first.rows[0]


def test_a_layer_that_mixes_images_gets_all_of_them() -> None:
    """Let the order of the dimensions be (L, N, E), as in torch's attention by default."""
    attention = nn.MultiheadAttention(512, 2)
    seen = []

    class Sequences(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]

    batch = torch.randn(9, 80, 512)
    model = quantized(Sequences(attention=attention), [batch], bits=4)
    forward = model.attention.forward

    def counted(query: Tensor, *rest: Any, **options: Any) -> Any:
        seen.append(len(query))
        return forward(query, *rest, **options)

    model.attention.forward = counted
    torchq.layer_errors(model, [batch], progress=False)
    assert seen == [9, 9, 9]


def test_clipping_codes_and_dead_channels() -> None:
    model = nn.Sequential(nn.Linear(4, 3, bias=False))
    torchq.quantize_(model)
    with torch.no_grad():
        model[0].weight.copy_(
            torch.tensor([[1.0, 0, 0, 0], [1e-9, 0, 0, 0], [0, 0, 0, 0]])
        )
    model[0].weight_quantizer.set_amax(torch.tensor([[1.0], [1.0], [1.0]]))
    model[0].input_quantizer.set_amax(1.0)
    inputs = torch.tensor([[2.0, 0.5, -1.0, 0.0]] * 4)
    row = torchq.layer_errors(model, [inputs], progress=False).rows[0]
    by_name = {q.name: q for q in row.quantizers}
    assert by_name["0.input_quantizer"].clipped == row.clipped == 0.25
    assert by_name["0.input_quantizer"].used_codes == 4
    assert by_name["0.input_quantizer"].codes == 256
    weight = by_name["0.weight_quantizer"]
    # The second channel is lost to rounding; the third one was 0 before.
    assert (weight.dead_channels, weight.channels, row.dead_channels) == (1, 3, 1)
    assert weight.used_codes == row.used_codes == 2


def test_values_at_the_end_of_the_range_are_not_clipped() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    torchq.quantize_(
        model, torchq.recipes.integer(4, 4, unsigned=False, input_method="max")
    )
    batch = torch.linspace(-1, 1, 64).view(16, 4)
    torchq.calibrate(model, [batch], progress=False)
    row = torchq.layer_errors(model, [batch], progress=False).rows[0]
    assert row.clipped == 0
    assert row.quantizers[0].used_codes == 15


@pytest.mark.parametrize("recipe", ["int8", "w4a4", "fp8", "mxfp8", "nvfp4"])
def test_every_recipe_has_rows_for_every_layer(recipe: str) -> None:
    model = ConvNet()
    batches = image_batches()
    simulated(model, batches, torchq.recipes.by_name(recipe))
    report = torchq.layer_errors(model, batches, progress=False)
    assert [row.name for row in report.rows] == ["stem.0", "left.0", "right.0", "head"]
    assert all(math.isfinite(row.local_sqnr) for row in report.rows)
    assert report.rows[0].kind == "Conv2d"


def test_layers_of_other_kinds_and_hand_placed_quantizers() -> None:
    class Projecting(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.linear(x, self.matrix)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = torchq.TensorQuantizer()
            self.project = Projecting(matrix=nn.Parameter(torch.randn(6, 4)))
            self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.own(self.project(x))
            return self.attention(x, x, x)[0]

    model = Mixed()
    batch = torch.randn(2, 3, 4)
    simulated(model, [batch], example=batch)
    report = torchq.layer_errors(model, [batch], progress=False)
    kinds = [("project", "Projecting"), ("own", "TensorQuantizer")]
    kinds.append(("attention", "MultiheadAttention"))
    assert [(row.name, row.kind) for row in report.rows] == kinds
    assert report.unseen == ()


def test_in_place_code_behind_a_layer_does_not_count_as_error() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.ReLU(inplace=True),
    )
    torchq.quantize_(model, torchq.recipes.integer(16, 16))
    batch = torch.randn(64, 4)
    torchq.calibrate(model, [batch], progress=False)
    assert torchq.layer_errors(model, [batch], progress=False).rows[0].sqnr > 60


def test_the_model_is_left_as_it_was() -> None:
    model = StagedNet()
    batches = image_batches()
    simulated(model, batches)
    model.train()
    model.head.eval()
    model.stem.input_quantizer.mode = "off"
    before = copy.deepcopy(model)
    seen = []

    def stop(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        seen.append(1)
        if len(seen) == 3:
            raise KeyboardInterrupt

    handle = model.head.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        torchq.layer_errors(model, batches, progress=False)
    handle.remove()
    for a, b in zip(model.modules(), before.modules(), strict=True):
        assert a.training == b.training
        assert getattr(a, "mode", None) == getattr(b, "mode", None)
        assert len(a._forward_hooks) == 0
    for key, value in before.state_dict().items():
        assert torch.equal(model.state_dict()[key], value)


def test_layers_that_no_batch_reaches_are_named() -> None:
    model = StagedNet()
    model.extra = nn.Linear(2, 2)
    torchq.quantize_(model)
    assert torchq.layer_errors(model, image_batches(), progress=False).unseen == (
        "extra",
    )


def test_an_operator_that_is_worse_than_all_layers_is_said_so() -> None:
    batches = sounds()
    endings = []
    for correct in (False, True):
        model = Spectrum().eval()
        torchq.quantize_(
            model, target="onnxruntime", example=batches[0], progress=False
        )
        torchq.calibrate(model, batches, correct=correct, progress=False)
        report = torchq.analysis.layer_errors(model, batches, progress=False)
        endings.append(str(report))
    # Calibration with a correction leaves it in float.
    assert "an operator beside layers is worse" in endings[0]
    assert "an operator beside layers is worse" not in endings[1]
