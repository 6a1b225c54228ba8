"""Detections of files that were read, in the ONNX files that are written of them."""

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.frontends.onnx_writer import Writer

pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.*no active quantizer"),
]
HERE = Path(__file__).parent
EXPORTERS = pytest.mark.parametrize(
    "dynamo", [True, False], ids=["dynamo", "torchscript"]
)


def ssd(changes: dict[str, str]) -> nn.Module:
    """Return the small SSD of the recorded files, with other fields of its last layer."""
    message = (HERE / "caffe_files/detector.prototxt").read_text()
    for old, new in changes.items():
        assert old in message
        message = message.replace(old, new)
    return torchq.from_caffe(message, HERE / "caffe_files/detector.caffemodel")


def photos(count: int, strength: float) -> Tensor:
    """Return images; a strength of 0 gives images without anything."""
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, 3, 32, 32, generator=generator) * strength


def exported(model: nn.Module, example: Any, folder: Path, dynamo: bool) -> Any:
    path = folder / "detector.onnx"
    torchq.export_onnx(model, example, path, dynamo=dynamo, progress=False)
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def assert_same_detections(
    session: Any, model: nn.Module, *inputs: Tensor
) -> list[Tensor]:
    feeds = {
        v.name: x.numpy() for v, x in zip(session.get_inputs(), inputs, strict=True)
    }
    with torch.no_grad():
        expected = model(*inputs)
    expected = [expected] if isinstance(expected, Tensor) else list(expected)
    for one, other in zip(session.run(None, feeds), expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(one), other, rtol=1e-4, atol=1e-5)
    return expected


SSD = {
    "as it is": {},
    "few": {
        "confidence_threshold: 0.3": "confidence_threshold: 0.6",
        "keep_top_k: 20": "",
    },
    "corners": {
        "CENTER_SIZE": "CORNER",
        "top_k: 50": "top_k: 9",
        "background_label_id: 0": "",
    },
    "no background": {"background_label_id: 0": "background_label_id: -1"},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "dynamo"),
    # What the fields change is a part of the graph that both exporters are given.
    [*((name, False) for name in SSD), ("no background", True)],
)
def test_detections_of_ssd_in_a_file_follow_the_image(
    name: str, dynamo: bool, tmp_path: Path
) -> None:
    model = ssd(SSD[name])
    session = exported(model, photos(1, 1.0), tmp_path, dynamo)
    counts = set()
    for count, strength in ((1, 1.0), (1, 0.0), (1, 4.0), (2, 2.0), (3, 8.0)):
        (actual,) = assert_same_detections(session, model, photos(count, strength))
        counts.add(int((actual[..., 1] >= 0).sum()))
    assert len(counts) >= 3, counts


@pytest.mark.slow
@EXPORTERS
def test_a_file_of_ssd_finds_nothing_where_nothing_is(
    dynamo: bool, tmp_path: Path
) -> None:
    model = ssd({"confidence_threshold: 0.3": "confidence_threshold: 0.6"})
    session = exported(model, photos(1, 4.0), tmp_path, dynamo)
    (none,) = assert_same_detections(session, model, photos(2, 0.0))
    assert torch.equal(none, torch.full((1, 1, 1, 7), -1.0))
    (some,) = assert_same_detections(session, model, photos(2, 4.0))
    assert some.shape[2] > 1
    assert bool((some[..., 1] >= 0).all())


@pytest.mark.sample(2)
@pytest.mark.parametrize("target", ["onnxruntime", "openvino", "tensorrt", "qnn"])
def test_default_boxes_of_a_detector_stay_float(target: str) -> None:
    model = ssd({})
    torchq.quantize_(model, target=target, example=photos(2, 1.0))
    joined = {node.meta.get("caffe_name"): node for node in model.graph.nodes}
    assert joined["prior"].target is torch.cat
    assert str(joined["loc"].target).startswith("quant_cat")


@EXPORTERS
def test_regions_of_a_file_that_was_read_follow_their_boxes(
    dynamo: bool, tmp_path: Path
) -> None:
    w = Writer(16)
    x = w.input("x", ["n", 3, 8, 8])
    rois = w.input("rois", ["k", 4])
    places = w.input("places", ["k"], torch.int64)
    options = {"output_height": 2, "output_width": 3, "sampling_ratio": 2}
    model = torchq.from_onnx(
        w.model(w.node("RoiAlign", w.conv(x, 3, 4), rois, places, **options))
    )
    boxes = torch.tensor([[0.0, 0, 4, 4], [1, 1, 6, 7], [2, 0, 7, 4]])
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    example = (images, boxes[:2], torch.tensor([0, 1]))
    path = tmp_path / "regions.onnx"
    open_sizes = {"rois": {0: "k"}, "places": {0: "k"}}
    torchq.export_onnx(
        model,
        example,
        path,
        dynamo=dynamo,
        dynamic_batch=False,
        dynamic_shapes=open_sizes,
    )
    session = onnxruntime.InferenceSession(
        str(path), providers=["CPUExecutionProvider"]
    )
    assert_same_detections(session, model, *example)
    assert_same_detections(session, model, images, boxes, torch.tensor([1, 0, 1]))
