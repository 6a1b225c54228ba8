"""Quantize a camera and point-cloud net in the manner of the published BEV scripts.

Its own classes derive from the mixins. It prints one JSON line.
"""

import json

import torch
import torch.nn.functional as F
from absl import logging as quant_logging
from common import (
    arguments,
    collect_stats,
    compute_amax,
    quantizers,
    replace_to_quantization_module,
)
from pytorch_quantization import enable_onnx_export, quant_modules, tensor_quant
from pytorch_quantization import nn as quant_nn
from pytorch_quantization.nn.modules import _utils as quant_nn_utils
from pytorch_quantization.tensor_quant import QuantDescriptor
from torch import nn


class SparseConvolution(nn.Module):
    """Stands for a third party's 3-D convolution with the output channels last in its weight."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int = 3) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.kernel_size = (
            in_channels,
            out_channels,
            kernel_size,
        )
        self.weight = nn.Parameter(
            torch.randn(kernel_size, kernel_size, kernel_size, in_channels, out_channels) * 0.1
        )
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def forward(self, x):
        return F.conv3d(
            x, self.weight.permute(4, 3, 0, 1, 2), self.bias, padding=self.kernel_size // 2
        )


class SparseConvolutionQuant(SparseConvolution, quant_nn_utils.QuantMixin):
    default_quant_desc_input = tensor_quant.QuantDescriptor(num_bits=8, calib_method="histogram")
    default_quant_desc_weight = tensor_quant.QuantDescriptor(num_bits=8, axis=(4))

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args)
        self.init_quantizer(*quant_nn_utils.pop_quant_desc_in_kwargs(self.__class__, **kwargs))

    def forward(self, x):
        weight = self._weight_quantizer(self.weight).permute(4, 3, 0, 1, 2)
        return F.conv3d(self._input_quantizer(x), weight, self.bias, padding=self.kernel_size // 2)


class QuantConcat(nn.Module, quant_nn_utils.QuantInputMixin):
    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self._input_quantizer = quant_nn.TensorQuantizer(
            QuantDescriptor(num_bits=8, calib_method="histogram")
        )
        self._input_quantizer._calibrator._torch_hist = True
        self._fake_quant = True
        self.dim = dim

    def forward(self, x, y):
        return torch.cat([self._input_quantizer(x), self._input_quantizer(y)], self.dim)


class QuantAdd(nn.Module, quant_nn_utils.QuantMixin):
    def __init__(self) -> None:
        super().__init__()
        self._input0_quantizer = quant_nn.TensorQuantizer(QuantDescriptor())
        self._input1_quantizer = quant_nn.TensorQuantizer(QuantDescriptor())

    def forward(self, x, y):
        return self._input0_quantizer(x) + self._input1_quantizer(y)


class wrappers:
    """Stands for a framework's module of its own layer classes."""

    class ConvTranspose2d(nn.ConvTranspose2d):
        pass


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.camera = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), wrappers.ConvTranspose2d(8, 4, 2, 2)
        )
        self.lidar = SparseConvolution(2, 2)
        self.cat, self.add = QuantConcat(), QuantAdd()
        self.fuser = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Conv2d(8, 2, 1))

    def forward(self, image, points):
        voxels = self.lidar(points).flatten(1, 2)
        x = self.cat(self.camera(image), voxels)
        return self.head(self.add(self.fuser(x), x))


def initialize() -> None:
    quant_modules._DEFAULT_QUANT_MAP.append(
        quant_modules._quant_entry(wrappers, "ConvTranspose2d", quant_nn.QuantConvTranspose2d)
    )
    for item in quant_modules._DEFAULT_QUANT_MAP:
        item.replace_mod.set_default_quant_desc_input(QuantDescriptor(calib_method="histogram"))
    quant_logging.set_verbosity(quant_logging.ERROR)


def batches(n: int):
    generator = torch.Generator().manual_seed(5)
    for _ in range(n):
        yield (
            torch.rand(2, 3, 16, 16, generator=generator),
            torch.randn(2, 2, 2, 16, 16, generator=generator),
        )


def quantization_error(model) -> float:
    """Of the whole model against itself with every quantizer off."""
    found = quantizers(model)
    with torch.no_grad():
        quantized = [model(*batch) for batch in batches(2)]
        for quantizer in found:
            quantizer.disable()
        exact = [model(*batch) for batch in batches(2)]
        for quantizer in found:
            quantizer.enable()
    return (
        sum(F.mse_loss(q, e).item() / e.var().item() for q, e in zip(quantized, exact, strict=True))
        / 2
    )


def main() -> None:
    args = arguments()
    torch.manual_seed(7)
    initialize()
    model = Net().eval()
    replace_to_quantization_module(model, {SparseConvolution: SparseConvolutionQuant})
    collect_stats(model, batches(3))
    compute_amax(model, method="entropy")
    model.fuser._input_quantizer.disable()
    shape = list(model.lidar._weight_quantizer.amax.shape)
    report = {
        "error": quantization_error(model),
        "lidar": shape,
        "keys": [k for k in model.state_dict() if k.endswith("_amax")],
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches(8):
        loss = model.train()(*batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    report["losses"] = losses
    torch.save(model.state_dict(), args.out + "/bev.pth")
    if args.onnx:
        with enable_onnx_export():
            torch.onnx.export(
                model.eval(),
                next(iter(batches(1))),
                args.out + "/bev.onnx",
                opset_version=13,
                dynamo=False,
            )
    print(json.dumps(report))  # noqa: T201  # how the test reads the outcome


if __name__ == "__main__":
    main()
