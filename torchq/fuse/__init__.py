"""Exact merging of BatchNorms and parallel linear branches, before quantization. See docs/fuse.md."""

from torchq.fuse.apply import fuse_
from torchq.fuse.blocks import BlockRule, find_blocks, register_block
from torchq.fuse.families import FAMILIES
from torchq.fuse.fold import ConstantPad
from torchq.fuse.layers import RescalesOutput
from torchq.fuse.ranges import LayerRange, RangeReport, diagnose_ranges
from torchq.fuse.report import FuseReport, Fusion, Refusal

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
