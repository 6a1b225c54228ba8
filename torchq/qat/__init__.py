"""Helpers for quantization-aware training. May import workflow and below."""

from torchq.qat.norm import Reestimate, freeze_bn_, reestimate_bn, unfreeze_bn_
from torchq.qat.optim import param_groups

__all__ = ["Reestimate", "freeze_bn_", "param_groups", "reestimate_bn", "unfreeze_bn_"]
