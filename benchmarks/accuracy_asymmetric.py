"""Accuracy of networks with GELU and SiLU under symmetric and asymmetric activation ranges.

A small convolutional network is trained on CIFAR-10 with each activation function and seed, and
then quantized with several widths of activations; weights have 8 bits per output channel. Nothing
is trained after quantizing. Read each row against the FP32 row of the same network. Finished rows
of an earlier run are not repeated.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence

import torch
from torch import nn

import torchq
from benchmarks.cifar import accuracy, arguments, logits, read_both, train
from benchmarks.harness import Reporter, parse
from torchq import QuantConfig
from torchq.recipes import integer

__all__ = ["main"]

_FUNCTIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "silu": nn.SiLU, "relu": nn.ReLU}
_WIDTHS = (8, 6, 5, 4)
_METHODS = ("max", "mse")


def network(function: type[nn.Module], seed: int) -> nn.Sequential:
    """Return an untrained network of four convolutions and a linear layer."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((3, 16, 1), (16, 32, 2), (32, 64, 2), (64, 64, 1)):
        convolution = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        layers += [convolution, nn.BatchNorm2d(outputs), function()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def configs(bits: int) -> dict[str, QuantConfig]:
    """Return the recipes that are compared at a width of activations."""
    return {
        "symmetric": integer(8, bits, unsigned=False),
        "unsigned if never negative": integer(8, bits, unsigned="auto"),
        "asymmetric": integer(8, bits, symmetric=False),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line a configuration."""
    options = arguments(__doc__, "no weights", train=8000)
    options.add_argument("--seeds", type=int, default=1, help="networks for each function")
    chosen = parse(options, argv)
    test, data, calibration = read_both(chosen)
    done: set[str] = set()
    if chosen.out is not None and chosen.out.exists():
        done = {_key(json.loads(line)) for line in chosen.out.read_text().splitlines()}
    with Reporter("accuracy_asymmetric", chosen.out) as report:
        for name, function in _FUNCTIONS.items():
            for seed in range(chosen.seeds):
                if all(key in done for key in _keys(name, seed)):
                    continue
                model = train(network(function, seed), data, max(1, chosen.steps), lr=0.1)
                torchq.fuse_(model, test.images[:4])
                found = {"function": name, "seed": seed, "case": "fp32"}
                report.value(**found, accuracy=round(accuracy(logits(model, test), test), 4))
                for bits in _WIDTHS:
                    for method in _METHODS:
                        for case, config in configs(bits).items():
                            quantized = copy.deepcopy(model)
                            torchq.quantize_(quantized, config)
                            torchq.calibrate(quantized, calibration, method=method, progress=False)
                            report.value(
                                function=name,
                                seed=seed,
                                case=case,
                                input_bits=bits,
                                method=method,
                                accuracy=round(accuracy(logits(quantized, test), test), 4),
                            )


def _keys(function: str, seed: int) -> list[str]:
    """Return the keys of all rows of a network."""
    rows = [
        {"input_bits": bits, "method": method, "case": case}
        for bits in _WIDTHS
        for method in _METHODS
        for case in configs(bits)
    ]
    return [_key({"function": function, "seed": seed, **row}) for row in rows]


def _key(row: dict[str, object]) -> str:
    """Return what tells a row from the others."""
    return " ".join(str(row.get(k)) for k in ("function", "seed", "case", "input_bits", "method"))


if __name__ == "__main__":
    main()
