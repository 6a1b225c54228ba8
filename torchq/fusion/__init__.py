"""Exact merging of BatchNorms and parallel linear branches, before quantization.

See docs/fuse.md.
"""

from torchq.fusion import graph_passes
from torchq.fusion.api import fuse_
from torchq.fusion.batchnorm.fold import ConstantPad
from torchq.fusion.modules import norm_affine
from torchq.fusion.quantized import RescalesOutput
from torchq.fusion.record import apply_fusion_record_, fusion_record
from torchq.fusion.reparam.blocks import find_blocks
from torchq.fusion.reparam.families import FAMILIES
from torchq.fusion.reparam.rule import BlockRule, register_block
from torchq.fusion.report import FuseReport, Fusion, Refusal

__all__ = [
    "FAMILIES",
    "BlockRule",
    "ConstantPad",
    "FuseReport",
    "Fusion",
    "Refusal",
    "RescalesOutput",
    "apply_fusion_record_",
    "find_blocks",
    "fuse_",
    "fusion_record",
    "graph_passes",
    "norm_affine",
    "register_block",
]
