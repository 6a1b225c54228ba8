"""The numbers that users give to quantizers: ranges, scales and zero points, checked."""

import torch
from torch import Tensor

from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError
from torchq.formats import PerTensor, ScaleType
from torchq.functional import QParams


def checked_numbers(
    where: str, what: str, value: object, device: torch.device
) -> Tensor:
    """Return a copy of numbers as finite float32: >= 0, or <= 0 for those called amin."""
    expected = (
        f"expected finite numbers {'<=' if what == 'amin' else '>='} 0 that fit float32"
    )
    try:
        numbers = as_tensor(value).detach()
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigError(
            f"{where}: got an {what} of which {error}; {expected}"
        ) from None
    if numbers.is_complex() or numbers.numel() == 0:
        shown = f"{what} of dtype {numbers.dtype} and shape {tuple(numbers.shape)}"
        raise ConfigError(f"{where}: got {shown}; {expected}")
    new = numbers.to(device=device, dtype=torch.float32, copy=True)
    outward = -new if what == "amin" else new
    if not new.is_meta and not bool(((outward >= 0) & (outward < torch.inf)).all()):
        raise ConfigError(f"{where}: got {what} {value}; {expected}")
    return new


def checked_qparams(
    where: str,
    d: QuantDescriptor,
    scale: object,
    zero_point: object,
    device: torch.device,
) -> QParams:
    """Return a scale (float32) and a zero point (int32) that a quantizer can hold as they are."""
    typed = (
        d.block_scale_format if isinstance(d.block_scale_format, ScaleType) else None
    )
    rounded = d.block_scale_format is not None and typed is None
    if d.learn_amax or d.dynamic or d.scale_amax is not None or rounded:
        raise ConfigError(
            f"{where}: got set_qparams for {d}; expected a descriptor without learn_amax, dynamic, "
            "scale_amax, scale_format of blocks and power_of_two. Use set_amax"
        )
    scales = checked_numbers(where, "scale", scale, device)
    point = as_tensor(zero_point).to(device)
    point = point.expand(scales.shape) if point.numel() == 1 else point
    if point.shape != scales.shape or (
        d.granularity == PerTensor() and scales.numel() != 1
    ):
        raise ConfigError(
            f"{where}: got a scale of shape {tuple(scales.shape)} and a zero point of shape "
            f"{tuple(point.shape)} for {d}; expected equal shapes, with one element per tensor"
        )
    low, high = (
        (0, 0) if d.symmetric else (int(d.format.quant_min), int(d.format.quant_max))
    )
    is_code = (point >= low) & (point <= high) & (point == point.to(torch.int32))
    if not point.is_meta and not bool(is_code.all()):
        raise ConfigError(
            f"{where}: got zero points from {float(point.min()):g} to {float(point.max()):g} for "
            f"{d}; expected whole numbers from {low} to {high}"
        )
    smallest = torch.finfo(torch.float32).tiny
    is_scale = (scales >= smallest) & (scales * d.format.qmax < torch.inf)
    if (
        typed is not None
        and not scales.is_meta
        and not scales.equal(typed.snap_(scales.clone()))
    ):
        raise ConfigError(
            f"{where}: got scales up to {float(scales.max()):.9g} for {d}; expected numbers that "
            f"{typed} holds. Use set_amax, whose scales are rounded"
        )
    if not scales.is_meta and not bool(is_scale.all()):
        raise ConfigError(
            f"{where}: got scales from {float(scales.min()):.3g} to {float(scales.max()):.3g}; "
            "expected normal numbers > 0 whose range fits float32"
        )
    return QParams(scales, point.to(torch.int32, copy=True), d.format)


def as_tensor(value: object) -> Tensor:
    """Return a value as a float64 or own-dtype tensor, whatever the defaults of torch are."""
    if isinstance(value, Tensor):
        return value
    tensor = torch.as_tensor(value, device="cpu")
    if hasattr(value, "__array__") or not tensor.is_floating_point():
        return tensor
    return torch.as_tensor(value, device="cpu", dtype=torch.float64)
