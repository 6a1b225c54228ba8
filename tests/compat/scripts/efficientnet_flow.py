"""Quantize blocks with squeeze and excitation as the published EfficientNet does.

The network is built within a switch that replaces torch's layers; factors of products and shortcuts
have quantizers of their own. Weights come from a float checkpoint. An average of the weights is
kept while it is fine-tuned in half precision. It knows nothing of torchq. It prints one JSON line.
"""

import copy
import json
from contextlib import contextmanager

import torch
import torch.nn.functional as F
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

QUANTIZED = (
    "QuantConv1d QuantConv2d QuantConv3d QuantConvTranspose1d QuantConvTranspose2d "
    "QuantConvTranspose3d QuantLinear QuantMaxPool2d QuantAvgPool2d QuantAdaptiveAvgPool2d"
)


@contextmanager
def switch_on_quantization(quantize: bool = True):
    if quantize:
        quant_modules.initialize()
    try:
        yield
    finally:
        if quantize:
            quant_modules.deactivate()


def select_default_calib_method(method: str) -> None:
    descriptor = QuantDescriptor(calib_method=method)
    for name in QUANTIZED.split():
        getattr(quant_nn, name).set_default_quant_desc_input(descriptor)


def activation_quantizer():
    return quant_nn.TensorQuantizer(quant_nn.QuantConv2d.default_quant_desc_input)


class SqueezeAndExcitation(nn.Module):
    def __init__(self, channels: int, squeezed: int, quantize: bool) -> None:
        super().__init__()
        self.pooling = nn.AdaptiveAvgPool2d(1)
        self.squeeze = nn.Linear(channels, squeezed)
        self.expand = nn.Linear(squeezed, channels)
        self.activation = nn.SiLU(inplace=True)
        self.quantize = quantize
        if quantize:
            self.mul_a_quantizer = activation_quantizer()
            self.mul_b_quantizer = activation_quantizer()

    def forward(self, x):
        factor = torch.flatten(self.pooling(x), 1)
        factor = torch.sigmoid(self.expand(self.activation(self.squeeze(factor))))
        factor = factor[:, :, None, None]
        if not self.quantize:
            return x * factor
        return self.mul_a_quantizer(x) * self.mul_b_quantizer(factor)


class MBConv(nn.Module):
    def __init__(self, channels: int, quantize: bool) -> None:
        super().__init__()
        wide = 2 * channels
        self.expand = nn.Conv2d(channels, wide, 1, bias=False)
        self.expand_norm = nn.BatchNorm2d(wide)
        self.depthwise = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False)
        self.depthwise_norm = nn.BatchNorm2d(wide)
        self.se = SqueezeAndExcitation(wide, channels // 2, quantize)
        self.project = nn.Conv2d(wide, channels, 1, bias=False)
        self.project_norm = nn.BatchNorm2d(channels)
        self.quantize = quantize
        if quantize:
            self.residual_quantizer = activation_quantizer()

    def forward(self, x):
        out = F.silu(self.expand_norm(self.expand(x)))
        out = F.silu(self.depthwise_norm(self.depthwise(out)))
        out = self.project_norm(self.project(self.se(out)))
        return out + (self.residual_quantizer(x) if self.quantize else x)


def build(quantize: bool) -> nn.Module:
    with switch_on_quantization(quantize):
        stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.SiLU(True)
        )
        blocks = [MBConv(8, quantize), MBConv(8, quantize)]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(8, 4)]
        return nn.Sequential(stem, *blocks, *head)


class EMA:
    """An average of every number of a state."""

    def __init__(self, mu: float, state) -> None:
        self.mu = mu
        self.state = copy.deepcopy(state)

    def __call__(self, state) -> None:
        for name, value in state.items():
            average = self.state[name]
            if average.is_floating_point():
                average.mul_(self.mu).add_(
                    value.detach(),
                    alpha=1 - self.mu,
                )


def data(batches: int):
    generator = torch.Generator().manual_seed(6)
    for _ in range(batches):
        target = torch.randint(4, (16,), generator=generator)
        image = torch.randn(16, 3, 12, 12, generator=generator) * 0.5
        image[:, 0] += (target % 2)[:, None, None] * 2.0 - 1.0
        image[:, 1] += (target // 2)[:, None, None] * 2.0 - 1.0
        yield image, target


def train(model, steps: int, rate: float, average=None) -> None:
    model.train()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=rate)
    for image, target in data(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(image), target)
        loss.backward()
        optimizer.step()
        if average is not None:
            average(model.state_dict())


def accuracy(model) -> float:
    model.eval()
    with torch.no_grad():
        hits = [(model(x).argmax(1) == y).float().mean().item() for x, y in data(4)]
    return sum(hits) / len(hits)


def loss(model) -> float:
    return mean_loss(model, data(4), F.cross_entropy)


def export(model, path: str) -> None:
    quant_nn.TensorQuantizer.use_fb_fake_quant = True
    names = {"input_names": ["images"], "output_names": ["scores"]}
    image, _ = next(data(1))
    torch.onnx.export(
        model.eval(), image, path, opset_version=13, dynamo=False, **names
    )
    quant_nn.TensorQuantizer.use_fb_fake_quant = False


def main() -> None:
    args = arguments()
    torch.manual_seed(13)
    float_model = build(quantize=False)
    train(float_model, 30, 3e-3)
    report = {"float": accuracy(float_model)}
    report["left"] = sum("Quant" in type(m).__name__ for m in float_model.modules())

    select_default_calib_method("histogram")
    model = build(quantize=True)
    keys = model.load_state_dict(float_model.state_dict(), strict=False)
    report["keys"] = len(keys.missing_keys) + len(keys.unexpected_keys)
    report["quantizers"] = len(quantizers(model))
    collect_stats(model, [(image,) for image, _ in data(2)])
    compute_amax(model, method="percentile", percentile=99.99)
    report["calibrated"] = accuracy(model)
    average = EMA(0.5, model.state_dict())
    train(model, 6, 3e-4, average)
    report["finetuned"] = accuracy(model)
    averaged = build(quantize=True)
    averaged.load_state_dict(average.state)
    report["averaged"] = accuracy(averaged)
    torch.save(average.state, args.out + "/average.pth")
    report["loss"] = both_losses(averaged, loss, args.out)
    if args.onnx:
        export(averaged, args.out + "/efficientnet.onnx")
    print(json.dumps(report))  # noqa: T201  # how the test reads the outcome


if __name__ == "__main__":
    main()
