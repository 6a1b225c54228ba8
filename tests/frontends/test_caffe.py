"""Networks of Caffe: their files are in caffe_files, with what OpenCV computes for them."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.frontends.caffe_writer import (
    RAW_TYPES,
    caffemodel,
    delimited,
    raw_blob,
    varint,
)
from torchq.errors import FrontendError
from torchq.frontends.caffe.messages import parse_text

FOLDER = Path(__file__).parent / "caffe_files"


def files_of(name: str) -> tuple[Path, Path]:
    return FOLDER / f"{name}.prototxt", FOLDER / f"{name}.caffemodel"


def recorded(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the inputs and the outputs that OpenCV computed, by name."""
    with np.load(FOLDER / f"{name}.npz") as arrays:
        actual = {key: torch.from_numpy(arrays[key]) for key in arrays.files}
    inputs = {key[3:]: value for key, value in actual.items() if key.startswith("in:")}
    return inputs, {
        key[4:]: value for key, value in actual.items() if key.startswith("out:")
    }


def outputs_of(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    with torch.no_grad():
        got = model(**inputs)
    return dict(
        zip(model.output_names, got if isinstance(got, tuple) else (got,), strict=True)
    )


@pytest.mark.parametrize("name", ["classifier", "operators"])
def test_networks_compute_what_opencv_computes(name: str) -> None:
    model = torchq.from_caffe(*files_of(name))
    inputs, expected = recorded(name)
    got = outputs_of(model, inputs)
    # OpenCV names the outputs of a layer with several after the layer.
    shared = set(got) & set(expected)
    assert len(shared) >= len(expected) - 3
    for key in shared:
        torch.testing.assert_close(
            got[key],
            expected[key],
            rtol=1e-5,
            atol=1e-5,
        )


def test_slices_and_splits() -> None:
    model = torchq.from_caffe(*files_of("operators"))
    inputs, expected = recorded("operators")
    got = outputs_of(model, inputs)
    x = inputs["data"]
    parts = [got[f"part{i}"] for i in range(3)]
    assert [part.shape[1] for part in parts] == [1, 2, 1]
    assert torch.equal(torch.cat(parts, 1), x)
    assert torch.equal(torch.cat([got["half0"], got["half1"]], 3), x)
    assert torch.equal(got["copy0"], got["copy1"])
    torch.testing.assert_close(
        got["copy0"],
        expected["copies"],
        rtol=1e-5,
        atol=1e-5,
    )


def test_detections_are_those_of_opencv() -> None:
    model = torchq.from_caffe(*files_of("detector"))
    inputs, expected = recorded("detector")
    rows = outputs_of(model, inputs)["found"][0, 0]
    wanted = expected["found"][0, 0]
    assert bool((rows[1:, 1] >= rows[:-1, 1]).all())  # Caffe's order: class after class
    # OpenCV orders by score; here both by score.
    rows = rows[rows[:, 2].argsort(stable=True)]
    torch.testing.assert_close(rows, wanted[wanted[:, 2].argsort(stable=True)])


# --- what becomes of a network ------------------------------------------------------------------


def test_layers_become_modules_under_their_names() -> None:
    model = torchq.from_caffe(*files_of("classifier"))
    assert type(model.conv1) is nn.Conv2d
    assert type(model.fc) is nn.Linear
    assert not hasattr(model, "scale1")  # part of the BatchNorm
    scale = parse_text(files_of("classifier")[0].read_text(), "").messages("layer")[3]
    assert scale.text("name") == "scale1"
    assert type(model.bn1) is nn.BatchNorm2d
    assert model.bn1.weight.std() > 0
    assert model.input_names == ["data"]
    assert model.output_names == ["prob"]
    conv = next(node for node in model.graph.nodes if node.target == "conv1")
    assert (conv.meta["caffe_name"], conv.meta["caffe_op"]) == ("conv1", "Convolution")


OLD = """
name: "old"  # a layer of version 1 that overwrites its input, and layers of the training phase
input: "data" input_dim: 1 input_dim: 2 input_dim: 4 input_dim: 4
layers { name: "train" type: DATA top: "other" include { phase: TRAIN } }
layers { name: 'conv' type: CONVOLUTION bottom: "data" top: "conv"
  blobs_lr: 1 weight_decay: 1 convolution_param { num_output: 3 kernel_size: 1 } }
layers { name: "relu" type: RELU bottom: "conv" top: "conv" }
layers < name: "ip" type: INNER_PRODUCT bottom: "conv" top: "ip"
  inner_product_param: { num_output: 2 } >
layers { name: "loss" type: SOFTMAX_LOSS bottom: "ip" bottom: "label" top: "loss"
  include: { phase: TRAIN } }
"""


def test_layers_of_version_1_are_read() -> None:
    conv = nn.Conv2d(2, 3, 1)
    ip = nn.Linear(48, 2)
    stored = {"conv": list(conv.parameters()), "ip": list(ip.parameters())}
    blobs = {
        name: [p.detach().numpy() for p in layer] for name, layer in stored.items()
    }
    model = torchq.from_caffe(OLD, caffemodel(blobs, old=True))
    x = torch.randn(1, 2, 4, 4)
    torch.testing.assert_close(
        model(x), ip(conv(x).relu().flatten(1)), rtol=1e-5, atol=1e-5
    )
    assert model.output_names == ["ip"]


TRAINED = """
layer { name: "d" type: "Data" top: "data" top: "label" include { phase: TEST } }
layer { name: "d" type: "Data" top: "data" top: "label" include { phase: TRAIN } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
  inner_product_param { num_output: 2 bias_term: false weight_filler { type: "xavier" } } }
layer { name: "accuracy" type: "Accuracy" bottom: "ip" bottom: "label" top: "accuracy" }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


@pytest.mark.parametrize("kind", RAW_TYPES)
def test_raw_data_of_every_width_is_read(kind: str) -> None:
    # Numbers that half precision has.
    weight = np.arange(6, dtype="f").reshape(2, 3) / 4
    layer = delimited(1, b"ip") + delimited(7, raw_blob(weight, kind))
    model = torchq.from_caffe(TRAINED, delimited(100, layer))
    assert model(torch.ones(1, 3, 1, 1)).tolist() == [weight.sum(1).tolist()]


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (
            varint(10 << 3) + varint(7) + delimited(12, b"\0" * 12),
            "ip.*got raw data of type 7",
        ),
        (delimited(10, b"\0" * 6), "ip.*got half_data, which a fork of Caffe writes"),
    ],
)
def test_other_numbers_are_refused_by_name(blob: bytes, message: str) -> None:
    shape = delimited(7, delimited(1, varint(2) + varint(3)))
    layer = delimited(1, b"ip") + delimited(7, shape + blob)
    with pytest.raises(FrontendError, match=message):
        torchq.from_caffe(TRAINED, delimited(100, layer))


def test_labels_and_losses_are_dropped() -> None:
    model = torchq.from_caffe(TRAINED, caffemodel({"ip": [np.ones((2, 3), "f")]}))
    assert model.input_names == ["data"]
    assert model.output_names == ["ip"]
    assert model(torch.ones(1, 3, 1, 1)).tolist() == [[3.0, 3.0]]


def input_layer(name: str, *shape: int) -> str:
    sizes = " ".join(f"dim: {size}" for size in shape)
    fields = f"input_param {{ shape {{ {sizes} }} }}"
    return f'layer {{ name: "{name}" type: "Input" top: "{name}" {fields} }}'


def one_layer(kind: str, fields: str = "", bottoms: int = 1, top: str = "y") -> str:
    inputs = input_layer("x0", 2, 3, 4) + input_layer("x1", 2, 3, 4)
    reads = " ".join(f'bottom: "x{i}"' for i in range(bottoms))
    return (
        f'{inputs} layer {{ name: "y" type: "{kind}" {reads} top: "{top}" {fields} }}'
    )


X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
CASES = [
    ("Clip", "clip_param { min: -0.5 max: 0.25 }", X, X.clamp(-0.5, 0.25)),
    ("Swish", "swish_param { beta: 2 }", X, X / (1 + torch.exp(-2 * X))),
    ("ArgMax", "argmax_param { axis: 1 }", X, X.argmax(1, keepdim=True).float()),
    (
        "Reshape",
        "reshape_param { shape { dim: -1 } axis: 1 num_axes: 2 }",
        X,
        X.reshape(2, 12),
    ),
    ("Flatten", "flatten_param { axis: 0 end_axis: 1 }", X, X.reshape(6, 4)),
    ("Permute", "permute_param { order: 1 }", X, X.permute(1, 0, 2)),
]


@pytest.mark.parametrize(("kind", "fields", "x", "expected"), CASES)
def test_layers_without_weights(
    kind: str, fields: str, x: Tensor, expected: Tensor
) -> None:
    model = torchq.from_caffe(one_layer(kind, fields), caffemodel({}))
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)


def test_factors_that_the_network_computes() -> None:
    given = torchq.from_caffe(
        one_layer("Scale", bottoms=2),
        caffemodel({}),
    )
    assert torch.equal(
        given(X, X[:, :, 0].clone()[0]),
        X * X[0, :, 0].view(1, 3, 1),
    )


def test_a_norm_behind_a_shape_that_is_not_known() -> None:
    message = one_layer(
        "Reshape", "reshape_param { shape { dim: 3 dim: 4 } axis: 1 num_axes: 2 }"
    )
    message += 'layer { name: "bn" type: "BatchNorm" bottom: "y" top: "bn" }'
    states = [
        np.array([1, 2, 3], "f"),
        np.array([4, 4, 4], "f"),
        np.array([1], "f"),
    ]
    model = torchq.from_caffe(message, caffemodel({"bn": states}))
    expected = (X - torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1)) / 2
    torch.testing.assert_close(model(X), expected, rtol=1e-5, atol=1e-5)


def test_a_last_window_outside_of_the_input_is_kept() -> None:
    """With one more column than the stride divides, Caffe gives a maximum of nothing."""
    message = one_layer(
        "Pooling", "pooling_param { pool: MAX kernel_size: 1 stride: 2 }"
    )
    x = torch.randn(1, 2, 4, 4)
    y = torchq.from_caffe(message, caffemodel({}))(x)
    assert y.shape == (1, 2, 3, 3)
    assert torch.equal(
        y[..., :2, :2],
        x[..., ::2, ::2],
    )
    assert y[0, 0, 2, 2] == torch.finfo(torch.float32).min


# --- refusals -----------------------------------------------------------------------------------


def test_unknown_layers_are_named_at_once_with_counts() -> None:
    message = (
        one_layer("Python") + 'layer { name: "z" type: "SPP" bottom: "y" top: "z" }'
    )
    with pytest.raises(FrontendError, match=r"Python \(1\), SPP \(1\)"):
        torchq.from_caffe(message, caffemodel({}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layer { name: ", "got 'the end'"),
        ('layer { name: "a" } }', "got '}'"),
        ("layer { $ }", "got '$ }'"),
        ("layer { " * 100, "more than 32"),
        ("layers { layer { } }", "version 0"),
        ('name: "empty" other { }', "no layers"),
        (one_layer("ReLU", 'bottom: "nothing"'), "reads 'nothing'"),
        (one_layer("ReLU", "relu_param { negative_slop: 1 }"), "fields negative_slop"),
        (one_layer("ReLU", 'relu_param { negative_slope: "1" }'), "expected numbers"),
        (
            one_layer("InnerProduct", "inner_product_param { num_output: 2 }"),
            "lacks its weight",
        ),
        (one_layer("Convolution"), "lacks its weight"),
        (
            one_layer("Eltwise", "eltwise_param { operation: MIN }"),
            "operation is 'MIN'",
        ),
        (one_layer("Pooling", "pooling_param { pool: STOCHASTIC }"), "stochastic"),
        (one_layer("Pooling"), "'kernel_size' is missing|kernel_size is"),
        (one_layer("DetectionOutput"), "'num_classes' is missing"),
        (
            one_layer("Reshape", "reshape_param { shape { dim: 1e30 } }"),
            "whole numbers",
        ),
    ],
)
def test_broken_networks_are_refused(text: str, message: str) -> None:
    pattern = message if "|" in message else re.escape(message)
    with pytest.raises(FrontendError, match=pattern):
        torchq.from_caffe(text, caffemodel({}))


@pytest.mark.parametrize(
    ("kind", "fields", "shapes", "message"),
    [
        ("Convolution", "num_output: 2", [(2, 3)], "0 spatial dimensions"),
        (
            "Convolution",
            "num_output: 2 kernel_size: 3",
            [(2, 3, 1)],
            "(2, 3, 1); expected [2, 3",
        ),
        (
            "Convolution",
            "num_output: 2 kernel_h: 1 kernel_w: 1",
            [(2, 3, 1)],
            "for 1 dimensions",
        ),
        ("InnerProduct", "num_output: 5", [(2, 3)], "for 5 outputs"),
        ("BatchNorm", "use_global_stats: false", [], "of each batch"),
        ("LRN", "local_size: 4", [], "expected an odd number"),
        ("Pooling", "kernel_size: 2 pad: 2", [], "less than the kernel"),
    ],
)
def test_layers_whose_parts_do_not_fit_are_refused(
    kind: str, fields: str, shapes: list[tuple[int, ...]], message: str
) -> None:
    weights = caffemodel({"y": [np.ones(shape, "f") for shape in shapes]})
    snake = {"InnerProduct": "inner_product", "BatchNorm": "batch_norm"}.get(
        kind, kind.lower()
    )
    with pytest.raises(FrontendError, match=re.escape(message)):
        torchq.from_caffe(one_layer(kind, f"{snake}_param {{ {fields} }}"), weights)


def test_forms_of_forks_compute_what_they_say() -> None:
    x = torch.arange(48.0).view(2, 3, 2, 4) - 20

    def net(kind: str, fields: str, bottoms: str = "x", *blobs: np.ndarray) -> Any:
        inputs = input_layer("x", 2, 3, 2, 4) + input_layer("s", 2, 3, 1, 1) * (
            "s" in bottoms
        )
        names = " ".join(f'bottom: "{name}"' for name in bottoms)
        message = (
            f'{inputs} layer {{ name: "y" type: "{kind}" {names} top: "y" {fields} }}'
        )
        return torchq.from_caffe(
            message, caffemodel({"y": list(blobs)} if blobs else {})
        )

    weight = np.arange(3, dtype="f").reshape(3, 1, 1, 1)
    narrow = "convolution_param { num_output: 3 kernel_size: 1 bias_term: false }"
    depthwise = net("DepthwiseConvolution", narrow, "x", weight)
    torch.testing.assert_close(
        depthwise(x), x * torch.from_numpy(weight).view(1, 3, 1, 1)
    )
    matrix = np.arange(48, dtype="f").reshape(24, 2)
    transposed = (
        "inner_product_param { num_output: 2 transpose: true bias_term: false }"
    )
    product = net("InnerProduct", transposed, "x", matrix)
    torch.testing.assert_close(
        product(x),
        x.flatten(1) @ torch.from_numpy(matrix),
    )
    larger = net("Upsample", "upsample_param { scale: 2 }")
    assert torch.equal(
        larger(x),
        x.repeat_interleave(2, 2).repeat_interleave(2, 3),
    )
    s = torch.tensor([0.5, 1.0, 2.0]).view(1, 3, 1, 1).expand(2, 3, 1, 1)
    torch.testing.assert_close(
        net("Axpy", "", "sxx")(x=x, s=s),
        s * x + x,
    )


GOOD = caffemodel({"y": [np.zeros((2, 3), "f")]})
WIDE = delimited(7, delimited(1, varint(2**40) + varint(2**20)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (GOOD[:-1], "is cut off"),
        (GOOD[:9], "is cut off"),
        (b"\xff" * 11, "more than 10 bytes"),
        (b"\x0b", "wire type 3"),
        (delimited(100, delimited(1, b"y") + delimited(7, WIDE)), "got 0 numbers"),
        (
            delimited(100, delimited(1, b"y") + delimited(7, delimited(5, b"123"))),
            "other numbers",
        ),
        (GOOD + GOOD, "two layers 'y'"),
    ],
)
def test_broken_weights_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(FrontendError, match=message):
        torchq.from_caffe(one_layer("ReLU"), data)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FrontendError, match="cannot read the network"):
        torchq.from_caffe(tmp_path / "net.prototxt", b"")
    with pytest.raises(FrontendError, match="cannot read the weights"):
        torchq.from_caffe(one_layer("ReLU"), tmp_path / "net.caffemodel")


def test_text_with_escapes_lists_and_comments() -> None:
    message = parse_text(
        'a: "x\\n\\101" "y" b: [1, 2.5e1] # c: 3\nd { e: TRUE_NAME f: -inf }', "t"
    )
    assert message.values["a"] == ["x\nAy"]
    assert message.values["b"] == [1.0, 25.0]
    assert message.message("d").values == {"e": ["TRUE_NAME"], "f": ["-inf"]}
