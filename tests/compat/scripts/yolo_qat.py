"""Quantize a detector-like net in the manner of the published YOLO scripts.

The model is not rebuilt; each layer is swapped by hand. The script has a regex skip list, patched
forwards with a shared quantizer, per-layer sensitivity, feature distillation and an export. It
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
    collect_stats,
    compute_amax,
    quantizers,
    replace_to_quantization_module,
)
from pytorch_quantization import nn as quant_nn
from pytorch_quantization.tensor_quant import QuantDescriptor
from torch import nn


class Conv(nn.Module):
    def __init__(self, c1: int, c2: int, k: int = 1, s: int = 1) -> None:
        super().__init__()
        self.conv, self.bn, self.act = (
            nn.Conv2d(c1, c2, k, s, k // 2, bias=False),
            nn.BatchNorm2d(c2),
            nn.SiLU(),
        )

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


class Bottleneck(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.cv1, self.cv2, self.add = Conv(c, c, 1), Conv(c, c, 3), True

    def forward(self, x):
        return x + self.cv2(self.cv1(x)) if self.add else self.cv2(self.cv1(x))


class C3(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.cv1, self.cv2, self.cv3, self.m = (
            Conv(c, c // 2),
            Conv(c, c // 2),
            Conv(c, c),
            Bottleneck(c // 2),
        )

    def forward(self, x):
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), 1))


class SPP(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.cv, self.m = Conv(c, c), nn.MaxPool2d(kernel_size=3, stride=1, padding=1)

    def forward(self, x):
        return self.cv(x) + self.m(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            Conv(3, 8, 3, 2), C3(8), SPP(8), Conv(8, 8, 3, 2), nn.Upsample(scale_factor=2)
        )
        self.head = nn.Conv2d(8, 6, 1)

    def forward(self, x):
        return self.head(self.model(x))


class QuantAdd(nn.Module):
    """Both inputs through one quantizer, so that the sum needs no requantization."""

    def __init__(self, quantization: bool = True) -> None:
        super().__init__()
        if quantization:
            self._input_quantizer = quant_nn.TensorQuantizer(
                QuantDescriptor(num_bits=8, calib_method="histogram")
            )
            self._input_quantizer._calibrator._torch_hist = True
            self._fake_quant = True
        self.quantization = quantization

    def forward(self, x, y):
        return self._input_quantizer(x) + self._input_quantizer(y) if self.quantization else x + y


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
    desc = QuantDescriptor(calib_method="histogram")
    for cls in (quant_nn.QuantConv2d, quant_nn.QuantMaxPool2d, quant_nn.QuantLinear):
        cls.set_default_quant_desc_input(desc)
    quant_logging.set_verbosity(quant_logging.ERROR)


def bottleneck_quant_forward(self, x):
    return (
        self.addop(x, self.cv2(self.cv1(x)))
        if hasattr(self, "addop")
        else x + self.cv2(self.cv1(x))
    )


def replace_custom_module_forward(model) -> None:
    Bottleneck.forward = bottleneck_quant_forward
    for _, bottleneck in model.named_modules():
        if isinstance(bottleneck, Bottleneck) and bottleneck.add:
            bottleneck.addop = QuantAdd(bottleneck.add)
    for _, c3 in model.named_modules():  # the two inputs of a concatenation share a range, too
        if isinstance(c3, C3):
            c3.cv2.conv._input_quantizer = c3.cv1.conv._input_quantizer


def batches(n: int):
    generator = torch.Generator().manual_seed(2)
    for _ in range(n):
        yield torch.rand(4, 3, 16, 16, generator=generator)


def distance(model, origin) -> float:
    with torch.no_grad():
        return sum(F.mse_loss(model(x), origin(x)).item() for x in batches(2))


def finetune(model, origin) -> list:
    """Train the quantized model to reproduce the features of the float one, layer by layer."""
    pairs, losses = [], []
    handles = []
    # As published, the shorter list ends the loop.
    for (_, ml), (_, ori) in zip(model.named_modules(), origin.named_modules()):  # noqa: B905
        if isinstance(ml, C3) and isinstance(ori, C3):
            for module in (ml, ori):
                pairs.append([])
                handles.append(
                    module.register_forward_hook(lambda m, i, o, store=pairs[-1]: store.append(o))
                )
    optimizer = torch.optim.Adam(model.parameters(), 1e-5)
    for image in batches(6):
        for store in pairs:
            store.clear()
        out, wanted = model(image), origin(image)
        loss = F.mse_loss(out, wanted.detach())
        for ml, ori in zip(pairs[0::2], pairs[1::2]):  # noqa: B905
            loss = loss + F.mse_loss(ml[0], ori[0].detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for handle in handles:
        handle.remove()
    return losses


def sensitivity_analysis(model, origin) -> dict:
    """The distance with one block quantized at a time."""
    found = {}
    disable_quantization(model).apply(True)
    for i in range(len(model.model)):
        if quantizers(model.model[i]):
            disable_quantization(model.model[i]).apply(False)
            found[str(i)] = distance(model, origin)
            disable_quantization(model.model[i]).apply(True)
    disable_quantization(model).apply(False)
    return found


def export(model, path: str) -> None:
    quant_nn.TensorQuantizer.use_fb_fake_quant = True
    names = {
        "input_names": ["images"],
        "output_names": ["out"],
        "dynamic_axes": {"images": {0: "batch"}, "out": {0: "batch"}},
    }
    with torch.no_grad():
        torch.onnx.export(
            model, torch.zeros(1, 3, 16, 16), path, opset_version=13, dynamo=False, **names
        )
    quant_nn.TensorQuantizer.use_fb_fake_quant = False


def main() -> None:
    args = arguments()
    torch.manual_seed(3)
    initialize()
    model = Model()
    for image in batches(30):  # stands for the pretrained weights: gives BatchNorm its statistics
        model(image)
    model.eval()
    origin = deepcopy(model)
    ignored = replace_to_quantization_module(
        model,
        {nn.MaxPool2d: quant_nn.QuantMaxPool2d},
        lambda path: any(re.match(pattern, path) for pattern in (r"head", r"model\.0\..*")),
    )
    replace_custom_module_forward(model)
    collect_stats(model, [(image,) for image in batches(3)])
    compute_amax(model, strict=False, method="mse")
    report = {"ignored": ignored, "distance": distance(model, origin)}
    with disable_quantization(model):
        report["off"] = distance(model, origin)
    report["sensitivity"] = sensitivity_analysis(model, origin)
    report["losses"] = finetune(model, origin)
    model.eval()
    torch.save({"model": model}, args.out + "/qat.pt")
    report["half"] = str(deepcopy(model).half().model[1].cv1.conv._input_quantizer._amax.dtype)
    if args.onnx:
        export(model, args.out + "/qat.onnx")
    print(json.dumps(report))  # noqa: T201  # how the test reads the outcome


if __name__ == "__main__":
    main()
