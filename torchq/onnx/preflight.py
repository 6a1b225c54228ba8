"""What must hold before a model is exported; every violation is one error that names the quantizers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import nn

from torchq.errors import ExportError
from torchq.functional import TINY
from torchq.functional.onnx_ops import opset_needed
from torchq.nn import TensorQuantizer
from torchq.onnx.torch_exporters import TORCHSCRIPT_MAX
from torchq.workflow import quantizers, weight_quantizers

__all__ = ["check_quantizers", "default_opset", "listed"]

#: ONNX Runtime 1.31 fails to optimise some files of opset 21 and above: where it moves a signed DequantizeLinear past a reshape or a
#: transposition and then makes it unsigned, it leaves an attribute behind that older opsets do not have.
_USUAL_OPSET = 20


def listed(names: list[str] | tuple[str, ...], most: int = 5) -> str:
    """The first names, comma separated."""
    return ", ".join(names[:most]) + (f", ... ({len(names)} in all)" if len(names) > most else "")


def default_opset(model: nn.Module) -> int:
    """The opset that every runtime reads best, raised where a quantizer needs a later one."""
    needed = _USUAL_OPSET
    for quantizer in quantizers(model).values():
        if quantizer.quantizing:
            with suppress(ExportError):  # check_quantizers tells, by name
                needed = max(
                    needed,
                    opset_needed(quantizer.descriptor.format, quantizer.descriptor.granularity)[0],
                )
    return needed


def check_quantizers(model: nn.Module, opset: int, modern: bool) -> dict[str, TensorQuantizer]:
    """The quantizers that are on, by dotted path.

    Args:
        modern: the ``torch.export`` based exporter will write them.

    Raises:
        ExportError: one of them has no fixed range, a range that cannot be right, codes as output, a format that ONNX lacks, or
            something that ``opset`` lacks. The text names all quantizers with the same fault.
    """
    active = {name: q for name, q in quantizers(model).items() if q.quantizing}
    weights = weight_quantizers(model)
    for fault, text in _FAULTS:
        if found := [name for name, q in active.items() if fault(q, id(q) in weights)]:
            raise ExportError(f"{listed(found)}: {text}")
    for name, quantizer in active.items():
        _check_opset(name, quantizer, opset, modern)
    return active


def _range_is(
    test: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[TensorQuantizer, bool], bool]:
    return lambda quantizer, _: bool(test(quantizer.amax.detach()).any())


def _is_dead(quantizer: TensorQuantizer, is_weight: bool) -> bool:
    # A weight of zeros is exact; an activation that was never anything but zero was calibrated on the wrong data.
    return not is_weight and bool((quantizer.amax.detach() <= TINY).all())


_CALIBRATE = (
    "Run torchq.calibrate(model, batches), or switch it off with torchq.disabled(model, name)"
)
_MODERN = "Use dynamo=True, with torch >= 2.8"
_FAULTS: tuple[tuple[Callable[[TensorQuantizer, bool], bool], str], ...] = (
    (
        lambda q, _: q.descriptor.dynamic,
        "is dynamic: takes its range from the data of each call; expected a fixed range. Use a descriptor without dynamic",
    ),
    (lambda q, _: not q.calibrated, f"has no calibrated range; expected an amax. {_CALIBRATE}"),
    (
        lambda q, _: q.amax.is_meta,
        "is on the meta device; expected real tensors. Load the weights first",
    ),
    (
        lambda q, _: not q.descriptor.fake_quant,
        "returns integer codes (fake_quant=False); expected fake quantization. Set fake_quant=True",
    ),
    (_range_is(torch.isnan), f"has a NaN range; expected finite numbers. {_CALIBRATE}"),
    (_range_is(torch.isinf), f"has an infinite range; expected finite numbers. {_CALIBRATE}"),
    (
        _range_is(lambda amax: amax < 0),
        "has a negative range; expected numbers >= 0. A learned range went wrong: lower its learning rate",
    ),
    (
        _is_dead,
        f"has the range zero; expected a positive one. It only ever saw zeros. {_CALIBRATE}",
    ),
)


def _check_opset(name: str, quantizer: TensorQuantizer, opset: int, modern: bool) -> None:
    d = quantizer.descriptor
    try:
        needed, what = opset_needed(d.format, d.granularity)
    except ExportError as error:
        raise ExportError(f"{name}: {error}") from None
    if d.scale_format is not None:
        raise ExportError(
            f"{name}: has {d.scale_format} block scales; expected float32 ones, ONNX Q/DQ has no others"
        )
    if needed > TORCHSCRIPT_MAX and not modern:
        if d.format.bits > 4 or d.block_size is not None:
            raise ExportError(
                f"{name}: the TorchScript exporter ends at opset {TORCHSCRIPT_MAX}; expected opset {needed} for {what}. {_MODERN}"
            )
        needed = 13  # int4 travels as int8 and is narrowed afterwards, where the opset has it
    if opset < needed:
        raise ExportError(
            f"{name}: opset {opset} has no QuantizeLinear for {what}; expected opset >= {needed}"
        )
