"""Quantize a detector of images and point clouds as the published YOLO and BEV scripts do.

The model is not rebuilt; each layer is swapped by hand. Own classes derive from the mixins. The
script has a regex skip list, patched forwards with a shared quantizer, training and an export. It
prints one JSON line.
"""

import json
import re
from copy import deepcopy

import torch
import torch.nn.functional as F
from absl import logging as quant_logging
from common import (
    arguments,
    both_losses,
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


class Conv(nn.Module):
    def __init__(self, c1: int, c2: int, k: int = 1, s: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c1, c2, k, s, k // 2, bias=False)
        self.bn = nn.BatchNorm2d(c2)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


class Bottleneck(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.cv1 = Conv(c, c, 1)
        self.cv2 = Conv(c, c, 3)
        self.add = True

    def forward(self, x):
        return x + self.cv2(self.cv1(x)) if self.add else self.cv2(self.cv1(x))


class C3(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        half = c // 2
        self.cv1 = Conv(c, half)
        self.cv2 = Conv(c, half)
        self.cv3 = Conv(c, c)
        self.m = Bottleneck(half)

    def forward(self, x):
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), 1))


class SPP(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.cv = Conv(c, c)
        self.m = nn.MaxPool2d(kernel_size=3, stride=1, padding=1)

    def forward(self, x):
        return self.cv(x) + self.m(x)


class SparseConvolution(nn.Module):
    """Stands for a third party's 3-D convolution with the output channels last in its weight."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int = 3
    ) -> None:
        super().__init__()
        self.padding = kernel_size // 2
        shape = (kernel_size, kernel_size, kernel_size, in_channels, out_channels)
        self.weight = nn.Parameter(torch.randn(shape) * 0.1)
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def forward(self, x):
        return F.conv3d(
            x, self.weight.permute(4, 3, 0, 1, 2), self.bias, padding=self.padding
        )


class SparseConvolutionQuant(SparseConvolution, quant_nn_utils.QuantMixin):
    default_quant_desc_input = tensor_quant.QuantDescriptor(
        num_bits=8, calib_method="histogram"
    )
    default_quant_desc_weight = tensor_quant.QuantDescriptor(num_bits=8, axis=(4))

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args)
        self.init_quantizer(
            *quant_nn_utils.pop_quant_desc_in_kwargs(self.__class__, **kwargs)
        )

    def forward(self, x):
        weight = self._weight_quantizer(self.weight).permute(4, 3, 0, 1, 2)
        return F.conv3d(
            self._input_quantizer(x), weight, self.bias, padding=self.padding
        )


class QuantConcat(nn.Module, quant_nn_utils.QuantInputMixin):
    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self._input_quantizer = quant_nn.TensorQuantizer(
            QuantDescriptor(calib_method="histogram")
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


class SharedAdd(nn.Module):
    """Both inputs through one quantizer, so that the sum needs no requantization."""

    def __init__(self) -> None:
        super().__init__()
        self._input_quantizer = quant_nn.TensorQuantizer(
            QuantDescriptor(calib_method="histogram")
        )
        self._fake_quant = True

    def forward(self, x, y):
        return self._input_quantizer(x) + self._input_quantizer(y)


class wrappers:
    """Stands for a framework's module of its own layer classes."""

    class ConvTranspose2d(nn.ConvTranspose2d):
        pass


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        up = wrappers.ConvTranspose2d(8, 4, 2, 2)
        self.model = nn.Sequential(
            Conv(3, 8, 3, 2),
            C3(8),
            SPP(8),
            up,
        )
        self.lidar = SparseConvolution(2, 2)
        self.cat = QuantConcat()
        self.add = QuantAdd()
        self.fuser = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Conv2d(8, 6, 1)

    def forward(self, image, points):
        x = self.cat(
            self.model(image),
            self.lidar(points).flatten(1, 2),
        )
        return self.head(self.add(self.fuser(x), x))


class disable_quantization:
    def __init__(self, model) -> None:
        self.model = model

    def apply(self, disabled: bool = True) -> None:
        for module in quantizers(self.model):
            module._disabled = disabled

    def __enter__(self) -> None:
        self.apply(True)

    def __exit__(self, *args) -> None:
        self.apply(False)


def initialize() -> None:
    quant_modules._DEFAULT_QUANT_MAP.append(
        quant_modules._quant_entry(
            wrappers, "ConvTranspose2d", quant_nn.QuantConvTranspose2d
        )
    )
    for item in quant_modules._DEFAULT_QUANT_MAP:
        item.replace_mod.set_default_quant_desc_input(
            QuantDescriptor(calib_method="histogram")
        )
    quant_logging.set_verbosity(quant_logging.ERROR)


def bottleneck_quant_forward(self, x):
    out = self.cv2(self.cv1(x))
    return self.addop(x, out) if hasattr(self, "addop") else x + out


def replace_custom_module_forward(model) -> None:
    Bottleneck.forward = bottleneck_quant_forward
    for _, bottleneck in model.named_modules():
        if isinstance(bottleneck, Bottleneck) and bottleneck.add:
            bottleneck.addop = SharedAdd()
    # The two inputs of a concatenation share a range, too.
    for (
        _,
        c3,
    ) in model.named_modules():
        if isinstance(c3, C3):
            c3.cv2.conv._input_quantizer = c3.cv1.conv._input_quantizer


def batches(n: int):
    generator = torch.Generator().manual_seed(2)
    for _ in range(n):
        images = torch.rand(4, 3, 16, 16, generator=generator)
        yield images, torch.randn(4, 2, 2, 16, 16, generator=generator)


def distance(model, origin) -> float:
    with torch.no_grad():
        return sum(F.mse_loss(model(*x), origin(*x)).item() for x in batches(2))


def train(model, optimizer, loss_of, steps: int) -> list:
    losses = []
    for batch in batches(steps):
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def loss(model) -> float:
    with torch.no_grad():
        return sum(model.eval()(*x).square().mean().item() for x in batches(2)) / 2


def export(model, path: str) -> None:
    quant_nn.TensorQuantizer.use_fb_fake_quant = True
    names = {"input_names": ["images", "points"], "output_names": ["out"]}
    names["dynamic_axes"] = {name: {0: "batch"} for name in ("images", "points", "out")}
    with torch.no_grad(), enable_onnx_export():
        inputs = next(iter(batches(1)))
        torch.onnx.export(model, inputs, path, opset_version=13, dynamo=False, **names)
    quant_nn.TensorQuantizer.use_fb_fake_quant = False


def main() -> None:
    args = arguments()
    torch.manual_seed(3)
    initialize()
    model = Model()
    # Stands for the pretrained weights: gives BatchNorm its statistics.
    for batch in batches(30):
        model(*batch)
    disable_quantization(model).apply(True)
    origin = deepcopy(model.eval())
    disable_quantization(model).apply(False)
    ignored = replace_to_quantization_module(
        model,
        {
            nn.MaxPool2d: quant_nn.QuantMaxPool2d,
            SparseConvolution: SparseConvolutionQuant,
        },
        lambda path: any(
            re.match(pattern, path) for pattern in (r"head", r"model\.0\..*")
        ),
    )
    replace_custom_module_forward(model)
    collect_stats(model, batches(3))
    report = {"ignored": ignored, "distance": {}}
    for method in ("entropy", "mse"):
        compute_amax(model, strict=False, method=method)
        report["distance"][method] = distance(model, origin)
    model.fuser._input_quantizer.disable()
    report["lidar"] = list(model.lidar._weight_quantizer.amax.shape)
    report["keys"] = [k for k in model.state_dict() if k.endswith("_amax")]
    with disable_quantization(model):
        report["off"] = distance(model, origin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    report["losses"] = train(model, optimizer, lambda b: model(*b).square().mean(), 8)
    model.eval()
    torch.save({"model": model}, args.out + "/qat.pt")
    report["half"] = str(
        deepcopy(model).half().model[1].cv1.conv._input_quantizer._amax.dtype
    )
    report["loss"] = both_losses(model, loss, args.out)
    if args.onnx:
        export(model, args.out + "/qat.onnx")
    print(json.dumps(report))  # noqa: T201  # how the test reads the outcome


if __name__ == "__main__":
    main()
