"""What every ONNX target promises, run over the registry. A new target is a file and a row here."""

from __future__ import annotations

import dataclasses
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import torchq
from tests.onnx.exported import Residual, calibrated
from torchq import QuantConfig, QuantDescriptor, Rule
from torchq.errors import ConfigError
from torchq.onnx.ir import load_model, nodes_of
from torchq.onnx.qdq import axis_of, qparams_of, quantizer_nodes, stored_weight
from torchq.runtimes import RUNTIMES, Codes, FileRules, Runtime

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


class Case(NamedTuple):
    """What a target does with a residual network, and a model that breaks one of its rules.

    Attributes:
        nonnegative: Type and zero point of activations that cannot be negative.
        others: Type and zero point of the other activations.
        channels_of: Operators whose weight has a scale per channel.
        offender: A module that one of the rules warns about, for images of 16 channels.
        weight: The descriptor of its weights.
        warning: A part of the text.
    """

    nonnegative: tuple[str, int]
    others: tuple[str, int | None]  # None: a zero point from the data
    channels_of: tuple[str, ...]
    offender: Callable[[], nn.Module]
    warning: str
    weight: QuantDescriptor = QuantDescriptor(axis=0)


def odd_channels() -> nn.Module:
    return nn.Sequential(nn.Conv2d(16, 9, 3))


def unfused() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(16, 16, 1),
        nn.BatchNorm2d(16),
    )


CASES = {
    "tensorrt": Case(
        ("int8", 0), ("int8", 0), ("Conv", "Gemm"), odd_channels, "9 channels"
    ),
    "onnxruntime": Case(
        ("uint8", 0),
        ("uint8", None),
        ("Conv", "MatMul"),
        odd_channels,
        "output is not quantized",
    ),
    "openvino": Case(
        ("uint8", 0), ("uint8", None), ("Conv", "Gemm"), unfused, "a BatchNorm follows"
    ),
    "qnn": Case(
        ("uint8", 0),
        ("uint8", None),
        ("Conv", "Gemm"),
        odd_channels,
        "QNN takes symmetric int8 weights",
        QuantDescriptor(4, axis=0),
    ),
}


def test_every_target_has_a_row() -> None:
    assert set(CASES) == {
        name for name in torchq.targets() if RUNTIMES[name].file is not None
    }


def test_the_table_of_targets_says_what_is_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The page of platforms shows the rest of its columns, as tests/test_docs.py checks."""
    monkeypatch.setenv("COLUMNS", "100")
    lines = str(torchq.targets()).splitlines()
    assert max(map(len, lines)) <= 100
    last = lines[0].index("here")
    assert {line[last:] for line in lines[1:-1]} <= {"yes", "no", ""}
    assert next(line for line in lines if line.startswith("torch ")).endswith("yes")


@pytest.mark.sample(6)
@pytest.mark.parametrize("runtime", RUNTIMES.values(), ids=lambda runtime: runtime.name)
def test_the_plan_of_a_runtime_is_stable_and_no_other_one_takes_it(
    runtime: Runtime,
) -> None:
    """The default recipe is that of the runtime; the object says the same as its name."""
    x = torch.randn(1, 3, 16, 16)
    rows = str(torchq.plan(Residual(), target=runtime.name, example=x))
    copy = pickle.loads(pickle.dumps(dataclasses.replace(runtime)))
    assert repr(copy) == repr(runtime)
    assert str(torchq.plan(Residual(), target=copy, example=x)) == rows
    model = Residual().eval()
    assert str(torchq.quantize_(model, target=runtime, example=x)) == rows
    other = "openvino" if runtime.name == "tensorrt" else "tensorrt"
    torchq.calibrate(model, [x], progress=False)
    if runtime.plans:
        with pytest.raises(
            ConfigError, match=f"was quantized for '{runtime.name}'; .*restore_"
        ):
            torchq.export_onnx(model, x, "m.onnx", target=other)
        with pytest.raises(ConfigError, match=rf"deploy: got target='{other}'"):
            torchq.deploy(model, x, target=other)
    torchq.restore_(model)
    assert str(torchq.quantize_(model, target=other, example=x)).endswith(
        "; evaluation simulates"
    )


def test_a_runtime_without_kernels_here_is_refused_by_deploy() -> None:
    with pytest.raises(
        ConfigError, match=r"target 'rknn', which has no kernels here; .*'torch'"
    ):
        torchq.deploy(nn.Linear(2, 2), target="rknn")


@pytest.fixture(scope="module", params=sorted(CASES))
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, nn.Module, Path]:
    """A residual network, quantized and exported for a target."""
    torch.manual_seed(0)
    target = request.param
    x = torch.randn(8, 3, 16, 16)
    # A recipe of its own may have zero points that data chose.
    config = torchq.recipes.int8()
    model = calibrated(
        Residual(),
        x,
        config=config,
        target=target,
        example=x[:1],
    )
    path = tmp_path_factory.mktemp(target) / "m.onnx"
    export(model, x, path, target)
    return target, model, path


@pytest.mark.parametrize(
    ("target", "advice"),
    [
        ("rknn", "torchq.save keeps the model with the numbers"),
        ("executorch", r"Write a file of its own with torchq\.runtimes\.executorch\."),
        ("torch", r"torchq\.deploy\(model, example\) runs it here"),
    ],
)
@pytest.mark.parametrize("quantized_for_it", [False, True])
def test_onnx_files_for_targets_that_read_none_are_refused(
    target: str, advice: str, quantized_for_it: bool, tmp_path: Path
) -> None:
    x = torch.randn(4, 3, 16, 16)
    model = Residual().eval()
    if quantized_for_it:
        torchq.quantize_(model, target=target, example=x)
    else:
        torchq.quantize_(model, RUNTIMES[target].recipe())
    torchq.calibrate(model, [x], progress=False)
    named = None if quantized_for_it else target
    expected = f"there are no ONNX files for {target}; expected a target that reads"
    with pytest.raises(ConfigError, match=f"{expected} ONNX. {advice}"):
        torchq.export_onnx(model, x, tmp_path / "m.onnx", target=named)
    assert not list(tmp_path.iterdir())


def export(
    model: nn.Module, x: torch.Tensor, path: Path, target: str | None
) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torchq.export_onnx(model, x[:1], path, target=target, dynamo=False)
    return [str(entry.message) for entry in seen]


@pytest.mark.sample(2)
def test_activations_have_the_types_of_the_target(
    written: tuple[str, nn.Module, Path],
) -> None:
    target, _, path = written
    actual = {
        name: (qparams.format.name, int(qparams.zero_point))
        for name, node in quantizer_nodes(load_model(path)).items()
        if (qparams := qparams_of(node)).scale.numel() == 1
    }
    case = CASES[target]
    kind, point = actual["stem.input_quantizer"]
    expected = case.others[1]
    assert kind == case.others[0]
    assert 0 < point < 255 if expected is None else point == expected
    # Behind a ReLU.
    assert actual["blocks.0.second.input_quantizer"] == case.nonnegative
    allowed = (case.others, case.nonnegative)
    assert all(
        value in allowed or (value[0], None) in allowed for value in actual.values()
    )


def test_weights_have_scales_where_the_target_takes_them(
    written: tuple[str, nn.Module, Path],
) -> None:
    target, _, path = written
    model = load_model(path)
    for node in nodes_of(model, "Conv", "Gemm", "MatMul"):
        weight = stored_weight(node.inputs[1])
        assert weight is not None
        qparams = qparams_of(weight)
        assert qparams.format.name == "int8"
        assert qparams.has_zero_point(0)
        per_channel = qparams.scale.numel() > 1
        assert per_channel == (node.op_type in CASES[target].channels_of), node.name
        if per_channel:
            assert (
                weight.inputs[0].const_value.shape[axis_of(weight)]
                == qparams.scale.numel()
            )


@pytest.mark.eight_bit_products("openvino")
def test_the_file_computes_what_the_model_simulates(
    written: tuple[str, nn.Module, Path],
) -> None:
    _, model, path = written
    report = torchq.verify_onnx(model, path, [torch.randn(4, 3, 16, 16)])
    assert report.ok, str(report)


@pytest.mark.parametrize("target", sorted(CASES))
def test_a_broken_rule_is_a_warning_with_the_layer(target: str, tmp_path: Path) -> None:
    case = CASES[target]
    x = torch.randn(4, 16, 8, 8)
    config = QuantConfig(
        (
            Rule(
                "type:torch.nn.modules.conv.*",
                input=QuantDescriptor(),
                weight=case.weight,
            ),
        )
    )
    model = calibrated(case.offender(), x, config=config)
    *_, message = export(model, x, tmp_path / "m.onnx", target)
    assert message.startswith(f"export_onnx(target={target!r}):\n- ")
    assert (
        f"0: {case.warning}" in message
        or f"0: has {case.warning}" in message
        or case.warning in message
    )


def test_a_new_target_takes_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry of the registry is all that a target is: nothing else knows their names."""
    seen: list[str] = []
    rules = FileRules(
        passes=(lambda model: seen.append("pass"),),
        checks=(lambda model: iter(["stem: this target wants nothing"]),),
    )
    monkeypatch.setattr(RUNTIMES, "_entries", dict(RUNTIMES._entries))
    RUNTIMES.add(
        "new",
        Runtime(name="new", codes=Codes(unsigned=False, stored="unsigned"), file=rules),
    )
    x = torch.randn(4, 3, 16, 16)
    model = calibrated(Residual(), x)
    with pytest.warns(UserWarning, match="stem: this target wants nothing"):
        report = torchq.export_onnx(
            model, x[:1], tmp_path / "m.onnx", target="new", dynamo=False
        )
    assert seen == ["pass"]
    assert report.target == "new"
    stem = quantizer_nodes(load_model(tmp_path / "m.onnx"))["stem.input_quantizer"]
    assert qparams_of(stem).format.name == "uint8"
