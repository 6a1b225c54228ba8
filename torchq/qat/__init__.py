"""Helpers for quantization-aware training. May import workflow and below."""

from torchq.qat.batchnorm import Reestimate, freeze_bn_, reestimate_bn_, unfreeze_bn_
from torchq.qat.distill import Distillation, first_logits, float_twin, logit_loss
from torchq.qat.optim import param_groups
from torchq.qat.prepare import Preparation, prepare
from torchq.qat.ranges import learn_ranges_
from torchq.qat.schedule import (
    freeze_bn_from_,
    freeze_ranges_from_,
    observing,
)
from torchq.qat.shared_ranges import share_range_

__all__ = [
    "Distillation",
    "Preparation",
    "Reestimate",
    "first_logits",
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
