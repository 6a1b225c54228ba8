"""Helpers for quantization-aware training. May import workflow and below."""

from torchq.qat.batchnorm import (
    freeze_bn_,
    freeze_bn_from_,
    reestimate_bn_,
    unfreeze_bn_,
)
from torchq.qat.distill import Distillation, float_twin, logit_loss
from torchq.qat.prepare import Preparation, param_groups, prepare
from torchq.qat.ranges import (
    freeze_ranges_from_,
    learn_ranges_,
    observing,
    share_range_,
)

__all__ = [
    "Distillation",
    "Preparation",
    "float_twin",
    "freeze_bn_",
    "freeze_bn_from_",
    "freeze_ranges_from_",
    "learn_ranges_",
    "logit_loss",
    "observing",
    "param_groups",
    "prepare",
    "reestimate_bn_",
    "share_range_",
    "unfreeze_bn_",
]
