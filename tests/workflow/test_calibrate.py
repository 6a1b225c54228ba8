"""calibrate: kinds of batches, what runs in which mode, what is kept, and every refusal."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.models import simulated
from torchq import QuantConfig, QuantDescriptor, Rule
from torchq.errors import CalibrationError, ConfigError
from torchq.functional import reduce_amax
from torchq.nn import TensorQuantizer
from torchq.workflow import quantizers


def net(config: QuantConfig | None = None) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    torchq.quantize_(model, config)
    return model


@pytest.fixture
def data(generator: torch.Generator) -> list[Tensor]:
    return [torch.randn(5, 4, generator=generator) * (i + 1) for i in range(3)]


def ranges(model: nn.Module) -> dict[str, Tensor]:
    return {name: q.amax.clone() for name, q in quantizers(model).items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


class Named(nn.Module):
    """Takes its input by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        return {"y": self.fc(x * scale)}


@pytest.mark.parametrize(
    ("wrap", "scale"),
    [
        (lambda x: x, 1.0),
        (lambda x: (x,), 1.0),
        (lambda x: (x, torch.zeros(5), torch.zeros(5)), 1.0),
        (lambda x: [x], 1.0),
        (lambda x: {"x": x, "scale": 2.0}, 2.0),
    ],
)
def test_kinds_of_batches(wrap: Any, scale: float, data: list[Tensor]) -> None:
    model = simulated(Named(), [wrap(x) for x in data])
    assert model.fc.input_quantizer.amax.item() == scale * max(
        x.abs().max().item() for x in data
    )


def test_own_forward_takes_any_batch(data: list[Tensor]) -> None:
    model = Named()
    torchq.quantize_(model)
    seen: list[object] = []

    def forward(model: nn.Module, batch: Any) -> None:
        seen.append(batch)
        model(batch["deep"][0].float(), scale=3.0)

    batches = ({"deep": [x]} for x in data)
    torchq.calibrate(model, batches, forward=forward, correct=False, progress=False)
    assert len(seen) == 3
    assert model.fc.input_quantizer.amax.item() == 3 * max(x.abs().max() for x in data)


@pytest.mark.parametrize(("given", "count"), [(None, 3), (1, 1), (2, 2), (9, 3)])
def test_number_of_batches(given: int | None, count: int, data: list[Tensor]) -> None:
    """A generator is asked for no batch more than it gives away."""
    taken = []

    def stream() -> Any:
        for x in data:
            taken.append(x)
            yield x

    model = net()
    torchq.calibrate(model, stream(), num_batches=given, correct=False, progress=False)
    assert len(taken) == count
    assert (
        model[0].input_quantizer.amax.item()
        == max(x.abs().max() for x in data[:count]).item()
    )


def test_ranges_come_from_the_float_model(data: list[Tensor]) -> None:
    """While calibrating nothing is quantized: no weight, and no tensor whose range is known."""
    floats = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model = nn.Sequential()
    model.extend(floats)  # the same layers
    hidden = [floats[:2](x) for x in data]
    torchq.quantize_(
        model,
        QuantConfig((Rule("*", input=QuantDescriptor(2), weight=QuantDescriptor(2)),)),
    )
    model[0].input_quantizer.set_amax(0.01)
    text = r"1 quantizers are calibrated already and keep their ranges \(0.input_quantizer\)"
    with pytest.warns(UserWarning, match=text):
        torchq.calibrate(model, data, progress=False)
    assert (
        model[2].input_quantizer.amax.item()
        == max(h.abs().max() for h in hidden).item()
    )
    assert model[0].weight_quantizer.amax.item() == model[0].weight.abs().max().item()
    assert model[0].input_quantizer.amax.item() == pytest.approx(0.01)


def test_modes_are_given_back(data: list[Tensor]) -> None:
    """Training flags and modes of quantizers come back."""
    model = net()
    model.train()
    model[1].eval()
    model[2].input_quantizer.mode = "off"

    def state() -> list[object]:
        return [m.training for m in model.modules()] + [
            q.mode for q in quantizers(model).values()
        ]

    before = state()
    torchq.calibrate(model, data, progress=False, force=True)
    assert state() == before
    assert not model[2].input_quantizer.calibrated  # it was off
    assert all(q.calibrator is None for q in quantizers(model).values())
    assert torch.is_grad_enabled() and all(p.grad is None for p in model.parameters())


def test_the_model_is_in_eval_mode_without_gradients(data: list[Tensor]) -> None:
    model = net()
    seen = []
    model[1].register_forward_hook(
        lambda m, a, y: seen.append((m.training, y.requires_grad))
    )
    torchq.calibrate(model.train(), data[:1], progress=False)
    # For the ranges, for the correction and its comparison.
    assert seen == 3 * [(False, False)]


def test_weights_need_no_data(data: list[Tensor]) -> None:
    model = net()
    torchq.calibrate(model)
    assert torch.equal(
        model[0].weight_quantizer.amax,
        reduce_amax(model[0].weight, model[0].weight_quantizer.descriptor.granularity),
    )
    assert not model[0].input_quantizer.calibrated
    weights_only = net(torchq.recipes.integer(4, None))
    torchq.calibrate(weights_only, data, progress=False)
    assert weights_only[0].weight_quantizer.calibrated


def test_weights_follow_the_descriptor_and_activations_the_method(
    data: list[Tensor],
) -> None:
    weight = QuantDescriptor(4, calib_method="mse")
    model = net(QuantConfig((Rule("*", input=QuantDescriptor(), weight=weight),)))
    torchq.calibrate(model, data, method="percentile", percentile=60.0, progress=False)
    assert model[0].input_quantizer.amax < max(x.abs().max() for x in data)
    assert 0 < model[0].weight_quantizer.amax < model[0].weight.abs().max()


def test_what_is_known_is_kept(data: list[Tensor]) -> None:
    """A second run warns and changes nothing; ``force`` replaces ranges, but never fixed ones."""
    model = net(
        QuantConfig(
            (
                Rule("*", input=QuantDescriptor(), weight=QuantDescriptor()),
                Rule("2", input=QuantDescriptor(amax=7.0)),
            )
        )
    )
    torchq.calibrate(model, data, progress=False)
    before = ranges(model)
    text = (
        r"2 quantizers are calibrated already and keep their ranges \(0.*\); force=True"
    )
    with pytest.warns(UserWarning, match=text):
        torchq.calibrate(model, [10 * data[0]], progress=False)
    assert same(ranges(model), before)
    torchq.calibrate(model, [10 * x for x in data], progress=False, force=True)
    assert model[0].input_quantizer.amax.item() == pytest.approx(
        10 * before["0.input_quantizer"].item()
    )
    assert model[2].input_quantizer.amax.item() == 7.0


def test_dynamic_quantizers_need_nothing(data: list[Tensor]) -> None:
    model = net(torchq.recipes.nvfp4())
    torchq.calibrate(model, data, progress=False)
    assert not any(q.calibrated for q in quantizers(model).values())


def test_a_single_quantizer_is_a_model_too(data: list[Tensor]) -> None:
    q = TensorQuantizer()
    torchq.calibrate(q, data, progress=False)
    assert (
        q.amax.item() == max(x.abs().max() for x in data).item()
        and q.mode == "quantize"
    )


@pytest.mark.parametrize(
    ("batches", "error", "text"),
    [
        ([], CalibrationError, "calibrate: got no batch; expected at least one"),
        (iter(()), CalibrationError, "got no batch; .*make a new one"),
        (
            torch.ones(1, 4),
            ConfigError,
            r"got a Tensor as batches; .*Pass \[batch\] for one batch",
        ),
        (
            torch.ones(1, 4).numpy(),
            ConfigError,
            r"got a ndarray as batches; .*Pass \[batch\] for",
        ),
        (5, ConfigError, "got a int as batches; expected an iterable of batches"),
        (
            [torch.ones(1, 4).numpy()],
            ConfigError,
            r"got a batch of ndarray, .*from_numpy\(array\)",
        ),
        (
            {"x": torch.ones(1, 4)},
            ConfigError,
            "got a dict as batches; expected an iterable of b",
        ),
    ],
)
def test_what_is_no_batches_is_named(
    batches: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        torchq.calibrate(net(), batches, progress=False)


def test_a_float_model_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"Linear has no quantizer; .*Run torchq.quantize_"
    ):
        torchq.calibrate(nn.Linear(2, 2), [])


class Unread(list[Tensor]):
    """Batches that must not be read."""

    def __iter__(self) -> Any:
        raise AssertionError("a batch was read")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"num_batches": -1},
            "calibrate: got num_batches=-1; expected an integer of at least 1",
        ),
        (
            {"num_batches": 0},
            "calibrate: got num_batches=0; expected an integer of at least 1",
        ),
        ({"num_batches": "2"}, "calibrate: got num_batches='2'; expected an integer"),
        ({"num_batches": 1.5}, r"calibrate: got num_batches=1\.5; expected an integer"),
        ({"num_batches": True}, "calibrate: got num_batches=True; expected an integer"),
        (
            {"method": "percentile", "percentile": 200},
            "percentile: got 200; expected 0 < perc",
        ),
        (
            {"method": "percentile", "percentile": float("nan")},
            "percentile: got nan; expected",
        ),
        (
            {"method": "percentile", "percentile": -1},
            "percentile: got -1; expected 0 < perc",
        ),
        (
            {"method": "percentile", "percentile": "99"},
            "got percentile='99'; expected a number",
        ),
        (
            {"method": "mse", "power": 2},
            r"'mse': got options \['power'\]; expected none",
        ),
        (
            {"method": "mse", "num_bins": 2.5},
            r"num_bins: got 2\.5; expected an integer",
        ),
        (
            {"method": "entropy", "num_bins": 1 << 30},
            "num_bins: got 1073741824; expected an int",
        ),
        (
            {"method": "moving_average", "momentum": 1.0},
            r"momentum.* got 1\.0; expected 0 <= mo",
        ),
        (
            {"method": "moving_average", "momentum": float("nan")},
            "momentum.* got nan; expected",
        ),
        ({"method": "moving_average", "momentum": "x"}, "got options"),
        (
            {"method": "mse", "timeout": 1},
            r"'mse': got options \['timeout'\]; expected none",
        ),
        ({"method": "auto"}, "calibrate: got method='auto'; expected one of: max, "),
        (
            {"on_unseen": "ignore"},
            "got on_unseen='ignore'; expected 'error', 'disable' or",
        ),
        ({"percentile": 9}, r"got options \['percentile'\]"),
        (
            {"method": "activation"},
            "calibrate: got method='activation'; expected one of: max, ",
        ),
        (
            {"forward": 3},
            "calibrate: got forward=3; expected a function of the model and a batch",
        ),
        (
            {"method": ["max"]},
            r"calibrate: got method=\['max'\]; expected one of: max, ",
        ),
    ],
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_options_are_checked_before_any_batch(
    symmetric: bool, arguments: dict[str, Any], text: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    descriptor = QuantDescriptor(symmetric=symmetric, unsigned=not symmetric)
    torchq.quantize_(model, QuantConfig((Rule("*", input=descriptor),)))
    before = [(q.mode, q.calibrator, q.calibrated) for q in quantizers(model).values()]
    with pytest.raises(ConfigError, match=text):
        torchq.calibrate(model, Unread([torch.ones(1, 4)]), progress=False, **arguments)
    assert before == [
        (q.mode, q.calibrator, q.calibrated) for q in quantizers(model).values()
    ]


def test_a_model_without_numbers_is_refused_before_any_batch() -> None:
    model = net().to("meta")
    with pytest.raises(
        ConfigError, match=r"0\.input_quantizer: is on the meta device.*to_empty"
    ):
        torchq.calibrate(model, Unread([torch.ones(1, 4)]), progress=False)


def test_nan_is_said_once_with_all_the_quantizers_that_saw_it() -> None:
    model = net()
    with pytest.raises(CalibrationError) as caught:
        torchq.calibrate(model, [torch.full((1, 4), float("nan"))], progress=False)
    assert str(caught.value) == (
        "calibrate: 0.input_quantizer, 2.input_quantizer: Calibrator: got NaN or infinite "
        "values in 1 of 1 batches; expected finite data. Check the input and the layers before, "
        "and start again"
    )


def test_all_bad_weights_are_named_and_the_others_have_ranges(
    data: list[Tensor],
) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    torchq.quantize_(model)
    with torch.no_grad():
        model[0].weight[0, 0] = model[1].weight[1, 1] = float("nan")
    with pytest.raises(
        CalibrationError, match=r"^calibrate: 0\.weight_q\w+, 1\.weight_q\w+: "
    ):
        torchq.calibrate(model, None, progress=False)
    assert model[2].weight_quantizer.calibrated


def test_the_report_says_what_was_calibrated_kept_and_unseen(
    data: list[Tensor],
) -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    torchq.quantize_(model)
    model["a"].weight_quantizer.set_amax(3.0)
    # A range of a weight alone was set on purpose, by hand or by an algorithm: there is no warning.
    report = torchq.calibrate(
        model,
        data,
        forward=lambda model, batch: model["a"](batch),
        on_unseen="disable",
        progress=False,
    )
    assert (report.batches, report.kept) == (3, ("a.weight_quantizer",))
    assert report.unseen == ("b.input_quantizer",)
    weight = model["b"].weight_quantizer.amax
    assert report.ranges == {
        "a.input_quantizer": (model["a"].input_quantizer.amax.item(),) * 2,
        "b.weight_quantizer": (weight.min().item(), weight.max().item()),
    }
    text = str(report)
    assert "2 ranges from 3 batches, 1 kept from before" in text
    assert "no data reached it" in text


def held(model: nn.Module) -> nn.Module:
    """Hold scales as they are, as those of a checkpoint of others."""
    for name, quantizer in quantizers(model).items():
        if name.endswith("input_quantizer"):
            quantizer.set_qparams(0.1)
    return model


KNOWN: dict[str, Callable[[], nn.Module]] = {
    "unknown ranges": net,
    "symmetric": lambda: calibrated(net()),
    "two ends": lambda: calibrated(net(torchq.recipes.int8(symmetric=False))),
    "chosen signs": lambda: calibrated(net(torchq.recipes.integer(4, 4))),
    "held scales": lambda: held(net()),
}


def calibrated(model: nn.Module) -> nn.Module:
    torchq.calibrate(model, [torch.linspace(-1, 1, 20).view(5, 4)], progress=False)
    return model


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize(
    "late", [False, True], ids=["between batches", "between ranges"]
)
@pytest.mark.parametrize("kind", KNOWN)
def test_an_interruption_leaves_everything_as_it_was(
    kind: str, late: bool, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = KNOWN[kind]().train()
    calls = []
    before = copy.deepcopy(model.state_dict())
    states = [
        (q.mode, str(q.descriptor), q.training) for q in quantizers(model).values()
    ]
    original = TensorQuantizer.finish_calibration

    def finish(self: TensorQuantizer) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise error
        original(self)

    def stream() -> Iterator[Tensor]:
        yield 3 * torch.ones(5, 4)
        if not late:
            raise error

    monkeypatch.setattr(TensorQuantizer, "finish_calibration", finish)
    with pytest.raises(error):
        torchq.calibrate(model, stream(), force=True, correct=False, progress=False)
    assert same(model.state_dict(), before)
    found = quantizers(model).values()
    assert [(q.mode, str(q.descriptor), q.training) for q in found] == states
    assert all(q.calibrator is None for q in found)


class Branched(nn.Module):
    """An auxiliary head that runs only in training."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.aux = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        self.use_aux = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).relu()
        return self.head(x) + self.aux(x) if self.use_aux else self.head(x)


@pytest.fixture
def branched() -> Branched:
    model = Branched()
    torchq.quantize_(model)
    return model


def test_unseen_quantizers_are_named_and_only_those(
    branched: Branched, data: list[Tensor]
) -> None:
    with pytest.raises(CalibrationError) as caught:
        torchq.calibrate(branched, data, progress=False)
    assert "aux.0.input_quantizer, aux.2.input_quantizer in 3 batches" in str(
        caught.value
    )
    assert "head" not in str(caught.value) and "body" not in str(caught.value)


@pytest.mark.parametrize("on_unseen", ["disable", "dynamic"])
def test_unseen_branches_can_stay_float(
    on_unseen: Any, branched: Branched, data: list[Tensor]
) -> None:
    torchq.calibrate(branched, data, on_unseen=on_unseen, progress=False)
    seen: list[Tensor] = []
    branched.aux[0].input_quantizer.register_forward_hook(
        lambda module, args, out: seen.append(args[0] - out)
    )
    branched.use_aux = True
    assert branched(data[0]).isfinite().all()
    assert (seen[0].count_nonzero() == 0) == (on_unseen == "disable")


def test_tensors_that_cannot_be_observed_are_named(branched: Branched) -> None:
    quantizer = branched.head.input_quantizer
    quantizer.start_calibration()
    text = r"^head.input_quantizer: Calibrator.collect: got a tensor of torch.int64"
    with pytest.raises(CalibrationError, match=text):
        quantizer(torch.ones(2, 2, dtype=torch.int64))


def test_weights_that_were_calibrated_alone_are_kept_in_silence() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    torchq.quantize_(model, torchq.recipes.integer(4, 8))
    torchq.workflow.calibrate_weights(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = torchq.calibrate(model, [torch.randn(16, 8)], progress=False)
    assert report.kept == ("0.weight_quantizer", "1.weight_quantizer")


@torch.no_grad()
def test_the_vectors_of_spectral_norm_stay_in_a_model_that_trains() -> None:
    torch.manual_seed(0)
    linear: Any = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 8))
    # A step of training: the vectors of the weight before would move to those of this one.
    linear.parametrizations.weight.original.normal_()
    model = nn.Sequential(linear).train()
    torchq.quantize_(model, progress=False)
    vectors = [
        name for name, _ in model.named_buffers() if name.endswith(("._u", "._v"))
    ]
    before = {name: model.get_buffer(name).clone() for name in vectors}
    torchq.calibrate(model, [torch.randn(4, 16)], progress=False)
    assert len(vectors) == 2 and model.training
    for name, value in before.items():
        assert torch.equal(model.get_buffer(name), value)
