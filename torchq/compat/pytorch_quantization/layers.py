"""Quantized layers: torch's own, with quantizers of the original."""

import inspect
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from torchq import nn as core
from torchq.compat.pytorch_quantization import mixins as _utils
from torchq.compat.pytorch_quantization import tensor_quant
from torchq.compat.pytorch_quantization.mixins import LegacyLayer
from torchq.compat.pytorch_quantization.tensor_quant import QuantDescriptor


class _ConstructorOfConvNd(_utils.QuantMixin):
    """The constructor of the original's base classes, and :meth:`_quant`."""

    def __init__(
        self,
        *args: Any,
        quant_desc_input: QuantDescriptor | None = None,
        quant_desc_weight: QuantDescriptor | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args[:11], **kwargs)
        extra_arguments = [*args[11:13], None, None]
        self.init_quantizer(
            quant_desc_input or extra_arguments[0] or self.default_quant_desc_input,
            quant_desc_weight or extra_arguments[1] or self.default_quant_desc_weight,
        )

    _quant = LegacyLayer._quant  # noqa: SLF001


class _QuantConvNd(_ConstructorOfConvNd, _ConvNd):
    """Base that scripts derive their own convolutions from; they define ``forward``."""


class _QuantConvTransposeNd(_ConstructorOfConvNd, _ConvTransposeNd):
    """Base that scripts derive their own transposed convolutions from."""


class QuantLinear(_utils.QuantMixin, LegacyLayer, core.QuantLinear):
    """Quantized :class:`torch.nn.Linear`."""

    __init__ = _utils.constructor(
        inspect.signature(nn.Linear.__init__), LegacyLayer.__init__
    )

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW


def _layer(name: str) -> type[LegacyLayer]:
    """Return the quantized twin of a class of torch.nn; convolutions have a range per channel."""
    if "Conv" not in name:
        return _utils.make_layer(name, __name__, _utils.QuantInputMixin)
    descriptor = getattr(
        tensor_quant, f"QUANT_DESC_8BIT_{name.upper()}_WEIGHT_PER_CHANNEL"
    )
    return _utils.make_layer(
        name,
        __name__,
        _QuantConvTransposeNd if "Transpose" in name else _QuantConvNd,
        default_quant_desc_weight=descriptor,
    )


_SPATIAL = (
    "Conv",
    "ConvTranspose",
    "MaxPool",
    "AvgPool",
    "AdaptiveAvgPool",
    "InstanceNorm",
)
#: Class by name: ``Conv1d`` and ``QuantConv1d``, and so on.
LAYERS: dict[str, type[LegacyLayer]] = {
    name: _layer(name)
    for name in (f"{kind}{d}d" for kind in _SPATIAL for d in (1, 2, 3))
}
LAYERS["Linear"] = QuantLinear
LAYERS |= {f"Quant{name}": layer for name, layer in LAYERS.items()}
globals().update(LAYERS)
