"""Pooling with a quantized input."""

from __future__ import annotations

from torchq.compat.pytorch_quantization.nn.modules import _utils

#: Class by name: ``MaxPool1d`` and ``QuantMaxPool1d``, and so on.
LAYERS = _utils.both_names(
    {
        f"{kind}{d}d": _utils.make_layer(f"{kind}{d}d", __name__, _utils.QuantInputMixin)
        for kind in ("MaxPool", "AvgPool", "AdaptiveAvgPool")
        for d in (1, 2, 3)
    }
)
globals().update(LAYERS)
