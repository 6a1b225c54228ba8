"""Calibrate, evaluate, fine-tune and export a residual net.

The order of calls is that of the original's classification example.

Knows nothing of torchq. Prints one JSON line.
"""

import json
import sys

import torch
import torch.nn.functional as F
from absl import logging
from common import (
    arguments,
    both_losses,
    collect_stats,
    compute_amax,
    mean_loss,
    quantizers,
)
from pytorch_quantization import nn as quant_nn
from pytorch_quantization import quant_modules
from pytorch_quantization.tensor_quant import QuantDescriptor
from torch import nn

logging.set_verbosity(logging.FATAL)


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        desc = quant_nn.QuantConv2d.default_quant_desc_input
        self.residual_quantizer = quant_nn.TensorQuantizer(desc)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += self.residual_quantizer(x)
        return self.relu(out)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(
            Bottleneck(8, 4),
            Bottleneck(8, 4),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        return self.fc(torch.flatten(self.avgpool(self.layer1(x)), 1))


def data(batches: int):
    """Four classes told apart by the mean of the three channels."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(batches):
        target = torch.randint(4, (16,), generator=generator)
        image = torch.randn(16, 3, 8, 8, generator=generator) * 0.5
        image[:, 0] += (target % 2)[:, None, None] * 2.0 - 1.0
        image[:, 1] += (target // 2)[:, None, None] * 2.0 - 1.0
        yield image, target


def evaluate(model) -> float:
    model.eval()
    with torch.no_grad():
        return (
            sum((model(x).argmax(1) == y).float().mean().item() for x, y in data(4)) / 4
        )


def loss(model) -> float:
    return mean_loss(model, data(4), F.cross_entropy)


def train(model, steps: int, lr: float) -> None:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for image, target in data(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(image), target).backward()
        optimizer.step()


def calibrate_model(model, calibrator: str, percentiles) -> dict:
    collect_stats(model, [(image,) for image, _ in data(2)])
    actual = {}
    methods = (
        [("max", {})] if calibrator == "max" else [(m, {}) for m in ("mse", "entropy")]
    )
    methods += [
        ("percentile", {"percentile": p})
        for p in percentiles
        if calibrator == "histogram"
    ]
    for method, options in methods:
        compute_amax(model, method=method, **options)
        actual[f"{method}{options.get('percentile', '')}"] = evaluate(model)
    return actual


def export(model, path: str) -> None:
    quant_nn.TensorQuantizer.use_fb_fake_quant = True
    model.eval()
    options = {
        "verbose": False,
        "opset_version": 13,
        "do_constant_folding": True,
        "dynamo": False,
    }
    torch.onnx.export(model, torch.randn(1, 3, 8, 8), path, **options)
    quant_nn.TensorQuantizer.use_fb_fake_quant = False


def main() -> None:
    choices = {"choices": ["max", "histogram"], "default": "max"}
    args = arguments(("--calibrator", choices))
    torch.manual_seed(12345)
    desc = QuantDescriptor(calib_method=args.calibrator)
    quant_nn.QuantConv2d.set_default_quant_desc_input(desc)
    quant_nn.QuantLinear.set_default_quant_desc_input(desc)
    quant_modules.initialize()
    model = Net()
    quant_modules.deactivate()
    for quantizer in quantizers(model):
        quantizer.disable()
    train(model, 20, 0.05)
    report = {"argv": sys.argv[1:2], "float": evaluate(model)}
    for quantizer in quantizers(model):
        quantizer.enable()
    report["calibrated"] = calibrate_model(model, args.calibrator, [99.9, 99.99])
    train(model, 5, 0.001)
    report["finetuned"] = evaluate(model)
    torch.save(model.state_dict(), args.out + "/model.pth")
    report["loss"] = both_losses(model, loss, args.out)
    if args.onnx:
        export(model, args.out + "/model.onnx")
    print(json.dumps(report))  # noqa: T201  # how the test reads the outcome


if __name__ == "__main__":
    main()
