"""Train a small VGG, calibrate it, fine-tune it, and trace it as Torch-TensorRT's users do.

The order of calls is that of a script that fine-tunes a VGG16 and hands a TorchScript file over. It
knows nothing of torchq. It prints one JSON line.
"""

import json
from collections import OrderedDict

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

WIDTHS = [8, "pool", 16, 16, "pool"]


class VGG(nn.Module):
    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.features = self._features()
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.classifier = nn.Sequential(
            nn.Linear(16, 16), nn.ReLU(True), nn.Dropout(0.2), nn.Linear(16, classes)
        )

    def _features(self) -> nn.Sequential:
        layers: list[nn.Module] = []
        channels = 3
        for width in WIDTHS:
            if width == "pool":
                layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
                continue
            layers.append(nn.Conv2d(channels, width, kernel_size=3, padding=1))
            layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        return nn.Sequential(*layers)

    def forward(self, x):
        x = torch.flatten(self.avgpool(self.features(x)), 1)
        return F.log_softmax(self.classifier(x), dim=1)


def data(batches: int):
    generator = torch.Generator().manual_seed(4)
    for _ in range(batches):
        target = torch.randint(4, (16,), generator=generator)
        image = torch.randn(16, 3, 8, 8, generator=generator) * 0.5
        image[:, 0] += (target % 2)[:, None, None] * 2.0 - 1.0
        image[:, 1] += (target // 2)[:, None, None] * 2.0 - 1.0
        yield image, target


def train(model, optimizer, steps: int) -> None:
    model.train()
    for image, target in data(steps):
        optimizer.zero_grad()
        F.nll_loss(model(image), target).backward()
        optimizer.step()


def accuracy(model) -> float:
    model.eval()
    with torch.no_grad():
        hits = [(model(x).argmax(1) == y).float().mean().item() for x, y in data(4)]
    return sum(hits) / len(hits)


def loss(model) -> float:
    return mean_loss(model, data(4), F.nll_loss)


def save(model, optimizer, path: str) -> None:
    """As a model of several devices is saved: its keys begin with ``module.``."""
    parallel = nn.DataParallel(model)
    content = {"epoch": 1, "model_state_dict": parallel.state_dict()}
    content["opt_state_dict"] = optimizer.state_dict()
    torch.save(content, path)


def resumed(path: str):
    checkpoint = torch.load(path, weights_only=True)
    weights = OrderedDict()
    for key, value in checkpoint["model_state_dict"].items():
        weights[key[7:]] = value
    model = VGG()
    model.load_state_dict(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer.load_state_dict(checkpoint["opt_state_dict"])
    for group in optimizer.param_groups:
        group["lr"] *= 0.1
    return model, optimizer


def traced(model, image):
    quant_nn.TensorQuantizer.use_fb_fake_quant = True
    with torch.no_grad():
        script = torch.jit.trace(model.eval(), image)
    quant_nn.TensorQuantizer.use_fb_fake_quant = False
    return script


def main() -> None:
    args = arguments()
    torch.manual_seed(7)
    quant_modules.initialize()
    quant_nn.QuantConv2d.set_default_quant_desc_input(
        QuantDescriptor(calib_method="histogram")
    )
    model = VGG()
    for quantizer in quantizers(model):
        quantizer.disable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train(model, optimizer, 60)
    report = {"float": accuracy(model)}
    for quantizer in quantizers(model):
        quantizer.enable()
    collect_stats(model, [(image,) for image, _ in data(2)])
    compute_amax(model, method="percentile", percentile=99.9)
    report["calibrated"] = accuracy(model)
    save(model, optimizer, args.out + "/calibrated.pth")
    model, optimizer = resumed(args.out + "/calibrated.pth")
    report["resumed"] = accuracy(model)
    train(model, optimizer, 5)
    report["finetuned"] = accuracy(model)
    report["loss"] = both_losses(model, loss, args.out)
    quant_modules.deactivate()

    image, _ = next(data(1))
    # What a writer of TensorBoard's graphs does.
    graph = torch.jit.trace(model, image, strict=False).inlined_graph
    report["python"] = sum(node.kind() == "prim::PythonOp" for node in graph.nodes())
    traced(model, image).save(args.out + "/vgg.ts")
    script = torch.jit.load(args.out + "/vgg.ts")
    kinds = [node.kind() for node in script.inlined_graph.nodes()]
    for kind in ("per_tensor", "per_channel"):
        report[kind] = kinds.count(f"aten::fake_quantize_{kind}_affine")
    with torch.no_grad():
        report["off"] = (script(image) - model(image)).abs().max().item()
    print(json.dumps(report))  # noqa: T201  # how the test reads the outcome


if __name__ == "__main__":
    main()
