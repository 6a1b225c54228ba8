"""Quantized layers: torch's own function on quantized input and weight."""

import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from torchq.compat.pytorch_quantization import nn as quant_nn
from torchq.compat.pytorch_quantization import quant_modules, tensor_quant, utils
from torchq.compat.pytorch_quantization.nn.modules import _utils, quant_conv
from torchq.compat.pytorch_quantization.tensor_quant import QuantDescriptor
from torchq.errors import ExportError
from torchq.graph.calling import tensors_in

SHAPES = {
    1: (2, 4, 9),
    2: (2, 4, 9, 8),
    3: (2, 4, 6, 5, 7),
}
WEIGHTED: list[tuple[str, tuple[Any, ...], tuple[int, ...], int]] = [
    *((f"Conv{d}d", (4, 6, 3), SHAPES[d], 0) for d in (1, 2, 3)),
    *((f"ConvTranspose{d}d", (4, 6, 3), SHAPES[d], 1) for d in (1, 2, 3)),
    ("Linear", (5, 6), (2, 3, 5), 0),
]
INPUT_ONLY: list[tuple[str, tuple[Any, ...], tuple[int, ...]]] = [
    *(
        (f"{kind}{d}d", (3, 1), SHAPES[d])
        for kind in ("MaxPool", "AvgPool")
        for d in (1, 2, 3)
    ),
    *((f"AdaptiveAvgPool{d}d", (3,), SHAPES[d]) for d in (1, 2, 3)),
    *((f"InstanceNorm{d}d", (4,), SHAPES[d]) for d in (1, 2, 3)),
]
FUNCTIONS: dict[str, Callable[..., Tensor]] = {"Linear": F.linear}
FUNCTIONS |= {f"Conv{d}d": getattr(F, f"conv{d}d") for d in (1, 2, 3)}
FUNCTIONS |= {
    f"ConvTranspose{d}d": getattr(F, f"conv_transpose{d}d") for d in (1, 2, 3)
}


def make(name: str, arguments: tuple[Any, ...], **options: Any) -> Any:
    return getattr(quant_nn, f"Quant{name}")(*arguments, **options)


def per_channel(weight: Tensor, axis: int) -> Tensor:
    return utils.reduce_amax(
        weight, axis=tuple(d for d in range(weight.dim()) if d != axis)
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("name", "arguments", "shape", "axis"), WEIGHTED, ids=[row[0] for row in WEIGHTED]
)
def test_weighted_layers(
    name: str, arguments: tuple[Any, ...], shape: tuple[int, ...], axis: int, bias: bool
) -> None:
    x = torch.randn(shape)
    layer = make(name, arguments, bias=bias)
    function = FUNCTIONS[name]
    weight = layer.weight.detach()
    quantize = tensor_quant.fake_tensor_quant
    quantized = quantize(weight, per_channel(weight, axis)), quantize(x, x.abs().max())
    assert layer(x).equal(function(quantized[1], quantized[0], layer.bias))
    layer.input_quantizer.disable()
    assert layer(x).equal(function(x, quantized[0], layer.bias))
    layer._weight_quantizer.disable()
    assert layer(x).equal(function(x, weight, layer.bias))
    layer.input_quantizer.enable()
    assert layer(x).equal(function(quantized[1], weight, layer.bias))
    descriptors = {
        "quant_desc_weight": QuantDescriptor(3),
        "quant_desc_input": QuantDescriptor(4),
    }
    flat = make(name, arguments, bias=bias, **descriptors)
    flat.load_state_dict(layer.state_dict())
    coarse = quantize(x, x.abs().max(), 4), quantize(weight, weight.abs().max(), 3)
    assert flat(x).equal(function(*coarse, layer.bias))


@pytest.mark.parametrize(
    ("name", "arguments", "shape"), INPUT_ONLY, ids=[row[0] for row in INPUT_ONLY]
)
@pytest.mark.parametrize("bits", [8, 4])
def test_input_layers(
    name: str, arguments: tuple[Any, ...], shape: tuple[int, ...], bits: int
) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    layer = make(name, arguments, quant_desc_input=QuantDescriptor(num_bits=bits))
    plain = getattr(nn, name)(*arguments)
    assert layer(x).equal(plain(tensor_quant.fake_tensor_quant(x, x.abs().max(), bits)))
    layer.input_quantizer.disable()
    assert layer(x).equal(plain(x))
    assert isinstance(layer, (getattr(nn, name), _utils.QuantInputMixin))
    assert not isinstance(layer, _utils.QuantMixin)


REFUSING: dict[str, tuple[int, ...]] = {
    "Conv2d": (3, 4, 3),
    "ConvTranspose1d": (3, 4, 3),
}
REFUSING |= {"Linear": (7, 9), "MaxPool1d": (3,), "AdaptiveAvgPool3d": (3,)}
REFUSING |= {"InstanceNorm2d": (3,), "LSTM": (3, 4), "LSTMCell": (3, 4)}


@pytest.mark.parametrize(("name", "given"), REFUSING.items())
def test_errors(name: str, given: tuple[int, ...]) -> None:
    with pytest.raises(TypeError, match=r"Unused keys: got \['descriptor'\]"):
        make(name, given, descriptor="oops")
    with pytest.raises(ValueError, match="Only fake quantization is supported"):
        make(name, given, quant_desc_input=QuantDescriptor(fake_quant=False))


@pytest.mark.parametrize(
    "entry", quant_modules._DEFAULT_QUANT_MAP, ids=lambda e: e.mod_name
)
def test_a_layer_is_built_from_a_float_one_by_the_names_of_its_constructor(
    entry: Any,
) -> None:
    """super-gradients reads the arguments of a quantized class as attributes of the float layer."""
    recurrent = entry.mod_name.startswith("LSTM")
    arguments = {"kernel_size": 2, "output_size": 1, "num_layers": 2, "bias": recurrent}
    sizes = {"in_channels": 3, "out_channels": 4, "in_features": 3, "out_features": 4}
    sizes |= {"input_size": 3, "hidden_size": 4}
    names = list(inspect.signature(entry.replace_mod.__init__).parameters)[1:]
    assert names.pop() == "kwargs"
    assert not {"args", "device", "dtype"} & set(names)
    before = getattr(nn, entry.mod_name)
    given = {
        name: (sizes | arguments)[name] for name in names if name in sizes | arguments
    }
    layer = before(**given)
    read = {name: getattr(layer, name) for name in names}
    if not isinstance(read.get("bias", False), bool):
        read["bias"] = read["bias"] is not None
    quantized = entry.replace_mod(**read, quant_desc_input=QuantDescriptor(num_bits=5))
    assert quantized.extra_repr() == layer.extra_repr()
    assert quantized.load_state_dict(layer.state_dict()) == ([], [])
    kinds = (m for n, m in quantized.named_modules() if "_input_quantizer" in n)
    assert all(
        m.num_bits == 5 for m in kinds if isinstance(m, quant_nn.TensorQuantizer)
    )


LAYERS_TO_TRACE: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (
        lambda: nn.Sequential(
            quant_nn.QuantConv2d(3, 4, 3), quant_nn.QuantAvgPool2d(2)
        ),
        (1, 3, 8, 8),
    ),
    (
        lambda: nn.Sequential(quant_nn.QuantLinear(3, 3), quant_nn.QuantLinear(3, 3)),
        (2, 3),
    ),
    (lambda: quant_nn.QuantLSTMCell(3, 4), (2, 3)),
]


# torch.jit is deprecated, and its tracer warns of sizes.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("build", "shape"), LAYERS_TO_TRACE)
@pytest.mark.parametrize("calibrated", [False, True])
def test_several_layers_are_traced_and_saved(
    build: Callable[[], nn.Module], shape: tuple[int, ...], calibrated: bool
) -> None:
    model = build().eval()
    x = torch.randn(shape)
    for module in model.modules():
        if calibrated and isinstance(module, quant_nn.TensorQuantizer):
            module.amax = 2.0
    traced = torch.jit.trace(model, (x,))  # It traces twice, and compares the graphs.
    buffer = io.BytesIO()
    torch.jit.save(traced, buffer)
    buffer.seek(0)
    for got, want in zip(
        tensors_in(torch.jit.load(buffer)(x)), tensors_in(model(x)), strict=True
    ):
        assert torch.equal(got, want)


DESCRIPTORS = [
    QuantDescriptor(),
    QuantDescriptor(num_bits=4, narrow_range=True),
    QuantDescriptor(num_bits=12),
    QuantDescriptor(unsigned=True),
    QuantDescriptor(axis=0),
    QuantDescriptor(axis=(-1,)),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("descriptor", DESCRIPTORS, ids=str)
def test_traces_hold_torchs_own_operators_on_demand(
    descriptor: QuantDescriptor, dtype: torch.dtype
) -> None:
    quant_nn.TensorQuantizer.use_fb_fake_quant = True
    quantizer = quant_nn.TensorQuantizer(descriptor).eval()
    x = torch.linspace(-2, 2, 40).reshape(8, 5).to(dtype)
    x = x.relu() if descriptor.unsigned else x
    # The first of several ranges is dead.
    lengths = {"axis=0": 8, "axis=(-1,)": 5, "axis=None": 1}
    length = lengths[f"axis={descriptor.axis}"]
    quantizer.amax = torch.linspace(1.5 if length == 1 else 0.0, 2, length)
    traced = torch.jit.trace(quantizer, (x,))
    kind = "per_tensor" if descriptor.axis is None else "per_channel"
    assert f"aten::fake_quantize_{kind}_affine" in str(traced.inlined_graph)
    # No value lies at a tie, so a reciprocal for a quotient costs a last bit.
    torch.testing.assert_close(traced(x), quantizer(x))


@pytest.mark.filterwarnings("ignore")
def test_traces_hold_ranges_along_one_dimension_alone() -> None:
    quant_nn.TensorQuantizer.use_fb_fake_quant = True
    quantizer = quant_nn.TensorQuantizer(QuantDescriptor(axis=(0, 1)))
    with pytest.raises(
        ExportError, match="expected ranges along one dimension at most"
    ):
        torch.jit.trace(quantizer, (torch.rand(3, 4),))


def test_defaults_belong_to_the_class() -> None:
    quant_conv.QuantConv2d.set_default_quant_desc_input(QuantDescriptor(num_bits=11))
    quant_conv.QuantConv2d.set_default_quant_desc_weight(
        QuantDescriptor(num_bits=13, axis=1)
    )
    layer = quant_conv.Conv2d(2, 3, 3)
    assert layer.input_quantizer._num_bits == 11
    assert layer.weight_quantizer._axis == 1
    other = quant_conv.Conv3d(2, 3, 3)
    assert other.input_quantizer._num_bits == 8
    assert other.weight_quantizer._axis == 0
    quant_nn.Linear.set_default_quant_desc_weight(QuantDescriptor(num_bits=5))
    assert quant_nn.QuantLinear(2, 2).weight_quantizer.num_bits == 5
    quant_nn.QuantMaxPool2d.set_default_quant_desc_input(QuantDescriptor(num_bits=4))
    assert quant_nn.QuantMaxPool2d(2).input_quantizer.num_bits == 4
    assert quant_nn.QuantMaxPool1d(2).input_quantizer.num_bits == 8
    with pytest.raises(ValueError, match="expected an instance of QuantDescriptor"):
        quant_nn.QuantLinear.set_default_quant_desc_input(8)


def test_every_module_called_quantizer_can_be_disabled() -> None:
    learned = QuantDescriptor(learn_amax=True)
    linear = quant_nn.QuantLinear(2, 2, quant_desc_input=learned)
    model = nn.ModuleList([linear, quant_nn.QuantLSTM(2, 2, 2)])
    actual = [module for name, module in model.named_modules() if "quantizer" in name]
    # Two quantizers and a clip; two lists of two.
    assert len(actual) == 2 + 1 + 2 * (1 + 2)
    for module in actual:
        module.disable()
    assert all(
        m._disabled for m in model.modules() if isinstance(m, quant_nn.TensorQuantizer)
    )
    model[1]._input_quantizers.enable()
    assert not model[1]._input_quantizers[1]._disabled


class QuantScale(nn.Linear, _utils.QuantMixin):
    """A user's layer, as the original's documentation shows how to write one."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.init_quantizer(*_utils.pop_quant_desc_in_kwargs(self.__class__, **kwargs))

    def forward(self, input: Tensor) -> Tensor:
        x = self._input_quantizer(input)
        weight = self._weight_quantizer(self.weight)
        return F.linear(x, weight, bias=self.bias)


class QuantTwice(quant_nn.QuantConv2d):
    """A user's subclass of a quantized layer."""

    def forward(self, input: Tensor) -> Tensor:
        x, weight = self._quant(input)
        return 2 * F.conv2d(x, weight, self.bias)


def test_user_classes() -> None:
    layer = QuantScale(3, 4)
    plain = quant_nn.QuantLinear(3, 4)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(5, 3)
    assert layer(x).equal(plain(x))
    assert layer.input_quantizer is layer._input_quantizer
    assert layer.weight_quantizer.axis == 0
    options: Any = {"quant_desc_input": QuantDescriptor(4)}
    twice = QuantTwice(2, 3, 3, **options)
    conv = quant_nn.QuantConv2d(2, 3, 3, **options)
    conv.load_state_dict(twice.state_dict())
    y = torch.randn(1, 2, 5, 5)
    assert twice(y).equal(2 * conv(y))
    assert isinstance(twice, quant_conv._QuantConvNd)


def test_clip_values_and_gradients() -> None:
    x = torch.randn(3, 100)
    x[0, 0] = -0.3
    x[0, 1] = 0.7  # the bounds themselves count as clipped
    x.requires_grad_()
    low = torch.tensor(-0.3, requires_grad=True)
    high = torch.tensor(0.7, requires_grad=True)
    weight = torch.randn(3, 100)
    (quant_nn.functional.clip(x, low, high) * weight).sum().backward()
    torch.testing.assert_close(low.grad, weight[x <= low].sum())
    torch.testing.assert_close(high.grad, weight[x >= high].sum())
    assert x.grad.equal(weight * ((x > low) & (x < high)))
    rows = torch.tensor([[0.1], [0.2], [0.3]])
    assert quant_nn.functional.clip(x, -rows, rows).equal(x.clamp(-rows, rows))
    with pytest.raises(ValueError, match="can only be scalar"):
        quant_nn.functional.clip(x, (-rows).requires_grad_(), rows).sum().backward()


def test_clip_module() -> None:
    x = torch.randn(50)
    assert quant_nn.Clip(torch.tensor(0.3), torch.tensor(0.7))(x).equal(
        x.clamp(0.3, 0.7)
    )
    assert list(quant_nn.Clip(0.3, 0.7).state_dict()) == []
    learned = quant_nn.Clip(0.3, 0.7, learn_min=True, learn_max=True)
    assert list(learned.state_dict()) == ["clip_value_min", "clip_value_max"]
    learned.disable()
    assert learned(x) is x
    learned.enable()
    assert learned(x).equal(x.clamp(0.3, 0.7))
    with pytest.raises(ValueError, match="must be scalar"):
        quant_nn.Clip(
            torch.tensor(0.3),
            torch.tensor(0.7),
            learn_min=True,
        )


def test_restoring_a_corrected_layer_leaves_nothing() -> None:
    """The gain and the shift that calibrate had added stayed in the float model."""
    model = nn.Sequential(quant_nn.QuantLinear(16, 8)).eval()
    torchq.calibrate(model, [torch.randn(64, 16)], correct=False, progress=False)
    model[0].correct_output_(
        torch.ones(8),
        torch.ones(8),
    )
    torchq.restore_(model)
    assert list(model.state_dict()) == ["0.weight", "0.bias"]


def folding_net() -> nn.Sequential:
    """Two layers of the original's names with a BatchNorm behind each, one of negative factors."""
    torch.manual_seed(0)
    layers = [
        quant_nn.QuantConv2d(3, 3, 3),
        nn.BatchNorm2d(3),
        quant_nn.QuantConv2d(3, 3, 3),
    ]
    model = nn.Sequential(*layers, nn.BatchNorm2d(3)).eval()
    nn.init.constant_(model[3].weight, -0.5)
    return model


@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_batchnorms_fold_into_layers_of_the_originals_names(
    calibrated: bool, shared: bool
) -> None:
    model = folding_net()
    x = torch.randn(2, 3, 8, 8)
    if shared:
        model[2]._weight_quantizer = model[0]._weight_quantizer
        model[2].weight = nn.Parameter(model[0].weight.detach().clone())  # of one range
    if calibrated:
        torchq.calibrate(model, [x], correct=False, progress=False)
    with torch.no_grad():
        want = model(x)
        report = torchq.fuse_(model, x, progress=False)
        error = (model(x) - want).abs().max() / want.abs().max()
    assert len(report.fused) == 2
    assert report.refused == ()
    assert sum(fusion.codes for fusion in report.fused) == (162 if calibrated else 0)
    assert model[0]._weight_quantizer is not model[2]._weight_quantizer
    # A tie may move the input of the second layer, and without a range the weights are float.
    assert error <= (1e-3 if calibrated else 2e-2)
