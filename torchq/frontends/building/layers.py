"""Layers of torch by the number of their dimensions, and their weights from a file."""

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from torchq.frontends.building.functions import pool
from torchq.frontends.building.graph import Constant, FileNode, GraphBuilder, Value

Classes = dict[int, type[Any]]


def _by_dims(name: str, ndim: int = 0) -> Classes:
    return {d + ndim: getattr(nn, f"{name}{d}d") for d in (1, 2, 3)}


#: By the number of spatial dimensions.
CONVOLUTIONS, TRANSPOSED = _by_dims("Conv"), _by_dims("ConvTranspose")
POOLS = {"max": _by_dims("MaxPool"), "avg": _by_dims("AvgPool")}
GLOBAL_POOLS = {"max": _by_dims("AdaptiveMaxPool"), "avg": _by_dims("AdaptiveAvgPool")}
#: By the number of dimensions.
BATCH_NORMS: Classes = {2: nn.BatchNorm1d, **_by_dims("BatchNorm", 2)}
INSTANCE_NORMS = _by_dims("InstanceNorm", 2)

Module = TypeVar("Module", bound=nn.Module)


def filled(
    builder: GraphBuilder,
    module: Module,
    weight: Constant,
    bias: Constant | None = None,
) -> Module:
    """Return a module with a weight and a bias, each of which is one parameter for all readers."""
    module.weight = builder.parameter(weight)
    if bias is not None:
        module.bias = builder.parameter(bias)
    return module


def convolution(
    builder: GraphBuilder,
    stored: Sequence[Constant],
    window: tuple[Sequence[int], Sequence[int], Sequence[int]],
    groups: int,
    extra: Sequence[int] | None = None,
) -> nn.Module:
    """Return a convolution (stride, padding, dilation), a transposed one with ``extra`` sizes."""
    stride, padding, dilation = (tuple(part) for part in window)
    first, second, *kernel = stored[0].tensor.shape
    spatial, size = len(kernel), tuple(kernel)
    options: dict[str, Any] = {
        "bias": len(stored) > 1,
        "groups": groups,
        "dilation": dilation,
    }
    if extra is None:
        channels = (second * groups, first)
        table = CONVOLUTIONS
    else:
        channels = (first, second * groups)
        table = TRANSPOSED
        options["output_padding"] = tuple(extra)
    module = table[spatial](*channels, size, stride, padding, device="meta", **options)
    return filled(builder, module, *stored)


def batch_norm(
    builder: GraphBuilder,
    ndim: int,
    stored: Sequence[Constant],
    eps: float,
    momentum: float,
) -> nn.Module:
    """Return a BatchNorm with the weight, bias, mean and variance of a file."""
    weight, bias, mean, variance = stored
    module = filled(
        builder, BATCH_NORMS[ndim](mean.tensor.numel(), eps, momentum), weight, bias
    )
    module.running_mean = mean.tensor.clone()
    module.running_var = variance.tensor.clone()
    return module


def symmetric(pads: Sequence[int] | str) -> list[int] | None:
    """Return the pads of each side where both sides have the same, else None."""
    if isinstance(pads, str):
        return None
    before = list(pads[: len(pads) // 2])
    behind = list(pads[len(pads) // 2 :])
    return before if before == behind and min(before, default=0) >= 0 else None


def pooling(
    node: FileNode,
    kind: str,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    pads: Sequence[int] | str,
    convention: str,
    include_pad: bool,
) -> Value:
    """Call a pooling: torch's own where it has the windows of ``pool`` for inputs of any size."""
    padding = symmetric(pads)
    table = POOLS.get(kind)
    parts = list(zip(kernel, stride, padding or (), strict=False))
    same = padding is not None and all(2 * p <= k for k, _, p in parts)
    same = same and (kind == "max" or set(dilation) <= {1})
    # torch leaves out a last window that begins in the padding, the convention "full" does not.
    same = same and (convention != "full" or all(s + p <= k for k, s, p in parts))
    if table is None or not same:
        window = list(kernel), list(stride), list(dilation), pads
        return node.call(pool, node.inputs[0], kind, *window, convention, include_pad)
    options: dict[str, Any] = {"dilation": dilation}
    if kind == "avg":
        options = {"count_include_pad": include_pad or not any(padding or ())}
    options["ceil_mode"] = convention != "valid"
    return node.module(
        table[len(kernel)](kernel, stride, padding, **options), node.inputs[0]
    )
