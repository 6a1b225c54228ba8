"""Ready-made configurations.

Each recipe is a plain :class:`~torchq.QuantConfig`: print it, add rules to it, save it as JSON.

Recipes quantize convolutions, linear layers and the projections of attention. Pooling,
normalization and embeddings stay float unless a rule names them. Recurrent layers are quantized by
``int8_dynamic``, and by ``int8(recurrent=True)``; average pools by ``int8(pooling=True)``.

The scale of a symmetric range is ``amax / 127`` throughout. The configurations of chips are with
the rest that is known of them, in :mod:`torchq.runtimes`.
"""

from collections.abc import Callable
from typing import Literal

from torchq.config import QuantConfig, Rule
from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError
from torchq.utils import Registry, short_repr

__all__ = [
    "RECIPES",
    "by_name",
    "fp8",
    "int8",
    "int8_dynamic",
    "int8_per_tensor",
    "integer",
    "mxfp8",
    "nvfp4",
    "w4a4",
    "w8a16",
]

RECIPES: Registry[str, Callable[..., QuantConfig]] = Registry("recipe")

_CONV = "type:torch.nn.modules.conv.Conv[123]d"
_TRANSPOSED = "type:torch.nn.modules.conv.ConvTranspose[123]d"
_LINEAR = "type:torch.nn.modules.linear.Linear"
_BILINEAR = "type:torch.nn.modules.linear.Bilinear"
_ATTENTION = "type:torch.nn.modules.activation.MultiheadAttention"
_RECURRENT = "type:torch.nn.modules.rnn.*"
_AVERAGE_POOLING = "type:torch.nn.modules.pooling.*AvgPool[123]d"
# The axis of the output channels of the weight.
_OUTPUT_AXES = {_CONV: 0, _TRANSPOSED: 1, _LINEAR: 0, _BILINEAR: 0, _ATTENTION: 0}
# Activations of up to this number of bits choose between signed and unsigned codes.
_FEW_BITS = 4


def compute_layers(
    input: QuantDescriptor | None,
    weight: QuantDescriptor | None,
    *,
    per_channel: bool,
    position: Literal["first", "last"] | None = None,
) -> list[Rule]:
    """Return a rule for each kind of layer; they differ in the axis of the output channels."""
    rules = []
    for pattern, axis in _OUTPUT_AXES.items():
        along = (
            weight.replace(axis=axis) if weight is not None and per_channel else weight
        )
        rules.append(
            Rule(pattern, input=input, weight=along, position=position, optional=True)
        )
    return rules


def integer(
    weight_bits: int | None = 8,
    input_bits: int | None = 8,
    *,
    first_last: int | None = None,
    per_channel: bool = True,
    unsigned: bool | Literal["auto"] | None = None,
    weight_method: str | None = None,
    input_method: str | None = None,
    learn_ranges: bool = False,
    symmetric: bool | None = None,
) -> QuantConfig:
    """Return a recipe of any integer widths.

    Args:
        weight_bits: width of the weights, 2 to 16; None leaves them float.
        input_bits: width of the inputs of layers, 2 to 16; None leaves them float.
        first_last: width of the weights and inputs of the first and last layer, in the order of
            ``model.named_modules()``; None treats them as the others. They are few and sensitive,
            so 8 is usual with 4 bits and fewer.
        per_channel: True keeps a weight range per output channel, False one per tensor.
        unsigned: the sign of the inputs. "auto": symmetric ranges, whose codes are unsigned if
            calibration sees no negative value. None means "auto" if ``input_bits`` is at most 4,
            and otherwise False: signed, unless the target of :func:`torchq.quantize_` has a finer
            form.
        weight_method: the calibration method of the weights. None means "activation" up to 4
            bits, which searches for the least error of a layer's output on the calibration
            batches (see :func:`torchq.calibrate`), and "max" above.
        input_method: the calibration method of the inputs; None means "mse" up to 4 bits and
            "max" above.
        learn_ranges: train the ranges too, with LSQ's gradient scale; for QAT. With
            ``first_last`` the ranges of the first and last layer stay as calibrated.
        symmetric: of the ranges of inputs; see :func:`int8`.

    Raises:
        ConfigError: no width at all, or a width out of range.

    Example:
        >>> config = integer(weight_bits=4, input_bits=8, first_last=8)
        >>> [str(rule) for rule in config.rules if rule.position == "last"][2]
        'type:torch.nn.modules.linear.Linear (last layer)'
    """
    if weight_bits is None and input_bits is None:
        raise ConfigError(
            "recipes.integer: got neither weight_bits nor input_bits; expected one"
        )

    if symmetric is False and unsigned in (None, "auto"):
        unsigned = True
    if unsigned is None:
        unsigned = "auto" if symmetric or (input_bits or 8) <= _FEW_BITS else False

    def rules(
        weight: int | None,
        input: int | None,
        position: Literal["first", "last"] | None = None,
    ) -> list[Rule]:
        learn = learn_ranges and position is None
        inputs = _learnable(
            input, input_method or _method(input, "mse"), unsigned, learn
        )
        if inputs is not None:
            inputs = inputs.replace(symmetric=symmetric is not False)
        method = weight_method or _method(weight, "activation")
        descriptors = (inputs, _learnable(weight, method, False, learn))
        return compute_layers(*descriptors, per_channel=per_channel, position=position)

    found = rules(weight_bits, input_bits)
    if first_last is not None:
        ends = (
            None if weight_bits is None else first_last,
            None if input_bits is None else first_last,
        )
        found += rules(*ends, "first") + rules(*ends, "last")
    parts = [
        f"w{weight_bits}" if weight_bits else "",
        f"a{input_bits}" if input_bits else "",
    ]
    return QuantConfig(tuple(found), name="".join(parts))


def _method(bits: int | None, few: str) -> str:
    """Return the calibration method of a width, where one is given for few bits."""
    return few if bits is not None and bits <= _FEW_BITS else "max"


def _learnable(
    bits: int | None, method: str, unsigned: bool | Literal["auto"], learn: bool
) -> QuantDescriptor | None:
    """Return the descriptor of a tensor with an integer format, or None without a width."""
    if bits is None:
        return None
    if type(bits) is not int:
        raise ConfigError(
            f"recipes.integer: got width {short_repr(bits)}; expected an integer"
        )
    return QuantDescriptor(
        bits,
        unsigned=unsigned,
        calib_method=method,
        learn_amax=learn,
        scale_range_grad=learn,
    )


@RECIPES.register("int8")
def int8(
    *,
    reduce_range: bool = False,
    symmetric: bool | None = None,
    recurrent: bool = False,
    pooling: bool = False,
) -> QuantConfig:
    """Return INT8 weights per output channel and INT8 activations per tensor.

    TensorRT, ONNX Runtime and OpenVINO run this form fastest.

    Args:
        reduce_range: True uses 7 bits for weights, stored as int8. It is meant for x86 CPUs
            without VNNI or AMX: their kernels add two products of uint8 and int8 in 16 bits,
            which 8-bit weights overflow. On other CPUs it only costs accuracy.
        symmetric: None leaves the form of activations to the target of :func:`torchq.quantize_`:
            a zero point where it has them, else signed codes. False gives them a zero point, uint8,
            for any target, so that their range ends where their values end. That is finer behind
            GELU, SiLU and other functions with a short negative side. ONNX Runtime, OpenVINO, QNN
            and ``deploy`` run it; TensorRT does not. True keeps ranges symmetric; their codes are
            unsigned where calibration sees no negative value and the target has such codes.
        recurrent: True also quantizes LSTM, GRU and RNN layers: the inputs, hidden
            states and weights of all products.
        pooling: True also quantizes the inputs of average pools, which pytorch-quantization did.
    """
    unsigned: bool | Literal["auto"] = "auto" if symmetric else symmetric is False
    input = QuantDescriptor(unsigned=unsigned, symmetric=symmetric is not False)
    weight = QuantDescriptor(7 if reduce_range else 8)
    rules = compute_layers(input, weight, per_channel=True)
    if recurrent:
        rules.append(_recurrent_layers(QuantDescriptor(), weight))
    if pooling:
        rules.append(Rule(_AVERAGE_POOLING, input=input, optional=True))
    name = {None: "int8", True: "int8_symmetric", False: "int8_asymmetric"}[symmetric]
    name += "_recurrent" if recurrent else ""
    return QuantConfig(tuple(rules), name=f"{name}_pooling" if pooling else name)


def _recurrent_layers(input: QuantDescriptor, weight: QuantDescriptor) -> Rule:
    """Return the rule for LSTM, GRU and RNN layers."""
    return Rule(_RECURRENT, input=input, weight=weight.replace(axis=0), optional=True)


@RECIPES.register("int8_dynamic")
def int8_dynamic() -> QuantConfig:
    """Return INT8 linear and recurrent layers with the activation ranges of each call.

    It needs no calibration. The layers are those of torch's ``quantize_dynamic``; weights have a
    range per output channel. For ``torchq.deploy``; ONNX files hold fixed ranges.
    """
    call = QuantDescriptor(dynamic=True)
    linear = Rule(_LINEAR, input=call, weight=call.replace(axis=0), optional=True)
    return QuantConfig((linear, _recurrent_layers(call, call)), name="int8_dynamic")


@RECIPES.register("int8_per_tensor")
def int8_per_tensor() -> QuantConfig:
    """Return INT8 weights and activations with one range per tensor."""
    rules = compute_layers(QuantDescriptor(), QuantDescriptor(), per_channel=False)
    return QuantConfig(tuple(rules), name="int8_per_tensor")


@RECIPES.register("w4a4")
def w4a4(*, first_last: int | None = 8) -> QuantConfig:
    """Return INT4 weights per output channel and INT4 activations, with ranges that QAT learns.

    Activations without negative values get unsigned codes at calibration. Weight ranges have the
    least error of the output of a layer. The gradient of the ranges is scaled as by LSQ (Esser et
    al., 2020).

    Args:
        first_last: the width of the first and last layer, whose ranges stay as calibrated; None
            treats them as the others.
    """
    config = integer(4, 4, first_last=first_last, learn_ranges=True)
    return QuantConfig(config.rules, name="w4a4")


@RECIPES.register("w8a16")
def w8a16() -> QuantConfig:
    """Return INT8 weights per output channel and activations of 16 bits.

    It is for chips that compute on integers alone: what would stay float elsewhere gets 256 times
    as many codes there. Qualcomm's HTP takes uint16 activations with int8 weights; its files need
    opset 21.

    Example:
        >>> str(w8a16().rules[0].input)
        'int16 per-tensor max'
    """
    return QuantConfig(integer(8, 16).rules, name="w8a16")


@RECIPES.register("fp8")
def fp8() -> QuantConfig:
    """Return FP8 E4M3 weights per output channel and activations per tensor."""
    descriptor = QuantDescriptor((4, 3))
    return QuantConfig(
        tuple(compute_layers(descriptor, descriptor, per_channel=True)), name="fp8"
    )


def _block_scaled(
    name: str, num_bits: tuple[int, int], size: int, scale_format: str
) -> QuantConfig:
    """Return rules for blocks along the axis that layers sum over, ranged by each call's data."""

    def along(axis: int) -> QuantDescriptor:
        return QuantDescriptor(
            num_bits,
            block_size=size,
            block_axis=axis,
            scale_format=scale_format,
            dynamic=True,
        )

    # The axis of the input and of the weight. Counting from the front lets 1-, 2- and
    # 3-dimensional convolutions share a rule.
    axes = {_CONV: (1, 1), _TRANSPOSED: (1, 0)}
    axes |= dict.fromkeys((_LINEAR, _BILINEAR, _ATTENTION), (-1, -1))
    rules = [
        Rule(pattern, input=along(input_axis), weight=along(weight_axis), optional=True)
        for pattern, (input_axis, weight_axis) in axes.items()
    ]
    return QuantConfig(tuple(rules), name=name)


@RECIPES.register("mxfp8")
def mxfp8() -> QuantConfig:
    """Return MXFP8: E4M3 in blocks of 32 with E8M0 scales; it needs no calibration.

    Reference: OCP Microscaling Formats (MX) 1.0.
    """
    return _block_scaled("mxfp8", (4, 3), 32, "e8m0")


@RECIPES.register("nvfp4")
def nvfp4() -> QuantConfig:
    """Return NVFP4: E2M1 in blocks of 16 with E4M3 scales; it needs no calibration.

    One fp32 scale per tensor brings the block scales into the range of E4M3.
    """
    return _block_scaled("nvfp4", (2, 1), 16, "e4m3")


def by_name(name: str) -> QuantConfig:
    """Return the recipe called ``name``.

    Raises:
        ConfigError: there is no such recipe; the text lists them.
    """
    return RECIPES[name]()
