"""Train a network in float, then quantized, with AMP and EMA, and load its checkpoint.

python examples/qat_training.py --epochs 6
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import torchq


def network() -> nn.Module:
    def block(inputs: int, outputs: int) -> nn.Module:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())

    layers = block(1, 16), nn.MaxPool2d(2), block(16, 32)
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    )


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> str:
    return f"{(model.eval()(images).argmax(1) == labels).float().mean().item():.1%}"


def train(model: nn.Module, ema: nn.Module | None, optimizer, images, labels) -> None:
    """Train for an epoch under autocast; ``ema`` follows the weights, and the ranges with them."""
    for rows in torch.randperm(1400).split(64):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(
                model.train()(images[rows]), labels[rows]
            )
        loss.backward()
        optimizer.step()
        for name, value in (ema.state_dict() if ema else {}).items():
            if value.is_floating_point():
                value.lerp_(model.state_dict()[name], 0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5, help="in float, and quantized")
    parser.add_argument("--checkpoint", type=Path, default=Path("qat.pt"))
    options = parser.parse_args()

    torch.manual_seed(0)
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    model, test = network(), (images[1400:], labels[1400:])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(options.epochs):
        train(model, None, optimizer, images, labels)
    print(f"float: {accuracy(model, *test)}")

    # Training sees what the runtime of the file rounds.
    runtime = {"target": "onnxruntime", "example": images[:8]}
    torchq.quantize_(model, torchq.recipes.w4a4(), **runtime)
    torchq.calibrate(model, images[:256].split(64), progress=False)
    ema = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(
        torchq.qat.param_groups(model, lr=1e-3, weight_decay=1e-3)
    )
    for epoch in range(options.epochs):
        train(model, ema, optimizer, images, labels)
        torch.save(
            {"model": model.state_dict(), "ema": ema.state_dict()}, options.checkpoint
        )
        print(f"epoch {epoch}: {accuracy(ema, *test)} with EMA")

    again = network()
    torchq.quantize_(again, torchq.recipes.w4a4(), **runtime)
    # Strict: the ranges are in it.
    again.load_state_dict(torch.load(options.checkpoint, weights_only=True)["ema"])
    torchq.fuse_(again.eval(), images[:8])
    print(f"loaded and folded: {accuracy(again, *test)}")


if __name__ == "__main__":
    main()
