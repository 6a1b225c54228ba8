"""InstanceNorm with a quantized input."""

from __future__ import annotations

from torchq.compat.pytorch_quantization.nn.modules import _utils

#: Class by name: ``InstanceNorm1d`` and ``QuantInstanceNorm1d``, and so on.
LAYERS = _utils.both_names(
    {
        f"InstanceNorm{d}d": _utils.make_layer(
            f"InstanceNorm{d}d", __name__, _utils.QuantInputMixin
        )
        for d in (1, 2, 3)
    }
)
globals().update(LAYERS)
