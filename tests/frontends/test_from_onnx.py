"""What becomes of a file: modules, names, shared weights, open sizes; and what is refused."""

import copy
import functools
import io
import os
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.frontends.onnx_writer import Writer, assert_agrees, run_reference
from tests.models import StagedNet
from torchq.errors import FrontendError, InputError
from torchq.frontends.onnx import CONVERTERS, converter

onnx = pytest.importorskip("onnx", reason="writes the files")


def exported(model: nn.Module, x: Tensor, **options: Any) -> bytes:
    """Return the file that torch's older exporter writes; that exporter warns of its age."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.onnx.export(model, (x,), buffer, dynamo=False, **options)
    return buffer.getvalue()


def test_a_network_comes_back_under_the_names_of_its_weights() -> None:
    model = StagedNet().eval()
    x = torch.randn(2, 3, 8, 8)
    read = torchq.from_onnx(exported(model, x, opset_version=17))
    torch.testing.assert_close(
        read(x),
        model(x),
        rtol=1e-5,
        atol=1e-6,
    )
    assert type(read.get_submodule("layer4.conv")) is nn.Conv2d
    assert type(read.get_submodule("head.0")) is nn.Linear
    assert torch.equal(
        read.state_dict()["layer4.conv.weight"], model.layer4.conv.weight
    )


def test_the_whole_way_from_a_file_to_a_quantized_file(tmp_path: Path) -> None:
    model = StagedNet().eval()
    x = torch.randn(4, 3, 8, 8)
    read = torchq.from_onnx(exported(model, x, opset_version=13), free_batch=True)
    torchq.fuse_(read, x)
    torchq.quantize_(read)
    torchq.calibrate(read, [x], progress=False)
    read.train()
    before = read.head.get_submodule("0").weight.detach().clone()
    optimizer = torch.optim.SGD(read.parameters(), lr=0.1)
    read(x).square().mean().backward()
    optimizer.step()
    assert not torch.equal(before, read.head.get_submodule("0").weight)
    read.eval()
    torchq.export_onnx(read, x, tmp_path / "q.onnx")
    again = torchq.from_onnx(tmp_path / "q.onnx")
    assert torch.equal(again(x), read(x))


def test_sizes_that_a_file_leaves_open_stay_open() -> None:
    w = Writer(17)
    x = w.input("x", ["batch", 2, 3])
    batch = w.node(
        "Gather",
        w.node("Shape", x),
        w.weight(torch.tensor(0)),
    )
    vector = w.node("Unsqueeze", batch, w.weight(torch.tensor([0])))
    target = w.node("Concat", vector, w.weight(torch.tensor([-1])), axis=0)
    read = torchq.from_onnx(w.model(w.node("Reshape", x, target)))
    for batch in (1, 5):
        assert read(torch.randn(batch, 2, 3)).shape == (batch, 6)
    sizes = ({0: torch.export.Dim("b")},)
    program = torch.export.export(read, (torch.randn(4, 2, 3),), dynamic_shapes=sizes)
    assert program.module()(torch.randn(7, 2, 3)).shape == (7, 6)


def padded_to_blocks() -> Any:
    """Return a file that pads signals to whole blocks of 8, and 16 numbers at least.

    It cuts them into blocks then.
    """
    w = Writer(17)
    x = w.input("x", [1, "samples"])
    one = w.constant([1])
    length = w.node("Slice", w.node("Shape", x), one, w.constant([2]))
    least = w.node("Max", length, w.constant([16]))
    rounded = w.node("Add", least, w.constant([7]))
    blocks = w.node("Min", w.node("Div", rounded, w.constant([8])), w.constant([512]))
    missing = w.node(
        "Neg", w.node("Sub", length, w.node("Mul", blocks, w.constant([8])))
    )
    pads = w.node("Concat", w.constant([0, 0, 0]), missing, axis=0)
    padded = w.node("Pad", x, pads)
    cut = w.node("Reshape", padded, w.constant([-1, 8]))
    return w.model(w.node("MatMul", cut, w.weight(torch.randn(8, 4))))


@pytest.mark.parametrize("dynamo", [True, False])
def test_the_larger_and_smaller_of_sizes_are_sizes(
    dynamo: bool, tmp_path: Path
) -> None:
    read = assert_agrees(padded_to_blocks(), {"x": torch.randn(1, 30)}).eval()
    examples = [torch.randn(1, n) for n in (30, 41, 5)]
    assert [len(read(x)) for x in examples] == [4, 6, 2]
    torchq.quantize_(read, target="onnxruntime", example=examples[0], progress=False)
    torchq.calibrate(read, examples, progress=False)
    lengths = {"x": {1: "samples"}}
    path = tmp_path / "net.onnx"
    torchq.export_onnx(
        read, examples[0], path, dynamic_shapes=lengths, dynamo=dynamo, progress=False
    )
    report = torchq.verify_onnx(read, path, examples, progress=False)
    assert report.ok, report


def test_a_shared_initializer_is_one_parameter() -> None:
    w = Writer(17)
    shared = w.random(2, 2, 1, 1)
    y = w.node("Conv", w.node("Conv", w.input("x", [1, 2, 4, 4]), shared), shared)
    read = torchq.from_onnx(w.model(y))
    first, second = (module for module in read.modules() if type(module) is nn.Conv2d)
    assert first.weight is second.weight
    assert len(list(read.parameters())) == 1


@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("shape", [(1, 5, 1, 1), (5, 1, 1)])
def test_a_convolution_and_the_bias_behind_it_are_one_layer(
    kind: str, shape: tuple[int, ...]
) -> None:
    """So Paddle writes biases. Without it nothing quantizes the result of the layer."""
    w = Writer(17)
    x = w.input("x", [2, 5, 7, 7])
    product = w.node(kind, x, w.random(5, 5, 3, 3))
    total = w.node("Relu", w.node("Add", product, w.random(*shape)))
    last = w.node(kind, total, w.random(5, 5, 1, 1))
    width = 5 if kind == "Conv" else 9
    other = w.node("Add", last, w.random(1, 1, 1, width))
    read = assert_agrees(w.model(other), {"x": torch.randn(2, 5, 7, 7)})
    first, second = [
        module
        for module in read.modules()
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d))
    ]
    assert first.bias is not None
    assert second.bias is None  # What is added there belongs to a column.


@pytest.mark.parametrize("shape", [(5,), (1, 5)])
def test_a_product_and_the_bias_behind_it_are_one_layer(shape: tuple[int, ...]) -> None:
    weight = torch.randn(3, 5)
    bias = torch.randn(5)
    w = Writer(17)
    product = w.node(
        "MatMul",
        w.input("x", [4, 3]),
        w.weight(weight, "fc.weight"),
    )
    total = w.node("Add", w.weight(bias.reshape(shape)), product)
    read = torchq.from_onnx(w.model(total))
    x = torch.randn(4, 3)
    assert type(read.fc) is nn.Linear
    assert torch.equal(read.fc.bias, bias)
    torch.testing.assert_close(
        read(x),
        x @ weight + bias,
    )
    two = w.model(total, w.node("Relu", product))
    # The product itself has a reader: the bias stays outside.
    y, raw = torchq.from_onnx(two)(x)
    torch.testing.assert_close(
        (y, raw),
        (x @ weight + bias, (x @ weight).relu()),
    )


def test_layers_behind_an_operator_of_ones_own_are_modules() -> None:
    """Shape inference of the package onnx stops there."""
    converter("Twice", domain="acme")(
        lambda node: node.call(torch.mul, node.inputs[0], 2.0)
    )
    try:
        w = Writer(17)
        x = w.node("Twice", w.input("x", ["n", 3, 4, 6]), domain="acme")
        x = w.node("MatMul", x, w.random(6, 8, name="fc.weight"))
        x = w.node("MaxPool", x, kernel_shape=[2, 2])
        read = torchq.from_onnx(w.model(x))
    finally:
        CONVERTERS.remove("acme.Twice")
    assert type(read.fc) is nn.Linear
    assert any(type(module) is nn.MaxPool2d for module in read.modules())
    assert read(torch.randn(2, 3, 4, 6)).shape == (2, 3, 3, 7)


def test_attention_is_read_by_its_definition_and_quantized(tmp_path: Path) -> None:
    w = Writer(23)
    x = w.input("x", ["n", 4, 8])
    q, k, v = (w.node("MatMul", x, w.random(8, 8)) for _ in range(3))
    y = w.node("Attention", q, k, v, q_num_heads=2, kv_num_heads=2)
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    read = assert_agrees(
        w.model(w.node("MatMul", y, w.random(8, 8))),
        {"x": x},
    )
    expected = read(x).detach()
    torchq.quantize_(read)
    torchq.calibrate(read, [x], progress=False)
    assert float((read(x).detach() - expected).norm() / expected.norm()) < 0.05
    torchq.export_onnx(read, x, tmp_path / "int8.onnx")
    assert torchq.verify_onnx(read, tmp_path / "int8.onnx", [x]).ok


def test_the_result_can_be_copied_pickled_and_traced() -> None:
    w = Writer(17)
    x = w.input("x", [1, 2, 4, 4])
    scales = w.weight(torch.tensor([1.0, 1.0, 1.5, 2.5]))
    y = w.node("Resize", x, "", scales, mode="cubic", exclude_outside=1)
    read = torchq.from_onnx(w.model(w.node("Relu", y)))
    x = torch.randn(1, 2, 4, 4)
    expected = read(x)
    copies = copy.deepcopy(read), pickle.loads(pickle.dumps(read))
    for other in (*copies, torch.fx.symbolic_trace(read)):
        assert torch.equal(other(x), expected)
        assert [node.target for node in other.graph.nodes] == [
            node.target for node in read.graph.nodes
        ]
        # torch.fx would keep the globals of each copy for ever, and patch all of them in a trace.
        assert "wrap(" not in other.code
    assert {node.meta.get("onnx_op") for node in read.graph.nodes} >= {"Resize", "Relu"}


def test_names_of_a_file_cannot_become_code() -> None:
    evil = 'z", None) or exec("raise SystemExit") or getattr(self, "0'
    w = Writer(17)
    y = w.node(
        "Conv", w.input("x", [1, 1, 2, 2]), w.weight(torch.ones(1, 1, 1, 1), evil)
    )
    y = w.node(
        "Add",
        w.node("Relu", y),
        w.weight(torch.ones(1, 1, 1, 2), "forward"),
    )
    for node, name in zip(w.nodes, (evil, "class", "forward"), strict=True):
        node.name = name
    read = torchq.from_onnx(w.model(y))
    assert torch.equal(
        read(torch.ones(1, 1, 2, 2)),
        torch.full((1, 1, 2, 2), 2.0),
    )
    assert "exec(" not in read.code


def test_unknown_operators_are_named_all_at_once() -> None:
    w = Writer(17)
    y = w.node("StringSplit", w.input("x", [1]))
    y = w.node("Fancy", w.node("Fancy", y, domain="acme"), domain="acme")
    with pytest.raises(
        FrontendError, match=r"no converter for StringSplit \(1\), acme.Fancy \(2\)"
    ):
        torchq.from_onnx(w.model(y))


@pytest.mark.parametrize(
    ("op_type", "domain", "text"),
    [
        (
            "FusedConv",
            "com.microsoft",
            "Read the file from before its runtime optimized it",
        ),
        ("QAttention", "com.microsoft", ".*quant_format=QuantFormat.QDQ"),
        ("ConvInteger", "", "It chooses scales at run time.*read the float file"),
        ("DynamicQuantizeLSTM", "com.microsoft", "It chooses scales at run time"),
    ],
)
def test_operators_of_optimized_and_quantized_files_are_refused_with_advice(
    op_type: str, domain: str, text: str
) -> None:
    w = Writer(17)
    y = w.node(op_type, *[w.input("x", [1])] * 8, domain=domain)
    with pytest.raises(FrontendError, match=rf"{op_type} \(1\). {text}"):
        torchq.from_onnx(w.model(y))


def one_convolution(size: int) -> Any:
    w = Writer(17)
    return w.model(
        w.node(
            "Conv", w.input("x", [1, 1, size, size]), w.weight(torch.ones(4, 1, 1, 1))
        )
    )


def stored(**fields: Any) -> Any:
    """Return a change of fields of the first initializer, and of the first number of ``dims``."""

    def change(model: Any) -> None:
        tensor = model.graph.initializer[0]
        for name, value in fields.items():
            if name == "dims":
                tensor.dims[0] = value
            else:
                setattr(tensor, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda m: m.opset_import[0].__setattr__("version", 99),
            "opset 99; expected at most",
        ),
        (
            lambda m: m.graph.node[0].input.__setitem__(0, "no"),
            "reads 'no', which nothing before",
        ),
        (
            lambda m: m.graph.node[0].output.__setitem__(0, "a"),
            "computes the output 'conv_0'",
        ),
        (
            lambda m: m.graph.initializer[0].dims.append(7),
            r"holds 4 elements; expected 28",
        ),
        (
            stored(raw_data=bytes(19)),
            r"holds 4 elements and a rest of 3 bytes; expected 4",
        ),
        (stored(dims=-4), r"has shape \(-4, 1, 1, 1\)"),
        (stored(data_type=8), "holds STRING, which torch has no type"),
        (lambda m: m.graph.Clear(), "a model without nodes"),
    ],
)
def test_broken_files_are_refused_by_name(change: Any, text: str) -> None:
    model = one_convolution(4)
    torchq.from_onnx(model)
    change(model)
    with pytest.raises(FrontendError, match=text):
        torchq.from_onnx(model)


def test_what_is_no_onnx_file(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"\x08\xff\xff\xff no protobuf")
    with pytest.raises(FrontendError, match=r"bad.onnx: cannot be read as ONNX"):
        torchq.from_onnx(tmp_path / "bad.onnx")
    with pytest.raises(FrontendError, match="there is no such file"):
        torchq.from_onnx(tmp_path / "missing.onnx")


def external(model: Any, location: str, offset: int, length: int) -> None:
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (
        ("location", location),
        ("offset", str(offset)),
        ("length", str(length)),
    ):
        tensor.external_data.add(key=key, value=value)


@pytest.mark.parametrize(
    ("location", "offset", "length", "text"),
    [
        ("w.bin", 4, 16, ""),
        ("../w.bin", 4, 16, "outside the folder"),
        ("w.bin", 8, 16, "needs 16 bytes from 8; w.bin has 20"),
        ("w.bin", -4, 16, "needs 16 bytes from -4"),
        ("w.bin", 4, 12, "needs 16 bytes from 4"),
        ("none.bin", 4, 16, "cannot be read"),
        ("", 4, 16, "cannot be read"),
        (".", 4, 16, "cannot be read"),
        ("w.bin\0", 4, 16, "cannot be read"),
        ("loop", 4, 16, "cannot be read"),
        ("pipe", 4, 16, "cannot be read"),
        ("w" * 300, 4, 16, "cannot be read"),
    ],
)
def test_data_beside_the_file(
    tmp_path: Path, location: str, offset: int, length: int, text: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    values = torch.arange(5.0)
    for place in (folder, tmp_path):
        (place / "w.bin").write_bytes(values.numpy().tobytes())
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    model = one_convolution(1)
    external(model, location, offset, length)
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    if text:
        with pytest.raises(FrontendError, match=text):
            torchq.from_onnx(folder / "m.onnx")
    else:
        read = torchq.from_onnx(folder / "m.onnx")
        assert read(torch.ones(1, 1, 1, 1)).flatten().tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_constant_that_would_fill_the_memory_is_refused() -> None:
    w = Writer(17)
    one = w.weight(torch.ones(1))
    huge = w.weight(torch.tensor([2**40]))
    bigger = w.node("Add", w.node("Expand", one, huge), one)
    with pytest.raises(FrontendError, match=r"Expand .* expected at most"):
        torchq.from_onnx(w.model(w.node("Add", w.input("x", [1]), bigger)))


def test_inputs_whose_names_make_one_argument_are_kept_apart() -> None:
    w = Writer(17)
    names = ["in.1", "in/1", "self", "in_1_2"]
    total, *rest = [w.input(name, [2]) for name in names]
    for other in rest:
        total = w.node("Sub", total, other)
    read = torchq.from_onnx(w.model(total))
    given = [torch.tensor([float(10**i), 1.0]) for i in range(4)]
    assert read.input_names == names
    assert torch.equal(
        read(*given),
        given[0] - given[1] - given[2] - given[3],
    )


@pytest.mark.parametrize(
    ("shape", "attributes", "bias"),
    [
        ((2, 4), {"alpha": 0.5}, (3,)),
        ((2, 4), {"beta": 2.0, "transB": 1}, (3,)),
        ((4, 2), {"transA": 1, "alpha": 3.0, "beta": 0.5}, (1, 3)),
        ((2, 4), {"alpha": 2.0}, (1,)),
        ((2, 4), {}, ()),
    ],
)
def test_a_product_with_factors_is_a_linear_layer_that_takes_its_norm(
    shape: tuple[int, int], attributes: dict[str, Any], bias: tuple[int, ...]
) -> None:
    w = Writer(13)
    x = w.input("x", shape)
    weight = w.random(
        *((3, 4) if attributes.get("transB") else (4, 3)), name="fc.weight"
    )
    y = w.node("Gemm", x, weight, w.random(*bias), **attributes)
    norm = [w.weight(torch.rand(3, generator=w.generator) + 0.5) for _ in range(4)]
    y = w.node("BatchNormalization", y, *norm)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    read = assert_agrees(w.model(y), {"x": x})
    assert type(read.fc) is nn.Linear
    before = read(x)
    torchq.fuse_(read, x)
    assert not any(isinstance(module, nn.BatchNorm1d) for module in read.modules())
    torch.testing.assert_close(read(x), before)


def flattened(opset: int, target: list[int], batch: int = 1) -> Any:
    """Return a file that fixes its batch, also in a Reshape."""
    w = Writer(opset)
    y = w.conv(w.input("images", [batch, 3, 4, 6]), 3, 5)
    y = w.node("Reshape", y, w.constant(target))
    return w.model(y)


@pytest.mark.parametrize("shape", [(4, 3, 4, 6), (1, 3, 4, 8), (1, 3, 24)])
def test_a_size_that_the_file_fixes_is_checked(shape: tuple[int, ...]) -> None:
    read = torchq.from_onnx(flattened(13, [1, -1]))
    assert read.input_shapes == [[1, 3, 4, 6]]
    given = re.escape(str(shape))
    message = rf"images: got the shape {given}; expected \(1, 3, 4, 6\), which the ONNX"
    with pytest.raises(InputError, match=message):
        read(torch.randn(shape))
    assert read(torch.randn(1, 3, 4, 6)).shape == (1, 120)


def test_fused_quantized_copied_and_deployed_models_check_sizes_too() -> None:
    read = torchq.from_onnx(flattened(13, [1, -1]))
    x = torch.randn(1, 3, 4, 6)
    torchq.fuse_(read, x)
    config = torchq.recipes.int8(reduce_range=True)  # It overflows on no CPU.
    torchq.quantize_(read, config, target="onnxruntime", example=x)
    torchq.calibrate(read, [x], progress=False)
    for model in (read, copy.deepcopy(read), torchq.deploy(read, x, target="torch")):
        assert model(x).shape == (1, 120)
        with pytest.raises(
            InputError, match=r"images'?: got (the )?shape \(4, 3, 4, 6\)"
        ):
            model(torch.randn(4, 3, 4, 6))


@pytest.mark.filterwarnings("ignore:.*the file has the fixed batch size of the example")
@pytest.mark.filterwarnings("ignore:.*no active quantizer")
@pytest.mark.parametrize("dynamo", [True, False])
def test_a_file_of_a_fixed_batch_is_written_with_that_batch(
    dynamo: bool, tmp_path: Path
) -> None:
    read = torchq.from_onnx(flattened(13, [1, -1]))
    torchq.export_onnx(
        read, torch.randn(1, 3, 4, 6), tmp_path / "f.onnx", dynamo=dynamo
    )
    (value,) = onnx.load(tmp_path / "f.onnx").graph.input
    assert value.type.tensor_type.shape.dim[0].dim_value == 1


@pytest.mark.parametrize(
    ("batch", "target"),
    [
        (1, [1, -1]),
        (2, [2, 5, 24]),
        (1, [-1, 24]),
    ],
)
def test_a_fixed_batch_is_freed_on_request(batch: int, target: list[int]) -> None:
    model = flattened(13, target, batch)
    read = torchq.from_onnx(model, free_batch=True)
    assert read.input_shapes == [[None, 3, 4, 6]]
    x = torch.randn(4, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    expected = torch.cat(
        [run_reference(model, {"images": p})[0] for p in x.split(batch)]
    )
    torch.testing.assert_close(read(x), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match=r"expected \(any, 3, 4, 6\)"):
        read(torch.randn(4, 3, 4, 8))


def taken(op_type: str) -> Any:
    """Return a file that computes with the one image of its batch."""
    w = Writer(13)
    y = w.conv(w.input("x", [1, 3, 4, 6]), 3, 5)
    one = w.constant([1])
    zero = w.constant([0])
    calls = {
        "Reshape": lambda: w.node("Reshape", y, w.constant([5, -1])),
        "Squeeze": lambda: w.node("Squeeze", y, zero),
        "Squeeze all": lambda: w.node("Squeeze", y),
        "Gather": lambda: w.node("Gather", y, w.constant(0), axis=0),
        "Slice": lambda: w.node("Slice", y, zero, one, zero),
        "ReduceMean": lambda: w.node("ReduceMean", y, axes=[0]),
        "Resize": lambda: w.node(
            "Resize", y, "", "", w.constant([1, 5, 8, 12]), mode="nearest"
        ),
        "Transposed": lambda: w.node("Reshape", turned(), w.constant([-1, 24])),
    }
    turned = functools.partial(w.node, "Transpose", y, perm=[1, 0, 2, 3])
    return w.model(calls[op_type]())


@pytest.mark.parametrize(
    "op_type",
    [
        "Reshape",
        "Squeeze",
        "Squeeze all",
        "Gather",
        "Slice",
        "ReduceMean",
        "Resize",
        "Transposed",
    ],
)
def test_an_operator_that_needs_the_fixed_batch_is_named(op_type: str) -> None:
    torchq.from_onnx(taken(op_type))
    name = {"Transposed": "Reshape"}.get(op_type, op_type.split()[0])
    message = rf"from_onnx: {name} '{name}_\d+' computes with the batch of 1 that the file fixes"
    with pytest.raises(FrontendError, match=message):
        torchq.from_onnx(taken(op_type), free_batch=True)


def recogniser() -> Any:
    """A head as PaddlePaddle writes one: attention over columns, of sizes that it computes.

    Inference of the package onnx knows nothing behind such a Reshape of these operators.
    """
    w = Writer(12)
    x = w.input("x", ["batch", 3, "height", "width"])
    y = w.conv(x, 3, 8)
    first_two = w.node(
        "Slice", w.node("Shape", y), w.constant([0]), w.constant([2]), w.constant([0])
    )
    rows = w.node("Reshape", y, w.node("Concat", first_two, w.constant([-1]), axis=0))
    rows = w.node("Transpose", rows, perm=[0, 2, 1])
    sizes = w.node("Cast", w.node("Shape", rows), to=onnx.TensorProto.INT32)
    length = w.node("Slice", sizes, w.constant([1]), w.constant([2]), w.constant([0]))
    length = w.node("Cast", length, to=onnx.TensorProto.INT64)
    parts = [w.constant([0]), length, *(w.constant([n]) for n in (3, 2, 4))]
    heads = w.node("MatMul", rows, w.random(8, 24))
    heads = w.node("Reshape", heads, w.node("Concat", *parts, axis=0))
    heads = w.node("Transpose", heads, perm=[2, 0, 3, 1, 4])
    query, key, value = (
        w.node(
            "Squeeze",
            w.node(
                "Slice", heads, w.constant([n]), w.constant([n + 1]), w.constant([0])
            ),
            axes=[0],
        )
        for n in range(3)
    )
    scores = w.node("MatMul", query, w.node("Transpose", key, perm=[0, 1, 3, 2]))
    return w.model(w.node("MatMul", w.node("Softmax", scores, axis=-1), value))


def test_sizes_that_a_reshape_computes_stay_sizes(tmp_path: Path) -> None:
    """So the whole is followed without an example, and torch can export it."""
    x = torch.randn(2, 3, 6, 10)
    model = assert_agrees(recogniser(), {"x": x}).eval()
    torchq.quantize_(model, target="onnxruntime", example=x)
    report = torchq.fuse_(model)
    assert (len(report.fused), len(report.refused)) == (1, 0)
    torchq.calibrate(model, [x], progress=False)
    path = tmp_path / "net.onnx"
    torchq.export_onnx(model, x, path, progress=False)
    other = torch.randn(3, 3, 6, 10)
    assert torchq.verify_onnx(model, path, [x, other], progress=False).ok
