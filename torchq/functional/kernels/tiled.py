"""The CPU kernels: the operations of the definition, on one cache-sized tile after another.

A chain of whole-tensor operations goes through main memory once for each. On a tile that stays in
the cache it costs little more than reading the input and writing the result. No temporary is
larger than a tile.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchq.formats import Format, round_
from torchq.functional.kernels.views import memory_order, merged_dims
from torchq.functional.scale import divisor, scale_from_amax, slope_divisor

# Elements in a tile for each thread: 1 MiB of float32. Smaller tiles spend their time in dispatch.
_TILE = 2**18
_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def supports(x: Tensor, amax: Tensor, format: Format, *, affine: bool = False) -> bool:
    """Return True on a CPU: the kernels can do every case there."""
    return x.device.type == "cpu"


def _tile() -> int:
    return _TILE * torch.get_num_threads()


def tiles(*tensors: Tensor) -> Iterator[Sequence[Tensor]]:
    """Yield aligned pieces of tensors, small enough for several passes in the cache.

    The first is dense; others have its shape, or as many dimensions with sizes of 1.
    """
    limit = _tile()
    if tensors[0].numel() <= limit:
        return iter((tensors,))
    return _tiles(_in_memory_order(list(tensors), tensors[0]), limit)


def _tiles(tensors: list[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Yield aligned pieces of at most ``limit`` elements; tensors broadcast to the first."""
    full = tensors[0]
    if full.numel() <= limit:
        yield tensors
        return
    row_size = full.numel() // full.shape[0]
    if row_size > limit:
        # One row is too large: each is divided along the next dimension.
        for row in range(full.shape[0]):
            yield from _tiles([_select_row(tensor, row) for tensor in tensors], limit)
        return
    rows = limit // row_size
    for start in range(0, full.shape[0], rows):
        length = min(rows, full.shape[0] - start)
        yield [_narrow_rows(tensor, start, length) for tensor in tensors]


def _select_row(tensor: Tensor, row: int) -> Tensor:
    """Return one index of the first dimension; one that is shared gives its only row."""
    if tensor.dim() == 0:
        return tensor
    return tensor.select(0, min(row, tensor.shape[0] - 1))


def _narrow_rows(tensor: Tensor, start: int, length: int) -> Tensor:
    """Return some indices of the first dimension; a shared one stays as it is."""
    if tensor.dim() == 0 or tensor.shape[0] == 1:
        return tensor
    return tensor.narrow(0, start, length)


def _in_memory_order(tensors: list[Tensor], dense: Tensor) -> list[Tensor]:
    """Permute the dimensions of tensors so that those of ``dense`` follow its memory."""
    if dense.is_contiguous():
        return tensors
    order = memory_order(dense)
    return [tensor.permute(order) if tensor.dim() else tensor for tensor in tensors]


def fake_quantize(
    x: Tensor,
    amax: Tensor,
    format: Format,
    scale_format: Format | None,
    with_mask: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute :func:`torchq.functional.kernels.reference.fake_quantize` tile by tile."""
    scale = scale_from_amax(amax, format, scale_format)
    numbers = amax, divisor(amax, scale), scale
    return fake_quantize_scaled(x, numbers, format, with_mask)


def fake_quantize_scaled(
    x: Tensor, numbers: tuple[Tensor, Tensor, Tensor], format: Format, with_mask: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute :func:`fake_quantize` with amax, its divisor and its scale."""
    scale = numbers[2]
    y = torch.empty_like(x)
    mask = torch.empty_like(x, dtype=torch.int8) if with_mask else None
    # Half precision is computed in float32, in a buffer of one tile.
    scratch = (
        None if x.dtype is scale.dtype else scale.new_empty(min(x.numel(), _tile()))
    )
    tensors = [x, y, *numbers]
    if mask is not None:
        tensors.append(mask)
    for x_t, y_t, amax_t, divisor_t, scale_t, *mask_t in _tiles(
        _in_memory_order(tensors, y), _tile()
    ):
        if scratch is None:
            if mask_t:
                # le into float, then to bytes: both are vectorised, le to bool is not.
                mask_t[0].copy_(torch.abs(x_t, out=y_t).le_(amax_t))
            torch.div(x_t, divisor_t, out=y_t)
            format.snap_(y_t).mul_(scale_t)
        else:
            work = scratch[: x_t.numel()].view(x_t.shape)
            if mask_t:
                work.copy_(x_t).abs_().le_(amax_t)
                mask_t[0].copy_(work)
            work.copy_(x_t).div_(divisor_t)
            format.snap_(work).mul_(scale_t)
            y_t.copy_(work)
    return y, mask


def fake_quantize_between(
    x: Tensor, scale: Tensor, low: Tensor, high: Tensor, format: Format, with_mask: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute :func:`torchq.functional.kernels.reference.fake_quantize_between` tile by tile."""
    y = torch.empty_like(x)
    mask = torch.empty_like(x, dtype=torch.int8) if with_mask else None
    # Half precision is computed in float32, in a buffer of one tile.
    is_half = x.dtype is not scale.dtype
    buffers = scale.new_empty(2 if is_half else 1, min(x.numel(), _tile()))
    tensors = [x, y, scale, low, high]
    if mask is not None:
        tensors.append(mask)
    for x_t, y_t, scale_t, low_t, high_t, *mask_t in _tiles(
        _in_memory_order(tensors, y), _tile()
    ):
        clamped = buffers[0, : x_t.numel()].view(x_t.shape)
        if is_half:
            work = buffers[1, : x_t.numel()].view(x_t.shape)
            work.copy_(x_t).div_(scale_t)
        else:
            work = torch.div(x_t, scale_t, out=y_t)
        if mask_t:
            torch.minimum(torch.maximum(work, low_t, out=clamped), high_t, out=clamped)
            mask_t[0].copy_(torch.eq(clamped, work, out=clamped))
        round_(work, format.rounding)
        torch.minimum(torch.maximum(work, low_t, out=work), high_t, out=work)
        work.mul_(scale_t)
        if is_half:
            y_t.copy_(work)
    return y, mask


def mask_gradient(grad: Tensor, mask: Tensor) -> Tensor:
    """Compute :func:`torchq.functional.kernels.reference.mask_gradient` tile by tile.

    The result is not differentiable. The bits of a number times 0 or 1 are those of 0.0 or its
    own, for infinities and NaN too. torch vectorises this multiplication, but neither ``where`` on
    booleans nor their multiplication with floats.
    """
    result = torch.empty_like(grad)
    bits = _BITS[grad.dtype]
    tensors = [grad.view(bits), result.view(bits), mask]
    for grad_t, result_t, mask_t in _tiles(_in_memory_order(tensors, result), _tile()):
        result_t.copy_(mask_t).mul_(grad_t)
    return result


def learned_gradients(
    grad: Tensor, x: Tensor, amax: Tensor, format: Format, scale_format: Format | None
) -> tuple[Tensor, Tensor]:
    """Compute :func:`torchq.functional.kernels.reference.learned_gradients` tile by tile.

    The order of the sum differs, and the result is not differentiable.
    """
    scale = scale_from_amax(amax, format, scale_format)
    grad_x = torch.empty_like(x)
    grad_amax = torch.zeros_like(amax)
    lowest = amax * (format.quant_min / format.qmax)
    by = slope_divisor(amax, scale)
    tensors = [x, grad, grad_x, amax, lowest, by, grad_amax]
    buffers = scale.new_empty(4, min(x.numel(), _tile()))
    for x_t, grad_t, grad_x_t, amax_t, lowest_t, divisor_t, sum_t in _tiles(
        _in_memory_order(tensors, grad_x), _tile()
    ):
        v, slope, inside, work = buffers[:, : x_t.numel()].view(4, *x_t.shape).unbind(0)
        torch.div(work.copy_(x_t), divisor_t, out=v)
        v.clamp_(format.quant_min - 1.0, format.quant_max + 1.0)
        # In floats, because torch does not vectorise booleans.
        torch.le(work, amax_t, out=inside).mul_(work.ge_(lowest_t))
        format.snap_(slope.copy_(v)).sub_(v.mul_(inside))
        work.copy_(grad_t)
        sum_t.add_(slope.mul_(work).sum_to_size(sum_t.shape))
        grad_x_t.copy_(work.mul_(inside))
    return grad_x, grad_amax.div_(format.qmax)


def largest_magnitude(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return ``x.abs().amax(dims, keepdim=True)``, tile by tile and dimension by dimension.

    ``x`` has at least one element and ``dims`` one entry. NaN where one is among the values; never
    a negative zero.
    The host does not wait. Without the sign, floats are ordered as the integers of the same bits,
    NaN last, and torch reduces integers faster.
    """
    shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    order = memory_order(x)
    if all(size == 1 for size in shape):
        smallest, largest = torch.aminmax(x.permute(order))
        return torch.maximum(smallest.abs(), largest.abs()).view(shape)
    # Neighbouring dimensions of one kind are merged, so that few and long ones are reduced.
    sizes, is_kept = merged_dims(x, x.new_empty(shape))
    integer = _BITS[x.dtype]
    scratch = x.new_empty(min(x.numel(), _tile()), dtype=integer)
    merged_shape = [
        size if keep else 1 for size, keep in zip(sizes, is_kept, strict=True)
    ]
    largest = x.new_zeros(merged_shape, dtype=integer)
    bits = x.permute(order).reshape(sizes).view(integer)
    all_but_the_sign = torch.iinfo(integer).max
    for part, result in _tiles([bits, largest], _tile()):
        work = scratch[: part.numel()].view(part.shape)
        magnitude = torch.bitwise_and(part, all_but_the_sign, out=work)
        for dim, size in enumerate(result.shape):
            if size == 1 and magnitude.shape[dim] > 1:
                magnitude = magnitude.amax(dim, keepdim=True)
        torch.maximum(result, magnitude, out=result)
    # From the order of the memory back to that of the dimensions.
    shape_in_memory = [shape[dim] for dim in order]
    back = sorted(range(x.dim()), key=order.__getitem__)
    return largest.view(x.dtype).view(shape_in_memory).permute(back)
