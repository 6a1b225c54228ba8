"""Plans and reports say how much of a model is quantized, and warn where it is little."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq import QuantDescriptor, Rule
from torchq.swap.share import RESULT_IN_FLOAT, Share, warn_if_small

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def convs() -> nn.Sequential:
    """8 * 27 * 36 and 8 * 72 * 16 multiply-adds for an image, and 8 * 16 * 5 in the head."""
    layers = (
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.Flatten(),
        nn.Linear(128, 5),
    )
    return nn.Sequential(*layers).eval()


def last_line(report: object) -> str:
    return str(report).splitlines()[-1]


@pytest.mark.parametrize("function", [torchq.plan, torchq.quantize_])
def test_the_last_line_says_how_many_multiply_adds_are_quantized(
    function: object,
) -> None:
    assert callable(function)
    work = {"0": 8 * 27 * 36, "2": 8 * 72 * 16, "4": 128 * 5}
    share = 1 - work["2"] / sum(work.values())
    counts, _, message = last_line(function(convs(), exclude="2", example=X)).partition(
        "; "
    )
    assert counts == "2 quantized, 1 skipped, recipe int8"
    assert message == f"{share:.1%} of the multiply-adds quantized"


def test_without_an_example_it_counts_weights() -> None:
    weights = {"0": 8 * 27, "2": 8 * 72, "4": 128 * 5}
    share = 1 - weights["4"] / sum(weights.values())
    line = last_line(torchq.plan(convs(), exclude="4"))
    assert line.endswith(f"; {share:.1%} of the weights of layers quantized")


def test_what_the_user_excludes_is_no_reason_to_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torchq.plan(convs(), include="4", example=X).share.quantized < 0.1
        assert torchq.plan(convs(), exclude=["0", "2"], example=X).share.quantized < 0.1


def test_few_multiply_adds_are_warned_of_with_the_largest_reason_first() -> None:
    layers = (
        nn.ConvTranspose2d(3, 8, 3),
        nn.ConvTranspose2d(8, 8, 3),
        nn.Conv2d(8, 1, 12),
    )
    model = nn.Sequential(*layers).eval()
    message = (
        r"^Sequential: only \d+\.\d% of the multiply-adds quantized\. Float stay 2 "
        r"ConvTranspose2d: its input stays float, as onnxruntime has no integer kernel for it "
        r"\(\d\d\.\d%\); Conv2d: its result is not quantized \(\d\.\d%\)$"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        torchq.quantize_(model, target="onnxruntime", example=X)
    assert len(caught) == 1


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("measured", [False, True])
def test_recurrent_layers_that_stay_float_are_named_with_the_way_to_quantize_them(
    kind: type[nn.RNNBase], measured: bool
) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = kind(6, 8, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0])

    model = Tagger().eval()
    x = torch.randn(2, 5, 6)
    gates = 4 if kind is nn.LSTM else 3
    # The same for weights and for multiply-adds.
    share = 8 * 3 / (8 * 3 + gates * 8 * (6 + 8))
    message = (
        rf"{kind.__name__}: no rule matches; torchq\.recipes\.int8\(recurrent=True\)"
    )
    with pytest.warns(UserWarning, match=message):
        report = torchq.quantize_(model, example=x if measured else None)
    assert report.share.quantized == pytest.approx(share)
    torchq.restore_(model)
    assert (
        torchq.quantize_(model, torchq.recipes.int8(recurrent=True)).share.quantized
        == 1
    )


def test_products_in_forwards_count_where_the_target_quantizes_them() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(8, 8)
            self.k = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.matmul(
                self.q(x),
                self.k(x).transpose(1, 2),
            )

    x = torch.randn(2, 5, 8)
    layers = 2 * 5 * 8 * 8
    products = 5 * 5 * 8
    plain = torchq.plan(Scores(), example=x).share
    assert plain.quantized == pytest.approx(layers / (layers + products))
    assert list(plain.float_work) == ["Scores: products in its forward"]
    on_integers = torchq.plan(Scores(), target="openvino", example=x)
    assert on_integers.share.quantized == 1
    part = products / (layers + products)
    line = (
        f"({part:.1%} are products as in attention, which executorch computes in float)"
    )
    assert line in torchq.plan(Scores(), target="executorch", example=x).verdict()
    assert "as in attention" not in on_integers.verdict()


def test_attention_and_weights_that_are_computed_count() -> None:
    class Gained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, 2 * self.weight)

    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(layer, Gained()).eval()
    x = torch.randn(2, 5, 8)
    report = torchq.quantize_(model, example=x)
    assert report.share.quantized == 1
    assert {"0.self_attn", "0.linear1", "0.linear2", "1"} <= report.work.amounts.keys()


def test_what_is_quantized_already_counts() -> None:
    model = convs()
    torchq.quantize_(model, include=["0", "2"])
    assert torchq.quantize_(model, example=X).share.quantized == 1


def test_weights_that_are_quantized_alone_on_purpose_count() -> None:
    config = torchq.QuantConfig((Rule("*", weight=QuantDescriptor(4)),))
    assert torchq.quantize_(convs(), config, example=X).share.quantized == 1


@pytest.mark.parametrize(
    ("count", "end"), [(2, r"b \(20\.0%\)"), (3, r"c \(20\.0%\)"), (5, "; 2 more")]
)
def test_three_reasons_of_a_small_share_are_shown_and_others_counted(
    count: int, end: str
) -> None:
    reasons = dict.fromkeys("abcde"[:count], 0.2)
    share = Share(0.1, 1.0, reasons, "multiply-adds")
    with pytest.warns(UserWarning, match=f"^Sequential: only 10.*a .*{end}$"):
        warn_if_small(convs(), share)


def test_a_third_of_what_was_wanted_is_no_small_share() -> None:
    """A warning would be an error; what a quantizer of a result is missing for counts as done."""
    for done, missing, wanted in ((0.3, 0.3, 0.9), (0.2, 0.7, 0.6), (0.0, 1.0, 0.0)):
        share = Share(done, wanted, {"a": missing}, "multiply-adds")
        warn_if_small(convs(), share)
    reason = f"a: {RESULT_IN_FLOAT}"
    warn_if_small(convs(), Share(0.1, 0.9, {reason: 0.2}, "multiply-adds"))
    with pytest.warns(UserWarning, match="only 10"):
        warn_if_small(convs(), Share(0.1, 0.9, {reason: 0.19}, "multiply-adds"))
