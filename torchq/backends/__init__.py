"""What a chip computes, bit for bit, on the graph of a quantized model.

A :class:`Backend` has handlers for operations, and :class:`torchq.graph.GraphRunner` runs a traced
model with it. Three come with torchq: :func:`shift_leaky_relu`, :func:`integer_average_pooling` and
:func:`fixed_point`. :func:`torchq.recipes.platform` quantizes a model for a chip in the first
place.
"""

from torchq.backends.backend import Backend, NodeCall, register_delegate, register_handler
from torchq.backends.handlers import (
    GEMMLOWP,
    SINGLE_ROUNDING,
    FixedPoint,
    fixed_point,
    integer_average_pooling,
    quantize_multiplier,
    shift_leaky_relu,
    shift_right,
)

__all__ = [
    "GEMMLOWP",
    "SINGLE_ROUNDING",
    "Backend",
    "NodeCall",
    "FixedPoint",
    "fixed_point",
    "integer_average_pooling",
    "quantize_multiplier",
    "register_delegate",
    "register_handler",
    "shift_leaky_relu",
    "shift_right",
]
