"""Writing small ONNX files in tests, and running them with ONNX Runtime."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import torchq

__all__ = ["Writer", "assert_agrees", "run_reference"]

onnx = pytest.importorskip("onnx", reason="writes the files")
helper = onnx.helper
numpy_helper = onnx.numpy_helper
TYPES = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.int64: onnx.TensorProto.INT64,
    torch.int32: onnx.TensorProto.INT32,
    torch.bool: onnx.TensorProto.BOOL,
}


class Writer:
    """Collects the nodes and weights of one graph.

    Args:
        opset: of ONNX's own operators.
        seed: of the weights.
    """

    def __init__(self, opset: int, seed: int = 0) -> None:
        self.opset = opset
        self.generator = torch.Generator().manual_seed(seed)
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self.inputs: list[Any] = []

    def input(
        self, name: str, shape: Sequence[Any], dtype: torch.dtype = torch.float32
    ) -> str:
        """Declare an input; sizes that are text are open."""
        self.inputs.append(
            helper.make_tensor_value_info(name, TYPES[dtype], list(shape))
        )
        return name

    def node(
        self, op_type: str, *inputs: str, outputs: int = 1, **attributes: Any
    ) -> Any:
        """Write a node; return the name of its output, or those of several."""
        domain = attributes.pop("domain", "")
        number = len(self.nodes)
        names = [
            f"{op_type.lower()}_{number}" + (f"_{i}" if i else "")
            for i in range(outputs)
        ]
        name = f"{op_type}_{number}"
        self.nodes.append(
            helper.make_node(op_type, inputs, names, name, domain=domain, **attributes)
        )
        return names[0] if outputs == 1 else names

    def constant(self, value: Any, dtype: torch.dtype | None = None) -> str:
        """Write a Constant node, as exporters do: float32 or int64 unless said otherwise."""
        array = torch.as_tensor(value, dtype=dtype).numpy()
        return str(self.node("Constant", value=numpy_helper.from_array(array)))

    def weight(self, value: Tensor, name: str = "") -> str:
        """Store an initializer."""
        name = name or f"w{len(self.initializers)}"
        self.initializers.append(
            numpy_helper.from_array(value.contiguous().numpy(), name)
        )
        return name

    def random(self, *shape: int, scale: float = 0.3, name: str = "") -> str:
        """Store random numbers."""
        return self.weight(torch.randn(shape, generator=self.generator) * scale, name)

    def conv(
        self, x: str, inputs: int, outputs: int, kernel: int = 3, stride: int = 1
    ) -> str:
        """Write a convolution with BatchNormalization behind it."""
        number = len(self.initializers)
        scale = (inputs * kernel * kernel) ** -0.5
        size = [kernel] * 2
        weight = self.random(
            outputs, inputs, *size, scale=scale, name=f"c{number}.conv.weight"
        )
        window = {
            "pads": [kernel // 2] * 4,
            "strides": [stride] * 2,
            "kernel_shape": size,
        }
        y = self.node("Conv", x, weight, **window)
        uniform = [torch.rand(outputs, generator=self.generator) for _ in range(4)]
        parts = [
            uniform[0] + 0.5,
            uniform[1] - 0.5,
            uniform[2] * 0.2,
            uniform[3] + 0.5,
        ]
        names = [self.weight(part, f"c{number}.bn.{i}") for i, part in enumerate(parts)]
        return str(self.node("BatchNormalization", y, *names, epsilon=1e-5))

    def model(self, *outputs: tuple[str, torch.dtype] | str) -> Any:
        """Return the file; outputs are float32 unless said otherwise."""
        pairs = [(o, torch.float32) if isinstance(o, str) else o for o in outputs]
        infos = [
            helper.make_tensor_value_info(name, TYPES[dtype], None)
            for name, dtype in pairs
        ]
        graph = helper.make_graph(
            self.nodes, "net", self.inputs, infos, self.initializers
        )
        opsets = [helper.make_opsetid("", self.opset)]
        if any(node.domain for node in self.nodes):
            opsets.append(helper.make_opsetid("com.microsoft", 1))
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def run_reference(model: Any, feeds: Mapping[str, Tensor]) -> list[Tensor]:
    """Return what ONNX Runtime computes."""
    runtime = pytest.importorskip("onnxruntime", reason="is the reference")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # it warns of what it folds
    data = model if isinstance(model, (bytes, str)) else model.SerializeToString()
    session = runtime.InferenceSession(
        data, options, providers=["CPUExecutionProvider"]
    )
    results = session.run(None, {name: value.numpy() for name, value in feeds.items()})
    return [torch.from_numpy(np.array(result)) for result in results]


def assert_agrees(model: Any, feeds: Mapping[str, Tensor], limit: float = 1e-4) -> Any:
    """Read a file, and compare with ONNX Runtime; return what was read.

    Args:
        model: the file.
        feeds: inputs by name.
        limit: of the error, relative to the largest output.
    """
    read = torchq.from_onnx(model)
    with torch.no_grad():
        got = read(*[feeds[name] for name in read.input_names])
    got = got if isinstance(got, tuple) else (got,)
    for one, expected in zip(got, run_reference(model, feeds), strict=True):
        assert one.shape == expected.shape
        assert one.dtype == expected.dtype
        if expected.numel():
            largest = float(expected.double().abs().max())
            assert float((one.double() - expected.double()).abs().max()) <= limit * max(
                largest, 1e-6
            )
    return read
