"""Helpers for quantization-aware training. May import workflow and below."""

from torchq.qat.batchnorm import Reestimate, freeze_bn_, reestimate_bn_, unfreeze_bn_
from torchq.qat.optim import param_groups
from torchq.qat.reparam import BranchReport, quantize_branches_
from torchq.qat.shared_ranges import share_range_

__all__ = [
    "BranchReport",
    "Reestimate",
    "freeze_bn_",
    "param_groups",
    "quantize_branches_",
    "reestimate_bn_",
    "share_range_",
    "unfreeze_bn_",
]
