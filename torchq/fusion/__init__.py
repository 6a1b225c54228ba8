"""Exact merging of BatchNorms and parallel linear branches, before quantization or after it.

See docs/fuse.md.
"""

from torchq.fusion.api import fuse_
from torchq.fusion.blocks import BlockRule, register_block
from torchq.fusion.families import FAMILIES
from torchq.fusion.fold import ConstantPad
from torchq.fusion.modules import OutputFold, RescalesOutput
from torchq.fusion.record import apply_fusion_record_, fusion_record
from torchq.fusion.report import FuseReport, Fusion, Refusal

__all__ = [
    "FAMILIES",
    "BlockRule",
    "ConstantPad",
    "FuseReport",
    "Fusion",
    "OutputFold",
    "Refusal",
    "RescalesOutput",
    "apply_fusion_record_",
    "fuse_",
    "fusion_record",
    "register_block",
]
