"""Convolutions, matrix products, pooling and norms, with the options that modules of torch lack."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.frontends.building.functions import (
    convolve,
    group_norm,
    max_pool_with_places,
    pad_amounts,
    pool,
    same_pads,
)
from torchq.frontends.building.graph import Constant, Value
from torchq.frontends.building.layers import (
    BATCH_NORMS,
    CONVOLUTIONS,
    GLOBAL_POOLS,
    INSTANCE_NORMS,
    batch_norm,
    convolution,
    filled,
    pooling,
    symmetric,
)
from torchq.frontends.building.one_call import one_call
from torchq.frontends.onnx.context import NodeContext, converter, row
from torchq.frontends.onnx.converters.quantization import module_name, weighted


class _Window(NamedTuple):
    """A window; its pads are numbers (all before, then all behind) or SAME_UPPER or SAME_LOWER."""

    kernel: list[int]
    stride: list[int]
    dilation: list[int]
    pads: list[int] | str


def _window(node: NodeContext) -> _Window:
    kernel = node.attr("kernel_shape", [])
    if not kernel and len(node.inputs) > 1:
        kernel = [int(size or 0) for size in (node.shape(1) or [])[2:]]
    spatial = len(kernel)
    if spatial not in CONVOLUTIONS:
        node.refuse(f"got a kernel of {spatial} dimensions; expected 1 to 3")
    stride = node.attr("strides", [1] * spatial)
    dilation = node.attr("dilations", [1] * spatial)
    pads = node.attr("pads", [0] * (2 * spatial))
    auto = node.attr("auto_pad", "NOTSET")
    if [len(stride), len(dilation), len(pads)] != [spatial, spatial, 2 * spatial]:
        node.refuse(
            f"strides, dilations or pads do not fit a kernel of {spatial} dimensions"
        )
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        return _Window(kernel, stride, dilation, auto)
    return _Window(
        kernel, stride, dilation, [0] * len(pads) if auto == "VALID" else pads
    )


def _padded(node: NodeContext, window: _Window) -> tuple[Value, list[int]]:
    """Return the input, padded where both sides differ, and the padding that is left to a layer."""
    x = node.inputs[0]
    *sizes, pads = window
    padding = symmetric(window.pads)
    if isinstance(pads, str):
        x = node.call(pad_same, x, *sizes, pads == "SAME_UPPER")
    elif padding is None:
        x = node.call(F.pad, x, pad_amounts(pads), "constant", 0.0)
    return x, padding or [0] * len(window.kernel)


@one_call
def pad_same(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    upper: bool,
) -> Tensor:
    """Return ``x`` padded with zeros so that a window gives ``ceil(size / stride)`` results."""
    return F.pad(x, pad_amounts(same_pads(x, kernel, stride, dilation, upper)))


def _constants(node: NodeContext, *indices: int) -> list[Constant] | None:
    """Return the inputs that are there if all of them are known, else None."""
    inputs = [node.input(index) for index in indices]
    constants = [value for value in inputs if isinstance(value, Constant)]
    return constants if len(constants) == len(inputs) - inputs.count(None) else None


@converter("Conv")
def _conv(node: NodeContext) -> Value:
    window = _window(node)
    groups = node.attr("group", 1)
    stored = _constants(node, 1, 2)
    x, padding = _padded(node, window)
    sizes = (window.stride, padding, window.dilation)
    if stored is None:
        return node.call(convolve, x, node.inputs[1], node.input(2), *sizes, groups)
    module = convolution(node.builder, stored, sizes, groups)
    return weighted(node, module, stored[0], x)


@converter("DeformConv")
def _deform_conv(node: NodeContext) -> Value:
    """Convert to samples of the input, laid out as windows, and a convolution of these."""
    window = _window(node)
    groups = node.attr("group", 1)
    offset_groups = node.attr("offset_group", 1)
    offsets = node.inputs[2], node.input(4)
    options = (*window, offset_groups)
    samples = node.call(deformed, node.inputs[0], *offsets, *options)
    stored = _constants(node, 1, 3)
    none, ones = [0] * len(window.kernel), [1] * len(window.kernel)
    sizes = (window.kernel, none, ones)
    if stored is None:
        return node.call(
            convolve, samples, node.inputs[1], node.input(3), *sizes, groups
        )
    module = convolution(node.builder, stored, sizes, groups)
    return weighted(node, module, stored[0], samples)


@one_call
def deformed(
    x: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    pads: Sequence[int],
    groups: int,
) -> Tensor:
    """Return what the windows of a deformable convolution read, one window beside the other.

    ``offset`` moves each place of a window (Dai et al. 2017), ``mask`` weighs what is read there
    (Zhu et al. 2019). A window of k x k gives k x k elements of the result.
    """
    spatial, count = len(kernel), math.prod(kernel)
    sizes, out = x.shape[2:], offset.shape[2:]
    moves = offset.reshape(-1, groups, count, spatial, *out)
    places = []
    for axis in range(spatial):
        shape = [-1 if i == axis else 1 for i in range(spatial)]
        inside = torch.arange(kernel[axis], device=x.device) * dilation[axis]
        inside = inside.view(shape).expand(*kernel).reshape(-1, *[1] * spatial)
        window = torch.arange(out[axis], device=x.device) * stride[axis] - pads[axis]
        at = moves[:, :, :, axis] + (inside + window.view(shape))
        places.append(at.clamp(-1, sizes[axis]).flatten(0, 1))
    channels = x.shape[1] // groups
    planes = x.reshape(-1, channels, *sizes)
    read = _interpolated(planes, places)
    if mask is not None:
        read = read * mask.reshape(*read.shape[:-1], 1)
    read = read.reshape(-1, groups, *kernel, *out, channels)
    pairs = [axis for i in range(spatial) for axis in (2 + spatial + i, 2 + i)]
    windows = read.permute(0, 1, 2 + 2 * spatial, *pairs)
    results = [size * k for size, k in zip(out, kernel, strict=True)]
    return windows.reshape(-1, x.shape[1], *results)


def _interpolated(planes: Tensor, places: Sequence[Tensor]) -> Tensor:
    """Return planes (planes, channels, ...) read between their elements, 0 outside; channels last.

    There is a tensor (planes, ...) of places for each spatial dimension.
    """
    sizes = planes.shape[2:]
    rows = planes.flatten(2).transpose(1, 2).flatten(0, 1)
    first = torch.arange(planes.shape[0], device=planes.device) * sizes.numel()
    first = first.view(-1, *[1] * (places[0].dim() - 1))
    results = []
    for corner in itertools.product((0, 1), repeat=len(places)):
        weight = torch.ones_like(places[0])
        inner = torch.zeros_like(places[0], dtype=torch.int64)
        for at, size, side in zip(places, sizes, corner, strict=True):
            low = at.floor()
            weight = weight * (at - low if side else 1 - (at - low))
            near = low.long() + side
            weight = weight * ((near >= 0) & (near < size)).to(weight.dtype)
            inner = inner * size + near.clamp(min=0).clamp(max=size - 1)
        index = first + inner
        read = rows.index_select(0, index.reshape(-1))
        results.append(read.reshape(*index.shape, -1) * weight.unsqueeze(-1))
    total = results[0]
    for result in results[1:]:
        total = total + result
    return total


@converter("ConvTranspose")
def _conv_transpose(node: NodeContext) -> Value:
    window = _window(node)
    groups = node.attr("group", 1)
    stored = _constants(node, 1, 2)
    extra = node.attr("output_padding", [0] * len(window.kernel))
    window = _transposed_window(node, window, extra)
    stride, dilation = window.stride, window.dilation
    fits = all(e < max(s, d) for e, s, d in zip(extra, stride, dilation, strict=True))
    padding = symmetric(window.pads)
    if padding is None or not fits or stored is None:
        options = (stride, dilation, groups, window.pads, extra)
        return node.call(conv_transpose, *node.inputs[:2], node.input(2), *options)
    sizes = (stride, padding, dilation)
    module = convolution(node.builder, stored, sizes, groups, extra)
    return weighted(node, module, stored[0], node.inputs[0])


def _transposed_window(node: NodeContext, window: _Window, extra: list[int]) -> _Window:
    """Return the window with the pads that follow from the output shape, or from ``auto_pad``."""
    output_shape = node.attr("output_shape", list | None)
    shape = node.shape(0)
    if not isinstance(window.pads, str) and not output_shape:
        return window
    if output_shape is not None and (shape is None or None in shape[2:]):
        node.refuse("its output shape is given, and its input shape is not known")
    before, behind = [], []
    parts = zip(window.kernel, window.stride, window.dilation, extra, strict=True)
    for axis, (k, s, d, e) in enumerate(parts):
        total = d * (k - 1) + 1 + e - s
        if output_shape is None:  # the output size is the input size times the stride
            total = max(0, total)
        else:
            total += (
                s * int((shape or [])[2 + axis] or 0)
                - output_shape[-len(extra) :][axis]
            )
        half = total // 2
        before.append(half if window.pads == "SAME_UPPER" else total - half)
        behind.append(total - before[-1])
    return _Window(window.kernel, window.stride, window.dilation, before + behind)


_BYTES = (torch.int8, torch.uint8)


@converter("MaxPool", "AveragePool")
def _pool(node: NodeContext) -> Value | list[Value]:
    node.attr("kernel_shape", list)
    kind = "max" if node.op_type == "MaxPool" else "avg"
    window = _window(node)
    dtype = node.dtype(0)
    if dtype in _BYTES and kind == "max":
        # Which float32 holds all of.
        node.inputs[0] = node.call(torch.Tensor.to, node.inputs[0], torch.float32)
    elif dtype is not None and not dtype.is_floating_point:
        node.refuse(f"it pools {dtype}; expected floats, or maxima of bytes")
    sizes = (window.kernel, window.stride, window.dilation, window.pads)
    include = node.attr("count_include_pad", False)
    is_ceil = node.attr("ceil_mode", False)
    results: list[Value] = []
    convention = "ceil" if is_ceil else "valid"
    column_major = node.attr("storage_order", False)
    if len([name for name in node.output_names if name]) > 1:
        options = (*sizes, convention, column_major)
        results = node.call_parts(2, max_pool_with_places, node.inputs[0], *options)
    elif is_ceil:
        results = [node.call(pool, node.inputs[0], kind, *sizes, "ceil", include)]
    else:
        results = [pooling(node, kind, *sizes, "valid", include)]
    if dtype in _BYTES:
        results[0] = node.call(torch.Tensor.to, results[0], dtype)
    return results


@converter("LpPool")
def _lp_pool(node: NodeContext) -> Value:
    node.attr("kernel_shape", list)
    window = _window(node)
    order = node.attr("p", 2)
    if order < 1:
        node.refuse(f"its p is {order}; expected 1 or more")
    convention = "ceil" if node.attr("ceil_mode", False) else "valid"
    sizes = (window.kernel, window.stride, window.dilation, window.pads)
    return node.call(lp_pool, node.inputs[0], order, *sizes, convention)


@converter("GlobalLpPool")
def _global_lp_pool(node: NodeContext) -> Value:
    return node.call(global_lp_pool, node.inputs[0], node.attr("p", 2))


@one_call
def global_lp_pool(x: Tensor, order: int) -> Tensor:
    """Return the norm of each plane, the spatial dimensions kept."""
    axes = list(range(2, x.dim()))
    return (x.abs() ** order).sum(axes, keepdim=True) ** (1 / order)


@one_call
def lp_pool(
    x: Tensor,
    order: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    pads: Sequence[int] | str,
    convention: str,
) -> Tensor:
    """Return the norms of windows."""
    window = kernel, stride, dilation, pads
    return pool(x.abs() ** order, "sum", *window, convention, False) ** (1 / order)


@converter("MaxUnpool")
def _max_unpool(node: NodeContext) -> Value:
    node.attr("kernel_shape", list)
    window = _window(node)
    spatial = len(window.kernel)
    assert not isinstance(window.pads, str)
    sizes: list[object] = [node.size(0, 0), node.size(0, 1)]
    parts = zip(window.kernel, window.stride, strict=True)
    for axis, (k, s) in enumerate(parts):
        less = window.pads[axis] + window.pads[spatial + axis]
        size = node.size(0, 2 + axis)
        sizes.append(node.arithmetic(_unpooled, size, k, s, less))
    if node.input(2) is not None:
        given = node.known(2, "output shape").tolist()
        if given != sizes:
            node.refuse(
                f"its output shape is {given}, that of its window {sizes}: the standard and "
                "runtimes disagree where its elements lie then; expected both the same"
            )
    return node.call(max_unpool, *node.inputs[:2], sizes)


@one_call
def _unpooled(size: int, kernel: int, stride: int, less: int) -> int:
    return (size - 1) * stride + kernel - less


@one_call
def max_unpool(x: Tensor, places: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return zeros with elements at the places that a pooling took them from."""
    count = 1
    for size in sizes:
        count = count * size
    zeros = x.new_zeros(count)
    return zeros.scatter(0, places.reshape(-1), x.reshape(-1)).reshape(list(sizes))


@converter("Col2Im")
def _col2im(node: NodeContext) -> Value:
    image, block = (node.ints_or_input(index) for index in (1, 2))
    strides, dilations, pads = (
        node.attr(name, list | None) for name in ("strides", "dilations", "pads")
    )
    count = len(block) if isinstance(block, list) else len(strides or dilations or [])
    padding = symmetric(pads or [0] * (2 * count))
    if isinstance(image, list) and len(image) == count == 2 and padding is not None:
        window = block, dilations or [1, 1], padding, strides or [1, 1]
        return node.call(F.fold, node.inputs[0], image, *window)
    return node.call(folded, node.inputs[0], image, block, strides, dilations, pads)


@one_call
def folded(
    x: Tensor,
    image: Tensor | Sequence[int],
    block: Tensor | Sequence[int],
    stride: Sequence[int] | None,
    dilation: Sequence[int] | None,
    pads: Sequence[int] | None,
) -> Tensor:
    """Return an image of any number of dimensions that blocks are added up to."""
    image = image.tolist() if isinstance(image, Tensor) else image
    block = block.tolist() if isinstance(block, Tensor) else block
    spatial = len(block)
    stride, dilation = stride or [1] * spatial, dilation or [1] * spatial
    pads = pads or [0] * (2 * spatial)
    sums = [image[i] + pads[i] + pads[spatial + i] for i in range(spatial)]
    parts = zip(sums, block, stride, dilation, strict=True)
    counts = [(size - d * (k - 1) - 1) // s + 1 for size, k, s, d in parts]
    channels = x.shape[1] // math.prod(block)
    columns = x.reshape(x.shape[0], channels, -1, *counts)
    result = x.new_zeros(x.shape[0], channels, *sums)
    for number, place in enumerate(itertools.product(*map(range, block))):
        slices = [
            slice(at * d, at * d + s * (count - 1) + 1, s)
            for at, d, s, count in zip(place, dilation, stride, counts, strict=True)
        ]
        at_block = (slice(None), slice(None), *slices)
        result[at_block] += columns[:, :, number]
    ends = [slice(pads[i], pads[i] + image[i]) for i in range(spatial)]
    inside = (slice(None), slice(None), *ends)
    return result[inside]


@converter("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(node: NodeContext) -> Value:
    table = GLOBAL_POOLS["avg" if node.op_type == "GlobalAveragePool" else "max"]
    spatial = node.ndim(0) - 2
    if spatial not in table:
        node.refuse(f"got {spatial} spatial dimensions; expected 1 to 3")
    return node.module(table[spatial](1), node.inputs[0])


_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@one_call
def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    pads: Sequence[int],
    extra: Sequence[int],
) -> Tensor:
    """Return a transposed convolution, cropped by ``pads``, and grown by ``extra`` behind."""
    function = _TRANSPOSED[weight.dim() - 2]
    spatial = len(stride)
    y = function(x, weight, bias, list(stride), 0, 0, groups, list(dilation))
    grown = [0] * spatial + list(extra)
    amounts = pad_amounts([more - less for more, less in zip(grown, pads, strict=True)])
    if bias is None or all(amount <= 0 for amount in amounts):
        return F.pad(y, amounts)
    shape = (1, -1, *[1] * spatial)
    return F.pad(y - bias.view(shape), amounts) + bias.view(shape)


def _linear(
    node: NodeContext,
    x: Value,
    weight: Constant,
    transposed: bool,
    bias: Constant | None,
    factors: tuple[float, float] = (1.0, 1.0),
) -> Value:
    """Return a call of a linear layer; weight and bias are multiplied by factors."""
    tensor, key = (
        (weight.tensor.t(), "transposed") if transposed else (weight.tensor, "")
    )
    alpha, beta = factors
    module = nn.Linear(
        tensor.shape[1], tensor.shape[0], bias is not None, device="meta"
    )
    if alpha != 1.0:
        key, tensor = f"{key} * {alpha}", tensor * alpha
    module.weight = node.builder.parameter(weight, key, tensor)
    if bias is not None:
        vector = bias.tensor.reshape(-1).expand(tensor.shape[0])
        vector = vector if beta == 1.0 else vector * beta
        module.bias = node.builder.parameter(
            bias, f"* {beta}" if beta != 1.0 else "", vector
        )
    return weighted(node, module, weight, x, transposed)


@converter("MatMul")
def _matmul(node: NodeContext) -> Value:
    weight = node.inputs[1]
    if isinstance(weight, Constant) and weight.tensor.dim() == 2 and node.floating(1):
        return _linear(node, node.inputs[0], weight, True, None)
    return node.call(torch.matmul, *node.inputs)


@one_call
def determinant(x: Tensor) -> Tensor:
    """Return the determinants of matrices, computed in float32 at least."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return torch.linalg.det(wide).to(x.dtype)


row("Det", determinant)


@converter("Gemm")
def _gemm(node: NodeContext) -> Value:
    x = node.inputs[0]
    weight = node.inputs[1]
    bias = node.input(2)
    transposed = node.attr("transA", False), node.attr("transB", False)
    factors = node.attr("alpha", 1.0), node.attr("beta", 1.0)
    if isinstance(weight, Constant) and _is_linear(
        node, weight, 0 if transposed[1] else 1
    ):
        x = node.call(torch.t, x) if transposed[0] else x
        constant_bias = bias if isinstance(bias, Constant) else None
        return _linear(node, x, weight, not transposed[1], constant_bias, factors)
    return node.call(gemm, x, weight, bias, *factors, *transposed)


def _is_linear(node: NodeContext, weight: Constant, axis: int) -> bool:
    """Return True for a product that a linear layer computes; ``axis`` is that of its outputs."""
    bias = node.input(2)
    is_constant = weight.tensor.is_floating_point() and (
        bias is None or isinstance(bias, Constant)
    )
    if node.attr("alpha", 1.0) != 1.0 and weight in node.builder.weights:
        return False  # the codes of the file would have another scale
    *leading, last = (1, *bias.tensor.shape) if isinstance(bias, Constant) else (1, 1)
    return (
        is_constant and last in (1, weight.tensor.shape[axis]) and set(leading) <= {1}
    )


@one_call
def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    alpha: float,
    beta: float,
    trans_a: bool,
    trans_b: bool,
) -> Tensor:
    """Return ``alpha * a @ b + beta * c`` of matrices that may be transposed before."""
    y = (a.t() if trans_a else a) @ (b.t() if trans_b else b)
    y = y if alpha == 1.0 else (y * alpha).to(y.dtype)
    if c is None:
        return y
    return y + (c if beta == 1.0 else (c * beta).to(y.dtype))


@converter("Einsum")
def _einsum(node: NodeContext) -> Value:
    return node.call(
        torch.einsum, node.attr("equation", str).replace(" ", ""), list(node.inputs)
    )


@converter("BatchNormalization")
def _batch_norm(node: NodeContext) -> Value:
    if (
        node.attr("training_mode", 0)
        or len([name for name in node.output_names if name]) > 1
    ):
        node.refuse("it is in training mode; expected inference")
    epsilon = node.attr("epsilon", 1e-5)
    momentum = node.attr("momentum", 0.9)
    parts = _constants(node, 1, 2, 3, 4)
    ndim = len(node.shape(0) or ())
    if parts is None or ndim not in BATCH_NORMS or not node.floating(0):
        x, scale, bias, mean, var = node.inputs
        return node.call(F.batch_norm, x, mean, var, scale, bias, False, 0.0, epsilon)
    module = batch_norm(node.builder, ndim, parts, epsilon, 1 - momentum)
    return node.module(module, node.inputs[0], name=module_name(node, parts[0]))


@converter("InstanceNormalization")
def _instance_norm(node: NodeContext) -> Value:
    epsilon = node.attr("epsilon", 1e-5)
    parts = _constants(node, 1, 2)
    ndim = node.ndim(0)
    if parts is None or ndim not in INSTANCE_NORMS:
        x, scale, bias = node.inputs
        return node.call(
            F.instance_norm, x, None, None, scale, bias, True, 0.0, epsilon
        )
    module = INSTANCE_NORMS[ndim](parts[0].tensor.numel(), epsilon, affine=True)
    filled(node.builder, module, *parts)
    return node.module(module, node.inputs[0], name=module_name(node, parts[0]))


@converter("LayerNormalization")
def _layer_norm(node: NodeContext) -> Value | list[Value]:
    axis = node.attr("axis", -1)
    epsilon = node.attr("epsilon", 1e-5)
    shape = node.shape(0)
    parts = _constants(node, 1, 2)
    tail = None if shape is None else shape[axis % len(shape) :]
    several = len([name for name in node.output_names if name]) > 1
    is_plain = tail is not None and None not in tail and not several
    if parts is None or not is_plain or list(parts[0].tensor.shape) != tail:
        normalized = node.call_parts(
            3, layer_norm, *node.inputs[:2], node.input(2), axis, epsilon
        )
        return normalized if several else normalized[0]
    module = filled(
        node.builder, nn.LayerNorm(tail, epsilon, bias=len(parts) > 1), *parts
    )
    return node.module(module, node.inputs[0], name=module_name(node, parts[0]))


@one_call
def layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor | None, axis: int, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised tensor, means, and inverse deviations, in float32 at least."""
    axes = list(range(axis % x.dim(), x.dim()))
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean = wide.mean(axes, keepdim=True)
    inverse = torch.rsqrt((wide - mean).square().mean(axes, keepdim=True) + epsilon)
    y = ((wide - mean) * inverse).to(x.dtype) * scale
    return (y if bias is None else y + bias), mean, inverse


@converter("GroupNormalization")
def _group_norm(node: NodeContext) -> Value:
    groups = node.attr("num_groups", int)
    epsilon = node.attr("epsilon", 1e-5)
    shape = node.shape(0)
    parts = _constants(node, 1, 2)
    channels = shape[1] if shape else None
    if parts is None or channels is None or parts[0].tensor.numel() != channels:
        return node.call(group_norm, *node.inputs, groups, epsilon)
    module = filled(node.builder, nn.GroupNorm(groups, channels, epsilon), *parts)
    return node.module(module, node.inputs[0], name=module_name(node, parts[0]))


@converter("LRN")
def _lrn(node: NodeContext) -> Value:
    alpha = node.attr("alpha", 1e-4)
    beta = node.attr("beta", 0.75)
    bias = node.attr("bias", 1.0)
    size = node.attr("size", int)
    if size % 2 == 0:
        node.refuse(f"its size is {size}; expected an odd number of channels")
    return node.module(nn.LocalResponseNorm(size, alpha, beta, bias), node.inputs[0])
