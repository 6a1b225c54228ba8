"""A session that is far from its file is looked into with few sessions, and judged as with many."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.onnx import VerifyReport
from torchq.onnx.verify import verify
from torchq.onnx.verify.exposed import ExposedFile, Ran, groups_apart

pytest.importorskip("onnxruntime")
pytest.importorskip("openvino")
LAYERS = 8
X = torch.randn(2, 16, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    torch.manual_seed(0)
    layers = [part for _ in range(LAYERS) for part in (nn.Conv2d(16, 16, 1), nn.ReLU())]
    model = nn.Sequential(*layers).eval()
    # Products of 7-bit weights overflow no kernel.
    recipe = torchq.recipes.int8(reduce_range=True)
    options = {"target": "openvino", "example": X}
    torchq.quantize_(model, recipe, progress=False, **options)
    torchq.calibrate(model, [X], progress=False)
    path = tmp_path_factory.mktemp("apart") / "net.onnx"
    torchq.export_onnx(model, X, path, dynamo=False, progress=False)
    return model, path


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Let the session of a user look far from its file; return what each session shows."""
    groups: list[list[str]] = []
    run = ExposedFile.run

    def noted(file: ExposedFile, feeds: Mapping[str, Tensor]) -> Ran:
        ran = run(file, feeds)
        groups.append(list(ran.computed))
        return ran

    monkeypatch.setattr(verify, "unlike_written", lambda *args: "is far")
    monkeypatch.setattr(ExposedFile, "run", noted)
    return groups


def off_by_three(
    monkeypatch: pytest.MonkeyPatch, name: str, *, beside_others: bool
) -> None:
    """Let all codes of one quantizer be others, alone as well or beside others only."""
    run = ExposedFile.run

    def changed(file: ExposedFile, feeds: Mapping[str, Tensor]) -> Ran:
        ran = run(file, feeds)
        # The first session shows all codes, and is the file as it is written.
        is_session = 0 < len(ran.computed) < LAYERS
        if name in ran.computed and is_session and len(ran.computed) > beside_others:
            ran.computed[name] += 3
        return ran

    monkeypatch.setattr(ExposedFile, "run", changed)


def verified(exported: tuple[nn.Module, Path]) -> VerifyReport:
    model, path = exported
    return torchq.verify_onnx(model, path, [X], progress=False)


def test_a_few_sessions_show_all_codes(
    exported: tuple[nn.Module, Path], shown: list[list[str]]
) -> None:
    report = verified(exported)
    assert report.ok, report
    assert "layers shown apart" in report.session
    # The file as it is written, three groups of a chain, and the session of a user.
    sessions = [group for group in shown if len(group) < LAYERS]
    names = [name for group in sessions for name in group]
    assert sorted(names) == sorted(torchq_inputs(exported[0]))
    assert [len(group) for group in sessions] == [3, 3, 2, 0]


def torchq_inputs(model: nn.Module) -> list[str]:
    names = torchq.workflow.quantizers(model)
    return [name for name in names if name.endswith("input_quantizer")]


@pytest.mark.parametrize("beside_others", [True, False])
def test_what_differs_is_shown_alone_before_it_is_judged(
    exported: tuple[nn.Module, Path],
    shown: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    beside_others: bool,
) -> None:
    """A difference that only a session of several shows is none; one of a layer is named."""
    off_by_three(monkeypatch, "6.input_quantizer", beside_others=beside_others)
    report = verified(exported)
    assert report.ok == beside_others
    assert ["6.input_quantizer"] in shown and ["4.input_quantizer"] in shown
    if not beside_others:
        assert report.first is not None and report.first.name == "6.input_quantizer"


def test_neighbours_are_in_groups_of_their_own() -> None:
    chain: dict[str, list[str]] = {"a": [], "b": ["a"], "c": ["b"], "d": ["c"]}
    assert groups_apart(chain) == [["a", "d"], ["b"], ["c"]]
    branches: dict[str, list[str]] = {"a": [], "b": [], "c": ["a", "b"], "d": []}
    assert groups_apart(branches) == [["a", "d"], ["b"], ["c"]]
    assert groups_apart({"a": []}) == [["a"]]
