"""torch itself: the integer kernels that it ships for CPUs, through torchq.lowering.

The order of scale, bias and rounding. For input codes q of zero point z and weight codes w, per
output channel c::

    sum = sum of (q - z) * w                        exact, integers
    y   = sum * (weight_scale[c] * x_scale) + bias[c]               float32
    y   = activation(y + (r - residual_zero_point) * residual_scale)
    out = clamp(round_half_even(y / scale) + zero_point, 0, 255)    or y itself

Tensors of floats are divided by their scale, as in the simulation. oneDNN adds ``-z * sum of w`` to
the bias in float64 before the call, and where only clamps stand between y and the codes one float32
factor ``weight_scale * x_scale / scale`` takes the place of three roundings. The sums are exact,
but a code next to a tie may be one off: of the codes of layers that read what they read in the
simulation, one in 1e5 at most, or two where codes are unsigned and twice as fine. Most of them are
the simulation's, which adds in float32. A channel of 4 bits whose factor happens to be a fraction,
such as 3/34, has ties in many of its sums, and there are more.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from torchq.lowering.api import lower_model
from torchq.runtimes.engine import Engine, Task
from torchq.utils import copy_module


@dataclass(frozen=True, kw_only=True, repr=False)
class Torch(Engine):
    """The kernels of torch; needs no other package.

    Attributes:
        quantized: see :class:`Engine`.
        fuse: False replaces layers only, each with floating-point input and output, and does not
            trace the model.
    """

    name: str = "torch"
    versions: str = "2.9 to 2.14"
    proved: str = "per layer"
    fuse: bool = True

    def build(self, task: Task) -> nn.Module:
        """See :meth:`Engine.build`; the task may have no example."""
        if not self.quantized:
            return copy_module(task.float_model)
        return lower_model(
            task.model,
            task.example,
            fuse=self.fuse,
            progress=task.progress,
            checks=task.checks,
            with_state=[name.rpartition(".")[0] for name in task.state],
        )
