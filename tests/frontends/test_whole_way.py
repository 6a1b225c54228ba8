"""One script for each of two files: read, fuse, quantize, calibrate, train, export, run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.frontends.onnx_writer import Writer, assert_agrees
from tests.onnx.exported import run_file


def detector() -> Any:
    """Return a file of opset 11: a pyramid of features, boxes decoded and selected in the graph."""
    w = Writer(11)
    x = w.input("images", ["batch", 3, 32, 32])
    low = w.node("Relu", w.conv(x, 3, 8, stride=2))
    high = w.node("LeakyRelu", w.conv(low, 8, 12, stride=2), alpha=0.1)
    # What PyTorch wrote for interpolate(size=low.shape[2:]).
    shape = w.node("Shape", low)
    sizes = w.node(
        "Slice",
        shape,
        w.constant([2]),
        w.constant([4]),
        w.constant([0]),
    )
    whole = w.node(
        "Slice", w.node("Shape", high), *(w.constant([i]) for i in (0, 2, 0))
    )
    target = w.node("Concat", whole, sizes, axis=0)
    empty = w.constant([])
    options = {"nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
    up = w.node("Resize", high, empty, empty, target, mode="nearest", **options)
    merged = w.node("Concat", w.conv(up, 12, 8, kernel=1), low, axis=1)
    merged = w.node(
        "Clip",
        w.conv(merged, 16, 16),
        w.constant(0.0),
        w.constant(6.0),
    )
    weights = w.random(6, 16, 1, 1, name="head.weight"), w.random(6, name="head.bias")
    head = w.node("Conv", merged, *weights, kernel_shape=[1, 1])
    flat = w.node("Reshape", head, w.constant([0, 6, -1]))
    rows = w.node("Transpose", flat, perm=[0, 2, 1])
    deltas, logits = w.node("Split", rows, outputs=2, axis=2, split=[4, 2])
    scores = w.node("Sigmoid", logits)
    anchors = torch.rand(1, 256, 4, generator=w.generator)
    offsets = w.node("Mul", deltas, w.constant([0.2]))
    boxes = w.node("Add", offsets, w.weight(anchors, "anchors"))
    best = w.node("ReduceMax", scores, axes=[2], keepdims=0)
    top, places = w.node("TopK", best, w.constant([20]), outputs=2, axis=1)
    index = w.node("Unsqueeze", places, axes=[2])
    wide = w.node("Expand", index, w.constant([1, 1, 4]))
    kept = w.node("GatherElements", boxes, wide, axis=1)
    classes = w.node("Transpose", scores, perm=[0, 2, 1])
    limits = w.constant([10]), w.constant([0.5]), w.constant([0.3])
    chosen = w.node("NonMaxSuppression", boxes, classes, *limits)
    return w.model(top, kept, (chosen, torch.int64), scores, boxes)


def transformer() -> Any:
    """Return a file of opset 12: tokens, attention in open batch and length, norms in parts."""
    w = Writer(12)
    tokens = w.input("tokens", ["batch", "length"], torch.int64)
    table = w.random(40, 16, scale=1.0, name="embeddings.word.weight")
    places = w.random(32, 16, name="embeddings.position.weight")
    length = w.node(
        "Gather",
        w.node("Shape", tokens),
        w.constant(1),
    )
    numbers = w.node(
        "Range",
        w.constant(0),
        length,
        w.constant(1),
    )
    x = w.node(
        "Add", w.node("Gather", table, tokens), w.node("Gather", places, numbers)
    )
    for layer in range(2):
        x = norm(
            w,
            w.node("Add", x, attention(w, x, f"layer{layer}.")),
            f"layer{layer}.norm1",
        )
        hidden = dense(w, x, 16, 32, f"layer{layer}.up")
        half = w.node("Div", hidden, w.constant(2**0.5))
        gate = w.node(
            "Add",
            w.node("Erf", half),
            w.constant(1.0),
        )
        act = w.node(
            "Mul",
            w.node("Mul", hidden, gate),
            w.constant(0.5),
        )
        x = norm(
            w,
            w.node("Add", x, dense(w, act, 32, 16, f"layer{layer}.down")),
            f"l{layer}.n2",
        )
    pooled = w.node("Gather", x, w.constant(0), axis=1)
    weight = w.random(5, 16, name="classifier.weight")
    bias = w.random(5, name="classifier.bias")
    return w.model(w.node("Gemm", pooled, weight, bias, transB=1), x)


def dense(w: Writer, x: str, inputs: int, outputs: int, name: str) -> str:
    weight = w.random(inputs, outputs, name=f"{name}.weight")
    return str(
        w.node(
            "Add", w.node("MatMul", x, weight), w.random(outputs, name=f"{name}.bias")
        )
    )


def norm(w: Writer, x: str, name: str) -> str:
    """Write LayerNorm as PyTorch did before opset 17."""
    centred = w.node("Sub", x, w.node("ReduceMean", x, axes=[-1]))
    square = w.node("Pow", centred, w.constant(2.0))
    variance = w.node("ReduceMean", square, axes=[-1])
    root = w.node("Sqrt", w.node("Add", variance, w.constant(1e-5)))
    scaled = w.node(
        "Mul", w.node("Div", centred, root), w.random(16, name=f"{name}.weight")
    )
    return str(w.node("Add", scaled, w.random(16, name=f"{name}.bias")))


def attention(w: Writer, x: str, name: str) -> str:
    shape = w.node("Shape", x)
    ends = [w.node("Gather", shape, w.constant(axis)) for axis in (0, 1)]
    ends = [w.node("Unsqueeze", end, axes=[0]) for end in ends]
    target = w.node("Concat", *ends, w.constant([2]), w.constant([8]), axis=0)
    heads = []
    for part, order in (
        ("q", [0, 2, 1, 3]),
        ("k", [0, 2, 3, 1]),
        ("v", [0, 2, 1, 3]),
    ):
        whole = w.node("Reshape", dense(w, x, 16, 16, name + part), target)
        heads.append(w.node("Transpose", whole, perm=order))
    products = w.node("MatMul", heads[0], heads[1])
    scaled = w.node("Div", products, w.constant(8**0.5))
    weights = w.node("Softmax", scaled, axis=3)
    mixed = w.node(
        "Transpose",
        w.node("MatMul", weights, heads[2]),
        perm=[0, 2, 1, 3],
    )
    merged = w.node("Reshape", mixed, w.node("Concat", *ends, w.constant([16]), axis=0))
    return dense(w, merged, 16, 16, f"{name}out")


def images(count: int) -> dict[str, Tensor]:
    return {
        "images": torch.rand(
            count, 3, 32, 32, generator=torch.Generator().manual_seed(count)
        )
    }


def sentences(count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return {"tokens": torch.randint(0, 40, (count, 7), generator=generator)}


CASES = [(detector, images, nn.Conv2d, 3), (transformer, sentences, nn.Linear, 12)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("make", "batch", "kind", "least"), CASES, ids=["detector", "transformer"]
)
@pytest.mark.parametrize("dynamo", [True, False], ids=["export", "torchscript"])
def test_the_whole_way(
    make: Any,
    batch: Any,
    kind: type[nn.Module],
    least: int,
    dynamo: bool,
    tmp_path: Path,
) -> None:
    feeds = batch(2)
    read = assert_agrees(make(), feeds)
    assert sum(type(module) is kind for module in read.modules()) >= least
    torchq.fuse_(read, tuple(feeds.values()))
    assert not any(isinstance(module, nn.BatchNorm2d) for module in read.modules())
    report = torchq.quantize_(read)
    assert sum(isinstance(module, kind) for module in read.modules()) >= least, report
    torchq.calibrate(read, [tuple(feeds.values())], progress=False)
    read.train()
    optimizer = torch.optim.SGD(read.parameters(), lr=1e-3)
    outputs = read(*feeds.values())
    torch.stack(
        [y.square().mean() for y in outputs if y.is_floating_point()]
    ).sum().backward()
    assert all(m.weight.grad is not None for m in read.modules() if isinstance(m, kind))
    optimizer.step()
    read.eval()
    path = tmp_path / "quantized.onnx"
    torchq.export_onnx(read, tuple(feeds.values()), path, dynamo=dynamo)
    for count in (2, 3):  # the batch size stays open
        actual = run_file(path, *batch(count).values(), optimize=True)
        with torch.no_grad():
            expected = read(*batch(count).values())
        compare(actual, expected)


def compare(found: list[Tensor], wanted: tuple[Tensor, ...]) -> None:
    """Compare results; where a value falls between two codes, few elements may differ by one."""
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        close = torch.isclose(
            one.double(),
            other.double(),
            rtol=1e-3,
            atol=1e-3,
        )
        assert float(close.double().mean()) >= 0.97


def test_boxes_are_chosen_in_exported_programs_too() -> None:
    read = torchq.from_onnx(detector())
    feeds = images(2)
    program = torch.export.export(read, (feeds["images"],), strict=False).module()
    with torch.no_grad():
        for one, other in zip(
            program(images(2)["images"]), read(feeds["images"]), strict=True
        ):
            assert torch.equal(one, other)
