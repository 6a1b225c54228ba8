"""Functions that are one ONNX operator in exported files, because no graph can express them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def write_operator(
    op_type: str,
    version: int,
    inputs: Sequence[Tensor],
    attributes: dict[str, Any],
    sizes: Sequence[int],
    dtype: torch.dtype,
    example: Tensor | None,
) -> Tensor:
    """Write an operator of ONNX; call it only during an export, with either exporter.

    Args:
        op_type: the operator.
        version: the first opset that has it.
        inputs: of the operator.
        attributes: of the operator.
        sizes: of its result, for the exporter that is based on ``torch.export``.
        dtype: of its result.
        example: some result, for the TorchScript exporter, which runs the rest of the model on it.
    """
    if torch.jit.is_tracing():
        assert example is not None
        return _Written.apply(op_type, attributes, example, *inputs)
    return torch.onnx.ops.symbolic(
        op_type, inputs, attributes, dtype=dtype, shape=sizes, version=version
    )


class _Written(torch.autograd.Function):
    """The operator for the TorchScript exporter, which calls ``symbolic``."""

    @staticmethod
    def forward(
        ctx: Any, op_type: str, attributes: dict[str, Any], example: Tensor, *inputs: Tensor
    ) -> Tensor:
        return example.clone()

    @staticmethod
    def symbolic(g: Any, op_type: str, attributes: Any, example: Any, *inputs: Any) -> Any:
        kinds = {int: "i", float: "f", str: "s"}
        named = {f"{name}_{kinds[type(v)]}": v for name, v in attributes.items()}
        result = g.op(op_type, *inputs, **named)
        result.setType(example.type().with_sizes([None] * example.type().dim()))
        return result
