"""The commands that look into a quantized model."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

import torchq
from tests.cli import conftest
from torchq.cli.main import build_parser, main

Printed = Callable[..., str]
SOURCE = [*conftest.SOURCE, "--num-batches", "2"]


def test_doctor_tells_by_its_exit_code(
    printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "0 errors" not in printed("doctor", *SOURCE)
    left = json.loads(printed("doctor", *SOURCE, "--no-fuse", "--json"))
    assert [f["kind"] for f in left["findings"]] == ["batchnorm_left"]
    broken = torchq.analysis.DoctorReport(
        (torchq.analysis.Finding("nan_range", "error", "0", "is NaN", "calibrate"),),
        ("nan_range",),
    )
    monkeypatch.setattr(torchq, "doctor", lambda *args, **kwargs: broken)
    assert "ERROR nan_range" in printed("doctor", *SOURCE, code=1)


def test_report(printed: Printed, folder: Path) -> None:
    pytest.importorskip("jinja2")
    out = printed("report", *SOURCE, "--metric", "user_net:mean", "--out", "r.html")
    assert out.startswith("Quantization ")
    assert "of the damage" in out
    assert out.endswith("\nwrote r.html\n")
    assert "mean" in (folder / "r.html").read_text()


@pytest.mark.parametrize("command", ["report", "doctor"])
def test_detections_are_a_metric_by_name(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here for a model that detects nothing, which the error says."""
    assert main([command, *SOURCE, "--metric", "detections"]) == 2
    assert "Detections: got the output" in capsys.readouterr().err


def test_inspect_gives_the_nodes_of_a_file_as_data(printed: Printed) -> None:
    pytest.importorskip("onnx")
    printed("quantize", *SOURCE, "--export", "m.onnx", "--no-report")
    nodes = json.loads(printed("inspect", "m.onnx", "--json"))["nodes"]
    assert {"name", "kind", "integer", "reason"} <= nodes[0].keys()
    assert "Conv" in {node["kind"] for node in nodes}


def test_plan_and_the_config_that_it_writes(printed: Printed, folder: Path) -> None:
    assert "3 quantized" in printed("plan", "--model", "user_net:build")
    budget = ["--budget", "mean_bits=6", "--formats", "4", "8", "--out", "mixed.json"]
    assert "budget mean_bits 6" in printed("plan", *SOURCE, *budget)
    config = torchq.QuantConfig.from_json((folder / "mixed.json").read_text())
    assert len(config.rules) == 3
    assert "3 quantized" in printed(
        "plan", "--model", "user_net:build", "--recipe", "mixed.json"
    )


def write_photos(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for number, name in enumerate(("cats", "dogs")):
        (folder / name).mkdir(parents=True)
        for index in range(6):
            pixels = (
                torch.randint(0, 128, (20, 20, 3), generator=generator) + 120 * number
            )
            image = Image.fromarray(pixels.to(torch.uint8).numpy())
            image.save(folder / name / f"{index}.png")


def test_quantize_compares_by_itself(printed: Printed, folder: Path) -> None:
    write_photos(folder / "photos")
    source = ["--model", "user_net:build", "--data", "photos", "--image-size", "16"]
    source += ["--batch-size", "4", "--num-batches", "2"]
    message = printed("quantize", *source, "--labels")
    line = next(
        line
        for line in message.splitlines()
        if line.startswith("beside the float model")
    )
    assert "on data that it was not calibrated with: accuracy " in line
    assert "% of 4, signal to noise" in line
    again = printed("quantize", *source, "--num-batches", "3", "--compare", "1")
    assert "on data that it was not calibrated with: same class for" in again
    assert "calibrated on 2 batches" in again  # of three; the last one is kept
    one = printed("quantize", *source, "--batch-size", "12")
    assert "on its calibration data: same class for" in one
    assert "beside" not in printed("quantize", *source, "--compare", "0")


def test_quantize_writes_the_report(printed: Printed, folder: Path) -> None:
    pytest.importorskip("jinja2")
    assert "wrote r.html" in printed("quantize", *SOURCE, "--report", "r.html")
    assert (folder / "r.html").stat().st_size > 100_000


def test_quantize_writes_a_report_beside_its_file(
    printed: Printed, folder: Path
) -> None:
    pytest.importorskip("jinja2")
    data = json.loads(printed("quantize", *SOURCE, "--save", "net.pt", "--json"))
    assert data["files"] == {"save": "net.pt", "report": "net.report.html"}
    assert data["comparison"]["held_out"] is True
    assert data["comparison"]["agreement"] is not None
    assert (folder / "net.report.html").exists()
    assert "torchq-report.html: open it" in printed("quantize", *SOURCE)
    (folder / "torchq-report.html").unlink()
    assert "open it" not in printed("quantize", *SOURCE, "--no-report")
    assert not (folder / "torchq-report.html").exists()


def test_quantize_succeeds_without_the_package_for_reports(
    printed: Printed,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "no report: report: jinja2 is not installed" in printed("quantize", *SOURCE)
    assert main(["quantize", *SOURCE, "--report", "r.html"]) == 2
    assert "jinja2 is not installed" in capsys.readouterr().err


def test_labels_need_sub_folders(refused: Callable[..., str], folder: Path) -> None:
    write_photos(folder / "photos")
    error = refused("quantize", *SOURCE[:2], "--data", "photos/cats", "--labels")
    assert "has 0 sub-folders; expected one for each class" in error


def test_help_shows_examples_that_parse(capsys: pytest.CaptureFixture[str]) -> None:
    parser = build_parser()
    assert "exit codes:" in parser.format_help()
    assert len(parser.format_help().splitlines()) <= 32  # one screen
    for name, child in parser.children.items():
        example = child.format_help().partition("example:\n")[2].split()
        assert example[:2] == ["torchq", name]
        usage = child.format_usage()
        assert usage.startswith(f"usage: torchq {name} [options]")
        assert len(usage.splitlines()) == 1  # each option has a line of its own below
        parser.parse_args(example[1:])


def test_interrupting_is_code_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torchq, "doctor", stop)
    assert main(["doctor", *SOURCE]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_forecast_needs_a_model_alone(printed: Callable[..., str]) -> None:
    shown = printed(
        "forecast",
        "--model",
        "user_net:build",
        "--shape",
        "2,3,16,16",
        "--targets",
        "torch",
    )
    assert "one call of (2, 3, 16, 16) on 1 thread" in shown
    assert "\nfastest: torch, " in shown


def test_a_forecast_names_a_shape_that_the_model_refuses(
    refused: Callable[..., str],
) -> None:
    message = refused("forecast", "--model", "user_net:build", "--shape", "2,4,16,16")
    assert "--shape 2,4,16,16: RuntimeError" in message
