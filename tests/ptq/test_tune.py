"""The search for settings that keep a metric."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.errors import CalibrationError, ConfigError, TorchqError
from torchq.ptq import TunedConfig, tune
from torchq.ptq.tuning import ALGORITHMS, SETTINGS, TuneResult, TuneTrial
from torchq.runtimes import RUNTIMES, Runtime


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    ).eval()


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [module for _ in range(4) for module in (nn.Linear(16, 16), nn.ReLU())]
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), *layers, nn.Linear(16, 4))
    for layer in model[::2]:
        nn.init.orthogonal_(layer.weight, gain=2**0.5)  # type: ignore[arg-type]
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return model.eval()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(64, 6, generator=generator) for _ in range(2)]


class Metric:
    """The negative relative error of the outputs; counts its calls."""

    def __init__(self, build: Callable[[], nn.Module] = net) -> None:
        self.x = torch.rand(128, 6, generator=torch.Generator().manual_seed(2))
        self.calls = 0
        with torch.no_grad():
            self.expected = build()(self.x)

    def __call__(self, model: nn.Module) -> float:
        assert not model.training
        self.calls += 1
        with torch.no_grad():
            return -(
                (model(self.x) - self.expected).norm() / self.expected.norm()
            ).item()


def search(
    metric: Any, max_drop: float, recipe: Any = None, build: Any = net, **arguments: Any
) -> Any:
    expected: Any = arguments.pop("expected", None)
    with pytest.warns(expected) if expected else nullcontext():
        return tune(
            build(),
            batches(),
            metric,
            max_drop=max_drop,
            recipe=recipe,
            progress=False,
            **arguments,
        )


def test_the_first_trial_that_keeps_the_metric_ends_the_search() -> None:
    metric = Metric()
    model = net()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    result = tune(model, batches(), metric, max_drop=0.1, progress=False)
    assert result.kept
    assert [t.change for t in result.table] == ["recipe int8"]
    assert metric.calls == 2
    assert result.float_metric == 0
    assert not torchq.workflow.is_quantized(model)
    assert torchq.workflow.is_quantized(result.model)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert "recipe int8" in str(result)
    assert "keeps the metric" in str(result)


def test_trials_build_on_the_best_before_them() -> None:
    metric = Metric()
    result = search(metric, 0.012, torchq.recipes.integer(3, 8, weight_method="max"))
    changes = [trial.change for trial in result.table]
    assert result.kept
    assert changes[:2] == ["recipe w3a8", "ends in 8 bits"]
    assert len(changes) > 2
    assert result.metric == max(trial.metric for trial in result.table)
    assert result.metric == result.table[-1].metric > result.table[0].metric
    again = net()
    result.config.apply_(again, batches())
    assert_same(again, result, metric)


def assert_same(model: nn.Module, result: Any, metric: Metric) -> None:
    with torch.no_grad():
        assert torch.equal(
            model(metric.x),
            result.model(metric.x),
        )


def run(code: str, model: nn.Module, recipe: Any = None) -> None:
    """Run the lines that a result prints, on a float model."""
    exec(
        code, {"torchq": torchq, "model": model, "batches": batches(), "recipe": recipe}
    )


@pytest.fixture
def quick_adaround(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let AdaRound learn for two steps."""
    quick: Any = partial(torchq.ptq.adaround_, steps=2)
    monkeypatch.setitem(ALGORITHMS, "adaround_", quick)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_adaround")
@torch.no_grad()
def test_mixed_precision_is_the_last_resort() -> None:
    metric = Metric(deep)
    recipe = torchq.recipes.integer(2, 8, weight_method="max")
    result = search(metric, 0.08, recipe, deep)
    changes = [trial.change for trial in result.table]
    assert not any(trial.error for trial in result.table)
    assert {"mse ranges", "gptq_", "adaround_", "ends in float"} <= set(changes)
    # There is no convolution, and calibrate corrects in order by itself.
    assert not {"equalize_", "correct_bias_"} & set(changes)
    mixed = [trial for trial in result.table if trial.change == "mixed precision"]
    assert mixed == list(result.table[-len(mixed) :])
    assert result.kept
    bits = [trial.mean_bits for trial in mixed]
    assert bits == sorted(bits)
    assert result.mean_bits == bits[-1] < 8
    assert all(trial.metric < -0.08 for trial in mixed[:-1])
    assert "torchq.mixed_precision(model, batches, budget={" in result.code
    again = deep()
    run(
        result.code.replace("batches, budget", "batches, progress=False, budget"),
        again,
        recipe,
    )
    assert_same(again, result, metric)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_adaround")
def test_transformers_get_what_applies_to_them() -> None:
    def metric(model: nn.Module) -> float:
        return -float(torchq.workflow.is_quantized(model))

    with pytest.warns(UserWarning, match="tune: the best of"):
        result = tune(
            nn.Sequential(nn.LayerNorm(6), net()).eval(),
            batches(),
            metric,
            max_drop=0.0,
            recipe=torchq.recipes.integer(4, 4),
            progress=False,
        )
    errors = {trial.change: trial.error for trial in result.table}
    assert errors["smooth_"] == ""
    assert "equalize_" not in errors


class Block(nn.Module):
    """A residual that reads a norm with one huge channel, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.layer = nn.Linear(6, 6)
        with torch.no_grad():
            self.norm.weight[2] = 60.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return y + self.layer(y)


def test_even_channels_are_tried_where_depthwise_layers_read_one_range() -> None:
    changes = {name: change for name, _, change in SETTINGS}
    layers = (nn.Conv2d(3, 4, 1), nn.ReLU6(), nn.Conv2d(4, 4, 3, groups=4))
    seen: Any = SimpleNamespace(model=nn.Sequential(*layers))
    plain = TunedConfig(torchq.recipes.int8(), source="recipe")
    settings = changes["equalize_depthwise_"](plain, seen)
    assert settings.before == ("equalize_depthwise_",)
    for_openvino = replace(plain, target="openvino")
    assert changes["equalize_depthwise_"](for_openvino, seen) == for_openvino
    one_scale = replace(plain, config=torchq.recipes.integer(8, 8, per_channel=False))
    assert changes["equalize_depthwise_"](one_scale, seen) == one_scale
    seen.model = nn.Sequential(*layers[:2])
    assert changes["equalize_depthwise_"](plain, seen) == plain


def test_factors_in_quantizers_are_tried_for_transformers_of_8_bits() -> None:
    changes = {name: change for name, _, change in SETTINGS}
    seen: Any = SimpleNamespace(model=Block())
    plain = TunedConfig(
        torchq.recipes.int8(),
        before=("smooth_",),
        source="recipe",
    )
    settings = changes["smooth_ anything"](plain, seen)
    assert settings.before == ("smooth_ anything",)
    few = replace(plain, config=torchq.recipes.integer(4, 8))
    assert changes["smooth_ anything"](few, seen) == few
    seen.model = net()
    assert changes["smooth_ anything"](plain, seen) == plain
    torch.manual_seed(0)
    float_model = Block().eval()
    model = copy.deepcopy(float_model)
    again = copy.deepcopy(float_model)
    settings.apply_(model, batches())
    run(settings.code(), again, torchq.recipes.int8())
    assert model.layer.weight_quantizer.pre_quant_scale is not None
    x = batches()[0]
    with torch.no_grad():
        assert torch.equal(
            model.eval()(x),
            again.eval()(x),
        )


def test_without_success_the_best_is_returned_with_a_warning() -> None:
    with pytest.warns(
        UserWarning, match=r"tune: the best of 1 trials has the metric -0\.\d+; exp"
    ):
        result = search(Metric(), 0.0, time_limit=0.0)
    assert not result.kept
    assert len(result.table) == 1
    assert "does NOT keep the metric" in str(result)


class Slow(nn.Module):
    """A network each of whose calls takes a second of a clock."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, x: Tensor) -> Tensor:
        CLOCK[0] += 1
        return self.body(x)


#: The time that all of them take together.
CLOCK = [0]


def limited(
    monkeypatch: pytest.MonkeyPatch, limit: float | None
) -> tuple[Slow, TuneResult]:
    CLOCK[0] = 0
    model = Slow().eval()
    monkeypatch.setattr("torchq.ptq.tuning.monotonic", lambda: CLOCK[0])
    with pytest.warns(UserWarning, match="tune: the best of"):
        result = tune(
            model, batches(), Metric(), max_drop=0, time_limit=limit, progress=False
        )
    return model, result


@pytest.mark.parametrize("beyond", [1, 3, 8])
def test_a_trial_is_ended_at_the_next_call_behind_the_limit(
    monkeypatch: pytest.MonkeyPatch, beyond: int
) -> None:
    _, whole = limited(monkeypatch, None)
    first, second = (trial.seconds for trial in whole.table[:2])
    assert second > 2
    # The metric of the float model is one call in front of the limit's begin.
    limit = first + min(beyond, second - 1)
    model, result = limited(monkeypatch, limit)
    assert CLOCK[0] == 1 + limit
    assert [trial.error for trial in result.table] == ["", "ended at the time limit"]
    assert result.metric == whole.table[0].metric
    assert Metric()(result.model) == result.metric
    for network in (model, result.model):
        assert not any(m._forward_pre_hooks for m in network.modules())
    assert not torchq.workflow.is_quantized(model)


def test_the_first_trial_is_finished_whatever_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, result = limited(monkeypatch, 1.0)
    assert [trial.error for trial in result.table] == [""]


def test_trials_that_fail_are_rows_of_the_table() -> None:
    metric = Metric()
    calls = 0

    def fails(model: nn.Module) -> float:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ConfigError("metric: got nothing; expected something")
        return metric(model)

    result = search(fails, 0.1)
    assert [trial.error for trial in result.table] == [
        "metric: got nothing; expected something",
        "",
    ]
    bad = [torch.full((4, 6), torch.nan)]
    with pytest.raises(CalibrationError, match="tune: no trial could be made"):
        tune(net(), bad, metric, max_drop=0.1, progress=False)


def test_inputs_that_no_batch_reaches_stay_float() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = net()
            self.unused = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    metric = Metric(Branches)
    with pytest.warns(
        UserWarning, match="no batch reached unused.input_quantizer: these inputs s"
    ):
        result = search(metric, 0.1, build=Branches)
    assert result.kept
    model: Any = result.model
    assert model.unused.input_quantizer.mode == "off"
    assert model.used[0].input_quantizer.quantizing
    assert result.code.endswith(", on_unseen='disable')")


def test_the_lines_of_a_result_make_its_model() -> None:
    """With an algorithm before calibration, one after it, a changed recipe and a target."""
    recipe = torchq.recipes.integer(4, 8, per_channel=False)
    settings = TunedConfig(recipe.with_ends(8), target="onnxruntime", method="mse")
    settings = replace(settings, before=("equalize_",), algorithm="gptq_")
    settings = replace(settings, source="recipe.with_ends(8)")
    models = [
        nn.Sequential(
            nn.Conv1d(6, 6, 1), nn.ReLU(), nn.Conv1d(6, 6, 1), nn.ReLU()
        ).eval()
        for _ in range(2)
    ]
    models[1].load_state_dict(models[0].state_dict())
    data = [batch[..., None] for batch in batches()]
    settings.apply_(models[0], data)
    exec(
        settings.code(),
        {"torchq": torchq, "model": models[1], "batches": data, "recipe": recipe},
    )
    assert settings.code().count("\n") == 3
    assert torch.equal(
        models[0](data[0]),
        models[1](data[0]),
    )


def test_settings_for_a_target_have_its_grids() -> None:
    result = search(
        Metric(), 0.0, time_limit=0.0, target="onnxruntime", expected=UserWarning
    )
    assert result.code.startswith(
        "torchq.quantize_(model, torchq.recipes.int8(), target='onnxrunt"
    )
    assert torchq.swap.plan_of(result.model).target == "onnxruntime"
    assert result.model[2].input_quantizer.descriptor.unsigned


def test_the_print_says_what_was_tried_why_and_at_what_cost() -> None:
    result = search(
        Metric(),
        0.02,
        torchq.recipes.integer(3, 8, weight_method="max"),
    )
    lines = str(result).splitlines()
    for trial in result.table:
        assert any(trial.change in line and trial.reason[:12] in line for line in lines)
    assert f"{len(result.table)} trials in " in str(result)
    assert str(result).endswith(result.code)


def test_bad_arguments_are_named() -> None:
    quantized = net()
    torchq.quantize_(quantized, torchq.recipes.int8())
    with pytest.raises(ConfigError, match=r"tune: got a quantized model \(0.input_qua"):
        tune(quantized, batches(), Metric(), max_drop=0.1)
    with pytest.raises(
        CalibrationError, match="tune: got no batch; expected at least one"
    ):
        tune(net(), [], Metric(), max_drop=0.1)
    with pytest.raises(
        ConfigError, match="tune: got max_drop=-1; expected a number >= 0"
    ):
        search(Metric(), -1)
    with pytest.raises(ConfigError, match="tune: the metric of the float model is nan"):
        search(lambda model: float("nan"), 0.1)
    with pytest.raises(
        ConfigError, match="TunedConfig: got algorithm='magic'; expected None or"
    ):
        TunedConfig(torchq.recipes.int8(), algorithm="magic")
    with pytest.raises(
        ConfigError, match="TunedConfig: got method='magic'; expected None or"
    ):
        TunedConfig(torchq.recipes.int8(), method="magic")
    with pytest.raises(
        ConfigError, match="TunedConfig: got before='magic'; expected None or"
    ):
        TunedConfig(torchq.recipes.int8(), before=("magic",))
    with pytest.raises(TorchqError, match="magic"):
        search(Metric(), 0.1, target="magic")
    with pytest.raises(ConfigError, match="tune: got a Tensor as batches"):
        tune(
            net(),
            batches()[0],
            Metric(),
            max_drop=0.1,
        )


def test_activations_of_sixteen_bits_come_first_where_the_chip_has_no_float() -> None:
    with pytest.warns(UserWarning, match="expected at least"):
        result = tune(
            net(),
            batches(),
            lambda m: -float(torchq.workflow.is_quantized(m)),
            max_drop=0.1,
            target="qnn",
            progress=False,
        )
    trial = result.table[1]
    assert trial.change == "activations in 16 bits"
    assert "recipe.with_input_bits(16), target='qnn'" in trial.settings.code()


# --- time ----------------------------------------------------------------------------------------


def seconds_of(quantized: float) -> Callable[[Path], float]:
    """Return a clock for which a file with codes takes these seconds, and one without takes 1."""

    def seconds(path: Path) -> float:
        return quantized if b"QuantizeLinear" in path.read_bytes() else 1.0

    return seconds


def tuned_for_time(
    quantized: float, faster_than: float, target: str | Runtime = "onnxruntime"
) -> torchq.ptq.TuneResult:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    return tune(
        model,
        [torch.ones(2, 8)],
        lambda m: 1.0,
        max_drop=0.1,
        target=target,
        faster_than=faster_than,
        time=seconds_of(quantized),
        progress=False,
    )


def test_a_model_that_is_fast_and_good_enough_is_kept() -> None:
    result = tuned_for_time(0.5, faster_than=1.5)
    assert result.kept
    assert [trial.speedup for trial in result.table] == [2.0]
    assert "2.00x" in str(result)


def test_a_runtime_that_is_not_registered_is_timed_too() -> None:
    toy = replace(RUNTIMES["onnxruntime"], name="toy")
    result = tuned_for_time(0.5, faster_than=1.5, target=toy)
    assert [trial.speedup for trial in result.table] == [2.0]
    assert ", target=target, example=batches[0])" in result.code


@pytest.mark.slow
def test_a_model_that_is_too_slow_is_not_kept() -> None:
    with pytest.warns(UserWarning, match=r"and is 2\.00x float; expected .* and 3x"):
        result = tuned_for_time(0.5, faster_than=3.0)
    assert not result.kept


def test_where_integers_gain_no_time_the_float_model_is_the_result() -> None:
    result = tuned_for_time(1.0, faster_than=1.0)
    assert result.kept
    assert not list(torchq.workflow.quantizers(result.model))
    assert "stays float, as integers gain no time: onnxruntime: " in result.code


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"faster_than": 0}, r"faster_than=0; expected a factor above 0"),
        ({"faster_than": "2"}, r"faster_than='2'; expected a factor above 0"),
        (
            {"faster_than": 2.0},
            r"faster_than=2.0 and no target; expected one, .*target=",
        ),
    ],
)
def test_speedups_that_mean_nothing_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"tune: got {message}"):
        tune(
            nn.Linear(2, 2),
            [torch.ones(1, 2)],
            lambda m: 1.0,
            max_drop=0.1,
            progress=False,
            **options,
        )


@pytest.mark.parametrize(
    ("metric", "word"), [(0.9, "helped"), (0.6, "hurt"), (0.8, "changed nothing")]
)
def test_the_report_says_whether_biases_in_order_helped(
    metric: float, word: str
) -> None:
    settings = TunedConfig(torchq.recipes.int8())
    trials = [
        TuneTrial("int8", "", settings, 0.7),
        TuneTrial("ends in 8 bits", "", settings, 0.8),
        TuneTrial("correct_bias_", "", settings, metric),
    ]
    result = TuneResult(
        nn.Identity(), settings, "", 1.0, metric, 8.0, False, tuple(trials)
    )
    assert f"correct_bias_ {word}: 0.8 -> {metric}" in " ".join(str(result).split())
    without = TuneResult(
        nn.Identity(), settings, "", 1.0, 0.8, 8.0, False, tuple(trials[:2])
    )
    assert "correct_bias_" not in str(without)


def test_the_correction_in_order_is_tried_early() -> None:
    changes = [change for change, _, _ in SETTINGS]
    assert changes.index("correct_bias_") < changes.index("zero points")
