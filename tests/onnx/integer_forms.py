"""Small networks, each with one form of an operator, and what ONNX Runtime makes of it."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Channels of every network.
WIDTH = 16


def weight(*shape: int) -> nn.Parameter:
    """Return random numbers of a size as trained weights have."""
    generator = torch.Generator().manual_seed(5)
    return nn.Parameter(torch.randn(*shape, generator=generator) * 0.3)


def convolution(dims: int, *settings: int) -> nn.Module:
    """Return a convolution of signals, images or volumes."""
    classes = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
    return classes[dims](*settings)


class Form(nn.Module):
    """A convolution with ReLU, one operator, another convolution, and a linear layer."""

    dims = 2

    def __init__(self) -> None:
        super().__init__()
        self.stem = convolution(self.dims, 3, WIDTH, 3)
        self.last = convolution(self.dims, WIDTH, 8, 1)
        self.head = nn.Linear(8, 5)

    def operator(self, x: Tensor) -> Tensor:
        """Return what the operator gives, with as many channels."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        x = self.operator(self.stem(x).relu())
        return self.head(self.last(x).relu().flatten(2).amax(2))


class Pooled(Form):
    """The same with a module."""

    def __init__(self, pool: nn.Module) -> None:
        self.dims = int(type(pool).__name__[-2])
        super().__init__()
        self.pool = pool

    def operator(self, x: Tensor) -> Tensor:
        return self.pool(x)


class SkipThroughNothing(Form):
    """A result that a layer reads, and an addition through what returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(WIDTH, WIDTH, 1)
        self.branch = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.skip = nn.Sequential(
            nn.Identity(),
            nn.Dropout(0.1),
        )
        self.register_buffer("zero", torch.zeros(1))

    def operator(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        branch = F.dropout(self.branch(x), 0.1, self.training)
        branch = (branch.detach() - self.zero) / 1
        return branch + (1.0 * self.skip(x).contiguous() + 0)


class Rows(Form):
    """The same with rows of features in place of the second convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, 8)
        del self.head

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.operator(self.stem(x).relu()))


class Beside(Form):
    """The same with two operands."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Conv2d(3, WIDTH, 3)

    def combined(self, x: Tensor, y: Tensor) -> Tensor:
        """Return what the operator gives of two tensors."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        y = self.combined(
            self.stem(x).relu(),
            self.other(x),
        )
        return self.head(self.last(y).relu().flatten(2).amax(2))


class MeanMethod(Rows):
    def operator(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class MeanFunction(Form):
    def operator(self, x: Tensor) -> Tensor:
        return torch.mean(x, [-1, -2], keepdim=True)


class MeanOfVolumes(Form):
    dims = 3

    def operator(self, x: Tensor) -> Tensor:
        return x.mean((2, 3, 4), keepdim=True)


class GlobalFunction(Rows):
    def operator(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, 1).flatten(1)


class AdaptiveFunction(Form):
    def operator(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, 5)


class WindowsFunction(Form):
    def operator(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 3, 2, 1)


class WholeWindow(Rows):
    def operator(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 10).flatten(1)


class UncountedFunction(Form):
    def operator(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 3, 2, padding=1, count_include_pad=False)


class SigmoidFunction(Form):
    def operator(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)


class Products(Beside):
    def combined(self, x: Tensor, y: Tensor) -> Tensor:
        return x @ y


class ProductsTransposed(Beside):
    def combined(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.matmul(x, y.transpose(2, 3))


class Attention(Beside):
    def combined(self, x: Tensor, y: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, y, y)


class GateOfImages(Beside):
    def combined(self, x: Tensor, y: Tensor) -> Tensor:
        return x + F.adaptive_avg_pool2d(y, 1)


class WeightedCall(Form):
    def __init__(self) -> None:
        super().__init__()
        self.weight = weight(WIDTH, WIDTH, 3, 3)
        self.bias = weight(WIDTH)

    def operator(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, padding=1).relu()


class Standardized(WeightedCall):
    def operator(self, x: Tensor) -> Tensor:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, self.weight - mean, self.bias, stride=2).relu()


class LinearCall(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.weight = weight(WIDTH, WIDTH)
        self.bias = weight(WIDTH)

    def operator(self, x: Tensor) -> Tensor:
        return F.linear(x.amax((2, 3)), self.weight, self.bias).relu()


class LastCall(LinearCall):
    def __init__(self) -> None:
        super().__init__()
        del self.last

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.stem(x).relu().amax((2, 3)), self.weight, self.bias)


class MatrixCall(LinearCall):
    def operator(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2) @ self.weight


class AddedCall(LinearCall):
    def operator(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.amax((2, 3)), self.weight).relu()


class WithoutBias(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(WIDTH, WIDTH, bias=False)

    def operator(self, x: Tensor) -> Tensor:
        return self.hidden(x.flatten(2).transpose(1, 2)).relu()


class StandardizedConv(nn.Conv2d):
    """A layer of its author, which halves what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, self.weight - mean, self.bias) * 0.5


class LayerOfItsOwn(Form):
    def __init__(self) -> None:
        super().__init__()
        self.layer = StandardizedConv(WIDTH, WIDTH, 3)

    def operator(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


class Einsum(Form):
    def __init__(self) -> None:
        super().__init__()
        self.weight = weight(WIDTH, WIDTH)

    def operator(self, x: Tensor) -> Tensor:
        return torch.einsum("bchw,dc->bdhw", x, self.weight)


class TransposedCall(Form):
    def __init__(self) -> None:
        super().__init__()
        self.weight = weight(WIDTH, WIDTH, 2, 2)

    def operator(self, x: Tensor) -> Tensor:
        return F.conv_transpose2d(x, self.weight, stride=2)


class TransposedLayer(Form):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(WIDTH, WIDTH, 2, 2)

    def operator(self, x: Tensor) -> Tensor:
        return self.up(x)


class MeanOfChannels(Rows):
    def operator(self, x: Tensor) -> Tensor:
        return x.flatten(2).mean((1, 2), keepdim=True).expand(-1, -1, WIDTH)


@dataclass(frozen=True)
class Case:
    """What is expected of a form.

    Attributes:
        made: makes the network.
        operator: the path of what is quantized for it.
        kernel: of ONNX Runtime that computes it; "" where none on integers does.
        is_rounded: that kernel returns codes.
    """

    made: type[nn.Module] | nn.Module
    operator: str
    kernel: str
    is_rounded: bool = True

    def model(self) -> nn.Module:
        """Return the network, with the weights of a seed."""
        torch.manual_seed(0)
        if isinstance(self.made, type):
            return self.made().eval()
        return Pooled(copy.deepcopy(self.made)).eval()


_POOL = "pool"
_TAP = "quant_pool"
_MEAN = "QLinearGlobalAveragePool"
_WINDOWS = "QLinearAveragePool"

#: Name of a form -> what is expected of it, on 12 elements a side, of which the stem leaves 10.
FORMS: dict[str, Case] = {
    "mean": Case(MeanMethod, _TAP, _MEAN),
    "mean that keeps dimensions": Case(MeanFunction, _TAP, _MEAN),
    "mean of volumes": Case(MeanOfVolumes, _TAP, _MEAN),
    "function of whole images": Case(GlobalFunction, _TAP, _MEAN),
    "function of parts": Case(AdaptiveFunction, _TAP, "QLinearConv"),
    "function of windows": Case(WindowsFunction, _TAP, "QLinearConv"),
    "one window": Case(WholeWindow, _TAP, "QLinearConv"),
    "uncounted, a function": Case(UncountedFunction, _TAP, _WINDOWS),
    "images": Case(nn.AdaptiveAvgPool2d(1), _POOL, _MEAN),
    "signals": Case(nn.AdaptiveAvgPool1d(1), _POOL, _MEAN),
    "volumes": Case(nn.AdaptiveAvgPool3d(1), _POOL, _MEAN),
    "parts": Case(nn.AdaptiveAvgPool2d(2), _POOL, "QLinearConv"),
    "windows": Case(nn.AvgPool2d((2, 5), 1), _POOL, "QLinearConv"),
    "windows that fit": Case(nn.AvgPool2d(5, ceil_mode=True), _POOL, "QLinearConv"),
    "windows of signals": Case(nn.AvgPool1d(2), _POOL, _WINDOWS),
    "windows of volumes": Case(nn.AvgPool3d(2), _POOL, _WINDOWS),
    "uncounted": Case(nn.AvgPool2d(3, 2, 1, count_include_pad=False), _POOL, _WINDOWS),
    "uncounted in signals": Case(
        nn.AvgPool1d(3, 2, 1, count_include_pad=False), _POOL, _WINDOWS
    ),
    "sigmoid": Case(SigmoidFunction, "quant_activation", "QLinearSigmoid"),
    "product": Case(Products, "quant_matmul", "QLinearMatMul"),
    "product, transposed": Case(ProductsTransposed, "quant_matmul", "QLinearMatMul"),
    "attention": Case(Attention, "quant_attention", "QLinearMatMul"),
    "skip through nothing": Case(SkipThroughNothing, "layer", "QLinearConv"),
    "sum with images": Case(GateOfImages, "quant_add", "QLinearAdd"),
    "conv2d": Case(WeightedCall, "weight_call", "QLinearConv"),
    "conv2d, weights computed": Case(Standardized, "conv2d_call_0", "QLinearConv"),
    "linear": Case(LinearCall, "weight_call", "QGemm"),
    "linear, last": Case(LastCall, "weight_call", "MatMulIntegerToFloat", False),
    "matmul": Case(MatrixCall, "weight_call", "QLinearMatMul"),
    "addmm": Case(AddedCall, "weight_call", "QGemm"),
    "tokens without bias": Case(WithoutBias, "hidden", "QLinearMatMul"),
    "windows over the edge": Case(nn.AvgPool2d(4, ceil_mode=True), _POOL, ""),
    "layer of its own": Case(LayerOfItsOwn, "layer", ""),
    "einsum": Case(Einsum, "weight_call", ""),
    "conv_transpose2d": Case(TransposedCall, "weight_call", ""),
    "transposed layer": Case(TransposedLayer, "up", ""),
    "mean of channels": Case(MeanOfChannels, _TAP, ""),
}
