"""The commands that look into a quantized model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import torchq
from torchq.cli.main import build_parser, main

MODELS = """
import torch
from torch import nn


def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2),
    )


def loader():
    torch.manual_seed(1)
    return [torch.randn(8, 3, 16, 16) for _ in range(4)]


def mean(output, batch):
    return output.mean()
"""
SOURCE = ["--model", "toy_nets:build", "--data", "toy_nets:loader", "--num-batches", "2"]


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "toy_nets.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main(argv) == code
    return capsys.readouterr().out


def test_doctor_tells_by_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "0 errors" not in printed(capsys, "doctor", *SOURCE)
    left = json.loads(printed(capsys, "doctor", *SOURCE, "--no-fuse", "--json"))
    assert [f["kind"] for f in left["findings"]] == ["batchnorm_left"]
    broken = torchq.analysis.DoctorReport(
        (torchq.analysis.Finding("nan_range", "error", "0", "is NaN", "calibrate"),), ("nan_range",)
    )
    monkeypatch.setattr(torchq, "doctor", lambda *args, **kwargs: broken)
    assert "ERROR nan_range" in printed(capsys, "doctor", *SOURCE, code=1)


def test_report(capsys: pytest.CaptureFixture[str], project: Path) -> None:
    pytest.importorskip("jinja2")
    out = printed(capsys, "report", *SOURCE, "--metric", "toy_nets:mean", "--out", "r.html")
    assert out.startswith("Quantization ")
    assert "of the damage" in out
    assert out.endswith("\nwrote r.html\n")
    assert "mean" in (project / "r.html").read_text()


def test_inspect(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "inspect", "--model", "toy_nets:build")
    assert "0.weight_quantizer" in text
    data = json.loads(printed(capsys, "inspect", *SOURCE, "--json"))
    assert len(data["rows"]) == 6
    assert main(["inspect", "kept.pt"]) == 2
    assert "--model package.module:name --data ... --load kept.pt" in capsys.readouterr().err


def test_inspect_gives_the_nodes_of_a_file_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnx")
    printed(capsys, "quantize", *SOURCE, "--export", "m.onnx", "--no-report")
    nodes = json.loads(printed(capsys, "inspect", "m.onnx", "--json"))["nodes"]
    assert {"name", "kind", "integer", "reason"} <= nodes[0].keys()
    assert "Conv" in {node["kind"] for node in nodes}


def test_plan_and_the_config_that_it_writes(
    capsys: pytest.CaptureFixture[str], project: Path
) -> None:
    assert "3 quantized" in printed(capsys, "plan", "--model", "toy_nets:build")
    budget = ["--budget", "mean_bits=6", "--formats", "4", "8", "--out", "mixed.json"]
    assert "budget mean_bits 6" in printed(capsys, "plan", *SOURCE, *budget)
    config = torchq.QuantConfig.from_json((project / "mixed.json").read_text())
    assert len(config.rules) == 3
    assert "3 quantized" in printed(
        capsys, "plan", "--model", "toy_nets:build", "--recipe", "mixed.json"
    )


def folder_of_photos(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for number, name in enumerate(("cats", "dogs")):
        (folder / name).mkdir(parents=True)
        for index in range(6):
            pixels = torch.randint(0, 128, (20, 20, 3), generator=generator) + 120 * number
            image = Image.fromarray(pixels.to(torch.uint8).numpy())
            image.save(folder / name / f"{index}.png")


def test_quantize_compares_by_itself(capsys: pytest.CaptureFixture[str], project: Path) -> None:
    folder_of_photos(project / "photos")
    source = ["--model", "toy_nets:build", "--data", "photos", "--image-size", "16"]
    source += ["--batch-size", "4", "--num-batches", "2"]
    text = printed(capsys, "quantize", *source, "--labels")
    line = next(line for line in text.splitlines() if line.startswith("beside the float model"))
    assert "on data that it was not calibrated with: accuracy " in line
    assert "% of 4, signal to noise" in line
    again = printed(capsys, "quantize", *source, "--num-batches", "3", "--compare", "1")
    assert "on data that it was not calibrated with: same class for" in again
    assert "calibrated on 2 batches" in again  # of three; the last one is kept
    one = printed(capsys, "quantize", *source, "--batch-size", "12")
    assert "on its calibration data: same class for" in one
    assert "beside" not in printed(capsys, "quantize", *source, "--compare", "0")


def test_quantize_writes_the_report(capsys: pytest.CaptureFixture[str], project: Path) -> None:
    pytest.importorskip("jinja2")
    assert "wrote r.html" in printed(capsys, "quantize", *SOURCE, "--report", "r.html")
    assert (project / "r.html").stat().st_size > 100_000


def test_quantize_writes_a_report_beside_its_file(
    capsys: pytest.CaptureFixture[str], project: Path
) -> None:
    pytest.importorskip("jinja2")
    data = json.loads(printed(capsys, "quantize", *SOURCE, "--save", "net.pt", "--json"))
    assert data["files"] == {"save": "net.pt", "report": "net.report.html"}
    assert data["comparison"]["held_out"] is True and data["comparison"]["agreement"] is not None
    assert (project / "net.report.html").exists()
    assert "torchq-report.html: open it" in printed(capsys, "quantize", *SOURCE)
    (project / "torchq-report.html").unlink()
    assert "open it" not in printed(capsys, "quantize", *SOURCE, "--no-report")
    assert not (project / "torchq-report.html").exists()


def test_quantize_succeeds_without_the_package_for_reports(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "no report: report: jinja2 is not installed" in printed(capsys, "quantize", *SOURCE)
    assert main(["quantize", *SOURCE, "--report", "r.html"]) == 2
    assert "jinja2 is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["report"], "--model is missing; expected torchvision:NAME"),
        (["report"], "; --data is missing; expected a folder of images"),
        (["plan", *SOURCE, "--budget", "mean_bits"], "expected KIND=NUMBER"),
        (["report", *SOURCE, "--out", "r.pdf"], "got suffix '.pdf'"),
        (
            ["quantize", *SOURCE, "--report", "nowhere/r.html"],
            "--report nowhere/r.html: the folder",
        ),
        (["quantize", "--model", "toy_nets:build"], "--data is missing; expected a folder"),
    ],
)
def test_problems_are_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], text: str
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"torchq {argv[0]}: error: ")
    assert text in error


def test_labels_need_sub_folders(capsys: pytest.CaptureFixture[str], project: Path) -> None:
    folder_of_photos(project / "photos")
    argv = ["quantize", "--model", "toy_nets:build", "--data", "photos/cats", "--labels"]
    assert main(argv) == 2
    assert "has 0 sub-folders; expected one for each class" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["quantise"], "Did you mean quantize"),
        (["report", "--modle", "x"], "Did you mean --model"),
        (["quantize", "--calib", "entrpy"], "Did you mean entropy"),
    ],
)
def test_typos_are_answered_with_suggestions(
    capsys: pytest.CaptureFixture[str], argv: list[str], text: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


def test_help_shows_examples_that_parse(capsys: pytest.CaptureFixture[str]) -> None:
    parser = build_parser()
    assert "exit codes:" in parser.format_help()
    assert len(parser.format_help().splitlines()) <= 32  # one screen
    for name, child in parser.children.items():
        example = child.format_help().partition("example:\n")[2].split()
        assert example[:2] == ["torchq", name]
        parser.parse_args(example[1:])


def test_interrupting_is_code_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torchq, "doctor", stop)
    assert main(["doctor", *SOURCE]) == 130
    assert "interrupted" in capsys.readouterr().err
