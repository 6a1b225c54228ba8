"""The activations that kernels apply to their result before it is rounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from torchq.utils import Registry

__all__ = ["ACTIVATIONS", "Activation", "activation"]


@dataclass(frozen=True)
class Activation:
    """An activation of an epilogue.

    Attributes:
        function: ``(x, *arguments) -> y`` in plain torch.
        onednn: the name of oneDNN's post-op.
        algorithm: the variant of the post-op.
        on_conv: True where torch's convolution operator takes it; its linear operator takes all.
    """

    function: Callable[..., Tensor]
    onednn: str
    algorithm: str = ""
    on_conv: bool = True


#: Name -> activation.
ACTIVATIONS: Registry[str, Activation] = Registry("activation")
ACTIVATIONS.add("none", Activation(lambda x: x, "none"))
ACTIVATIONS.add("relu", Activation(F.relu, "relu"))
ACTIVATIONS.add("clamp", Activation(lambda x, low, high: x.clamp(low, high), "hardtanh"))
ACTIVATIONS.add("gelu", Activation(F.gelu, "gelu", "none", on_conv=False))
ACTIVATIONS.add(
    "gelu_tanh", Activation(lambda x: F.gelu(x, approximate="tanh"), "gelu", "tanh", on_conv=False)
)
ACTIVATIONS.add("silu", Activation(F.silu, "swish"))
ACTIVATIONS.add("hardswish", Activation(F.hardswish, "hardswish"))


def activation(x: Tensor, name: str, arguments: Sequence[float]) -> Tensor:
    """Return an activation of ``x`` by its name in :data:`ACTIVATIONS`."""
    return ACTIVATIONS[name].function(x, *arguments)
