"""What must hold before a model is exported; every violation is one error that names quantizers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import nn

from torchq.errors import ExportError
from torchq.formats import SCALE_TYPES
from torchq.functional.onnx_ops import FOUR_BITS, opset_needed
from torchq.nn import TensorQuantizer
from torchq.nn.convert import float_name
from torchq.runtime import Runtime, planned_target
from torchq.swap.grids import in_codes
from torchq.utils.optional import import_optional
from torchq.workflow import quantizers, weight_quantizers

_OPSETS = range(10, 24)
_DYNAMO_MIN = 18
#: ONNX Runtime 1.31 fails to optimise some files of opset 21 and above: where it moves a signed
#: DequantizeLinear past a Reshape or Transpose and then makes it unsigned, it leaves an attribute
#: that older opsets do not have.
_USUAL_OPSET = 20


def choose_exporter(dynamo: bool | None, opset: int) -> bool:
    """Return True to use the exporter that is based on ``torch.export``."""
    if not isinstance(opset, int) or opset not in _OPSETS:
        raise ExportError(
            f"export_onnx: got opset {opset!r}; expected {_OPSETS.start} to {_OPSETS.stop - 1}"
        )
    if dynamo and opset < _DYNAMO_MIN:
        raise ExportError(
            f"export_onnx: dynamo=True with opset {opset}; expected opset >= {_DYNAMO_MIN}. "
            "Pass dynamo=False"
        )
    if dynamo is None:
        dynamo = opset >= _DYNAMO_MIN
    if dynamo:
        import_optional("onnxscript", "export_onnx(dynamo=True)")
    return dynamo


def default_opset(model: nn.Module) -> int:
    """Return the opset that runtimes read best, raised where a quantizer needs a later one."""
    needed = _USUAL_OPSET
    for quantizer in quantizers(model).values():
        if quantizer.quantizing:
            descriptor = quantizer.descriptor
            # check_quantizers raises it with the quantizer's name.
            with suppress(ExportError):
                needed = max(
                    needed, opset_needed(descriptor.format, descriptor.granularity)[0]
                )
    return needed


def check_dtypes(model: nn.Module, runtime: Runtime | None) -> None:
    """Raise an error where a parameter has a type that a runtime has no kernels for."""
    if runtime is None or runtime.file is None:
        return
    types = runtime.file.float_types
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype not in types:
            float_types = ", ".join(map(_dtype_name, types))
            raise ExportError(
                f"{name}: is {_dtype_name(parameter.dtype)}; expected {float_types}, since "
                f"{runtime.name} cannot compute in other types. Export "
                "copy.deepcopy(model).float() with a float32 example"
            )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_formats(model: nn.Module, opset: int | None = None) -> None:
    """Raise an error where a quantizer has a format or scales that no ONNX file can hold.

    Ranges are not looked at, so that this can be known before calibration.
    """
    if opset is not None:
        choose_exporter(None, opset)
    for name, quantizer in quantizers(model).items():
        if quantizer.quantizing or quantizer.observing:
            _check_opset(name, quantizer, opset or _OPSETS[-1])


def check_quantizers(
    model: nn.Module, opset: int, runtime: Runtime | None = None
) -> dict[str, TensorQuantizer]:
    """Return the quantizers that are switched on, by dotted path."""
    active = {name: q for name, q in quantizers(model).items() if q.quantizing}
    weights = weight_quantizers(model)
    for is_faulty, fault in _FAULTS:
        faulty = [name for name, q in active.items() if is_faulty(q, id(q) in weights)]
        if faulty:
            raise ExportError(f"{_listed(faulty)}: {fault}")
    for name, quantizer in active.items():
        _check_opset(name, quantizer, opset)
    dead = [name for name, q in active.items() if _is_dead(q, id(q) in weights)]
    if dead:
        warnings.warn(
            f"export_onnx: {_listed(dead)}: calibrated on zeros alone, so the model gives 0 there, "
            "and the file rounds to whole numbers. If other values come, run "
            "torchq.calibrate(model, batches) on data that has them, or switch the quantizer off "
            "with torchq.disabled(model, name)",
            stacklevel=3,
        )
    if (
        runtime is not None
        and runtime.codes is not None
        and not runtime.codes.zero_points
    ):
        _check_zero_points(active, runtime)
    return active


def warn_of_own_grid(
    model: nn.Module, active: dict[str, TensorQuantizer], runtime: Runtime | None
) -> None:
    """Warn of a float model, and of one for no runtime that has other codes than ``runtime``."""
    if not active:
        warnings.warn(
            f"export_onnx: {float_name(model)} has no active quantizer; "
            "the file will hold a float model",
            stacklevel=3,
        )
    if runtime is None or runtime.codes is None or planned_target(model) is not None:
        return
    weights = weight_quantizers(model)
    affected = []
    for name, quantizer in active.items():
        descriptor = quantizer.given_descriptor
        is_input = id(quantizer) not in weights
        if is_input and in_codes(descriptor, runtime.codes) != descriptor:
            affected.append(name)
    if affected:
        warnings.warn(
            f"export_onnx: the model was quantized for no target, so the file has its own codes: "
            f"{_listed(affected)}. {runtime.name} has finer ones, or faster kernels for "
            f"others; call torchq.quantize_(model, target={runtime.name!r}, example=...) before "
            "calibration",
            stacklevel=3,
        )


def _check_zero_points(active: dict[str, TensorQuantizer], runtime: Runtime) -> None:
    """Raise an error where a runtime without zero points would read asymmetric ranges."""
    asymmetric = [name for name, q in active.items() if not q.descriptor.symmetric]
    if asymmetric:
        raise ExportError(
            f"{_listed(asymmetric)}: has an asymmetric range, and {runtime.name} takes no "
            "zero point but 0; expected symmetric ranges. Quantize with symmetric=True, or for "
            "another target"
        )


def _listed(names: list[str], most: int = 5) -> str:
    """Return the first names, comma separated."""
    ending = f", ... ({len(names)} in all)" if len(names) > most else ""
    return ", ".join(names[:most]) + ending


def _range_is(
    test: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[TensorQuantizer, bool], bool]:
    return lambda quantizer, _: any(
        bool(test(end).any()) for _, end in quantizer.range.ends()
    )


def _is_dead(quantizer: TensorQuantizer, is_weight: bool) -> bool:
    """Return True for an activation that was calibrated on zeros; a weight of zeros is exact."""
    return not is_weight and bool(quantizer.dead_ranges().all())


_CALIBRATE = (
    "Run torchq.calibrate(model, batches), or switch it off with "
    "torchq.disabled(model, name)"
)
_FAULTS: tuple[tuple[Callable[[TensorQuantizer, bool], bool], str], ...] = (
    (
        lambda q, _: q.descriptor.dynamic,
        "is dynamic: takes its range from the data of each call; expected a fixed range. "
        "Use a descriptor without dynamic",
    ),
    (
        lambda q, _: not q.calibrated,
        f"has no calibrated range; expected an amax. {_CALIBRATE}",
    ),
    (
        lambda q, _: q.amax.is_meta,
        "is on the meta device; expected real tensors. Load the weights first",
    ),
    (
        lambda q, _: not q.descriptor.fake_quant,
        "returns integer codes (fake_quant=False); expected fake quantization. Set fake_quant=True",
    ),
    (_range_is(torch.isnan), f"has a NaN range; expected finite numbers. {_CALIBRATE}"),
    (
        _range_is(torch.isinf),
        f"has an infinite range; expected finite numbers. {_CALIBRATE}",
    ),
    (
        lambda q, _: q.delegate is not None,
        "has a delegate, which no file can hold; expected none. Set quantizer.delegate = None",
    ),
    (
        # Training may drive a learned range below zero: its values are zeros, in a file too.
        lambda q, _: not isinstance(q.amax, nn.Parameter) and bool((q.amax < 0).any()),
        f"has a negative range; expected numbers >= 0. {_CALIBRATE}",
    ),
)


def _check_opset(name: str, quantizer: TensorQuantizer, opset: int) -> None:
    """Raise an error where no opset, or a later one alone, can hold a quantizer."""
    descriptor = quantizer.descriptor
    wide = opset < FOUR_BITS
    try:
        needed, what = opset_needed(descriptor.format, descriptor.granularity, wide)
    except ExportError as error:
        raise ExportError(f"{name}: {error}") from None
    if descriptor.scale_format not in (None, *SCALE_TYPES):
        raise ExportError(
            f"{name}: has {descriptor.scale_format} block scales; expected float32 ones, "
            "ONNX Q/DQ has no others"
        )
    if opset < needed:
        raise ExportError(
            f"{name}: opset {opset} has no QuantizeLinear for {what}; expected opset >= {needed}"
        )
