"""Small calibrated models that together have every layer that exports, their files, and graphs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from torchq.functional import QParams
from torchq.onnx.ir import Model, onnx_ir
from torchq.onnx.qdq import qparams_of, quantizer_nodes
from torchq.runtime import open_session


class Layers(nn.Module):
    """Convolutions, a transposed one, and two linear layers that read the same tensor."""

    def __init__(self, groups: int = 2) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(3, 8, 3, padding=1),
                nn.Conv2d(8, 16, 3, stride=2, groups=groups),
            ]
        )
        self.up = nn.ConvTranspose2d(
            16, 4, 3, stride=2, groups=groups, output_padding=1
        )
        self.left = nn.Linear(16, 5)
        self.right = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for conv in self.convs:
            x = conv(x).relu()
        pooled = x.mean((2, 3))
        return self.up(x), self.left(pooled), self.right(pooled)


class Residual(nn.Module):
    """A stem with max pooling, two kinds of residual blocks, a concatenation, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.blocks = nn.Sequential(
            Block(16, 16),
            Block(16, 32),
        )
        self.side = nn.Conv2d(32, 16, 1)
        self.gap = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.stem(x)))
        x = self.blocks(x)
        x = torch.cat([x, torch.relu(self.side(x))], dim=1)
        return self.head(torch.flatten(self.gap(x), 1))


class Block(nn.Module):
    """A basic residual block."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, padding=1)
        self.second = nn.Conv2d(out, out, 3, padding=1)
        self.down = None if channels == out else nn.Conv2d(channels, out, 1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.down is None else self.down(x)
        out = self.second(self.relu(self.first(x)))
        out += identity
        return self.relu(out)


def calibrated(
    model: nn.Module,
    *batches: Any,
    config: torchq.QuantConfig | None = None,
    **options: Any,
) -> nn.Module:
    """Swapped, calibrated on ``batches`` and in eval mode."""
    torchq.quantize_(model, config, **options)
    torchq.calibrate(model, list(batches), progress=False)
    return model.eval()


def exported(
    model: nn.Module,
    x: Tensor,
    path: Path,
    target: str | None = "onnxruntime",
    *,
    config: torchq.QuantConfig | None = None,
    **options: Any,
) -> nn.Module:
    """Quantize a model for a target, calibrate it, and write its file without warnings."""
    calibrated(
        model.eval(), x, config=config, target=target, example=x if target else None
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torchq.export_onnx(
            model, x, path, target=target, **{"dynamo": False, **options}
        )
    return model


def graph_of(
    *nodes: tuple[str, list[str], list[str], dict[str, Any]],
    stored: dict[str, Tensor],
    shape: Sequence[Any],
    outputs: dict[str, Sequence[Any] | None] | None = None,
) -> Model:
    """A graph that reads ``x``: operator, inputs, outputs and attributes of each node."""
    import onnx

    helper = onnx.helper
    kind = onnx.TensorProto.FLOAT
    results = {"y": None} if outputs is None else outputs
    graph = helper.make_graph(
        [
            helper.make_node(op, *ends, name=ends[1][0], **more)
            for op, *ends, more in nodes
        ],
        "test",
        [helper.make_tensor_value_info("x", kind, shape)],
        [
            helper.make_tensor_value_info(name, kind, dims)
            for name, dims in results.items()
        ],
        [
            onnx.numpy_helper.from_array(tensor.numpy(), name)
            for name, tensor in stored.items()
        ],
    )
    imports = [helper.make_opsetid("", 20)]
    return onnx_ir.from_proto(
        helper.make_model(graph, opset_imports=imports, ir_version=9)
    )


def run_file(path: Path, *inputs: Tensor, optimize: bool = False) -> list[Tensor]:
    """The outputs of a file in ONNX Runtime, by default without any optimisation of the graph."""
    session = open_session(path, optimize=optimize)
    return session.run(dict(zip(session.inputs, inputs, strict=True)))


def ends(path: Path, kind: str) -> dict[str, Any]:
    """The Q or DQ nodes of a file by the path of their quantizer."""
    import onnx

    nodes: Sequence[Any] = onnx.load(str(path)).graph.node
    return {
        node.name.rpartition("/")[0]: node for node in nodes if node.op_type == kind
    }


def activation_qparams(model: Model) -> dict[str, QParams]:
    """Return the parameters of each quantizer of an activation, by name and in order."""
    return {name: qparams_of(node) for name, node in quantizer_nodes(model).items()}
