"""Estimators of the gradient: what training does with the rounding, whose own gradient is zero.

An estimator is a function ``(v, grid, **options) -> codes``. ``v`` is the input over its scale,
not clamped; ``grid`` knows the codes. Its forward says what training computes with, its gradient
what training follows. Outside training, quantizers always round.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError
from torchq.formats import Format, round_
from torchq.functional import (
    compute_dtype,
    scale_and_zero_point,
    scale_from_amax,
    straight_through,
)
from torchq.functional.affine import living_ends
from torchq.functional.scale import divisor
from torchq.nn import TensorQuantizer
from torchq.utils import Pattern, Registry
from torchq.workflow import select_quantizers

__all__ = ["ESTIMATORS", "Estimator", "EstimatorFunction", "Grid", "use_estimator_"]

EstimatorFunction = Callable[..., Tensor]

#: Name -> function; ``@ESTIMATORS.register("mine")`` adds one.
ESTIMATORS: Registry[str, EstimatorFunction] = Registry("gradient estimator")

#: The least and the largest slope of a smooth staircase.
_SHARPNESS = 1e-4, 1000.0


@dataclass(frozen=True)
class Grid:
    """The codes of a tensor, less its zero point.

    Attributes:
        format: the number format.
        low: the smallest code, broadcastable to the tensor.
        high: the largest code.
    """

    format: Format
    low: Tensor
    high: Tensor

    def clamp(self, v: Tensor) -> Tensor:
        """Return ``v`` between the bounds; the gradient passes inside, and goes to the bounds."""
        return torch.minimum(torch.maximum(v, self.low), self.high)

    def snap(self, v: Tensor) -> Tensor:
        """Return the nearest code, without gradient."""
        with torch.no_grad():
            if self.format.is_integer:
                return self.clamp(round_(v.detach().clone(), self.format.rounding))
            return self.format.snap_(v.detach().clone())


@dataclass(frozen=True)
class Estimator:
    """An estimator with its options, as a delegate of quantizers.

    Attributes:
        name: in :data:`ESTIMATORS`.
        range_gradient: ``"full"`` lets a learned range feel the rounding too (LSQ); ``"clipped"``
            only the values that it clips (PACT).
        options: keyword arguments of the function.
    """

    name: str
    range_gradient: Literal["full", "clipped"] = "full"
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, x: Tensor, quantizer: TensorQuantizer) -> Tensor:
        """Return ``x`` as training computes with it, or quantized outside training."""
        if not quantizer.training or torch.onnx.is_in_onnx_export():
            return quantizer.apply_own(x)
        d = quantizer.descriptor
        amin, amax = quantizer.ends_for(x)
        parts, dtype = d.granularity.split(x), compute_dtype(x.dtype)
        top = d.granularity.align(amax.to(dtype), x.shape)
        if amin is None:
            scale = scale_from_amax(top, d.format, d.block_scale_format)
            point = torch.zeros_like(scale)
            by = divisor(top, scale)
        else:
            bottom = d.granularity.align(amin.to(dtype), x.shape)
            bottom, top = living_ends(bottom, top)
            scale, point = scale_and_zero_point(bottom, top, d.format, d.block_scale_format)
            by = scale
        grid = Grid(d.format, d.format.quant_min - point, d.format.quant_max - point)
        y = self._quantize(parts.to(dtype), scale, by, grid)
        return d.granularity.join(y.to(x.dtype), x.shape)

    def _quantize(self, x: Tensor, scale: Tensor, by: Tensor, grid: Grid) -> Tensor:
        function = ESTIMATORS[self.name]
        if self.range_gradient == "full":
            return function(x / by, grid, **self.options) * scale
        # The range is felt where it clips; for the rounding it is a constant.
        clipped = torch.minimum(torch.maximum(x, grid.low * scale), grid.high * scale)
        fixed = Grid(grid.format, grid.low.detach(), grid.high.detach())
        return function(clipped / by.detach(), fixed, **self.options) * scale.detach()


def use_estimator_(
    model: nn.Module,
    name: str | None,
    patterns: Sequence[Pattern] | Pattern = "*",
    *,
    range_gradient: Literal["full", "clipped"] = "full",
    **options: Any,
) -> tuple[str, ...]:
    """Choose how the selected quantizers estimate gradients, in place.

    Without this call they use the straight-through estimator in its fast form. Estimators act in
    training mode alone. Call it again with other options to anneal one. The choice goes into
    copies and pickles; state dicts and files do not have it.

    Args:
        model: a quantized model.
        name: of an estimator in :data:`ESTIMATORS`; None brings the fast form back.
        patterns: as for :func:`torchq.disabled`.
        range_gradient: ``"full"`` or ``"clipped"``; see :class:`Estimator`.
        **options: of the estimator.

    Returns:
        The paths of the selected quantizers.

    Raises:
        ConfigError: an unknown name or option, a format that the estimator cannot do, a pattern
            that selects no quantizer, or a quantizer that computes something else by a delegate.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> _ = torchq.quantize_(model, torchq.recipes.w4a4(first_last=None))
        >>> use_estimator_(model, "ewgs", "*.weight_quantizer", delta=0.3)
        ('0.weight_quantizer',)
    """
    if range_gradient not in ("full", "clipped"):
        raise ConfigError(
            f"use_estimator_: got range_gradient={range_gradient!r}; expected 'full' or 'clipped'"
        )
    chosen = select_quantizers(model, patterns)
    delegate = None if name is None else Estimator(name, range_gradient, options)
    for path, quantizer in chosen.items():
        if not isinstance(quantizer.delegate, Estimator | None):
            raise ConfigError(
                f"{path}: got an estimator for a quantizer with a delegate of its own; expected "
                "one without. Leave it out of the patterns"
            )
        if delegate is not None:
            _try(path, quantizer, delegate)
    for quantizer in chosen.values():
        quantizer.delegate = delegate
    return tuple(chosen)


def _try(path: str, quantizer: TensorQuantizer, estimator: Estimator) -> None:
    """Raise an error unless the estimator runs with its options on the quantizer's format."""
    known = inspect.signature(ESTIMATORS[estimator.name]).parameters
    is_open = any(p.kind is p.VAR_KEYWORD for p in known.values())
    unknown = [] if is_open else sorted(estimator.options.keys() - known.keys())
    if unknown:
        expected = ", ".join(list(known)[2:]) or "none"
        raise ConfigError(
            f"use_estimator_({estimator.name!r}): got the options {', '.join(unknown)}; "
            f"expected {expected}"
        )
    format = quantizer.descriptor.format
    bounds = (
        torch.tensor(float(bound), device="cpu") for bound in (format.quant_min, format.quant_max)
    )
    generator = torch.random.get_rng_state()
    try:
        ESTIMATORS[estimator.name](
            torch.zeros(1, device="cpu"), Grid(format, *bounds), **estimator.options
        )
    except (TypeError, ConfigError) as error:
        raise ConfigError(f"{path}: use_estimator_({estimator.name!r}): {error}") from None
    finally:
        torch.random.set_rng_state(generator)


def _check_option(name: str, value: float, low: float, high: float) -> None:
    """Raise an error for an option outside its range; NaN is outside of all."""
    if not low <= value <= high:
        raise ConfigError(f"got {name}={value!r}; expected a number from {low:g} to {high:g}")


def _whole(name: str, grid: Grid) -> None:
    """Raise an error for a format whose codes are no whole numbers."""
    if not grid.format.is_integer:
        raise ConfigError(f"got {grid.format} for {name}; expected an integer format")


@ESTIMATORS.register("ste")
def _straight_through(v: Tensor, grid: Grid) -> Tensor:
    """Round; the gradient passes inside the bounds (Bengio et al. 2013)."""
    return straight_through(grid.clamp(v), grid.snap(v))


class _ElementWise(torch.autograd.Function):
    """The codes; the gradient grows where it moves a value away from its code."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, codes: Tensor, delta: float) -> Tensor:
        """Return a view of ``codes``."""
        ctx.save_for_backward(v - codes)
        ctx.delta = delta
        return codes.view_as(codes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return ``g * (1 + delta * sign(g) * (v - code))``."""
        (error,) = ctx.saved_tensors
        return grads[0] * (1 + ctx.delta * grads[0].sign() * error), None, None


@ESTIMATORS.register("ewgs")
def _ewgs(v: Tensor, grid: Grid, *, delta: float = 0.2) -> Tensor:
    """Round; scale each gradient by the distance to the code (Lee et al., CVPR 2021, section 3.2).

    ``delta`` is in distances of codes: 0.2 changes a gradient by a tenth at most.
    """
    _check_option("delta", delta, 0, 2)
    return _ElementWise.apply(grid.clamp(v), grid.snap(v), delta)


def _soft_round(v: Tensor, sharpness: float) -> Tensor:
    """Return a smooth staircase: near the identity for 1e-4, near the rounding for 1000.

    Reference: Gong et al., Differentiable Soft Quantization (ICCV 2019), section 3.2.
    """
    _check_option("sharpness", sharpness, *_SHARPNESS)
    middle = v.detach().floor() + 0.5
    top = torch.tanh(torch.as_tensor(sharpness / 2, dtype=v.dtype, device=v.device))
    return middle + 0.5 * torch.tanh(sharpness * (v - middle)) / top


@ESTIMATORS.register("dsq")
def _dsq(v: Tensor, grid: Grid, *, sharpness: float = 5.0) -> Tensor:
    """Round; the gradient is that of a smooth staircase (Gong et al. 2019)."""
    _whole("dsq", grid)
    return straight_through(_soft_round(grid.clamp(v), sharpness), grid.snap(v))


@ESTIMATORS.register("soft")
def _soft(v: Tensor, grid: Grid, *, sharpness: float = 5.0) -> Tensor:
    """Compute with the smooth staircase itself; raise the sharpness while training."""
    _whole("soft", grid)
    return grid.clamp(_soft_round(grid.clamp(v), sharpness))


@ESTIMATORS.register("stochastic")
def _stochastic(v: Tensor, grid: Grid) -> Tensor:
    """Round up with the probability of the fraction, so that the mean is exact (Gupta et al. 2015).

    Noise comes from torch's own generator, as that of dropout.
    """
    _whole("stochastic", grid)
    inside = grid.clamp(v)
    with torch.no_grad():
        codes = grid.clamp((inside + torch.rand_like(inside)).floor())
    return straight_through(inside, codes)


@ESTIMATORS.register("noise")
def _noise(v: Tensor, grid: Grid) -> Tensor:
    """Add uniform noise of one code's width in place of rounding (Defossez et al. 2022)."""
    _whole("noise", grid)
    return grid.clamp(grid.clamp(v) + (torch.rand_like(v) - 0.5))


@ESTIMATORS.register("qdrop")
def _qdrop(v: Tensor, grid: Grid, *, probability: float = 0.5) -> Tensor:
    """Leave each element float with a probability (Wei et al., QDrop, ICLR 2022, section 4)."""
    _check_option("probability", probability, 0, 1)
    return torch.where(torch.rand_like(v) < probability, v, _straight_through(v, grid))
