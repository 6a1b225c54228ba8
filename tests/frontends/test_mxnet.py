"""Networks of MXNet: their files are in mxnet_files, with what MXNet 1.9.1 computes for them."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.errors import FrontendError
from torchq.frontends.mxnet.params import read_params

FOLDER = Path(__file__).parent / "mxnet_files"
NETWORKS = sorted(path.stem for path in FOLDER.glob("*.npz"))


def files_of(name: str) -> tuple[Path, Path]:
    return FOLDER / f"{name}-symbol.json", FOLDER / f"{name}-0000.params"


def recorded(name: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the inputs by name and the outputs that MXNet computed."""
    with np.load(FOLDER / f"{name}.npz") as arrays:
        actual = {key: torch.from_numpy(arrays[key]) for key in arrays.files}
    inputs = {key[3:]: value for key, value in actual.items() if key.startswith("in:")}
    count = len(actual) - len(inputs)
    return inputs, [actual[f"out:{i}"] for i in range(count)]


def compare(name: str, symbol: str | Path | None = None) -> None:
    """Compare a network, or another text of it, with MXNet: both compute in float32.

    The softmax of the classifier is near 1 and 0 whatever the layers before it do, but the
    logarithm of its smallest values is their result: these must agree to digits of their own.
    """
    own, params = files_of(name)
    inputs, expected = recorded(name)
    with torch.no_grad():
        got = torchq.from_mxnet(symbol or own, params)(**inputs)
    for output, wanted in zip(
        got if isinstance(got, tuple) else (got,), expected, strict=True
    ):
        torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)
        if name == "classifier":
            torch.testing.assert_close(
                output.log(),
                wanted.log(),
                rtol=1e-5,
                atol=1e-5,
            )


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_compute_what_mxnet_computes(name: str) -> None:
    compare(name)


# --- older files --------------------------------------------------------------------------------


def in_dialect_of_version_8(text: str) -> str:
    """Return a symbol as versions up to 0.8 wrote it: ``param``, and no auxiliary states."""
    data = json.loads(text)
    old: list[dict[str, Any]] = []
    number: dict[int, int] = {}
    for place, node in enumerate(data["nodes"]):
        if node["name"].endswith(("_moving_mean", "_moving_var")):
            continue
        attributes = {
            k: v for k, v in node.get("attrs", {}).items() if not k.startswith("__")
        }
        inputs = [[number[nid], out] for nid, out, _ in node["inputs"] if nid in number]
        number[place] = len(old)
        entry = {
            "op": node["op"],
            "name": node["name"],
            "param": attributes,
            "inputs": inputs,
        }
        old.append(entry | {"backward_source_id": -1, "attr": {"ctx_group": "stage1"}})
    heads = [[number[nid], out] for nid, out, _ in data["heads"]]
    return json.dumps({"nodes": old, "arg_nodes": [], "heads": heads})


def in_dialect_of_version_9(text: str) -> str:
    """Return a symbol as versions 0.9 to 0.12 wrote it: ``attr``, also for variables."""
    data = json.loads(text)
    for node in data["nodes"]:
        node["attr"] = node.pop("attrs", {}) | {
            "__lr_mult__": "1.0",
            "weight_lr_mult": "2",
        }
    data["attrs"] = {"mxnet_version": ["int", 905]}
    return json.dumps(data)


@pytest.mark.parametrize("dialect", [in_dialect_of_version_8, in_dialect_of_version_9])
def test_older_dialects_are_read(dialect: Callable[[str], str]) -> None:
    compare("classifier", dialect(files_of("classifier")[0].read_text()))


#: Names of version 0.8 that differ from those of 1.9.
OLD_NAMES = {"elemwise_add": "_Plus", "elemwise_sub": "_Minus", "elemwise_mul": "_Mul"}
OLD_NAMES |= {
    "elemwise_div": "_Div",
    "add_n": "ElementWiseSum",
    "_rminus_scalar": "_RMinusScalar",
}
OLD_NAMES |= {"_rdiv_scalar": "_RDivScalar", "_rpower_scalar": "_RPowerScalar"}
OLD_NAMES |= {
    f"_{kind}_scalar": f"_{kind.title()}Scalar" for kind in ("plus", "minus", "power")
}
OLD_NAMES |= {
    f"_{kind}": f"_{kind.title()}" for kind in ("maximum", "greater", "not_equal")
}
OLD_NAMES |= {"_greater_equal_scalar": "_GreaterEqualScalar"}


#: Other names of operators, which files of some version hold.
ALIASES = {
    "binary": OLD_NAMES,
    "classifier": {"BatchNorm": "BatchNorm_v1", "Convolution": "Convolution_v1"}
    | {"Pooling": "Pooling_v1", "Flatten": "flatten", "SoftmaxOutput": "Softmax"},
    "reductions": {name: f"{name}_axis" for name in ("sum", "max", "min")},
    "movement": {"Concat": "concat", "Reshape": "reshape", "SliceChannel": "split"},
    "unary": {"Cast": "cast"},
}


@pytest.mark.parametrize("name", ALIASES)
def test_other_names_of_operators_are_read(name: str) -> None:
    data = json.loads(files_of(name)[0].read_text())
    for node in data["nodes"]:
        node["op"] = ALIASES[name].get(
            node["op"],
            node["op"],
        )
    assert {node["op"] for node in data["nodes"]} >= set(ALIASES[name].values())
    compare(name, json.dumps(data))


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"\((\d+), (\d+)\)", r"[\1, \2]"),
        (r"\((\d+), (\d+)\)", r"(\1L,\2L)"),
        (r"\((\d+),\)", r"[\1]"),
        ("False", "0"),
        ("True", "1"),
    ],
)
def test_attributes_in_the_writing_of_other_versions_are_read(
    pattern: str, text: str
) -> None:
    own = files_of("convolutions")[0].read_text()
    changed, count = re.subn(f'"{pattern}"', f'"{text}"', own)
    assert count > 0
    compare("convolutions", changed)


def shape_bytes(shape: tuple[int, ...]) -> bytes:
    return struct.pack(f"<i{len(shape)}q", len(shape), *shape)


FLAGS = {
    "float32": 0,
    "float64": 1,
    "float16": 2,
    "uint8": 3,
    "int32": 4,
    "int8": 5,
    "int64": 6,
}


def array_bytes(version: int, array: Any) -> bytes:
    """Write an array in a version of the format, from its description."""
    tail = struct.pack("<iii", 1, 0, FLAGS[array.dtype.name]) + array.tobytes()
    if version == 0:
        return struct.pack(f"<I{array.ndim}I", array.ndim, *array.shape) + tail
    storage = b"" if version == 1 else bytes(4)
    return (
        struct.pack("<I", 0xF993FAC7 + version)
        + storage
        + shape_bytes(array.shape)
        + tail
    )


def params_bytes(arrays: dict[str, bytes]) -> bytes:
    names = b"".join(struct.pack("<Q", len(name)) + name.encode() for name in arrays)
    count = struct.pack("<Q", len(arrays))
    return (
        struct.pack("<QQ", 0x112, 0) + count + b"".join(arrays.values()) + count + names
    )


@pytest.mark.parametrize("version", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", FLAGS)
def test_each_version_of_arrays_is_read(version: int, dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    actual = read_params(params_bytes({"arg:w": array_bytes(version, array)}), "test")
    assert torch.equal(actual["w"], torch.from_numpy(array))


def test_scalars_and_empty_arrays_are_read() -> None:
    scalar = array_bytes(3, np.float32(2.5).reshape(()))
    # Nothing follows a shape without dimensions.
    empty = struct.pack("<Iii", 0xF993FAC9, 0, 0)
    actual = read_params(params_bytes({"a": scalar, "b": empty}), "test")
    assert actual["a"].shape == ()
    assert actual["a"] == 2.5
    assert actual["b"].numel() == 0


def test_sparse_arrays_are_read_with_their_zeros() -> None:
    rows = struct.pack("<Ii", 0xF993FAC9, 1) + shape_bytes((1, 2)) + shape_bytes((3, 2))
    rows += struct.pack("<iii", 1, 0, 0) + struct.pack("<i", 6) + shape_bytes((1,))
    rows += np.float32([5, 6]).tobytes() + np.int64([1]).tobytes()
    csr = struct.pack("<Ii", 0xF993FAC9, 2) + shape_bytes((2,)) + shape_bytes((2, 3))
    csr += struct.pack("<iii", 1, 0, 0)
    csr += (
        struct.pack("<i", 6)
        + shape_bytes((3,))
        + struct.pack("<i", 6)
        + shape_bytes((2,))
    )
    csr += (
        np.float32([7, 8]).tobytes()
        + np.int64([0, 1, 2]).tobytes()
        + np.int64([2, 0]).tobytes()
    )
    actual = read_params(params_bytes({"rows": rows, "csr": csr}), "test")
    assert actual["rows"].tolist() == [[0, 0], [5, 6], [0, 0]]
    assert actual["csr"].tolist() == [[0, 0, 7], [8, 0, 0]]


# --- what becomes of a network ------------------------------------------------------------------


def test_layers_become_modules_under_their_names() -> None:
    model = torchq.from_mxnet(*files_of("classifier"))
    assert type(model.conv0) is nn.Conv2d
    assert type(model.fc1) is nn.Linear
    assert type(model.bn0) is nn.BatchNorm2d
    assert type(model.prelu0) is nn.PReLU
    assert model.input_names == ["data"]
    assert model.output_names == ["softmax"]
    conv = next(node for node in model.graph.nodes if node.target == "conv0")
    assert (conv.meta["mxnet_name"], conv.meta["mxnet_op"]) == ("conv0", "Convolution")


def test_a_fixed_gamma_counts_as_one_and_stays_one() -> None:
    model = torchq.from_mxnet(*files_of("classifier"))
    assert torch.equal(model.bn_data.weight, torch.ones(3))
    assert not model.bn_data.weight.requires_grad
    assert model.bn0.weight.requires_grad
    assert model.bn0.eps == 2e-5
    assert model.bn_data.momentum == pytest.approx(0.1)


def test_the_whole_way_to_a_quantized_model() -> None:
    model = torchq.from_mxnet(*files_of("classifier"))
    (x,) = recorded("classifier")[0].values()
    expected = model(x)
    report = torchq.fuse_(model, x)
    assert [fusion.name for fusion in report.fused] == ["conv0"]
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
    torchq.quantize_(model)
    torchq.calibrate(model, [x], progress=False)
    assert (model(x) - expected).abs().max() < 0.1  # probabilities on 8-bit codes


# --- refusals -----------------------------------------------------------------------------------


def one_operator(op: str, attributes: dict[str, str], inputs: int = 1) -> str:
    variables = [{"op": "null", "name": f"v{i}", "inputs": []} for i in range(inputs)]
    reads = [[i, 0, 0] for i in range(inputs)]
    node = {"op": op, "name": "node", "attrs": attributes, "inputs": reads}
    return json.dumps({"nodes": [*variables, node], "heads": [[inputs, 0, 0]]})


def test_unknown_operators_are_named_at_once_with_counts() -> None:
    data = json.loads(one_operator("Custom", {}))
    data["nodes"] += [dict(data["nodes"][1], op=op) for op in ("CTCLoss", "Custom")]
    with pytest.raises(FrontendError, match=r"CTCLoss \(1\), Custom \(2\)"):
        torchq.from_mxnet(json.dumps(data), {})


BROKEN = [
    (one_operator("relu", {"slope": "1"}), "attributes slope, which are not supported"),
    (
        one_operator("Convolution", {"kernel": "(3, 3)", "num_filter": "2"}, 2),
        "not a parameter",
    ),
    (one_operator("Activation", {"act_type": "swish"}), "act_type is 'swish'"),
    (one_operator("Activation", {}), "'act_type' is missing"),
    (
        one_operator("Pooling", {"kernel": "__import__('os')"}),
        "expected a tuple of whole numbers",
    ),
    (one_operator("_zeros", {"shape": "(99999999, 99999999)"}, 0), "at most"),
    (
        one_operator("sum", {"axis": "(0,"}).replace("[[0, 0, 0]]", "[[7, 0, 0]]", 1),
        "got node 7",
    ),
    ('{"nodes": 3}', "no list of nodes"),
    ('{"nodes": [], "heads": []}', "without heads"),
    ("{" * 100_000, "not JSON"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN)
def test_broken_symbols_are_refused(text: str, message: str) -> None:
    with pytest.raises(FrontendError, match=re.escape(message)):
        torchq.from_mxnet(text, {})


SMALL = {"kernel": "(1, 1)", "num_filter": "2"}


@pytest.mark.parametrize(
    ("op", "attributes", "shapes", "message"),
    [
        (
            "Convolution",
            {"kernel": "(1,1,1,1)", "num_filter": "2"},
            [(2, 1)],
            "1 to 3 sizes",
        ),
        (
            "Convolution",
            {"kernel": "(3, 3)", "num_filter": "2"},
            [(2, 1, 1, 1)],
            "expected kernel",
        ),
        (
            "Convolution",
            SMALL | {"num_filter": "3"},
            [(2, 1, 1, 1)],
            "expected num_filter, 3",
        ),
        (
            "Convolution",
            SMALL,
            [(2, 1, 1, 1), (3,)],
            "its bias has shape (3,); expected (2,)",
        ),
        (
            "Deconvolution",
            SMALL | {"adj": "(1, 1)"},
            [(1, 1, 1, 1)],
            "less than the stride",
        ),
        (
            "FullyConnected",
            {"num_hidden": "3", "no_bias": "True"},
            [(2, 4)],
            "expected (3, any)",
        ),
        (
            "Embedding",
            {"input_dim": "3", "output_dim": "4"},
            [(4, 3)],
            "expected (3, 4)",
        ),
        (
            "Pooling",
            {"kernel": "(2, 2)", "pool_type": "lp"},
            [],
            "a pooling of type 'lp'",
        ),
        (
            "Pooling",
            {"kernel": "(2, 2)", "stride": "(1,)"},
            [],
            "expected 1 to 3 sizes",
        ),
        (
            "UpSampling",
            {"scale": "2", "sample_type": "cubic"},
            [],
            "nearest or bilinear",
        ),
        (
            "UpSampling",
            {"scale": "2", "sample_type": "nearest"},
            [(1,)],
            "got 2 inputs",
        ),
        ("Crop", {}, [], "got no size to crop to"),
        ("BatchNorm", {}, [(2,), (2,), (3,), (2,)], "expected equal ones"),
        ("LayerNorm", {"axis": "1"}, [(2,), (2,)], "axis is 1; expected the last one"),
        (
            "L2Normalization",
            {"mode": "row"},
            [],
            "expected instance, channel or spatial",
        ),
        ("LeakyReLU", {"act_type": "swish"}, [], "expected prelu or one of"),
        ("SoftmaxActivation", {"mode": "row"}, [], "expected instance or channel"),
    ],
)
def test_operators_whose_parts_do_not_fit_are_refused(
    op: str, attributes: dict[str, str], shapes: list[tuple[int, ...]], message: str
) -> None:
    text = one_operator(op, attributes, 1 + len(shapes))
    parameters = {f"v{i}": torch.ones(shape) for i, shape in enumerate(shapes, 1)}
    with pytest.raises(FrontendError, match=re.escape(message)):
        torchq.from_mxnet(text, parameters)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FrontendError, match="cannot read the symbol"):
        torchq.from_mxnet(tmp_path / "net-symbol.json", {})
    with pytest.raises(FrontendError, match="cannot read the parameters"):
        torchq.from_mxnet(files_of("unary")[0], tmp_path / "net-0000.params")


GOOD = params_bytes({"w": array_bytes(2, np.zeros((2, 3), np.float32))})
HUGE = struct.pack("<Ii", 0xF993FAC9, 0) + shape_bytes((2**40, 2**20))
SPARSE = (
    struct.pack("<Ii", 0xF993FAC9, 1) + shape_bytes((0, 1)) + shape_bytes((2**50, 1))
)
SPARSE += struct.pack("<iiiii", 1, 0, 0, 6, 1) + struct.pack("<q", 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cut off"),
        (b"\x00" * 64, "expected 0x112"),
        (b"PK\x03\x04" + b"\x00" * 64, ".npz"),
        (GOOD[:-20], "cut off"),
        (GOOD + b"\x00", "1 bytes behind"),
        (params_bytes({"w": HUGE + struct.pack("<iii", 1, 0, 0)}), "cut off"),
        (params_bytes({"w": SPARSE}), "sparse array of shape"),
        (params_bytes({"w": struct.pack("<Ii", 0xF993FAC9, 9)}), "storage type 9"),
        (struct.pack("<QQQ", 0x112, 0, 2**60), "more than the file can hold"),
        (
            GOOD.replace(struct.pack("<iii", 1, 0, 0), struct.pack("<iii", 1, 0, 99)),
            "type 99",
        ),
    ],
)
def test_broken_parameters_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(FrontendError, match=re.escape(message)):
        read_params(data, "test")


def test_outputs_of_one_node_have_different_names() -> None:
    data = json.loads(one_operator("SliceChannel", {"num_outputs": "2"}))
    act = {
        "op": "Activation",
        "name": "act",
        "inputs": [[0, 0]],
        "attrs": {"act_type": "relu"},
    }
    data |= {"nodes": [*data["nodes"], act], "heads": [[1, 1], [2, 0], [1, 0]]}
    model = torchq.from_mxnet(json.dumps(data), {})
    assert model.output_names == ["node_output1", "act", "node_output0"]


@pytest.mark.parametrize("squeezed", [False, True])
def test_splits_that_do_not_come_out_even_are_refused_as_by_mxnet(
    squeezed: bool,
) -> None:
    attributes = {"num_outputs": "2", "squeeze_axis": str(squeezed)}
    model = torchq.from_mxnet(one_operator("SliceChannel", attributes), {})
    assert model(torch.ones(1, 2, 5)).shape == ((1, 5) if squeezed else (1, 1, 5))
    message = (
        r"SliceChannel: got 3 entries along axis 1 to split into 2 parts; expected"
    )
    with pytest.raises(FrontendError, match=message):
        model(torch.ones(1, 3, 5))


def test_parts_that_are_squeezed_have_one_entry() -> None:
    attributes = {"num_outputs": "2", "squeeze_axis": "True"}
    model = torchq.from_mxnet(one_operator("SliceChannel", attributes), {})
    with pytest.raises(FrontendError, match=r"got 4 entries .* expected 2"):
        model(torch.ones(1, 4, 5))
