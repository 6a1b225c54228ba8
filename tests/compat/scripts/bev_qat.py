"""Quantize a camera and point-cloud net in the manner of the published BEV scripts.

Its own classes derive from the mixins. It prints one JSON line.
"""

import argparse
import json

import torch
import torch.nn.functional as F
from absl import logging as quant_logging
from pytorch_quantization import calib, enable_onnx_export, quant_modules, tensor_quant
from pytorch_quantization import nn as quant_nn
from pytorch_quantization.nn.modules import _utils as quant_nn_utils
from pytorch_quantization.nn.modules.tensor_quantizer import TensorQuantizer
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


def transfer(instance: nn.Module, quant_class):
    quant_instance = quant_class.__new__(quant_class)
    for k, val in vars(instance).items():
        setattr(quant_instance, k, val)

    def __init__(self) -> None:
        quant_desc_input, quant_desc_weight = quant_nn_utils.pop_quant_desc_in_kwargs(
            self.__class__
        )
        if isinstance(self, quant_nn_utils.QuantInputMixin):
            self.init_quantizer(quant_desc_input)
        else:
            self.init_quantizer(quant_desc_input, quant_desc_weight)

    __init__(quant_instance)
    return quant_instance


def quantize(model: nn.Module) -> None:
    module_dict = {
        id(getattr(e.orig_mod, e.mod_name)): e.replace_mod for e in quant_modules._DEFAULT_QUANT_MAP
    }
    module_dict[id(SparseConvolution)] = SparseConvolutionQuant

    def recurse(module) -> None:
        for name in list(module._modules):
            child = module._modules[name]
            recurse(child)
            if id(type(child)) in module_dict:
                module._modules[name] = transfer(child, module_dict[id(type(child))])

    recurse(model)


def set_quantizer_fast(module) -> None:
    for _, m in module.named_modules():
        if isinstance(m, quant_nn.TensorQuantizer) and isinstance(
            m._calibrator, calib.HistogramCalibrator
        ):
            m._calibrator._torch_hist = True


def batches(n: int):
    generator = torch.Generator().manual_seed(5)
    for _ in range(n):
        yield (
            torch.rand(2, 3, 16, 16, generator=generator),
            torch.randn(2, 2, 2, 16, 16, generator=generator),
        )


def calibrate(model) -> None:
    for _, module in model.named_modules():
        if isinstance(module, TensorQuantizer):
            module.disable_quant()
            module.enable_calib()
    with torch.no_grad():
        for batch in batches(3):
            model(*batch)
    for _, module in model.named_modules():
        if isinstance(module, TensorQuantizer):
            module.enable_quant()
            module.disable_calib()
            if isinstance(module._calibrator, calib.MaxCalibrator):
                module.load_calib_amax()
            else:
                module.load_calib_amax(method="entropy")


def quantization_error(model) -> float:
    """Of the whole model against itself with every quantizer off."""
    quantizers = [m for _, m in model.named_modules() if isinstance(m, TensorQuantizer)]
    with torch.no_grad():
        quantized = [model(*batch) for batch in batches(2)]
        for quantizer in quantizers:
            quantizer.disable()
        exact = [model(*batch) for batch in batches(2)]
        for quantizer in quantizers:
            quantizer.enable()
    return (
        sum(F.mse_loss(q, e).item() / e.var().item() for q, e in zip(quantized, exact, strict=True))
        / 2
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--onnx", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.set_num_threads(1)
    initialize()
    model = Net().eval()
    quantize(model)
    set_quantizer_fast(model)
    calibrate(model)
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
