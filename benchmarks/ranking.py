"""What part of ``calibrate`` does the ranking of operators beside layers take?

Each network is quantized twice for ``--target``: untouched, so that ``calibrate`` ranks what the
target added beside layers, and with rules that name every such operator, so that it does not. The
ratio is that of the processor times of ``calibrate``, alternating, on the same images. MobileNetV3
has random weights, ResNet-20 those of ``--data`` where the folder is given.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import torchq
from benchmarks.cifar import read_split, resnet20
from benchmarks.harness import Reporter, compare, parse, parser


def _resnet(folder: Path | None) -> nn.Module:
    return resnet20(folder).eval()


def _mobilenet(folder: Path | None) -> nn.Module:
    from torchvision.models import mobilenet_v3_small

    return mobilenet_v3_small(num_classes=10).eval()


#: Name -> a float network, and the sides of its images.
NETWORKS: dict[str, tuple[Callable[[Path | None], nn.Module], int]] = {
    "resnet20": (_resnet, 32),
    "mobilenet_v3_small": (_mobilenet, 96),
}


def _quantized(
    name: str, folder: Path | None, target: str, *, ranks: bool
) -> nn.Module:
    make, side = NETWORKS[name]
    torch.manual_seed(0)
    model = make(folder)
    example = torch.randn(2, 3, side, side)
    torchq.fuse_(model, example, progress=False)
    config = torchq.recipes.int8()
    if not ranks:
        planned = torchq.plan(model, target=target, example=example)
        optional = [d.name for d in planned.replaced if d.optional]
        rules = [torchq.Rule(n, input=torchq.QuantDescriptor()) for n in optional]
        config = config.with_rules(*rules)
    torchq.quantize_(
        model, config=config, target=target, example=example, progress=False
    )
    return model


def _calibrating(
    model: nn.Module, batches: list[Tensor]
) -> Callable[[], torchq.CalibrationReport]:
    return lambda: torchq.calibrate(model, batches, force=True, progress=False)


def _batches(
    options: argparse.Namespace, name: str, count: int, side: int
) -> list[Tensor]:
    """Return images of CIFAR-10 for the network that was trained on them, and noise for others."""
    if options.data is not None and name == "resnet20":
        images = read_split(options.data, "train", 512).images[:count]
    else:
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(count, 3, side, side, generator=generator)
    return list(images.split(options.batch))


def main(argv: Sequence[str] | None = None) -> None:
    described = parser(__doc__)
    described.add_argument("--data", type=Path, help="folder of the ResNet-20")
    described.add_argument("--networks", nargs="*", default=list(NETWORKS))
    described.add_argument("--target", default="onnxruntime")
    described.add_argument("--images", type=int, nargs="*", default=[8, 64])
    described.add_argument("--batch", type=int, default=32, help="images of a batch")
    options = parse(described, argv)
    warnings.simplefilter("ignore")
    with Reporter("ranking", options.out) as reporter:
        for name in options.networks:
            models = {
                ranks: _quantized(name, options.data, options.target, ranks=ranks)
                for ranks in (False, True)
            }
            for count in options.images:
                side = NETWORKS[name][1]
                batches = _batches(options, name, count, side)
                rows = compare(
                    {
                        "named": _calibrating(models[False], batches),
                        "ranked": _calibrating(models[True], batches),
                    },
                    baseline="named",
                    rounds=options.rounds,
                    warmup=options.warmup,
                    min_time=options.min_time,
                    clock=time.process_time,
                )
                left = _calibrating(models[True], batches)().operators.left_float
                case = {"network": name, "target": options.target, "left": len(left)}
                size = {"images": count, "batch": options.batch}
                for row in rows:
                    reporter.timing(row, **case, **size)


if __name__ == "__main__":
    main()
