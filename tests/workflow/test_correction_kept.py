"""When the correction of results is kept: never where it makes a layer or the output worse.

Both sides of each comparison see the same thing, whatever a forward draws, chooses or remembers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchq
from tests.models import simulated
from torchq.graph import results_in
from torchq.workflow import correction

Net = Callable[[], nn.Module]
W4 = torchq.recipes.integer(4, 8)
SEED = 9


def rows(count: int = 6, size: int = 256) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 16, generator=generator) for _ in range(count)]


class Hooked(nn.Sequential):
    """A hook of the user changes what the first layer returns."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self[0].register_forward_hook(lambda module, args, out: out + 3)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 32)
        self.b = nn.Linear(32, 8)


class Noisy(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        return self.b(h + torch.randn_like(h) * h.std())


class Dropping(Two):
    """Dropout that stays on in eval mode, as in Monte Carlo dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(F.relu(self.a(x)), 0.5, training=True))


class InPlace(Two):
    """Normalises its input in place, and goes on in place."""

    def forward(self, x: Tensor) -> Tensor:
        x.sub_(0.5).div_(0.25)
        h = self.a(x)
        h.clamp_(min=0)
        return self.b(h)


class Tokens(nn.Module):
    """Half of the rows go on, chosen by what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16)
        self.o = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        chosen = h.mean(-1) > h.mean(-1).median()
        h = h.clone()
        h[chosen] = self.b(h[chosen])
        return self.o(h)


class Experts(nn.Module):
    """Each row goes to the two experts of its largest gates."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.out = nn.Linear(16, 8)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, places = self.gate(x).softmax(-1).topk(2, -1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, rank = (places == number).nonzero(as_tuple=True)
            mixed.index_add_(0, row, expert(x[row]) * weights[row, rank].unsqueeze(-1))
        return self.out(F.relu(mixed))


class Branching(Two):
    """Which way a batch goes depends on a result of a quantized layer."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(F.relu(h) if h.mean() > 0 else torch.tanh(h))


class Streaming(Two):
    """Adds what it kept of the call before."""

    past: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("past", torch.zeros(16))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.past
        self.past = x[-1].detach()
        self.calls += 1
        return self.b(F.relu(self.a(x)))


NETS = (Hooked, Noisy, Dropping, InPlace, Tokens, Experts, Branching, Streaming)


def ratio(floats: nn.Module, model: nn.Module, batches: list[Tensor]) -> float:
    """Signal to noise in dB, where both draw the same random numbers and start from one state."""
    powers = torch.zeros(2, dtype=torch.float64)
    torch.manual_seed(SEED)
    state = torch.get_rng_state()
    kept = [copy.deepcopy(one) for one in (floats, model)]
    for x in batches:
        results = []
        for one in kept:
            torch.set_rng_state(state)
            (result,) = results_in(one(x.clone()))
            results.append(result.double())
        state = torch.get_rng_state()
        powers += torch.stack(
            [results[0].square().sum(), (results[0] - results[1]).square().sum()]
        )
    return 10 * math.log10(powers[0] / powers[1])


@torch.no_grad()
@pytest.mark.parametrize("config", [None, W4], ids=["8 bits", "4 bits"])
@pytest.mark.parametrize("net", NETS)
def test_a_correction_never_makes_the_output_worse(
    net: Callable[[], nn.Module], config: Any
) -> None:
    """On the batches that were compared; the hook alone made it 36 dB worse."""
    torch.manual_seed(0)
    floats = net().eval()
    compared = rows()[:2]
    found = []
    for correct in (True, False):
        torch.manual_seed(SEED)
        model = simulated(copy.deepcopy(floats), rows(), config, correct=correct)
        found.append(ratio(floats, model, compared))
    # The outputs that were compared are these, but for the order in which float32 adds.
    assert found[0] >= found[1] - 0.01


@torch.no_grad()
@pytest.mark.parametrize("net", [Noisy, Tokens, Experts, Dropping])
def test_gains_are_near_one_whatever_a_forward_draws_or_chooses(
    net: Callable[[], nn.Module],
) -> None:
    """Pairs of different rows, or with different noise, made gains of 0.55."""
    torch.manual_seed(0)
    model = simulated(net().eval(), rows(9), W4)
    gains = [
        m.output_gain for m in model.modules() if getattr(m, "is_corrected", False)
    ]
    assert gains and all(gain.mean() > 0.9 for gain in gains)


def test_batches_and_the_state_of_the_model_stay_as_they_are() -> None:
    for net in (InPlace, Streaming):
        batches, model = rows(), net().eval()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        for config in (None, W4):
            copied = simulated(copy.deepcopy(model), batches, config)
            assert all(map(torch.equal, batches, rows()))
            assert all(
                torch.equal(copied.state_dict()[name], value)
                for name, value in state.items()
            )
            assert getattr(copied, "calls", 0) == 0


def test_random_numbers_go_on_as_after_one_run_of_the_batches() -> None:
    drawn = []
    for correct in (True, False):
        torch.manual_seed(3)
        model = Noisy().eval()
        simulated(model, rows(), W4, correct=correct)
        drawn.append(torch.rand(4))
    assert torch.equal(*drawn)


def samples_of(model: nn.Module, batches: Any, config: Any, correct: bool) -> int:
    counted = [0]

    def count(module: nn.Module, args: Any) -> None:
        counted[0] += len(args[0])

    model.register_forward_pre_hook(count)
    simulated(model, batches, config, correct=correct)
    return counted[0]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("config", "runs"), [(None, 2), (W4, 3)], ids=["8 bits", "4 bits"]
)
def test_it_costs_few_runs_of_a_third_of_the_batches(
    config: Any, runs: int, shuffle: bool
) -> None:
    """A loader that shuffles gives the same batches again, as it draws the same numbers.

    A few samples of each batch more show whether ranges should be averages.
    """
    data = TensorDataset(torch.cat(rows()))
    for batches in (rows(), DataLoader(data, batch_size=256, shuffle=shuffle)):
        assert samples_of(Hooked().eval(), batches, config, False) == 6 * 256
        count = samples_of(Hooked().eval(), batches, config, True)
        least = (6 + runs * 2) * 256
        assert least <= count < least + 256 / 2


def test_a_loader_that_gives_other_batches_each_time_is_compared_all_the_same() -> None:
    """Its own generator goes on; the float model runs on these batches too."""
    data = TensorDataset(torch.cat(rows()))
    generator = torch.Generator().manual_seed(4)
    batches = DataLoader(data, batch_size=256, shuffle=True, generator=generator)
    model = Hooked().eval()
    torchq.quantize_(model, W4)
    done = torchq.calibrate(model, batches, progress=False).correction
    assert done is not None and done.layers
    before = done.outputs.before
    after = done.outputs.after
    assert before is not None and after is not None and after < before < 0.05


def test_the_report_says_how_many_batches_were_compared_and_what_changed() -> None:
    model = Hooked().eval()
    torchq.quantize_(model, W4)
    report = torchq.calibrate(model, rows(9), progress=False)
    done = report.correction
    assert done is not None and done.outputs.batches == 3
    assert f"; output {-10 * math.log10(done.outputs.before or 1):.1f} dB -> " in str(
        report
    )
    assert " dB on 3 batches" in str(report)


@pytest.mark.parametrize("config", [None, W4], ids=["8 bits", "4 bits"])
def test_a_wrong_fit_is_left_out_and_counted(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fit adds a fifth of the deviation, and claims that it helps."""
    solve = correction._Fit.solve

    def damaged(self: Any, sums: Tensor | None = None) -> Any:
        gain, shift = solve(self, sums)
        return gain, shift + 0.2

    monkeypatch.setattr(correction._Fit, "solve", damaged)
    for claims in (True, False):
        if claims:
            monkeypatch.setattr(correction._Fit, "helps", property(lambda self: True))
        model = Hooked().eval()
        plain = simulated(copy.deepcopy(model), rows(), config, correct=False)
        torchq.quantize_(model, config)
        report = torchq.calibrate(model, rows(), progress=False)
        done = report.correction
        assert done is not None and not done.layers
        assert torch.equal(model(rows()[0]), plain(rows()[0]))
        assert set(done.skipped.values()) == {
            "with all corrections the output of the model is worse than without"
        }
        assert "of 0 layers, 2 not" in done.line and "so it is left out" in done.line


def test_a_fit_that_does_not_help_on_other_results_is_left_out() -> None:
    """Eight results of each channel cannot tell a mean error from chance."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32))
    torchq.quantize_(model)
    done = torchq.calibrate(model, [rows()[0][:8]], progress=False).correction
    assert done is not None
    assert done.skipped == {"0": "the error of its results does not fall"}


class OneShot:
    """An object whose batches can be read once, which its type does not show."""

    def __init__(self) -> None:
        self._batches = iter(rows())

    def __iter__(self) -> Iterator[Tensor]:
        return self._batches


@pytest.mark.parametrize("config", [None, W4], ids=["8 bits", "4 bits"])
def test_an_object_whose_batches_end_is_named(config: Any) -> None:
    model = Hooked().eval()
    torchq.quantize_(model, config)
    with pytest.warns(
        UserWarning, match="can be read only once; expected a list or a loader"
    ):
        report = torchq.calibrate(model, OneShot(), progress=False)
    assert report.batches == 6 and not model[0].is_corrected


class Rest(OneShot):
    """The second read gives what the first left, and the third nothing."""

    def __init__(self) -> None:
        self._batches = iter(rows(4))

    def __iter__(self) -> Iterator[Tensor]:
        yield from islice(self._batches, 3)


def test_without_a_comparison_nothing_is_corrected() -> None:
    model = Hooked().eval()
    torchq.quantize_(model)
    with pytest.warns(
        UserWarning, match="can be read only once; expected a list or a loader"
    ):
        report = torchq.calibrate(model, Rest(), progress=False)
    assert report.correction is None and not model[0].is_corrected


class OneRow(nn.Module):
    """A layer gets vectors, and a hook returns a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 8)
        self.b = nn.Linear(8, 4)
        self.a.register_forward_hook(lambda module, args, out: (out, out.sum()))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)[0])


@pytest.mark.parametrize("config", [None, W4], ids=["8 bits", "4 bits"])
def test_vectors_and_hooks_that_return_pairs_are_read(config: Any) -> None:
    torch.manual_seed(0)
    model = OneRow().eval()
    torchq.quantize_(model, config)
    vectors = list(torch.cat(rows()).unbind())[:120]
    done = torchq.calibrate(model, vectors, progress=False).correction
    assert done is not None and done.batches == 40
    assert not any("no batch" in reason for reason in done.skipped.values())


class ReadElsewhere(Two):
    """The bias of one layer is added somewhere else too."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(F.relu(h + self.a.bias))


@pytest.mark.parametrize("config", [None, W4], ids=["8 bits", "4 bits"])
def test_a_tensor_that_a_forward_reads_is_not_corrected(config: Any) -> None:
    model = ReadElsewhere().eval()
    torchq.quantize_(model, config)
    done = torchq.calibrate(model, rows(), progress=False).correction
    assert done is not None
    assert done.skipped["a"] == "its weight or bias is read outside of it too"


class Tied(nn.Module):
    """An embedding and a head with one weight, two layers with one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(50, 16)
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16)
        self.h = nn.Linear(16, 50)
        self.h.weight = self.e.weight
        self.b.bias = self.a.bias

    def forward(self, i: Tensor) -> Tensor:
        return self.h(self.b(F.relu(self.a(self.e(i)))))


@torch.no_grad()
def test_corrections_of_tied_tensors_are_folded_for_one_reader_alone() -> None:
    """A gain of the head changed the embedding, and both shifts stood in one bias."""
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (64, 7))
    model = simulated(Tied().eval(), [ids], torchq.recipes.integer(3, 8), correct=False)
    for layer in (model.a, model.b, model.h):
        gain = torch.rand(layer.out_features) + 0.5
        layer.correct_output_(gain, torch.randn(layer.out_features))
    expected = model(ids)
    tensors = dict(model.named_parameters())
    with torchq.nn.correction.folded_corrections(model):
        assert not model.h.is_corrected
        # The same products in another order.
        torch.testing.assert_close(model(ids), expected, rtol=1e-5, atol=1e-5)
    assert all(tensors[name] is tensor for name, tensor in model.named_parameters())
    assert model.h.weight is model.e.weight and model.b.bias is model.a.bias
    assert torch.equal(model(ids), expected)


def test_layers_whose_weights_share_a_quantizer_get_no_gain() -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    torchq.quantize_(net, W4)
    net[1].weight_quantizer = net[0].weight_quantizer
    done = torchq.calibrate(net, rows(), progress=False).correction
    assert done is not None
    assert "its weight has the quantizer of another one" in done.skipped.values()


def test_outputs_without_numbers_are_said_to_be_incomparable() -> None:
    class Answers(Hooked):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).argmax(-1)

    model = Answers().eval()
    torchq.quantize_(model)
    done = torchq.calibrate(model, rows(), progress=False).correction
    assert done is not None and done.layers
    assert (
        "the outputs of 2 batches cannot be compared with those of the float model"
        in done.line
    )


def test_a_function_of_the_user_may_return_anything() -> None:
    """The output of the model is compared, not the loss or nothing that the function returns."""

    def nothing(model: nn.Module, batch: Tensor) -> None:
        model(batch)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    for forward in (nothing, loss):
        model = Hooked().eval()
        torchq.quantize_(model)
        done = torchq.calibrate(
            model, rows(), forward=forward, progress=False
        ).correction
        assert done is not None and done.outputs.before is not None


def test_empty_batches_in_front_are_passed_over() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    torchq.quantize_(model, W4, progress=False)
    first, second = rows(2)
    batches = [first[:0], first[:0], first, second]
    report = torchq.calibrate(model, batches, progress=False)
    assert report.correction is not None
    assert report.correction.layers
