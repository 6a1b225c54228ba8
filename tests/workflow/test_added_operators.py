"""Operators beside layers that calibration leaves in float: what ruins outputs, nothing else."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.models import ConvNet, image_batches
from torchq.config import Rule
from torchq.swap import plan_of
from torchq.swap.optional import optional_operators
from torchq.workflow import added_operators
from torchq.workflow.runs import Runs


class Spectrum(nn.Module):
    """The logarithm of a sum of squares, as in front of networks that listen.

    A range of 8 bits for the squares of loud samples leaves nothing of quiet ones.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.real = nn.Conv1d(1, 8, 16, stride=8)
        self.imaginary = nn.Conv1d(1, 8, 16, stride=8)
        self.first = nn.Conv1d(8, 16, 3, padding=1)
        self.second = nn.Conv1d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 2)
        with torch.no_grad():
            for parameter in self.parameters():
                size = parameter[0].numel() ** -0.5
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator) * size
                )

    def forward(self, x: Tensor) -> Tensor:
        power = self.real(x) ** 2 + self.imaginary(x) ** 2
        h = self.first((power + 1e-3).log()).relu()
        h = (h + self.second(h)).relu()
        return self.head(h.mean(2))


class Detached(Spectrum):
    """No gradient passes the forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(x)


def sounds(loudness: float = 2.0) -> list[Tensor]:
    """Loud and quiet samples (8, 1, 256), the same in every call."""
    generator = torch.Generator().manual_seed(5)
    batches = []
    for _ in range(3):
        volume = torch.randn(8, 1, 1, generator=generator) * loudness
        batches.append(torch.randn(8, 1, 256, generator=generator) * volume.exp())
    return batches


def quantized(
    model: nn.Module, target: str = "onnxruntime", **options: object
) -> nn.Module:
    batches = sounds()
    torchq.quantize_(
        model, target=target, example=batches[0], progress=False, **options
    )
    return model


def calibrated(model: nn.Module, **options: object) -> torchq.CalibrationReport:
    return torchq.calibrate(model, sounds(), progress=False, **options)


@torch.no_grad()
def decibels(model: nn.Module) -> float:
    """Return the ratio of signal to noise of the outputs, beside those of the float network."""
    signal = noise = 0.0
    exact = Spectrum().eval()
    for x in sounds():
        signal += float(exact(x).square().sum())
        noise += float((model.eval()(x) - exact(x)).square().sum())
    return 10 * math.log10(signal / noise)


@pytest.mark.parametrize("target", ["onnxruntime", "executorch", "tensorrt"])
def test_an_operator_that_ruins_the_outputs_stays_in_float(target: str) -> None:
    kept = quantized(Spectrum(), target)
    calibrated(kept, correct=False)
    model = quantized(Spectrum(), target)
    before = plan_of(model)
    report = calibrated(model)
    # 8 bits for squares of samples whose volumes differ a hundredfold cost nearly everything.
    assert decibels(model) > decibels(kept) + 8
    plan = plan_of(model)
    left = [d for d in plan.replaced if d.left_float]
    assert left and len(left) < len(optional_operators(before)) + 1
    assert {d.by for d in left} == {"calibrate"}
    assert all(d.noise is not None for d in optional_operators(plan))
    assert f"{len(left)} of " in str(report) and "at the output" in str(report)
    assert "adds noise" in plan.explain(report.operators.left_float[0])
    assert "left in float" in plan.verdict()
    assert "optional until calibrated" in str(before)
    assert "optional until calibrated" not in str(plan)


def test_a_network_that_loses_nothing_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = []
    for worst in (added_operators.worst_operators, lambda ranked: ()):
        monkeypatch.setattr(added_operators, "worst_operators", worst)
        torch.manual_seed(0)
        model = ConvNet().eval()
        torchq.quantize_(
            model, target="onnxruntime", example=image_batches()[0], progress=False
        )
        report = torchq.calibrate(model, image_batches(), progress=False)
        assert report.operators.line == ""
        models.append(model)
    first, second = (model.state_dict() for model in models)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    plans = [plan_of(model) for model in models]
    assert plans[0].outcome() == plans[1].outcome() and plans[0].modes == plans[1].modes


def test_a_function_that_takes_a_batch_apart_ranks_the_same() -> None:
    direct, model = quantized(Spectrum()), quantized(Spectrum())
    expected = calibrated(direct).operators
    report = torchq.calibrate(
        model,
        [{"sound": x, "label": n} for n, x in enumerate(sounds())],
        forward=lambda module, batch: module(batch["sound"]),
        progress=False,
    )
    assert report.operators.noise == expected.noise
    assert report.operators.left_float == expected.left_float != ()


def test_batches_of_which_one_tensor_is_alike_are_ranked_apart() -> None:
    class Shifted(Spectrum):
        def forward(self, x: Tensor, shifts: Tensor) -> Tensor:
            return super().forward(x + shifts.mean(2, keepdim=True))

    batches = [(x[:2], torch.zeros(2, 1, n + 3)) for n, x in enumerate(sounds())]
    model = Shifted()
    torchq.quantize_(model, target="onnxruntime", example=batches[0], progress=False)
    report = torchq.calibrate(model, batches, progress=False)
    assert report.operators.left_float and report.operators.outputs.batches == 3


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "nowhere near"),
        (1e-3, "30.0 dB below"),
        (0.5, "3.0 dB below"),
        (4.0, "6.0 dB above"),
    ],
)
def test_noise_is_said_in_decibels(share: float, text: str) -> None:
    assert added_operators.decibels(share) == text


def test_the_choice_is_saved_and_loaded(tmp_path) -> None:
    model = quantized(Spectrum())
    calibrated(model)
    torchq.save(model, tmp_path / "model.pt")
    loaded = torchq.load(Spectrum(), tmp_path / "model.pt")
    assert plan_of(loaded) == plan_of(model)
    x = sounds()[0]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(x), model.eval()(x))


def test_a_rule_that_names_an_operator_keeps_it_quantized() -> None:
    config = torchq.recipes.int8().with_rules(
        Rule("quant_add", input=torchq.QuantDescriptor())
    )
    model = quantized(Spectrum(), config=config)
    calibrated(model)
    decision = plan_of(model).decision("quant_add")
    assert decision is not None and not decision.left_float and not decision.optional
    assert model.quant_add.input_quantizer.mode == "quantize"


def test_a_second_calibration_decides_anew() -> None:
    model = quantized(Spectrum())
    planned = plan_of(model)
    first = calibrated(model)
    again = calibrated(model, force=True)
    assert again.operators == first.operators and first.operators.left_float
    # The way back leads to what was planned: quantizers on and shared, biases rounded.
    with torch.no_grad():
        assert added_operators.take_back_operators_(Runs(model, sounds(), None))
    assert plan_of(model).outcome() == planned.outcome()
    assert plan_of(model).modes == planned.modes
    assert "optional until calibrated" in str(plan_of(model))


def test_layers_in_front_give_float_results_then() -> None:
    model = quantized(Spectrum())
    planned = plan_of(model)
    calibrated(model)
    plan = plan_of(model)
    left = {d.name for d in plan.replaced if d.left_float}
    assert planned.decision("real").bias == "int32"
    for d in plan.replaced:
        assert d.rounded_by.rpartition(".")[0] not in left
    assert "quant_add" in left
    in_group = {slot.rpartition(".")[0] for group in plan.shared for slot in group}
    assert not left & in_group


def test_without_gradients_groups_tell() -> None:
    model = quantized(Detached())
    report = calibrated(model)
    assert report.operators.by == "groups"
    assert "quant_add" in report.operators.left_float


@pytest.mark.parametrize("culprit", [0, 13, 57])
def test_one_operator_of_many_is_found_in_a_dozen_runs(culprit: int) -> None:
    names = [f"operator{i}" for i in range(58)]
    runs = []

    def measure(chosen: Iterable[str]) -> float:
        runs.append(chosen)
        return 0.01 + 0.5 * (names[culprit] in chosen)

    noise, layers = added_operators._by_groups(names, measure, 12)
    ranked = added_operators.OperatorChoice(noise, layers)
    worst = added_operators.worst_operators(ranked)
    # Twelve runs halve 58 operators at least five times.
    assert names[culprit] in worst and len(worst) <= 2 and len(runs) <= 12


def test_estimates_are_the_noise_that_runs_show() -> None:
    model = quantized(Spectrum(), exclude="quant_add")
    torchq.calibrate(model, sounds(0.2), correct=False, progress=False)
    runs = Runs(model.eval(), sounds(0.2), None)
    # Layers in float, so that runs show what operators do.
    with torchq.disabled(model, "type:torch.nn.modules.*"), torch.no_grad():
        rows = [d.name for d in optional_operators(plan_of(model))]
        operators = {name: model.get_submodule(name) for name in rows}
        samples = added_operators.samples_of_all(runs, 3)
        noise, _ = added_operators._by_gradients(model, operators, samples)
        assert noise
        for name in noise:
            others = [module for n, module in operators.items() if n != name]
            results = [added_operators._run_with(model, s, others) for s in samples]
            shown = added_operators._noise(samples, results)
            # Three directions and three samples are nine draws of a square: within a factor of 4.
            assert shown / 4 < noise[name] < 4 * shown


def test_a_choice_without_gain_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized(Spectrum())
    planned = plan_of(model)
    monkeypatch.setattr(added_operators, "_LEAST_GAIN", 99.0)

    def replanned(*_: object) -> Any:
        raise AssertionError("a plan takes as long as some runs, which come first")

    monkeypatch.setattr(added_operators, "_replanned", replanned)
    report = calibrated(model)
    assert report.operators.left_float == () and report.operators.outputs.batches == 3
    assert plan_of(model).outcome() == planned.outcome()
    assert plan_of(model).modes == planned.modes


def test_operators_that_promise_no_gain_are_not_looked_at_in_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def tried(*_: object) -> Any:
        raise AssertionError("this takes as long as all the rest of the ranking")

    monkeypatch.setattr(added_operators, "worst_operators", lambda _: ("quant_add_1",))
    monkeypatch.setattr(added_operators, "_tried", tried)
    report = calibrated(quantized(Spectrum()))
    assert report.operators.noise and report.operators.left_float == ()
    monkeypatch.undo()
    monkeypatch.setattr(added_operators, "_tried", tried)
    with pytest.raises(AssertionError, match="all the rest of the ranking"):
        calibrated(quantized(Spectrum()))


def test_the_expected_gain_explains_all_noise_of_a_run() -> None:
    noise = {"a": 3.0, "b": 1.0}
    choice = added_operators.OperatorChoice(noise, layers=1.0, together=2.0)
    assert choice.expected_gain(["a"]) == pytest.approx(10 * math.log10(5 / 2))
    # Each is twice its estimate then.
    choice = dataclasses.replace(choice, together=8.0)
    assert choice.expected_gain(["a"]) == pytest.approx(10 * math.log10(9 / 3))
    choice = dataclasses.replace(choice, layers=0.0)
    assert choice.expected_gain(["a", "b"]) == math.inf


def jackknifed_error(noise: Tensor) -> float:
    """Return the standard error of a gain by leaving out one sample at a time.

    Args:
        noise: (2, samples), without and with a change.
    """
    gains = []
    for sample in range(noise.shape[1]):
        others = [i for i in range(noise.shape[1]) if i != sample]
        before, after = noise[:, others].sum(1).tolist()
        gains.append(10 * math.log10(before / after))
    mean = sum(gains) / len(gains)
    squares = sum((gain - mean) ** 2 for gain in gains)
    return math.sqrt(squares * (len(gains) - 1) / len(gains))


@pytest.mark.parametrize(
    ("layers", "noise", "worst"),
    [
        # Of answers .4 % more may change: that is (.1 + .004)**2 - .01 = 8.16e-4 beside layers.
        (1e-2, {"a": 1e-7, "b": 5e-3, "c": 1e-2}, ("c", "b")),
        (1e-2, {"a": 1e-2, "b": 4e-4, "c": 4.1e-4}, ("a",)),
        (1e-2, {"a": 1e-2, "b": 4e-4, "c": 4.2e-4}, ("a", "c")),
        (1e-2, {"a": 8.1e-4}, ()),
        # No answer notices what is 40 dB below the outputs.
        (5e-6, {"a": 9e-5}, ()),
        (1.5e-5, {"a": 9e-5}, ("a",)),
        (0.0, {}, ()),
    ],
)
def test_the_fewest_operators_without_which_layers_make_the_noise(
    layers: float, noise: dict[str, float], worst: tuple[str, ...]
) -> None:
    choice = added_operators.OperatorChoice(noise, layers)
    assert added_operators.worst_operators(choice) == worst


def test_the_error_of_a_gain_is_that_of_leaving_samples_out() -> None:
    generator = torch.Generator().manual_seed(7)
    exact = torch.randn(200, 6, generator=generator)
    noise = torch.randn(2, 200, 6, generator=generator) * 0.1
    results = [(exact + noise[0],), (exact + 0.7 * noise[1],)]
    parts = [slice(0, 64), slice(64, 200)]
    samples = [added_operators.Sample((), {}, None, [exact[part]]) for part in parts]
    before, after = ([[r[part]] for part in parts] for (r,) in results)
    error = added_operators.error_of_gain(
        nn.Linear(1, 1), samples, (before, after), None
    )
    squares = torch.stack([(r - exact).square().sum(1) for (r,) in results])
    # To first order in the noise of one of 200 samples.
    assert error == pytest.approx(jackknifed_error(squares.double()), rel=0.02)
    assert error > 0.2


def test_a_gain_of_one_sample_has_no_error() -> None:
    exact = torch.ones(1, 6)
    sample = added_operators.Sample((), {}, 1, [exact])
    results = [[exact + 1]], [[exact + 0.1]]
    model = nn.Linear(1, 1)
    assert added_operators.error_of_gain(model, [sample], results, None) is None


def test_a_gain_within_its_error_leaves_nothing_in_float(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = 0.0
    monkeypatch.setattr(added_operators, "error_of_gain", lambda *_: error)
    sure = calibrated(quantized(Spectrum())).operators
    assert sure.left_float
    error = sure.gain / 2
    model = quantized(Spectrum())
    report = calibrated(model)
    assert report.operators.left_float == ()
    assert not any(d.left_float for d in plan_of(model).replaced)


def test_a_plan_whose_outputs_are_no_nearer_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan leaves more in float than these operators alone, so its outputs are compared too."""
    model = quantized(Spectrum())
    planned = plan_of(model)
    really = added_operators.compared
    seen: list[Any] = []

    def compared(*arguments: Any) -> Any:
        outputs = really(*arguments)
        assert outputs.before is not None
        if seen:
            outputs = dataclasses.replace(outputs, after=outputs.before)
        seen.append(any(d.left_float for d in plan_of(model).decisions))
        return outputs

    monkeypatch.setattr(added_operators, "compared", compared)
    report = calibrated(model)
    assert seen == [False, True]
    assert report.operators.left_float == () and report.operators.gain == 0
    assert plan_of(model).outcome() == planned.outcome()
    assert plan_of(model).modes == planned.modes


def test_an_interrupt_leaves_the_placement_as_it_was() -> None:
    model = quantized(Spectrum())
    before = plan_of(model)
    state = copy.deepcopy(model.state_dict())

    def stop(module: nn.Module, args: object) -> None:
        if any(d.left_float for d in plan_of(module).replaced):
            raise KeyboardInterrupt

    with model.register_forward_pre_hook(stop), pytest.raises(KeyboardInterrupt):
        calibrated(model)
    assert plan_of(model) == before
    after = model.state_dict()
    assert state.keys() == after.keys()
    assert all(torch.equal(state[key], after[key]) for key in state)


def test_preparing_to_train_reports_and_leaves_the_plan() -> None:
    model = Spectrum()
    prepared = torchq.qat.prepare(model, sounds(), target="onnxruntime", progress=False)
    assert "cost much at the output" in str(prepared)
    assert not any(d.left_float for d in plan_of(model).replaced)
    assert all(q.mode == "quantize" for q in torchq.workflow.quantizers(model).values())


def test_without_a_correction_nothing_is_decided() -> None:
    model = quantized(Spectrum())
    report = calibrated(model, correct=False)
    assert report.operators.noise == {} and not plan_of(model).modes


def test_chips_without_float_kernels_keep_their_operators() -> None:
    model = quantized(Spectrum(), "qnn")
    assert not optional_operators(plan_of(model))
    assert "optional" not in str(plan_of(model))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(?s).*its output is not quantized")
@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_files_compute_what_is_left_in_float(target: str, tmp_path) -> None:
    import onnx

    # Weights of 8 bits overflow on CPUs without VNNI.
    model = quantized(Spectrum(), target, config=torchq.recipes.int8(reduce_range=True))
    calibrated(model)
    path = tmp_path / "model.onnx"
    x = sounds()[0]
    torchq.export_onnx(model.eval(), x, path, target=target)
    graph = onnx.load(path).graph
    producers = {name: node.op_type for node in graph.node for name in node.output}
    added = [node for node in graph.node if node.op_type == "Add"]
    squares = [n for n in added if {producers.get(i) for i in n.input} == {"Mul"}]
    squares += [n for n in added if {producers.get(i) for i in n.input} == {"Pow"}]
    assert squares
    report = torchq.verify_onnx(model, path, [x], progress=False)
    assert report.ok, str(report)


def test_layers_keep_the_quantizers_that_an_operator_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = quantized(Spectrum())
    assert model.quant_add_1.input_quantizer is model.second.input_quantizer
    monkeypatch.setattr(added_operators, "worst_operators", lambda _: ("quant_add_1",))
    monkeypatch.setattr(added_operators, "_LEAST_GAIN", -99.0)
    monkeypatch.setattr(added_operators, "_LEAST_EXPECTED", -99.0)
    calibrated(model)
    plan = plan_of(model)
    assert model.quant_add_1.input_quantizer.mode == "off"
    assert model.second.input_quantizer.mode == "quantize"
    # What is read in float gives float results, on the side of the plan and of the layer.
    assert plan.decision("second").bias == model.second.bias_format == ""
    assert plan.decision("first").rounded_by == model.first.rounded_by == ""
    assert plan.decision("real").bias == model.real.bias_format == "int32"


class OneByOne(Spectrum):
    """Takes a single sample."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[0] == 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("network", "calls"),
    # In float, along errors and quantized: in one run each of four batches together, or apart.
    [(Spectrum, 3), (OneByOne, 12)],
)
def test_small_batches_are_ranked_together_where_the_model_takes_them(
    network: type[nn.Module], calls: int
) -> None:
    model = network().eval()
    batches = list(torch.cat(sounds(0.2))[:8].split(1))
    torchq.quantize_(
        model,
        target="onnxruntime",
        example=batches[0],
        exclude="quant_add",
        progress=False,
    )
    torchq.calibrate(model, batches, correct=False, progress=False)
    names = [d.name for d in optional_operators(plan_of(model))]
    sizes: list[int] = []

    def note(module: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> None:
        sizes.append(args[0].shape[0])

    runs = Runs(model, batches, None)
    with model.register_forward_hook(note), torch.no_grad():
        few = added_operators.FewSamples(runs, len(batches))
        ranked = added_operators.rank_operators(runs, names, few)
    assert ranked.by == "gradients"
    assert len(sizes) == calls and sum(sizes) == 12


@pytest.mark.parametrize("few_are_all", [True, False])
def test_what_ranking_has_run_is_not_run_again_to_compare(few_are_all: bool) -> None:
    size = 8 if few_are_all else 9
    batch = torch.cat(sounds(0.2))[:size]
    model = quantized(Spectrum(), exclude="quant_add")
    torchq.calibrate(model, [batch], correct=False, progress=False)
    runs = Runs(model.eval(), [batch], None)
    names = [d.name for d in optional_operators(plan_of(model))]
    calls: list[int] = []

    def note(module: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> None:
        calls.append(len(args[0]))

    few = added_operators.FewSamples(runs, 1)
    with torch.no_grad():
        added_operators.rank_operators(runs, names, few)
        alone = added_operators.samples_of_all(runs, 1)
        with model.register_forward_hook(note):
            results = few.results()
            assert calls == ([] if few_are_all else [size, size])
        torch.testing.assert_close(
            [s.exact for s in few.of_all()], [s.exact for s in alone], rtol=0, atol=0
        )
        torch.testing.assert_close(
            results, added_operators.results_of(model, alone), rtol=0, atol=0
        )


def test_what_a_model_gave_is_not_kept_when_operators_stay_in_float() -> None:
    batches = [torch.cat(sounds())[::3]]
    model = quantized(Spectrum())
    torchq.calibrate(model, batches, correct=False, progress=False)
    runs = Runs(model.eval(), batches, None)
    few = added_operators.FewSamples(runs, 1)
    with torch.no_grad():
        before = few.results()
        choice = added_operators.choose_operators_(runs, few)
        assert choice.left_float
        now = added_operators.results_of(model, few.of_all())
        torch.testing.assert_close(few.results(), now, rtol=0, atol=0)
    assert not torch.equal(before[0][0], now[0][0])


def test_more_samples_tell_where_the_noise_of_a_few_differs_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = [batch.repeat(6, 1, 1) for batch in sounds()]
    counts: list[int] = []

    def error(model: nn.Module, samples: Any, *_: object) -> float:
        counts.append(sum(sample.count for sample in samples))
        return 0.0 if counts[-1] > 40 else 99.0

    monkeypatch.setattr(added_operators, "error_of_gain", error)
    model = quantized(Spectrum())
    report = torchq.calibrate(model, batches, progress=False)
    assert counts == [33, 129] and report.operators.left_float
