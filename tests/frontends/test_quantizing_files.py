"""Files with what real exporters write, quantized for a runtime, written again and deployed."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchq
from tests.frontends.onnx_writer import Writer, assert_agrees


def uneven_pooling() -> Any:
    """Write poolings whose padding is not the same on both sides, as PaddlePaddle and Keras do."""
    w = Writer(11)
    y = w.node("Relu", w.conv(w.input("x", ["n", 3, 17, 17]), 3, 8))
    pooled = w.node(
        "MaxPool", y, kernel_shape=[2, 2], pads=[0, 0, 1, 1], strides=[1, 1]
    )
    same = w.node(
        "MaxPool", y, kernel_shape=[2, 2], strides=[1, 1], auto_pad="SAME_UPPER"
    )
    both = w.conv(w.node("Concat", pooled, same, axis=1), 16, 8)
    rounded = w.node(
        "MaxPool",
        both,
        kernel_shape=[3, 3],
        strides=[2, 2],
        ceil_mode=1,
    )
    return w.model(w.conv(rounded, 8, 4))


def affine_blocks() -> Any:
    """Write a factor and an offset behind convolutions, and hard-swish in its parts."""
    w = Writer(12)
    y = w.input("x", ["n", 3, 17, 17])
    for inputs, outputs in ((3, 8), (8, 16)):
        y = w.node(
            "Conv",
            y,
            w.random(outputs, inputs, 3, 3),
            pads=[1, 1, 1, 1],
        )
        y = w.node(
            "Add",
            w.node("Mul", w.weight(torch.tensor([1.7])), y),
            w.random(1),
        )
        gate = w.node("Add", y, w.constant(3.0))
        gate = w.node(
            "Clip",
            gate,
            w.constant(0.0),
            w.constant(6.0),
        )
        y = w.node(
            "Div",
            w.node("Mul", y, gate),
            w.constant(6.0),
        )
    last = w.node("Conv", y, w.random(4, 16, 1, 1))
    return w.model(w.node("Mul", last, w.weight(torch.tensor([-0.4]))))


def grid_of_a_detector() -> Any:
    """Write a grid that is computed from the sizes of an image, cast to floats."""
    w = Writer(17)
    y = w.conv(w.input("x", ["n", 3, "height", "width"]), 3, 4, stride=2)
    ends = []
    for axis in (2, 3):
        size = w.node(
            "Gather",
            w.node("Shape", y),
            w.constant(axis),
            axis=0,
        )
        bounds = (w.constant(0.0), w.node("Cast", size, to=1))
        ends.append(w.node("Range", *bounds, w.constant(1.0)))
    column = w.node(
        "Unsqueeze",
        ends[0],
        w.constant([1]),
    )
    return w.model(w.node("Add", y, w.node("Mul", column, ends[1])))


CASES: dict[str, Callable[[], Any]] = {
    "uneven pooling": uneven_pooling,
    "affine blocks": affine_blocks,
    "grid of a detector": grid_of_a_detector,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_files_are_quantized_for_a_runtime(name: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(count, 3, 17, 17, generator=generator) for count in (2, 3)]
    model = assert_agrees(
        CASES[name](),
        {"x": batches[0]},
    )
    with torch.no_grad():
        expected = model(batches[0])
    torchq.fuse_(model, batches[0])
    # Weights of 8 bits overflow on CPUs without VNNI.
    config = torchq.recipes.int8(reduce_range=True)
    torchq.quantize_(model, config, target="onnxruntime", example=batches[0])
    torchq.calibrate(model, batches, progress=False)
    with torch.no_grad():
        assert decibels(expected, model(batches[0])) > 20
    with warnings.catch_warnings():
        # Of convolutions that return floats.
        warnings.simplefilter("ignore", UserWarning)
        torchq.export_onnx(
            model,
            batches[0],
            tmp_path / "m.onnx",
            target="onnxruntime",
        )
        int8 = torchq.deploy(model, batches[0], target="torch")
    report = torchq.verify_onnx(model, tmp_path / "m.onnx", batches)
    assert report.ok, report
    with torch.no_grad():
        assert decibels(model(batches[1]), int8(batches[1])) > 30


def decibels(wanted: Tensor, found: Tensor) -> float:
    return float(
        20 * torch.log10(wanted.norm() / (wanted - found).norm().clamp(min=1e-12))
    )
