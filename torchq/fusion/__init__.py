"""Exact merging of BatchNorms and parallel linear branches, before quantization. See docs/fuse.md."""

from torchq.fusion.api import fuse_
from torchq.fusion.batchnorm.fold import ConstantPad
from torchq.fusion.channel_ranges import LayerRange, RangeReport, diagnose_ranges
from torchq.fusion.modules import RescalesOutput
from torchq.fusion.reparam.families import FAMILIES
from torchq.fusion.reparam.rule import BlockRule, find_blocks, register_block
from torchq.fusion.report import FuseReport, Fusion, Refusal

__all__ = [
    "FAMILIES",
    "BlockRule",
    "ConstantPad",
    "FuseReport",
    "Fusion",
    "LayerRange",
    "RangeReport",
    "Refusal",
    "RescalesOutput",
    "diagnose_ranges",
    "find_blocks",
    "fuse_",
    "register_block",
]
