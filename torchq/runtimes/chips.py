"""Chips that torchq knows the numbers of: their configurations, and no file or kernels.

The rows follow the quantizers of PPQ 0.6.6 (ppq/quantization/quantizer) and the documents of the
makers, except that the scale of a symmetric range is ``amax / 127`` throughout. PPQ takes
``2 * amax / 255`` for codes from -128 to 127. :mod:`torchq.runtimes.emulation` computes what chips
compute in fixed point.
"""

from __future__ import annotations

from functools import partial

from torchq.config import QuantConfig
from torchq.descriptor import QuantDescriptor
from torchq.recipes import compute_layers
from torchq.runtime import Runtime
from torchq.swap.layers import one_weight_scale


def layers(
    name: str, input: QuantDescriptor, weight: QuantDescriptor, per_channel: bool = True
) -> QuantConfig:
    """Return the rules for convolutions, linear layers and attention."""
    return QuantConfig(
        tuple(compute_layers(input, weight, per_channel=per_channel)), name=name
    )


_NARROW = QuantDescriptor(narrow_range=True, rounding="half_away")
_UNSIGNED = QuantDescriptor(unsigned=True, symmetric=False)
_SHIFT = QuantDescriptor(power_of_two=True)

#: Name, activations, weights, whether a weight has one range for each output channel.
_ROWS = (
    ("ncnn", _NARROW.replace(calib_method="percentile"), _NARROW, True),
    ("mnn", _NARROW.replace(calib_method="percentile"), _NARROW, True),
    ("rknn", _UNSIGNED, _UNSIGNED, False),
    ("snpe", _UNSIGNED, _UNSIGNED, False),
    (
        "ascend",
        _UNSIGNED.replace(rounding="half_away"),
        QuantDescriptor(rounding="half_away"),
        True,
    ),
    (
        "nxp",
        _SHIFT.replace(rounding="half_up"),
        _SHIFT.replace(rounding="half_away"),
        True,
    ),
    ("fpga", _SHIFT, _SHIFT, False),
)
_ONE_SCALE = partial(one_weight_scale, ("*",))
CHIPS = tuple(
    Runtime(
        name=name,
        recipe=partial(layers, name, input, weight, per_channel),
        adapting=() if per_channel else (_ONE_SCALE,),
        # Nothing is known of their kernels.
        float_before_norms=frozenset(),
        versions="PPQ 0.6.6",
        computes_floats=False,
    )
    for name, input, weight, per_channel in _ROWS
)
