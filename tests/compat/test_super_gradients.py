"""What the quantizer of super-gradients does with the classes of pytorch-quantization.

:class:`Quantizer` is a stand-in that does the same with them, written for these tests: it gives the
classes a constructor from float layers, reads their arguments with ``inspect``, replaces children
of a network, and calibrates. tests/roads/test_super_gradients.py runs the library itself.
"""

import copy
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchq.compat.pytorch_quantization import calib, quant_modules
from torchq.compat.pytorch_quantization import nn as quant_nn
from torchq.compat.pytorch_quantization.nn.modules._utils import (
    QuantInputMixin,
    QuantMixin,
)
from torchq.compat.pytorch_quantization.tensor_quant import QuantDescriptor

#: Layers and their quantized classes, by the names that it asks for.
CLASSES: dict[type[nn.Module], Any] = {
    nn.Conv1d: quant_nn.QuantConv1d,
    nn.Conv2d: quant_nn.QuantConv2d,
    nn.Conv3d: quant_nn.QuantConv3d,
    nn.ConvTranspose1d: quant_nn.QuantConvTranspose1d,
    nn.ConvTranspose2d: quant_nn.QuantConvTranspose2d,
    nn.ConvTranspose3d: quant_nn.QuantConvTranspose3d,
    nn.Linear: quant_nn.Linear,
    nn.LSTM: quant_nn.LSTM,
    nn.LSTMCell: quant_nn.LSTMCell,
    nn.AvgPool1d: quant_nn.QuantAvgPool1d,
    nn.AvgPool2d: quant_nn.QuantAvgPool2d,
    nn.AvgPool3d: quant_nn.QuantAvgPool3d,
    nn.AdaptiveAvgPool1d: quant_nn.QuantAdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d: quant_nn.QuantAdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d: quant_nn.QuantAdaptiveAvgPool3d,
}


def from_float(cls: Any, layer: nn.Module, **descriptors: QuantDescriptor) -> nn.Module:
    """Build a quantized layer from the attributes that its constructor names."""
    names = list(inspect.signature(cls.__init__).parameters)[1:]
    arguments = {name: getattr(layer, name) for name in names if name != "kwargs"}
    if not isinstance(arguments.get("bias", True), bool):
        arguments["bias"] = arguments["bias"] is not None
    built: nn.Module = cls(**arguments, **descriptors)
    return built


class Quantizer:
    """Replaces layers of a network by quantized ones.

    Args:
        weights: the name of the calibrator of weights, which have a range per channel.
        inputs: that of inputs.
        learns: the ranges of inputs are trained.
        classes: more classes by float ones.
    """

    def __init__(
        self,
        weights: str = "max",
        inputs: str = "histogram",
        learns: bool = False,
        classes: Mapping[type[nn.Module], type] | None = None,
    ) -> None:
        self.classes = {**CLASSES, **(classes or {})}
        self.input = QuantDescriptor(calib_method=inputs, learn_amax=learns)
        axis = 0 if weights == "max" else None
        self.weight = QuantDescriptor(calib_method=weights, axis=axis)

    def quantize(self, network: nn.Module) -> None:
        """Replace the layers of a network that are registered."""
        for name, child in network.named_children():
            cls = self.classes.get(type(child))
            if cls is None:
                self.quantize(child)
                continue
            assert issubclass(cls, (QuantMixin, QuantInputMixin))
            descriptors = {"quant_desc_input": self.input}
            if issubclass(cls, QuantMixin):
                descriptors["quant_desc_weight"] = self.weight
            quantized = cls.from_float(child, **descriptors)
            learned = any("clip." in key for key in quantized.state_dict())
            quantized.load_state_dict(child.state_dict(), strict=not learned)
            setattr(network, name, quantized)


def calibrate(network: nn.Module, batches: Iterable[Tensor], **method: Any) -> None:
    """Calibrate, by the flags of quantizers and the kinds of their calibrators."""
    quantizers = [
        module
        for module in network.modules()
        if isinstance(module, quant_nn.TensorQuantizer)
    ]
    for quantizer in quantizers:
        if isinstance(quantizer._calibrator, calib.HistogramCalibrator):
            quantizer._calibrator._torch_hist = False
        quantizer.disable_quant()
        quantizer.enable_calib()
    with torch.no_grad():
        for batch in batches:
            network(batch)
    for quantizer in quantizers:
        quantizer.disable_calib()
        quantizer.enable_quant()
        if isinstance(quantizer._calibrator, calib.MaxCalibrator):
            quantizer.load_calib_amax()
        else:
            quantizer.load_calib_amax(**method)
        if hasattr(quantizer, "clip"):
            quantizer.init_learn_amax()
        quantizer._calibrator.reset()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding="same", bias=False)
        self.branches = nn.ModuleList([nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)])
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.pool = nn.Sequential(
            nn.AvgPool2d(2),
            nn.AdaptiveAvgPool2d(1),
        )
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = self.up(self.branches[0](x) + self.branches[1](x))
        result: Tensor = self.last(self.pool(x).flatten(1))
        return result


@pytest.fixture(autouse=True)
def constructors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every registered class the constructor from a float layer, as the library does."""
    for entry in quant_modules._DEFAULT_QUANT_MAP:
        built = classmethod(from_float)
        monkeypatch.setattr(entry.replace_mod, "from_float", built, raising=False)


@pytest.mark.parametrize("float_class", CLASSES, ids=lambda c: c.__name__)
def test_each_class_is_registered_for_its_layer(float_class: type[nn.Module]) -> None:
    (entry,) = (
        entry
        for entry in quant_modules._DEFAULT_QUANT_MAP
        if getattr(nn, entry.mod_name) is float_class
    )
    assert entry.replace_mod is CLASSES[float_class]


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize(
    ("weights", "inputs", "method"),
    [
        ("max", "max", {}),
        ("max", "histogram", {"method": "percentile", "percentile": 99.99}),
        ("histogram", "histogram", {"method": "mse"}),
    ],
)
def test_a_network_is_quantized_and_calibrated(
    weights: str, inputs: str, method: dict[str, Any], learns: bool
) -> None:
    torch.manual_seed(0)
    network = Network().eval()
    batches = [torch.rand(4, 3, 8, 8) for _ in range(2)]
    expected = network(batches[0])
    quantized = copy.deepcopy(network)
    Quantizer(weights, inputs, learns).quantize(quantized)
    layers = [quantized.first, *quantized.branches, quantized.up, quantized.last]
    layers += list(quantized.pool)
    assert all(type(layer) in CLASSES.values() for layer in layers)
    kinds = {"max": calib.MaxCalibrator, "histogram": calib.HistogramCalibrator}
    assert type(quantized.first._input_quantizer._calibrator) is kinds[inputs]
    assert type(quantized.first._weight_quantizer._calibrator) is kinds[weights]
    calibrate(quantized, batches, **method)
    result = quantized(batches[0])
    # INT8 costs about a percent, a range for each tensor of weights and its search some more.
    assert 0 < (result - expected).norm() < 0.1 * expected.norm()
    learned = [name for name, _ in quantized.named_parameters() if "clip." in name]
    assert len(learned) == (14 if learns else 0)
    result.sum().backward()
    for name, parameter in quantized.named_parameters():
        assert parameter.grad is not None, name
    fresh = copy.deepcopy(network)
    Quantizer(weights, inputs, learns).quantize(fresh)
    fresh.load_state_dict(quantized.state_dict())
    assert torch.equal(fresh(batches[0]), result)


class Block(nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.features = features
        self.classes = classes
        self.linear = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result


class QuantBlock(nn.Module, QuantMixin):
    """A registered block whose constructor takes the descriptors by name."""

    from_float = classmethod(from_float)

    def __init__(self, features: int, classes: int, **kwargs: QuantDescriptor) -> None:
        super().__init__()
        self.linear = quant_nn.QuantLinear(features, classes, **kwargs)
        self.residual = quant_nn.TensorQuantizer(kwargs["quant_desc_input"])

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.residual(x[:, :1])


def test_a_block_of_the_user_is_replaced_with_its_descriptors() -> None:
    network = nn.Sequential(
        nn.Linear(4, 6),
        Block(6, 2),
    )
    state = network.state_dict()
    Quantizer("histogram", "max", classes={Block: QuantBlock}).quantize(network)
    block = network[1]
    assert type(block) is QuantBlock
    assert torch.equal(block.linear.weight, state["1.linear.weight"])
    assert type(block.linear._input_quantizer._calibrator) is calib.MaxCalibrator
    assert type(block.linear._weight_quantizer._calibrator) is calib.HistogramCalibrator
    assert network(torch.rand(3, 4)).shape == (3, 2)
