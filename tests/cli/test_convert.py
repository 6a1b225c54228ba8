"""``torchq convert``, and ``torchq quantize`` of files of other frameworks."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import torchq
from tests.processes import run_code
from torchq.cli import main

FILES = Path(__file__).parents[1] / "frontends"


@pytest.mark.parametrize(
    "name", ["mxnet_files/classifier-symbol.json", "caffe_files/classifier.prototxt"]
)
def test_a_file_becomes_a_program(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "model.pt2"
    assert main(["convert", str(FILES / name), "--to", str(target)]) == 0
    assert "torch.export.load" in capsys.readouterr().out
    x = torch.randn(2, 3, 16, 16)
    if name.endswith("json"):
        model = torchq.from_mxnet(
            FILES / name, FILES / "mxnet_files/classifier-0000.params"
        )
    else:
        model = torchq.from_caffe(
            FILES / name, FILES / "caffe_files/classifier.caffemodel"
        )
    torch.testing.assert_close(
        torch.export.load(target).module()(x),
        model(x),
    )


def test_the_shape_of_an_input_may_be_given(tmp_path: Path) -> None:
    network = tmp_path / "net.prototxt"
    network.write_text(
        'input: "x" layer { name: "y" type: "ReLU" bottom: "x" top: "y" }'
    )
    (tmp_path / "net.caffemodel").write_bytes(b"")
    target = str(tmp_path / "net.pt2")
    command = ["convert", str(network), "--to", target]
    assert main(command) == 2
    assert main([*command, "--shape", "4,5"]) == 0
    assert torch.export.load(target).module()(-torch.ones(4, 5)).sum() == 0


def test_a_network_of_mxnet_is_quantized_in_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchvision", reason="reads images")
    image = pytest.importorskip("PIL.Image", reason="writes images")
    for name in ("classifier-symbol.json", "classifier-0000.params"):
        shutil.copy(FILES / "mxnet_files" / name, tmp_path / name)
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(2):
        pixels = torch.randint(0, 255, (16, 16, 3), dtype=torch.uint8)
        image.fromarray(pixels.numpy()).save(photos / f"{number}.png")
    saved = tmp_path / "int8.pt"
    command = [
        "quantize",
        str(tmp_path / "classifier-symbol.json"),
        "--data",
        str(photos),
    ]
    assert main([*command, "--image-size", "16", "--save", str(saved)]) == 0
    out = capsys.readouterr().out
    assert saved.exists()
    assert "torchq.from_mxnet(" in out
    assert "classifier-0000.params" in out


SUPPRESSED = """
import torch
import torchq.frontends
boxes = torch.tensor([[[0., 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3]]])
scores = torch.tensor([[[0.9, 0.8, 0.7]]])
print(torch.export.load({path!r}).module()(boxes, scores).tolist())
"""


@pytest.mark.slow
def test_the_line_that_loads_a_file_defines_its_operators(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The choice of detections is an operator of torchq."""
    onnx = pytest.importorskip("onnx")
    graph = onnx.parser.parse_graph("""
        chosen (float[1, 3, 4] boxes, float[1, 1, 3] scores) => (int64[n, 3] y)
            <int64[1] most = {5}, float[1] overlap = {0.5}> {
            y = NonMaxSuppression (boxes, scores, most, overlap)
        }
    """)
    network = tmp_path / "net.onnx"
    onnx.save(onnx.helper.make_model(graph), network)
    target = str(tmp_path / "net.pt2")
    assert main(["convert", str(network), "--to", target]) == 0
    assert "import torchq.frontends; torch.export.load" in capsys.readouterr().out
    code = SUPPRESSED.format(path=target)
    assert json.loads(run_code(code)) == [[0, 0, 0], [0, 0, 2]]
