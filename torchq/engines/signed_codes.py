"""Signed codes in graphs for OpenVINO, on CPUs whose kernels read them.

Files for OpenVINO have unsigned codes with the zero point 128 where most CPUs would read signed
ones wrongly; see :func:`torchq.onnx.targets.openvino_codes.unsigned_codes`. CPUs with AMX multiply
signed codes as they are, and are faster with them, as there is no zero point to take into account.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from torchq.onnx.ir import Model, nodes_of, onnx_ir
from torchq.onnx.targets.activations import ActivationTypes, retype_activations
from torchq.utils.optional import import_optional

__all__ = ["reads_signed_codes", "with_signed_codes"]

_NEEDED_BY = "deploy(engine='openvino')"


@lru_cache
def reads_signed_codes() -> bool:
    """Return True if OpenVINO's convolutions read signed codes on this CPU.

    A small convolution is compiled and asked: elsewhere OpenVINO makes its codes unsigned. So
    whatever limits the kernels (an environment variable, an operating system without AMX) is seen.
    """
    runtime = import_optional("openvino", _NEEDED_BY, "openvino")
    ops: Any = import_optional("openvino.opset13", _NEEDED_BY, "openvino")
    image = ops.parameter([1, 16, 8, 8], runtime.Type.f32)
    codes = ops.fake_quantize(image, -128.0, 127.0, -128.0, 127.0, 256)
    stored = ops.constant(torch.ones(16, 16, 1, 1, dtype=torch.int8).numpy())
    weight = ops.multiply(
        ops.convert(stored, runtime.Type.f32), ops.constant(0.5, runtime.Type.f32)
    )
    result = ops.convolution(codes, weight, [1, 1], [0, 0], [0, 0], [1, 1])
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = runtime.Core().compile_model(runtime.Model([result], [image]), "CPU", settings)
    nodes = (node.get_rt_info() for node in compiled.get_runtime_model().get_ops())
    return any(
        str(info["layerType"].value) == "Convolution"
        and str(info["runtimePrecision"].value).lower() == "i8"
        for info in nodes
    )


def with_signed_codes(graph: bytes) -> bytes:
    """Return an ONNX file whose activations have the zero point 0 in place of 128.

    Codes and zero points are 128 less, so every value stays what it was.

    Args:
        graph: the file.

    Returns:
        ``graph`` itself where no zero point is 128.
    """
    onnx = import_optional("onnx", _NEEDED_BY)
    model = onnx_ir.from_proto(onnx.load_model_from_string(graph))
    before = _types(model)
    retype_activations(model, ActivationTypes("unsigned", "signed"))
    if _types(model) == before:
        return graph
    changed: bytes = onnx_ir.to_proto(model).SerializeToString()
    return changed


def _types(model: Model) -> list[Any]:
    """Return the dtype of the codes of each quantizer."""
    return [node.outputs[0].dtype for node in nodes_of(model, "QuantizeLinear")]
