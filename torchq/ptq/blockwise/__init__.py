"""Running a model block by block, in float and with what is quantized already.

What the learned and the closed-form algorithms share: the blocks of a model, their inputs and
outputs, and the layers inside.
"""

from torchq.ptq.blockwise.blocks import Block, CallCount, find_blocks, said_how_far
from torchq.ptq.blockwise.forwards import replaced_forward
from torchq.ptq.blockwise.grid import Grid, check_on_grid, grid_of
from torchq.ptq.blockwise.layers import (
    check_calibrated,
    check_ready,
    find_layers,
    weight_quantizer,
)
from torchq.ptq.blockwise.replay import Captured, Replay, RunOptions
from torchq.ptq.blockwise.storage import TensorStore, map_tensors

__all__ = [
    "Block",
    "CallCount",
    "Captured",
    "Grid",
    "Replay",
    "RunOptions",
    "TensorStore",
    "check_calibrated",
    "check_on_grid",
    "check_ready",
    "find_blocks",
    "find_layers",
    "grid_of",
    "map_tensors",
    "replaced_forward",
    "said_how_far",
    "weight_quantizer",
]
