"""Numbers, paths and functions of a user: what cannot work is refused before any work is done."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchq
from torchq.cli import main

FILES = Path(__file__).parents[1] / "frontends"
MODULE = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(4, 2))

def loader():
    print("the data was read")
    return [torch.randn(2, 3, 8, 8) for _ in range(6)]

def breaks_early():
    raise KeyError("no such key")

def breaks_late():
    yield torch.randn(2, 3, 8, 8)
    raise IndexError("no such index")

def two(output, batch):
    return output.mean()

def none(model):
    return None

def three(a, b, c):
    return 1.0
"""
SOURCE = ["--model", "user_net:build", "--data", "user_net:loader"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "user_net.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "user_net", raising=False)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the error of a command that ends with code 2, before data is read or files written."""
    before = {path.name for path in Path().iterdir()} | {"__pycache__"}
    try:
        code: object = main(argv)
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    captured = capsys.readouterr()
    assert "the data was read" not in captured.out
    assert {path.name for path in Path().iterdir()} <= before
    first = captured.err.splitlines()[0]
    assert first.startswith(f"torchq {argv[0]}: error: ")
    return first


@pytest.mark.parametrize("command", ["quantize", "doctor"])
@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--num-batches", ["-2", "0", "nan", "1.5", "x", "9" * 20]),
        ("--batch-size", ["0", "-1"]),
        ("--image-size", ["0", "-1", "0x8", "8x", "8x8x8", "99999"]),
        ("--std", ["0", "-1", "nan", "inf"]),
        ("--mean", ["nan", "1e999", "x"]),
        ("--seed", ["-1", "x"]),
    ],
)
def test_numbers_about_data_are_checked_first(
    capsys: pytest.CaptureFixture[str], command: str, option: str, values: list[str]
) -> None:
    for value in values:
        given = [value] * 3 if option in ("--std", "--mean") else [value]
        error = refused(capsys, command, *SOURCE, option, *given)
        assert f"argument {option}: got '{value}'; expected" in error


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (
            ["quantize", "--compare", "-1"],
            "got '-1'; expected a whole number, 0 or more",
        ),
        (["quantize", "--verify", "0"], "--verify: got '0'; expected a whole number, 1 or more"),
        (["quantize", "--verify", "-1"], "--verify: got '-1'"),
        (["quantize", "--opset", "999"], "--opset: got '999'; expected a whole number, 10 to 23"),
        (["plan", "--budget", "mean_bits=nan"], "expected a positive number"),
        (["plan", "--budget", "bits=5"], "got budget 'bits'; expected one of mean_bits"),
        (["plan", "--budget", "mean_bits=5", "--formats", "bits"], "unknown recipe 'bits'"),
        (["plan", "--budget", "mean_bits=5", "--formats", "float"], "got no formats"),
        (["plan", "--out", "config.json"], "--out config.json: expected --budget"),
        (["report", "--recipe", "w5"], "unknown recipe 'w5'"),
        (["quantize", "--labels", "--metric", "user_net:two"], "not allowed with argument"),
        (["quantize", "--device", "meta"], "--device meta: "),
        (["doctor", "--device", "meta"], "--device meta: "),
        (["doctor", "--device", "abacus"], "--device abacus: "),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_other_options_are_checked_first(
    capsys: pytest.CaptureFixture[str], argv: list[str], text: str
) -> None:
    assert text in refused(capsys, argv[0], *SOURCE, *argv[1:])


@pytest.mark.parametrize("argv", [["--epochs", "0"], ["--epochs", "-1"], ["--seed", "-1"]])
def test_numbers_of_the_demo_are_checked_first(
    capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert f"got '{argv[1]}'" in refused(capsys, "demo", *argv)


def test_an_opset_that_cannot_hold_the_recipe_is_refused_before_calibration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("onnx")
    assert main(["quantize", *SOURCE, "--export", "a.onnx", "--opset", "10"]) == 2
    captured = capsys.readouterr()
    assert "opset 10 has no QuantizeLinear for" in captured.err
    assert "calibrated" not in captured.out


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["quantize", "--save", "a.onnx", "--export", "./sub/../a.onnx"], "of --export too"),
        (["quantize", "--save", "link", "--export", "a.onnx"], "of --export too"),
        (["quantize", "--save", "linked/a.html", "--report", "sub/a.html"], "of --save too"),
        (
            ["quantize", "--save", "a.report.html", "--export", "a.onnx"],
            "a.report.html: is",
        ),
        (["quantize", "--weights", "kept.pt", "--save", "kept.pt"], "of --weights too"),
        (["plan", "--recipe", "kept.json", "--out", "kept.json"], "of --recipe too"),
        (["report", "--load", "kept.json", "--out", "kept.json"], "of --load too"),
    ],
    ids=lambda value: " ".join(value[:5]) if isinstance(value, list) else "",
)
def test_a_file_is_written_by_one_option_only(
    capsys: pytest.CaptureFixture[str], argv: list[str], text: str
) -> None:
    Path("sub").mkdir()
    Path("linked").symlink_to("sub")
    Path("link").symlink_to("a.onnx")
    torch.save({}, "kept.pt")
    Path("kept.json").write_text(torchq.recipes.int8().to_json())
    assert text in refused(capsys, argv[0], *SOURCE, *argv[1:])


OUTPUTS = {
    "quantize": ["--export", "--save", "--report"],
    "report": ["--out"],
    "plan": ["--out"],
}


@pytest.mark.parametrize("command", OUTPUTS)
def test_outputs_of_every_command_are_checked_first(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    Path("sub").mkdir()
    for option in OUTPUTS[command]:
        error = refused(capsys, command, *SOURCE, option, "missing/a.json")
        assert f"{option} missing/a.json: the folder" in error
        assert f"{option} sub: is a folder" in refused(capsys, command, *SOURCE, option, "sub")
    refused(capsys, "convert", "net.onnx", "--to", "missing/a.pt2")


@pytest.mark.parametrize("command", ["quantize", "inspect", "doctor", "plan", "convert"])
def test_inputs_that_are_not_there_are_named(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    Path("sub.onnx").mkdir()
    to = ["--to", "a.pt2"] if command == "convert" else []
    assert "MODEL no.onnx: no such file" in refused(capsys, command, "no.onnx", *to)
    assert "MODEL sub.onnx: is a folder" in refused(capsys, command, "sub.onnx", *to)
    assert "-symbol.json, .prototxt" in refused(capsys, command, "net.bin", *to)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--weights", "sub"], "--weights sub: is a folder; expected a file"),
        (["--weights", "user_net.py"], "--weights user_net.py: UnpicklingError: "),
        (["--weights", "list.pt"], "--weights list.pt: expected a state dict, a file of named"),
        (["--weights", "other.pt"], "--weights other.pt: Error(s) in loading state_dict"),
        (["--data", "sub"], "--data sub: no image in it; expected files like .jpg"),
        (["--data", "noise"], "cannot be read as an image"),
        (["--recipe", "no.json"], "--recipe no.json: no such file"),
        (["--recipe", "noise.json"], "config: not JSON"),
        (["--export", "a.pt"], "--export a.pt: expected a name that ends in .onnx"),
        (["--metric", "user_net:three"], "expected"),
    ],
)
def test_files_and_functions_of_the_wrong_kind_are_refused(
    capsys: pytest.CaptureFixture[str], argv: list[str], text: str
) -> None:
    Path("sub").mkdir()
    Path("noise.json").write_bytes(b"\xff\xfe\x00")
    Path("noise").mkdir()
    Path("noise", "a.jpg").write_bytes(b"\xff\xfe\x00")
    torch.save([1], "list.pt")
    torch.save({"other": torch.ones(1)}, "other.pt")
    assert text in refused(capsys, "quantize", *SOURCE, *argv)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (
            ["quantize", "--model", "user_net:breaks_early"],
            "breaks_early: KeyError",
        ),
        (
            ["doctor", *SOURCE[:2], "--data", "user_net:breaks_early"],
            "--data user_net:",
        ),
        (["report", *SOURCE[:2], "--data", "user_net:breaks_late"], "IndexError: no such index"),
        (
            ["quantize", "--model", "raises:x"],
            "x: ValueError: at import (raises.py",
        ),
    ],
    ids=["factory", "loader", "iterator", "module"],
)
def test_what_a_users_code_raises_is_one_line_with_its_place(
    capsys: pytest.CaptureFixture[str], argv: list[str], text: str
) -> None:
    Path("raises.py").write_text("raise ValueError('at import')")
    error = refused(capsys, *argv)
    assert text in error
    assert re.search(r"\((user_net|raises)\.py, line \d+\)$", error)


@pytest.mark.parametrize("command", ["quantize", "report"])
def test_a_metric_that_gives_no_number_is_an_error(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, *SOURCE, "--metric", "user_net:none"]) == 2
    assert "--metric user_net:none: TypeError: float() argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("network", "weights"),
    [
        ("mxnet_files/classifier-symbol.json", "mxnet_files/classifier-0000.params"),
        ("caffe_files/classifier.prototxt", "caffe_files/classifier.caffemodel"),
    ],
)
def test_weights_that_lie_elsewhere_are_named_in_the_line_that_loads(
    folder: Path, capsys: pytest.CaptureFixture[str], network: str, weights: str
) -> None:
    name = shutil.copy(FILES / network, folder)
    decoy = folder / Path(weights).name  # A file of this name would be found by itself.
    decoy.write_bytes(b"")
    (folder / "elsewhere").mkdir()
    moved = shutil.copy(FILES / weights, folder / "elsewhere" / "renamed")
    text = MODULE + "\ndef large():\n    return [torch.randn(2, 3, 16, 16)]\n"
    (folder / "user_net.py").write_text(text)
    argv = ["quantize", str(name), "--weights", str(moved), "--data", "user_net:large"]
    assert main([*argv, "--save", "a.pt", "--no-report"]) == 0
    line = capsys.readouterr().out.split("load it with\n")[1].splitlines()[0].strip()
    assert repr(str(moved)) in line
    code = f"{line}; print(torchq.workflow.is_quantized(model))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


def test_every_number_of_the_command_line_has_bounds() -> None:
    """A plain int or float takes -1 and nan, which fail late or pass in silence."""
    from torchq.cli.main import build_parser

    for child in build_parser().children.values():
        for action in child._actions:
            kind = action.type
            assert kind not in (int, float), action.option_strings
            assert kind is None or inspect.isfunction(kind) or kind is Path


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_that_is_not_writable_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("sub").mkdir(mode=0o555)
    assert "is not writable" in refused(capsys, "quantize", *SOURCE, "--save", "sub/a.pt")
