"""What traces of ``torch.jit`` hold of quantizers and of functions of autograd."""

from typing import Any

import torch
from torch import Tensor

from torchq.errors import ExportError
from torchq.formats import IntFormat
from torchq.functional import scale_from_amax
from torchq.utils import constant_while_tracing


def is_traced() -> bool:
    """Return True in a trace of ``torch.jit`` that is none of the TorchScript exporter."""
    return torch.jit.is_tracing() and not torch.onnx.is_in_onnx_export()


def applied(function: type[torch.autograd.Function], *arguments: object) -> Any:
    """Return ``function.apply(*arguments)``; its plain operators in a trace of ``torch.jit``.

    A trace would hold a call of Python, whose names differ at each run: the check of
    ``torch.jit.trace`` refuses two of them, and none can be saved. The exporter of TorchScript
    inlines such calls, or writes them by their ``symbolic``.
    """
    return function.forward(*arguments) if is_traced() else function.apply(*arguments)


def fake_quantize(inputs: Tensor, amax: Tensor, format: IntFormat) -> Tensor:
    """Return values quantized by torch's own operators, with constants for scales.

    Torch-TensorRT reads ``aten::fake_quantize_per_tensor_affine`` and ``..._per_channel_affine``
    in traces. These multiply by the reciprocal of a scale, so a value beside a tie may get the
    other one of two codes.

    Args:
        inputs: floating point.
        amax: with one element, or with several along one dimension of ``inputs``; 0 where all
            values become 0.
        format: the codes.

    Raises:
        ExportError: ``amax`` has several elements along several dimensions.
    """
    axes = [d for d in range(amax.dim()) if amax.shape[d] != 1]
    if len(axes) > 1:
        raise ExportError(
            f"use_fb_fake_quant: got amax of shape {tuple(amax.shape)}; expected ranges along one "
            "dimension at most, as torch.fake_quantize_per_channel_affine has. Give the weight "
            "quantizer one axis"
        )
    with constant_while_tracing():
        ranges = torch.tensor(amax.detach().flatten().tolist())
        # Any value over the largest number is rounded to 0.
        largest = torch.finfo(ranges.dtype).max
        scales = torch.where(ranges == 0, largest, scale_from_amax(ranges, format))
        constants = scales.tolist()
    bounds = (int(format.quant_min), int(format.quant_max))
    x = inputs if inputs.dtype is torch.float32 else inputs.float()
    if axes:
        zero_points = torch.zeros(len(constants), dtype=torch.int32, device=x.device)
        result = torch.fake_quantize_per_channel_affine(
            x, torch.tensor(constants, device=x.device), zero_points, axes[0], *bounds
        )
    else:
        result = torch.fake_quantize_per_tensor_affine(x, constants[0], 0, *bounds)
    return result if x is inputs else result.to(inputs.dtype)
