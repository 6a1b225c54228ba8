"""All that fusion knows of quantization: how to see quantizers, and what it asks of their layer.

Fusion imports no quantizer and no number format. A module counts as quantized if it has a child
named ``*_quantizer``; a quantized layer takes part in fusion through :class:`RescalesOutput`.
"""

from typing import Protocol, runtime_checkable

from torch import Tensor, nn

QUANTIZED_FIRST = (
    "holds quantizers; expected the order fuse_, quantize_, calibrate: restore_ the model, fuse it,"
    " then quantize and calibrate again"
)

#: One fold into a quantized layer: a weight on a tie between two codes may round to the other
#: one. The limit is one code of the smallest format that is worth quantizing to.
QUANTIZED_FOLD_TOLERANCE = 2e-2

#: A whole quantized model: rounding moves an activation between two codes to the other code.
QUANTIZED_MODEL_TOLERANCE = 5e-2


@runtime_checkable
class RescalesOutput(Protocol):
    """A layer with a quantized weight whose output channels can be scaled without changing a code.

    The weight's range of output channel ``c`` has to grow by ``|scale[c]|`` together with the
    weight; a negative scale flips the sign of the codes. ``fuse_`` calls
    :meth:`output_scale_obstacle` while it plans, and :meth:`rescale_output_` after it has put the
    scaled weight into the layer.
    """

    def output_scale_obstacle(self, scale: Tensor) -> str | None:
        """Return why the codes could not stay the same under ``scale``, or None if they can.

        ``scale`` is ``(out_channels,)``, of any sign.
        """
        ...

    def rescale_output_(self, scale: Tensor) -> None:
        """Multiply the weight's ranges by ``|scale|``."""
        ...


def holds_quantizers(module: nn.Module) -> bool:
    """Return True if ``module`` or a descendant has a child ``*_quantizer``, no Identity."""
    return any(
        name.rpartition(".")[2].endswith("_quantizer") and type(child) is not nn.Identity
        for name, child in module.named_modules()
    )
