"""How chips and their toolchains quantize, as data: codes, zero points, scales, rounding.

A platform says what is simulated. Where a runtime wants quantizers is the business of
``torchq.quantize_(..., target=)``, and what it computes in fixed point that of
:mod:`torchq.backends`.

The entries follow the quantizers of PPQ 0.6.6 (ppq/quantization/quantizer) and the documents of the
platforms, except that the scale of a symmetric range is ``amax / 127`` throughout, as TensorRT
defines it. PPQ takes ``2 * amax / 255`` for codes from -128 to 127.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchq.config import QuantConfig
from torchq.descriptor import QuantDescriptor
from torchq.recipes.recipes import compute_layers
from torchq.utils import Registry

__all__ = ["PLATFORMS", "Platform", "platform"]


@dataclass(frozen=True)
class Platform:
    """How one platform quantizes.

    Attributes:
        name: the platform.
        input: the activations.
        weight: the weights, apart from the axis.
        per_channel: a weight has one range for each output channel.
        bias_bits: the width of biases, which have the scale of input times weight. They are not
            simulated: :func:`torchq.backends.handlers` computes them.
        target: the name of ``quantize_(target=)`` and ``export_onnx(target=)``, if there is one.
    """

    name: str
    input: QuantDescriptor
    weight: QuantDescriptor
    per_channel: bool = True
    bias_bits: int = 32
    target: str | None = None

    def config(self) -> QuantConfig:
        """Return the rules for convolutions, linear layers and attention."""
        rules = compute_layers(self.input, self.weight, per_channel=self.per_channel)
        return QuantConfig(tuple(rules), name=self.name)


_SIGNED = QuantDescriptor()
_ACTIVATION = QuantDescriptor(calib_method="percentile")
_NARROW = {"narrow_range": True, "rounding": "half_away"}
_UNSIGNED = QuantDescriptor(unsigned=True, symmetric=False)

#: Name -> platform.
PLATFORMS: Registry[str, Platform] = Registry("platform")

for _platform in (
    Platform("tensorrt", _ACTIVATION, _SIGNED, target="tensorrt"),
    Platform("openvino", _ACTIVATION, _SIGNED, target="openvino"),
    Platform("onnxruntime", _ACTIVATION, _SIGNED, target="onnxruntime"),
    Platform("ncnn", _ACTIVATION.replace(**_NARROW), _SIGNED.replace(**_NARROW)),
    Platform("mnn", _ACTIVATION.replace(**_NARROW), _SIGNED.replace(**_NARROW)),
    Platform("rknn", _UNSIGNED, _UNSIGNED, per_channel=False),
    Platform("snpe", _UNSIGNED, _UNSIGNED, per_channel=False),
    # What ONNX Runtime's provider for QNN reads: symmetric weights.
    Platform("qnn", _UNSIGNED, _SIGNED, target="qnn"),
    Platform(
        "ascend", _UNSIGNED.replace(rounding="half_away"), _SIGNED.replace(rounding="half_away")
    ),
    Platform(
        "nxp",
        QuantDescriptor(power_of_two=True, rounding="half_up"),
        QuantDescriptor(power_of_two=True, rounding="half_away"),
    ),
    Platform(
        "fpga",
        QuantDescriptor(power_of_two=True),
        QuantDescriptor(power_of_two=True),
        per_channel=False,
    ),
):
    PLATFORMS.add(_platform.name, _platform)


def platform(name: str) -> QuantConfig:
    """Return the configuration that simulates a platform.

    Args:
        name: a key of :data:`PLATFORMS`: tensorrt, openvino, onnxruntime, ncnn, mnn, rknn, snpe,
            qnn, ascend, nxp, fpga.

    Raises:
        ConfigError: an unknown name; the text lists the known ones.

    Example:
        >>> [str(r.input) for r in platform("ncnn").rules][0]
        'int8_narrow per-tensor half_away percentile'
    """
    return PLATFORMS[name].config()
