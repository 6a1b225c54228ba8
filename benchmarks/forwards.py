"""A quantized forward over the same in float: evaluation and steps of training, few images or many.

``torchq`` is quantized for onnxruntime and calibrated; in eval mode and without gradients it
computes the codes of the runtime, and simulates in training. ``aten`` is a parametrization and a
hook around torch's own fake-quantize operators, as in qat_step. The float model is fused, and so
are the others. On one thread the clock is CPU time.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import torchq
from benchmarks.cifar import resnet20
from benchmarks.harness import Reporter, compare, parse, parser, timing
from benchmarks.qat_step import aten
from benchmarks.zoo_models import build

Case = tuple[str, int, int]

#: Network, images in a batch, and their size.
EVALUATION: tuple[Case, ...] = (
    ("ResNet-20", 1, 32),
    ("ResNet-20", 16, 32),
    ("MobileNetV2", 1, 224),
    ("MobileNetV2", 8, 224),
)
TRAINING: tuple[Case, ...] = (
    ("ResNet-20", 4, 32),
    ("ResNet-20", 32, 32),
    ("ResNet-20", 128, 32),
)


def made(case: Case) -> tuple[dict[str, nn.Module], Tensor]:
    """Return the fused network of a case in float and in its quantized forms, and a batch."""
    name, count, size = case
    torch.manual_seed(0)
    x = torch.randn(count, 3, size, size)
    if name == "ResNet-20":
        model: nn.Module = resnet20()
    else:
        model = build("torchvision/mobilenet_v2").model
    model.eval()
    torchq.fuse_(model, x[:1])
    quantized = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torchq.quantize_(quantized, target="onnxruntime", example=x[:1], progress=False)
        torchq.calibrate(quantized, [x], progress=False)
    models = {
        "float": model,
        "torchq": quantized,
        "aten": aten(copy.deepcopy(model), x),
    }
    return models, x


def forwards(case: Case) -> dict[str, Callable[[], object]]:
    """Return what is timed in evaluation."""
    models, x = made(case)

    def evaluate(model: nn.Module) -> Callable[[], object]:
        return torch.no_grad()(lambda: model(x))

    return {name: evaluate(model) for name, model in models.items()}


def steps(case: Case) -> dict[str, Callable[[], object]]:
    """Return what is timed in training."""
    models, x = made(case)
    labels = torch.randint(0, 10, (len(x),))

    def training(model: nn.Module) -> Callable[[], object]:
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), labels).backward()
            optimizer.step()

        return step

    return {name: training(model) for name, model in models.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Time every case."""
    options = parse(parser(__doc__), argv)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    settings = {"baseline": "float", "clock": clock, **timing(options)}
    kinds = (("evaluation", EVALUATION, forwards), ("training", TRAINING, steps))
    with Reporter("forwards", options.out) as report:
        for what, cases, candidates in kinds:
            for case in cases[:1] if options.quick else cases:
                for row in compare(candidates(case), **settings):
                    name, count, size = case
                    report.timing(row, what=what, network=name, batch=count, size=size)


if __name__ == "__main__":
    main()
