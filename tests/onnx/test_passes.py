"""Single passes on small graphs, and what the passes of onnx_ir do to stored codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.onnx.exported import graph_of
from torchq.onnx.ir import (
    add_initializer,
    is_constant,
    nodes_of,
    onnx_ir,
    remove_unused,
    run_passes,
    value_of,
)
from torchq.onnx.passes.constants import (
    fold_scales,
    fold_slices,
    known_shapes,
    lift_constants,
)
from torchq.onnx.passes.matmuls import keep_integer_matmuls, split_gemms, store_transposed
from torchq.onnx.passes.pairs import (
    fold_weights,
    merge_duplicates,
)
from torchq.onnx.qdq import read_record

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnx_ir")

Node = tuple[str, list[str], list[str], dict[str, Any]]


def kinds(model: Any) -> list[str]:
    return [node.op_type for node in model.graph]


def test_constants_become_initializers() -> None:
    value = onnx.numpy_helper.from_array(torch.tensor(2.0).numpy())
    nodes: list[Node] = [
        ("Constant", [], ["two"], {"value": value}),
        ("Constant", [], ["three"], {"value_float": 3.0}),
        ("Mul", ["x", "two"], ["m"], {}),
        ("Add", ["m", "three"], ["y"], {}),
    ]
    model = graph_of(*nodes, stored={}, shape=[2])
    lift_constants(model)
    assert kinds(model) == ["Mul", "Add"]
    assert [value_of(v).item() for v in model.graph.initializers.values()] == [2.0, 3.0]


def test_slices_and_scales_are_computed() -> None:
    stored = {
        "packed": torch.arange(6.0),
        "starts": torch.tensor([2]),
        "ends": torch.tensor([4]),
        "amax": torch.tensor(254.0),
        "qmax": torch.tensor(127.0),
        "zero": torch.tensor(0, dtype=torch.int8),
    }
    nodes: list[Node] = [
        ("Slice", ["packed", "starts", "ends"], ["bias"], {}),
        ("Div", ["amax", "qmax"], ["scale"], {}),
        ("QuantizeLinear", ["x", "scale", "zero"], ["q"], {}),
        ("DequantizeLinear", ["q", "scale", "zero"], ["d"], {}),
        ("Add", ["d", "bias"], ["y"], {}),
    ]
    model = graph_of(*nodes, stored=stored, shape=[2])
    run_passes(model, (fold_slices, fold_scales))
    assert kinds(model) == ["QuantizeLinear", "DequantizeLinear", "Add"]
    quantize, _, add = model.graph
    assert value_of(quantize.inputs[1]).item() == 2.0
    assert value_of(add.inputs[1]).tolist() == [2.0, 3.0]


def test_weights_become_codes_and_equal_tensors_one() -> None:
    """Both weights get the same codes; a tensor that two quantizers read is quantized once."""
    weight = torch.tensor([[0.6, -0.4], [100.0, 0.25]])
    stored = {
        "w": weight,
        "v": weight.clone(),
        "s": torch.tensor(0.5),
        "s2": torch.tensor(0.5),
        "z": torch.tensor(0, dtype=torch.int8),
    }
    nodes: list[Node] = [
        ("QuantizeLinear", ["x", "s", "z"], ["a/QuantizeLinear"], {}),
        ("DequantizeLinear", ["a/QuantizeLinear", "s", "z"], ["a/DequantizeLinear"], {}),
        ("QuantizeLinear", ["x", "s2", "z"], ["b/QuantizeLinear"], {}),
        ("DequantizeLinear", ["b/QuantizeLinear", "s2", "z"], ["b/DequantizeLinear"], {}),
        ("QuantizeLinear", ["w", "s", "z"], ["c/QuantizeLinear"], {}),
        ("DequantizeLinear", ["c/QuantizeLinear", "s", "z"], ["c/DequantizeLinear"], {}),
        ("QuantizeLinear", ["v", "s", "z"], ["d/QuantizeLinear"], {}),
        ("DequantizeLinear", ["d/QuantizeLinear", "s", "z"], ["d/DequantizeLinear"], {}),
        ("MatMul", ["a/DequantizeLinear", "c/DequantizeLinear"], ["p"], {}),
        ("MatMul", ["b/DequantizeLinear", "d/DequantizeLinear"], ["q"], {}),
        ("Add", ["p", "q"], ["y"], {}),
    ]
    model = graph_of(*nodes, stored=stored, shape=[2, 2])
    run_passes(model, (fold_weights, merge_duplicates))
    codes = value_of(model.graph.initializers["c/weight"])
    assert codes.tolist() == [[1, -1], [127, 0]]  # 0.25 / 0.5 is a tie, which goes to even.
    assert codes.dtype is torch.int8
    assert len(nodes_of(model, "QuantizeLinear")) == 1
    assert len(nodes_of(model, "DequantizeLinear")) == 2
    assert read_record(model)["merged"] == {"b": "a", "d": "c"}


def integer_product(op_type: str, bias: list[float], **attributes: int) -> Any:
    stored = {
        "w": torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int8),
        "s": torch.tensor(0.5),
        "z": torch.tensor(0, dtype=torch.int8),
        "b": torch.tensor(bias),
    }
    nodes: list[Node] = [
        ("QuantizeLinear", ["x", "s", "z"], ["q"], {}),
        ("DequantizeLinear", ["q", "s", "z"], ["d"], {}),
        ("DequantizeLinear", ["w", "s", "z"], ["v"], {}),
    ]
    if op_type == "Gemm":
        gemm = ("Gemm", ["d", "v", "b"], ["y"], attributes)
        return graph_of(*nodes, gemm, stored=stored, shape=[1, 3])
    nodes += [
        ("Transpose", ["v"], ["t"], {"perm": [1, 0]}),
        ("MatMul", ["d", "t"], ["p"], {}),
        ("Add", ["p", "b"], ["y"], {}),
    ]
    return graph_of(*nodes, stored=stored, shape=[1, 4, 3])


def test_a_transposed_weight_is_stored_so_and_a_bias_gets_a_dimension() -> None:
    model = integer_product("MatMul", [1.0, 2.0])
    run_passes(model, (store_transposed, keep_integer_matmuls))
    assert kinds(model) == ["QuantizeLinear", *["DequantizeLinear"] * 2, "MatMul", "Add"]
    (product,), (add,) = nodes_of(model, "MatMul"), nodes_of(model, "Add")
    weight = product.inputs[1].producer().inputs[0]
    assert value_of(weight).tolist() == [[1, 4], [2, 5], [3, 6]]
    assert value_of(add.inputs[1]).tolist() == [[1.0, 2.0]]


def test_a_gemm_becomes_a_product_and_an_addition() -> None:
    model = integer_product("Gemm", [1.0, 2.0], transB=1)
    run_passes(model, (split_gemms,))
    found = kinds(model)
    assert "Gemm" not in found
    assert [found.count(kind) for kind in ("MatMul", "Add", "Unsqueeze", "Squeeze")] == [1] * 4
    assert model.graph.outputs[0].name == "y"


@pytest.mark.parametrize("name", ["INT8", "UINT8", "INT4", "UINT4"])
def test_passes_of_onnx_ir_keep_every_code(name: str) -> None:
    """All codes of a type, stored twice: merging, removal and saving change none of them."""
    dtype = onnx_ir.DataType[name]
    bits = 4 if name.endswith("4") else 8
    low = 0 if name.startswith("U") else -(2 ** (bits - 1))
    codes = torch.arange(low, low + 2**bits)[:-1]  # An odd number: half a byte is left over.
    codes = codes.to(torch.uint8 if name.startswith("U") else torch.int8)
    model = graph_of(("Identity", ["x"], ["y"], {}), stored={}, shape=[1])
    values = [add_initializer(model.graph, f"w{i}", codes, dtype) for i in range(2)]
    add_initializer(model.graph, "unused", codes, dtype)
    for i, value in enumerate(values):
        model.graph.append(onnx_ir.node("Cast", [value], {"to": 1}, name=f"cast{i}"))
        model.graph.outputs.append(model.graph[-1].outputs[0])
    merge_duplicates(model)
    remove_unused(model)
    assert list(model.graph.initializers) == ["w0"]
    loaded = onnx_ir.from_proto(onnx_ir.to_proto(model))
    (stored,) = loaded.graph.initializers.values()
    assert is_constant(stored) and torch.equal(value_of(stored), codes)


def test_parts_without_their_dimension_have_no_known_shape() -> None:
    """Shape inference of onnx says (2, 1), and a Reshape to the length of that is wrong."""
    model = graph_of(
        ("SplitToSequence", ["x"], ["parts"], {"axis": 1, "keepdims": 0}),
        ("SequenceAt", ["parts", "first"], ["part"], {}),
        ("Relu", ["part"], ["y"], {}),
        stored={"first": torch.tensor(0)},
        shape=[2, 3],
    )
    shapes = known_shapes(model)
    assert shapes["x"] == (2, 3)
    assert "part" not in shapes
    assert shapes.get("y") in (None, ())
