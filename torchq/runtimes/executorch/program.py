"""From a calibrated model to a ``torch.export.ExportedProgram`` with pairs of Q and DQ operators.

The form is that of torch's PT2E quantization: ``quantize_per_tensor`` and ``dequantize_per_tensor``
of ``torch.ops.quantized_decomposed`` behind each quantizer, and weights that are stored as int8 in
front of ``dequantize_per_channel``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from torchq.errors import ExportError
from torchq.formats import PerTensor
from torchq.graph import call_arguments, call_model, map_tensors
from torchq.lowering.api import simulated_copy
from torchq.nn import TensorQuantizer
from torchq.nn.convert import float_name
from torchq.nn.integer_bias import rounded_biases
from torchq.nn.tensor_quantizer import Delegate
from torchq.runtimes.executorch.form import write_form
from torchq.swap.even_channels import give_numbers_of_files_
from torchq.utils import evaluating, plain_attention, state_kept
from torchq.workflow import quantizers, weight_quantizers

#: The codes of PT2E that every partitioner reads.
LEAST = -128
LARGEST = 127
CODES = torch.int8
_BYTE = 8


def to_exported_program(model: nn.Module, example: object) -> ExportedProgram:
    """Return a calibrated model as a ``torch.export`` program in the form of PT2E quantization.

    It is what partitioners of ExecuTorch and other readers of that form take. Activations are int8
    with one scale and any zero point, weights are stored as int8 with a scale per channel. Where
    kernels cannot compute on integers, as nothing quantizes the result of a layer, its weight is
    stored as float32: the values that the codes stand for.

    Args:
        model: calibrated; left unchanged.
        example: arguments for one call, see :func:`torchq.graph.call_model`. The program takes
            tensors of these shapes alone.

    Returns:
        The program. Its results differ from those of the simulation where a value lies on a tie.

    Raises:
        ExportError: Nothing is quantized, a range is not known, the form cannot hold what a
            quantizer does (the text names it), or torch cannot export the model.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        >>> x = torch.randn(1, 3, 8, 8)
        >>> report = torchq.quantize_(model, target="executorch", example=x)
        >>> report = torchq.calibrate(model, [x], progress=False)
        >>> program = torchq.runtimes.executorch.to_exported_program(model, x)
        >>> program.module()(x).shape
        torch.Size([1, 4, 6, 6])
    """
    return traced(simulated_copy(model), example)[0]


def traced(model: nn.Module, example: object) -> tuple[ExportedProgram, dict[str, str]]:
    """Return the program, and the layers with quantized weights; see :func:`write_form`.

    ``model`` is a copy that may be changed; a float model is traced as it is.
    """
    # A file takes its inputs in the memory order of the example, which is channels last for
    # pictures that were read as height x width x channels; XNNPACK takes no weights in that order.
    model.to(memory_format=torch.contiguous_format)
    args, kwargs = map_tensors(call_arguments(model, example), Tensor.contiguous)
    active = {path: q for path, q in quantizers(model).items() if q.quantizing}
    _check(model, active)
    give_numbers_of_files_(model)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(evaluating(model))
        stack.enter_context(plain_attention())
        stack.enter_context(rounded_biases(model))
        if active:
            # Registers the operators.
            importlib.import_module("torch.ao.quantization.fx._decomposed")
            stack.enter_context(_pairs(model, active, example))
        stack.enter_context(state_kept(model))
        try:
            program = torch.export.export(model, args, kwargs, strict=False)
        except Exception as error:
            line = str(error).strip().partition("\n")[0]
            raise ExportError(
                f"{float_name(model)}: torch.export cannot trace it ({type(error).__name__}: "
                f"{line}); expected a model without code that depends on values. Trace the parts "
                "that can be, or change that code"
            ) from error
        return write_form(program)


def _check(model: nn.Module, active: dict[str, TensorQuantizer]) -> None:
    """Raise an error for a quantizer that the form, or XNNPACK's kernels, cannot express."""
    weights = weight_quantizers(model)
    for path, quantizer in active.items():
        if problem := _problem(quantizer, id(quantizer) in weights):
            raise ExportError(f"{path}: {problem}")
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype is not torch.float32:
            raise ExportError(
                f"{name}: got {parameter.dtype}; expected torch.float32 beside int8. Export "
                "copy.deepcopy(model).float() with a float32 example"
            )


def _problem(quantizer: TensorQuantizer, is_weight: bool) -> str:
    d = quantizer.descriptor
    kind = "weights" if is_weight else "activations"
    if d.dynamic or not quantizer.calibrated:
        return "takes its range from the data of each call; expected a fixed one. Calibrate it"
    if quantizer.delegate is not None:
        return "has a delegate, which no file can hold; expected none"
    if not d.fake_quant:
        return "returns integer codes; expected fake quantization. Set fake_quant=True"
    if not d.format.is_integer or d.format.bits > _BYTE or d.block_size is not None:
        return f"got {kind} of {d}; expected integers of 8 bits without blocks. Quantize it so"
    if d.format.rounding != "half_even":
        return f"rounds {d.format.rounding}; expected half_even, the one rounding of the runtime"
    if is_weight:
        if not quantizer.qparams().has_zero_point(0) or d.format.quant_max > LARGEST:
            return (
                f"got weights of {d}; expected signed ones around 0. Use symmetric=True"
            )
        return ""
    if d.granularity != PerTensor():
        return f"got {d}; expected one scale for an activation. Use a descriptor without axis"
    if d.format.quant_max - d.format.quant_min != LARGEST - LEAST:
        return (
            f"got {d}; expected activations of 8 bits, from -128 to 127. Quantize it so"
        )
    return ""


@contextmanager
def _pairs(
    model: nn.Module, active: dict[str, TensorQuantizer], example: object
) -> Iterator[None]:
    """Let quantizers call the operators of PT2E inside the ``with`` block."""
    weights = weight_quantizers(model)
    codes = _weight_codes(
        model, {p: q for p, q in active.items() if id(q) in weights}, example
    )
    try:
        for path, quantizer in active.items():
            if path in codes:
                quantizer.delegate = _stored(quantizer, codes[path])
            elif id(quantizer) not in weights:
                qparams = quantizer.qparams().stored(signed=True)
                scale = float(qparams.scale)
                zero_point = int(qparams.zero_point)
                quantizer.delegate = partial(_pair, scale, zero_point)
        yield
    finally:
        for quantizer in active.values():
            quantizer.delegate = None


def _pair(
    scale: float, zero_point: int, x: Tensor, quantizer: TensorQuantizer
) -> Tensor:
    """Return a tensor quantized by a Q operator and a DQ operator; it is a delegate."""
    grid = (scale, zero_point, LEAST, LARGEST, CODES)
    operators = torch.ops.quantized_decomposed
    codes = operators.quantize_per_tensor.default(x, *grid)
    return operators.dequantize_per_tensor.default(codes, *grid)


def _stored(quantizer: TensorQuantizer, codes: Tensor) -> Delegate:
    """Let a quantizer hold codes, and return a delegate that dequantizes these."""
    qparams = quantizer.qparams()
    quantizer.register_buffer("stored_codes", codes.to(CODES))
    if qparams.axis is None:
        return partial(_of_tensor, float(qparams.scale))
    scale = qparams.scale.flatten().to(torch.float32)
    quantizer.register_buffer("stored_scale", scale)
    quantizer.register_buffer(
        "stored_zero_point", torch.zeros_like(scale, dtype=torch.int64)
    )
    return partial(_of_channels, qparams.axis % codes.dim())


def _of_tensor(scale: float, x: Tensor, quantizer: TensorQuantizer) -> Tensor:
    """Return the stored weight with one scale; it is a delegate."""
    operator = torch.ops.quantized_decomposed.dequantize_per_tensor.default
    return operator(quantizer.stored_codes, scale, 0, LEAST, LARGEST, CODES)


def _of_channels(axis: int, x: Tensor, quantizer: TensorQuantizer) -> Tensor:
    """Return the stored weight with a scale for each channel; it is a delegate."""
    held = quantizer.stored_codes, quantizer.stored_scale, quantizer.stored_zero_point
    operator = torch.ops.quantized_decomposed.dequantize_per_channel.default
    return operator(*held, axis, LEAST, LARGEST, CODES)


def _weight_codes(
    model: nn.Module, of_weights: dict[str, TensorQuantizer], example: object
) -> dict[str, Tensor]:
    """Return the codes of each weight that the model reads in a run on the example.

    What quantizers of weights read may be computed: by weight norm, or as a part of a parameter.
    """
    codes: dict[str, Tensor] = {}

    def note(path: str, x: Tensor, quantizer: TensorQuantizer) -> Tensor:
        current = quantizer.codes(x)
        if path in codes and not torch.equal(codes[path], current):
            raise ExportError(
                f"{path}: quantizes several weights; expected one, as a file stores its codes. "
                "Give each weight a quantizer of its own"
            )
        codes[path] = current
        return quantizer.apply_own(x)

    try:
        for path, quantizer in of_weights.items():
            quantizer.delegate = partial(note, path)
        with state_kept(model):
            call_model(model, example)
    finally:
        for quantizer in of_weights.values():
            quantizer.delegate = None
    return codes
