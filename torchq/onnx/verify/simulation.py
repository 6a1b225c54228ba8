"""The model with the types of a file: what its quantizers compute, and what they should."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from torchq.formats import format_by_name
from torchq.functional import QParams
from torchq.functional.onnx_ops import onnx_type
from torchq.nn import TensorQuantizer
from torchq.onnx.interface import named_calls
from torchq.onnx.qdq import path_of

#: Scales that a target derives are rounded to float32 once or twice.
_RTOL = 1e-6


@dataclass(frozen=True)
class Seen:
    """One call of a quantizer.

    Attributes:
        scaled: Its input over the scale of the file, not rounded.
        codes: Its codes, less the zero point of the file.
        values: Its output.
    """

    scaled: Tensor
    codes: Tensor
    values: Tensor


class Simulation:
    """Hooks on the quantizers of a model, which note what they compute under the names of a file.

    A target may write an activation in another type than the model has, such as uint8 behind a
    ReLU. Where the file has parameters that a target derives from the model's own, the model is
    simulated with these; any other parameters are an error of the file, and the model keeps its
    own.
    """

    def __init__(
        self,
        quantizers: Mapping[str, TensorQuantizer],
        qparams: Mapping[str, QParams],
        merged: Mapping[str, str],
    ) -> None:
        self._quantizers, self._qparams, self._merged = quantizers, qparams, merged
        self.seen: dict[str, Seen] = {}
        self.called: list[str] = []
        self.as_in_file = True
        self._derived = {
            name: not _is_own(quantizers[path_of(name)], found)
            and not parameter_difference(quantizers[path_of(name)], found)
            for name, found in qparams.items()
        }
        self.derives = any(self._derived.values())

    def active(self, model: nn.Module) -> AbstractContextManager[None]:
        """Note the calls of quantizers inside the ``with`` block."""
        return named_calls(model, self._quantizers, self._note)

    def start(self, as_in_file: bool) -> None:
        """Forget the calls of earlier runs of the model."""
        self.as_in_file = as_in_file
        self.seen.clear()
        self.called.clear()

    def _note(self, name: str, quantizer: TensorQuantizer, x: Tensor, out: Tensor) -> Tensor:
        if quantizer.quantizing:
            self.called.append(name)
        in_file = self._merged.get(name, name)
        found = self._qparams.get(in_file)
        if found is None or not self.as_in_file:
            return out
        if quantizer.pre_quant_scale is not None:
            x = x * quantizer.pre_quant_scale.to(x.dtype)
        if self._derived[in_file]:
            scaled = found.scaled(x)
            codes = _codes_as_in_file(quantizer, found, scaled)
            out = found.dequantize(found.round(scaled)).to(out.dtype)
        else:
            own = _own_layout(quantizer, found)
            scaled = own.scaled(x)
            codes = own.scaled(out)  # The division leaves a last bit.
            codes = codes.round_() if own.format.is_integer else own.format.snap_(codes)
        self.seen[name] = Seen(scaled, codes, out.clone())  # The layer may work in place.
        return out


def _codes_as_in_file(quantizer: TensorQuantizer, found: QParams, scaled: Tensor) -> Tensor:
    """Return the codes of a derived type; a negative value that it cannot hold keeps its code.

    A target takes unsigned codes from 0 for tensors that cannot be negative; a negative value
    there is an error of the file, which clips it.
    """
    if found.has_zero_point(0) and not found.format.signed:
        return scaled.round().clamp_(max=found.quant_max)
    return found.round(scaled)


def _own_layout(quantizer: TensorQuantizer, found: QParams) -> QParams:
    """Return the parameters of the model, in the layout that the file has."""
    scale, point = (t.detach().float().cpu() for t in quantizer.calculate_qparams())
    format = quantizer.descriptor.format
    if scale.numel() != found.scale.numel():
        return QParams(scale.reshape(-1)[0], point.reshape(-1)[0], format)
    scale, point = scale.reshape(found.scale.shape), point.reshape(found.scale.shape)
    return QParams(scale, point, format, found.axis, found.block)


def _is_own(quantizer: TensorQuantizer, found: QParams) -> bool:
    """Return True if the file has the model's scale; a zero point only shifts the codes."""
    scale, point = (t.detach().float().reshape(-1).cpu() for t in quantizer.calculate_qparams())
    if scale.shape != found.scale.reshape(-1).shape:
        return False
    highest = found.quant_max - found.zero_point.reshape(-1).float()
    own = quantizer.descriptor.format.quant_max - point
    same_scale = torch.allclose(scale, found.scale.reshape(-1), rtol=_RTOL, atol=0)
    return same_scale and bool((highest >= own).all())


def parameter_difference(quantizer: TensorQuantizer, found: QParams) -> str:
    """Return how the parameters in a file differ from all that a target may write; "" if not."""
    own = _own_layout(quantizer, found)
    stored = onnx_type(own.format)[0]
    if stored.bits == 4 and found.format.bits == 8:  # Written as 8 bits, clipped.
        stored = format_by_name("int8" if own.format.signed else "uint8")
    own = replace(own, format=stored)
    moved = (own.stored(True), own.stored(False)) if own.scale.numel() == 1 else ()
    candidates = (own, *moved)
    for candidate in candidates:
        if candidate.format.name == found.format.name and _equal(candidate, found):
            return ""
    wanted = " or ".join(sorted({_text(candidate) for candidate in candidates}))
    return f"the file has {_text(found)}; expected {wanted}"


def _equal(one: QParams, other: QParams) -> bool:
    return (
        one.scale.numel() == other.scale.numel()
        and torch.allclose(one.scale.reshape(-1), other.scale.reshape(-1), rtol=_RTOL, atol=0)
        and torch.equal(one.zero_point.reshape(-1), other.zero_point.reshape(-1))
    )


def _text(qparams: QParams) -> str:
    scale, zero_point = qparams.scale.reshape(-1), qparams.zero_point.reshape(-1)
    more = ", ..." if scale.numel() > 1 else ""
    return f"{qparams.format.name}, scale {scale[0]:.4g}{more}, zero point {zero_point[0]:g}"
