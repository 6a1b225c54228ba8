"""Functions that let a positive factor of a channel pass: ``f(s * x) = s * f(x)`` for s > 0."""

from __future__ import annotations

from torch import nn

from torchq.graph import Call

__all__ = ["keeps_factors"]

# Element by element.
_HOMOGENEOUS = (
    *(nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.Identity),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
)
_HOMOGENEOUS_FUNCTIONS = frozenset(["relu", "relu_", "leaky_relu", "leaky_relu_", "dropout"])
# The same for the pixels of one channel.
_POOLING = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)
_POOLING_FUNCTIONS = frozenset(
    f"{kind}_pool{d}d" for kind in ("max", "avg", "adaptive_avg") for d in (1, 2, 3)
)


def keeps_factors(call: Call, is_convolution: bool) -> bool:
    """Return True if a call on channels times positive factors gives its output times these.

    Args:
        call: of a function or module with one input.
        is_convolution: the channels are those of images, so pooling does not mix them.
    """
    modules = (*_HOMOGENEOUS, *_POOLING) if is_convolution else _HOMOGENEOUS
    names = _HOMOGENEOUS_FUNCTIONS
    if is_convolution:
        names = names | _POOLING_FUNCTIONS
    return isinstance(call.module, modules) if call.module is not None else call.name in names
