"""What each runtime wants quantized beside the inputs of layers, as data.

Sources: measured with ONNX Runtime 1.31 and OpenVINO 2026.4; TensorRT's explicit quantization guide, the onnx-tensorrt importer and
NVIDIA ModelOpt.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchq.utils import Registry

__all__ = ["TARGETS", "Target"]


@dataclass(frozen=True)
class Target:
    """Where a runtime wants quantizers.

    Attributes:
        name: of the runtime.
        operators: kinds of operators whose inputs are quantized: "add", "mul", "matmul", "attention", "cat", "pool", "activation". Except
            products of matrices, only in modules that hold a convolution: between linear layers and norms these cost more than they save.
        modules: patterns of modules without weights whose input is quantized.
        one_branch: of an addition, leave the branch that ends in a convolution or linear layer unquantized.
        float_inputs: patterns of modules whose input stays float, as the runtime has no integer kernel; their weights are still stored
            as integers.
    """

    name: str
    operators: frozenset[str]
    modules: tuple[str, ...]
    one_branch: bool = False
    float_inputs: tuple[str, ...] = ()


_MAX, _AVERAGE = (
    "type:torch.nn.modules.pooling.MaxPool[123]d",
    "type:torch.nn.modules.pooling.*AvgPool[123]d",
)
_TRANSPOSED = "type:torch.nn.modules.conv.ConvTranspose[123]d"
# An activation that no convolution kernel takes in: without a quantizer before it, the convolution would have to return floats.
_ACTIVATIONS = tuple(
    f"type:torch.nn.modules.activation.{name}"
    for name in ("SiLU", "Hardswish", "Hardsigmoid", "LeakyReLU", "ELU", "Mish", "Sigmoid")
)
_BETWEEN = frozenset(["add", "mul", "cat", "pool"])
_PRODUCTS = frozenset(["matmul", "attention"])

TARGETS: Registry[str, Target] = Registry("target")
# A convolution whose sum is its only reader adds in int32 there, before the result is rounded. Q moves through max pooling by itself.
TARGETS.add("tensorrt", Target("tensorrt", frozenset(["add", "cat"]), (_AVERAGE,), one_branch=True))
# Integer kernels exist between Q/DQ alone, so every tensor between layers needs one.
TARGETS.add(
    "onnxruntime",
    Target(
        "onnxruntime",
        _BETWEEN | _PRODUCTS | {"activation"},
        (_MAX, _AVERAGE, *_ACTIVATIONS),
        float_inputs=(_TRANSPOSED,),
    ),
)
TARGETS.add("openvino", Target("openvino", _BETWEEN | _PRODUCTS, (_MAX, _AVERAGE)))
