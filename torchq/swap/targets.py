"""Runtimes that a model can be quantized for, by name, and where each one wants quantizers.

:mod:`torchq.onnx.targets` defines the targets that come with torchq, one file each.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchq.utils import Registry


@dataclass(frozen=True)
class Target:
    """Where a runtime wants quantizers, beside the inputs of layers.

    Attributes:
        name: The runtime.
        operators: Kinds of operators whose inputs are quantized: "add", "mul", "matmul",
            "attention", "cat", "pool", "activation". All but matrix multiplications are quantized
            in modules that hold a convolution only: between linear layers and norms these
            quantizers cost more than they save.
        modules: Patterns of modules without weights whose input is quantized.
        one_branch: Leave the operand of an addition that ends in a convolution or linear layer
            unquantized.
        float_inputs: Patterns of modules whose input stays float, because the runtime has no
            integer kernel for them. Their weights are still stored as integers.
        per_tensor_weights: Patterns of modules whose weight has one scale, not one per channel.
        quantized_results: Quantize the results of convolutions that no operator behind them
            quantizes; needs an example.
        float_stem: The first layers stay float, unless max pooling reads their result; needs an
            example.
        narrow_depthwise: Depthwise convolutions with fewer channels stay float.
        most_unequal: The largest ratio of the ranges of concatenated tensors that share one range.
            Each has its own where the example shows a larger ratio and another quantizer reads
            one of the tensors, or something reads the result in float; and where only some of the
            tensors have negative values. None: they always share one.
    """

    name: str
    operators: frozenset[str]
    modules: tuple[str, ...]
    one_branch: bool = False
    float_inputs: tuple[str, ...] = ()
    per_tensor_weights: tuple[str, ...] = ()
    quantized_results: bool = False
    float_stem: bool = False
    narrow_depthwise: int = 0
    most_unequal: float | None = None


#: Name -> target. ``torchq quantize --target`` lists these names.
TARGETS: Registry[str, Target] = Registry("target")
