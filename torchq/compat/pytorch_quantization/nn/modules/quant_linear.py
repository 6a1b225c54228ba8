"""Quantized Linear."""

from __future__ import annotations

from torchq import nn as core
from torchq.compat.pytorch_quantization import tensor_quant
from torchq.compat.pytorch_quantization.nn.modules import _utils
from torchq.compat.pytorch_quantization.nn.modules._utils import LegacyLayer


class QuantLinear(_utils.QuantMixin, LegacyLayer, core.QuantLinear):
    """Quantized :class:`torch.nn.Linear`."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW


Linear = QuantLinear
