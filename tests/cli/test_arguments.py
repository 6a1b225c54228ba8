"""Numbers, paths and functions of a user: what cannot work is refused before any work is done."""

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torchq
from tests.cli.conftest import SOURCE
from tests.frontends.test_caffe import one_layer
from torchq.cli import main
from torchq.cli.loading import load_model
from torchq.cli.main import build_parser

Refused = Callable[..., str]
MODEL = SOURCE[:2]
NAMED = ("quantize", "report", "doctor", "plan")  # commands that SOURCE stands for


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
    refused: Refused, command: str, option: str, values: list[str]
) -> None:
    for value in values:
        given = [value] * 3 if option in ("--std", "--mean") else [value]
        error = refused(command, *SOURCE, option, *given)
        assert f"argument {option}: got '{value}'; expected" in error


@pytest.fixture
def files() -> None:
    """Files and folders of the wrong kind, links, and files that are to be kept."""
    for name in ("sub", "noise", "sub.onnx"):
        Path(name).mkdir()
    Path("linked").symlink_to("sub")
    Path("link").symlink_to("a.onnx")
    Path("noise.json").write_bytes(b"\xff\xfe\x00")
    Path("noise", "a.jpg").write_bytes(b"\xff\xfe\x00")
    Path("kept.json").write_text(torchq.recipes.int8().to_json())
    for stem in ("net", "alone"):
        Path(f"{stem}.prototxt").write_text(one_layer("ReLU"))
    Path("net.caffemodel").write_bytes(b"")
    torch.save({}, "kept.pt")
    torch.save([1], "list.pt")
    torch.save({"other": torch.ones(1)}, "other.pt")


TO = "--to a.pt2"
#: A command with its arguments behind SOURCE (or its own where it begins with --model or a file),
#: and a part of its error.
REFUSALS = [
    # numbers and choices
    ("quantize --compare -1", "got '-1'; expected a whole number, 0 or more"),
    ("quantize --verify 0", "--verify: got '0'; expected a whole number, 1 or more"),
    ("quantize --opset 999", "--opset: got '999'; expected a whole number, 10 to 23"),
    ("plan --budget mean_bits=nan", "expected a positive number"),
    ("plan --budget mean_bits", "expected KIND=NUMBER"),
    ("plan --budget bits=5", "got budget 'bits'; expected one of mean_bits"),
    ("plan --budget mean_bits=5 --formats bits", "unknown recipe 'bits'"),
    ("plan --budget mean_bits=5 --formats float", "got no formats"),
    ("plan --out config.json", "--out config.json: expected --budget"),
    ("report --recipe w5", "unknown recipe 'w5'"),
    ("report --out r.pdf", "got suffix '.pdf'"),
    ("quantize --labels --metric user_net:mean", "not allowed with argument"),
    ("quantize --device meta", "--device meta: "),
    ("doctor --device abacus", "--device abacus: "),
    ("demo --epochs 0", "got '0'"),
    ("demo --seed -1", "got '-1'"),
    # typing errors
    ("quantise", "Did you mean quantize"),
    ("report --modle x", "Did you mean --model"),
    ("quantize --calib entrpy", "Did you mean entropy"),
    *(
        (f"{words} --exclude 0 2", "given again: --exclude 0 --exclude 2")
        for words in ("plan", "plan net.onnx")
    ),
    # models and data by name
    ("quantize --model nowhere:build", "cannot import nowhere"),
    ("quantize --model user_net:missing", "user_net has no missing"),
    ("quantize --model user_net", "expected package.module:name"),
    ("quantize --model user_net:make_number", "got a int; expected a torch.nn.Module"),
    ("quantize --model torchvision:resnet1", "no such model; expected one like"),
    ("quantize --model user_net:build", "--data is missing; expected a folder"),
    ("report --model", "--model is missing; expected torchvision:NAME"),
    ("report --model", "; --data is missing; expected a folder of images"),
    ("inspect kept.pt", "inspect kept.pt: expected a name that ends in .onnx"),
    ("quantize --data nofolder", "no such folder"),
    ("quantize --data user_net:nothing", "got no batch"),
    ("quantize --data user_net:make_number", "expected an iterable of batches"),
    (
        "quantize --data user_net:small",
        "fails on a batch of shape (2, 3, 2, 2) (RuntimeError",
    ),
    # files
    ("quantize --save a.onnx --export ./sub/../a.onnx", "of --export too"),
    ("quantize --save link --export a.onnx", "of --export too"),
    ("quantize --save linked/a.html --report sub/a.html", "of --save too"),
    ("quantize --save a.report.html --export a.onnx", "a.report.html: is"),
    ("quantize --weights kept.pt --save kept.pt", "of --weights too"),
    ("plan --recipe kept.json --out kept.json", "of --recipe too"),
    ("report --load kept.json --out kept.json", "of --load too"),
    ("quantize --export missing/a.json", "--export missing/a.json: the folder"),
    ("quantize --export sub", "--export sub: is a folder"),
    ("quantize --report missing/a.json", "--report missing/a.json: the folder"),
    ("report --out sub", "--out sub: is a folder"),
    ("plan --out missing/a.json", "--out missing/a.json: the folder"),
    ("convert net.onnx --to missing/a.pt2", "no such file"),
    *((f"{c} no.onnx", "MODEL no.onnx: no such file") for c in ("inspect", *NAMED)),
    *((f"{c} sub.onnx", "MODEL sub.onnx: is a folder") for c in ("inspect", *NAMED)),
    *((f"{c} net.bin", "-symbol.json, .prototxt") for c in NAMED),
    (f"convert no.onnx {TO}", "MODEL no.onnx: no such file"),
    (f"convert sub.onnx {TO}", "MODEL sub.onnx: is a folder"),
    (f"convert net.bin {TO}", "expected a name that ends in .onnx"),
    ("convert net.prototxt --to a.pt", "expected a name that ends in .pt2"),
    (f"convert net.prototxt {TO} --weights no", "--weights no: no such file"),
    (f"convert alone.prototxt {TO}", "no .caffemodel beside it"),
    (f"convert net.prototxt {TO} --shape 1,x", "expected sizes"),
    (f"convert net.prototxt {TO} --shape 1 --shape 1", "got 2"),
    ("quantize --weights sub", "--weights sub: is a folder; expected a file"),
    ("quantize --weights no.pt", "--weights no.pt: no such file"),
    ("quantize --weights user_net.py", "--weights user_net.py: UnpicklingError: "),
    (
        "quantize --weights list.pt",
        "--weights list.pt: expected a state dict, a file of named",
    ),
    (
        "quantize --weights other.pt",
        "--weights other.pt: Error(s) in loading state_dict",
    ),
    ("quantize --data sub", "--data sub: no image in it; expected files like .jpg"),
    ("quantize --data noise", "cannot be read as an image"),
    ("quantize --recipe no.json", "--recipe no.json: no such file"),
    ("quantize --recipe noise.json", "config: not JSON"),
    ("quantize --export a.pt", "--export a.pt: expected a name that ends in .onnx"),
    ("quantize --metric user_net:three", "expected"),
]


@pytest.mark.parametrize(
    ("line", "text"),
    REFUSALS,
    ids=[line for line, _ in REFUSALS],
)
def test_what_cannot_work_is_refused_first(
    refused: Refused, files: None, line: str, text: str
) -> None:
    command, *argv = line.split()
    if argv == ["--model"]:
        argv = []
    elif command in NAMED and argv[0].startswith("--") and argv[0][:4] != "--mo":
        argv = [*SOURCE, *argv]  # a later option wins
    assert text in refused(command, *argv)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--exclude head.*", "'head.*' matches no module"),
        ("--export a.onnx --opset 10", "opset 10 has no QuantizeLinear for"),
        ("--recipe mxfp8 --export m.onnx", "ONNX"),
        ("--recipe nvfp4 --export m.onnx", "ONNX"),
    ],
)
def test_what_the_model_shows_is_refused_before_calibration(
    refused: Refused, line: str, text: str
) -> None:
    pytest.importorskip("onnx")
    assert text in refused("quantize", *SOURCE, *line.split(), late=True)


def test_an_unknown_recipe_is_answered_with_all_names(refused: Refused) -> None:
    error = refused("quantize", *MODEL, "--recipe", "int5")
    assert re.search("unknown recipe 'int5'; expected one of: .*'int8'", error)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["quantize", "--model", "user_net:breaks_early"], "breaks_early: KeyError"),
        (["doctor", *MODEL, "--data", "user_net:breaks_early"], "--data user_net:"),
        (
            ["report", *MODEL, "--data", "user_net:breaks_late"],
            "IndexError: no such index",
        ),
        (["quantize", "--model", "raises:x"], "x: ValueError: at import (raises.py"),
    ],
    ids=["factory", "loader", "iterator", "module"],
)
def test_what_a_users_code_raises_is_one_line_with_its_place(
    refused: Refused, argv: list[str], text: str
) -> None:
    Path("raises.py").write_text("raise ValueError('at import')")
    error = refused(*argv)
    assert text in error
    assert re.search(r"\((user_net|raises)\.py, line \d+\)$", error)


@pytest.mark.parametrize("command", ["quantize", "report"])
def test_a_metric_that_gives_no_number_is_an_error(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, *SOURCE, "--metric", "user_net:none"]) == 2
    assert (
        "--metric user_net:none: TypeError: float() argument" in capsys.readouterr().err
    )


def test_every_number_of_the_command_line_has_bounds() -> None:
    """A plain int or float takes -1 and nan, which fail late or pass in silence."""
    for child in build_parser().children.values():
        for action in child._actions:
            kind = action.type
            assert kind not in (int, float), action.option_strings
            assert kind is None or inspect.isfunction(kind) or kind is Path


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_that_is_not_writable_is_refused(refused: Refused) -> None:
    Path("sub").mkdir(mode=0o555)
    assert "is not writable" in refused("quantize", *SOURCE, "--save", "sub/a.pt")


def test_weights_of_classes_that_ask_for_their_version_are_loaded(
    tmp_path: Path,
) -> None:
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    trained = models.mnasnet0_5()
    torch.save(trained.state_dict(), tmp_path / "w.pt")
    model = load_model("torchvision:mnasnet0_5", str(tmp_path / "w.pt"))
    assert torch.equal(model.layers[0].weight, trained.layers[0].weight)
