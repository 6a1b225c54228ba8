"""Helpers for quantization-aware training. May import workflow and below."""

from torchq.qat.batchnorm import Reestimate, freeze_bn_, reestimate_bn_, unfreeze_bn_
from torchq.qat.distill import Distillation, feature_loss, float_twin, logit_loss
from torchq.qat.optim import param_groups
from torchq.qat.prepare import Preparation, prepare
from torchq.qat.reparam import BranchReport, quantize_branches_
from torchq.qat.schedule import (
    bits_at_,
    change_bits_,
    freeze_bn_from_,
    freeze_ranges_from_,
    observing,
    quantize_from_,
)
from torchq.qat.shared_ranges import share_range_

__all__ = [
    "BranchReport",
    "Distillation",
    "Preparation",
    "Reestimate",
    "bits_at_",
    "change_bits_",
    "feature_loss",
    "float_twin",
    "freeze_bn_",
    "freeze_bn_from_",
    "freeze_ranges_from_",
    "logit_loss",
    "observing",
    "param_groups",
    "prepare",
    "quantize_from_",
    "quantize_branches_",
    "reestimate_bn_",
    "share_range_",
    "unfreeze_bn_",
]
