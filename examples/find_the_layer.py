"""Find the layer that costs accuracy in few bits, and leave it in more bits.

python examples/find_the_layer.py --bits 3
"""

from __future__ import annotations

import argparse
import copy

import torch
from sklearn.datasets import load_digits
from torch import nn

import torchq


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in [(1, 16), (16, 16), (16, 32), (32, 32)]:
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
    head = nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    return nn.Sequential(*layers, *head)


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> str:
    return f"{(model.eval()(images).argmax(1) == labels).float().mean().item():.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=int, default=3, help="of weights and inputs")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    torch.manual_seed(0)
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    test = images[1400:], labels[1400:]
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(options.epochs):
        for rows in torch.randperm(1400).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    print(f"float: {accuracy(model, *test)}")

    batches = images[:256].split(64)
    few = torchq.recipes.integer(options.bits, options.bits)
    quantized = copy.deepcopy(model)
    torchq.quantize_(quantized, few)
    torchq.calibrate(quantized, batches, progress=False)
    print(f"{options.bits} bits: {accuracy(quantized, *test)}")

    ranking = torchq.sensitivity(quantized, batches, metric="fisher", progress=False)
    print(ranking)
    worst = ranking.worst(2)
    eight = torchq.recipes.int8().rules
    rules = [
        torchq.Rule(name, input=eight[0].input, weight=eight[0].weight)
        for name in worst
    ]
    torchq.quantize_(model, few.with_rules(*rules))
    torchq.calibrate(model, batches, progress=False)
    print(
        f"{options.bits} bits, and 8 in {' and '.join(worst)}: {accuracy(model, *test)}"
    )


if __name__ == "__main__":
    main()
