"""Runtimes that a model can be quantized for, by name, and where each one wants quantizers.

:mod:`torchq.onnx.targets` defines the targets that come with torchq, one file each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchq.utils import Registry

__all__ = ["TARGETS", "IntegerGains", "Target"]


@dataclass(frozen=True)
class IntegerGains:
    """The time that a runtime saves on integers, in nanoseconds; below 0 where float is faster.

    A convolution or linear layer saves ``product`` for each product of each element of its result,
    and ``result`` for the element itself. The figures are measured on one thread of one CPU; their
    ratios decide.

    Attributes:
        product: For each product of a convolution or linear layer.
        result: For each element of its result.
        image_product: As ``product``, where the convolution reads an image.
        image_result: As ``result``, where the convolution reads an image.
        depthwise: For each element of the result of a depthwise convolution.
        unaligned_depthwise: As ``depthwise``, where the channels are no multiple of 4.
        modules: For each element of the result of other modules, by the names of their classes.
        boundary: The cost of each element that changes from float to integers.
        pooled_boundary: The same where max pooling computes or reads them.
        least: What float must save in all for the first layers to stay float.
    """

    product: float
    result: float
    image_product: float
    image_result: float
    depthwise: float
    unaligned_depthwise: float
    modules: Mapping[str, float] = field(default_factory=dict)
    boundary: float = 0.0
    pooled_boundary: float = 0.0
    least: float = 0.0


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
        integer_gains: What integers save; the first layers stay float where that is negative;
            needs an example. None leaves all on integers.
        narrow_depthwise: Depthwise convolutions with fewer channels stay float where these cannot
            be padded, because they do not stand between convolutions alone; needs an example.
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
    integer_gains: IntegerGains | None = None
    narrow_depthwise: int = 0
    most_unequal: float | None = None


#: Name -> target. ``torchq quantize --target`` lists these names.
TARGETS: Registry[str, Target] = Registry("target")
