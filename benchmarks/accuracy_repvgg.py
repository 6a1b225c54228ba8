"""Accuracy of a trained RepVGG: where branches and their kernel are quantized makes the difference.

Rows: FP32; PTQ of the branches one by one (quantized before fusing); PTQ of the fused network; QAT of the fused network, which has no
BatchNorm any more; QAT of the branches under the equivalent kernel, fused afterwards. Each with one range per output channel and with
one per tensor, at 8 and at 4 bits. Test images are kept out of calibration and training.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from benchmarks.cifar import Images, accuracy, logits, read_split
from benchmarks.harness import Reporter, parse, parser
from benchmarks.repvgg import repvgg_cifar
from torchq.fuse import diagnose_ranges
from torchq.workflow import calibrate_weights

__all__ = ["main"]


def _recipes() -> dict[str, torchq.QuantConfig]:
    four = torchq.QuantDescriptor(4)
    convs = torchq.Rule("type:torch.nn.modules.conv.Conv2d", input=torchq.QuantDescriptor(), weight=four.replace(axis=0))
    per_tensor = torchq.Rule("type:torch.nn.modules.conv.Conv2d", input=torchq.QuantDescriptor(), weight=four)
    return {
        "int8 per channel": torchq.recipes.int8(),
        "int8 per tensor": torchq.recipes.int8_per_tensor(),
        "w4a8 per channel": torchq.recipes.int8().with_rules(convs),
        "w4a8 per tensor": torchq.recipes.int8().with_rules(per_tensor),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line a configuration."""
    options = parser(__doc__)
    options.add_argument("--data", type=Path, required=True, help="folder with repvgg.pt and the tars of images")
    options.add_argument("--images", type=int, default=2000, help="test images (default: %(default)s)")
    options.add_argument("--calibration", type=int, default=512, help="training images to calibrate on (default: %(default)s)")
    options.add_argument("--train", type=int, default=10000, help="training images for QAT (default: %(default)s)")
    options.add_argument("--steps", type=int, default=200, help="QAT steps of 64 images; 0 leaves QAT out (default: %(default)s)")
    options.add_argument("--qat", nargs="*", default=["int8 per tensor", "w4a8 per channel"], choices=list(_recipes()), help="recipes")
    options.add_argument("--lr", type=float, default=0.003, help="learning rate of QAT with branches, cosine to 0 (default: %(default)s)")
    options.add_argument(
        "--lr-fused", type=float, default=0.001, help="and of the fused network, where 0.01 diverges (default: %(default)s)"
    )
    chosen = parse(options, argv)
    test = read_split(chosen.data, "test", 50 if chosen.quick else chosen.images)
    data = read_split(chosen.data, "train", 64 if chosen.quick else max(chosen.calibration, chosen.train))
    chosen.steps = min(chosen.steps, 1) if chosen.quick else chosen.steps
    with Reporter("accuracy_repvgg", chosen.out) as report:
        _run(report, repvgg_cifar(chosen.data), test, data, chosen)


def _run(report: Reporter, model: nn.Module, test: Images, data: Images, options: argparse.Namespace) -> None:
    calibration = data.batches(64)[: max(1, options.calibration // 64)]
    fused = copy.deepcopy(model)
    done = torchq.fuse_(fused, test.images[:4])
    text = diagnose_ranges(model, calibration[0]).compare(diagnose_ranges(fused, calibration[0]))
    report.value(case="fp32", accuracy=_score(model, test))
    report.value(case="fp32 fused", accuracy=_score(fused, test), error=done.error, ranges=text)
    for name, config in _recipes().items():
        cases = {"PTQ before fusing": _ptq(model, config, calibration), "PTQ after fusing": _ptq(fused, config, calibration)}
        for case, quantized in cases.items():
            report.value(case=case, recipe=name, accuracy=_score(quantized, test))
        if options.steps and name in options.qat:
            trained = _train(cases["PTQ after fusing"], data, options, options.lr_fused)
            report.value(case="QAT after fusing", recipe=name, steps=options.steps, accuracy=_score(trained, test))
            _equivalent(report, name, _branches(model, config, calibration), test, data, options)


def _equivalent(report: Reporter, name: str, model: nn.Module, test: Images, data: Images, options: argparse.Namespace) -> None:
    """Train the branches, the last half with frozen BatchNorm and fresh weight ranges, then fuse."""
    trained = _train(model, data, options, options.lr, freeze_at=options.steps // 2)
    before = logits(trained, test)
    done = torchq.fuse_(trained, test.images[:4])
    same = torch.equal(before, logits(trained, test))
    report.value(
        case="QAT of the equivalent kernel",
        recipe=name,
        steps=options.steps,
        accuracy=_score(trained, test),
        fused=len(done.fused),
        same_bits=same,
    )


def _score(model: nn.Module, test: Images) -> float:
    return round(accuracy(logits(model, test), test), 4)


def _ptq(model: nn.Module, config: torchq.QuantConfig, calibration: list[Tensor]) -> nn.Module:
    return _calibrated(model, config, calibration, torchq.quantize_)


def _branches(model: nn.Module, config: torchq.QuantConfig, calibration: list[Tensor]) -> nn.Module:
    return _calibrated(model, config, calibration, torchq.qat.quantize_branches_)


def _calibrated(model: nn.Module, config: torchq.QuantConfig, calibration: list[Tensor], quantize: Callable[..., object]) -> nn.Module:
    quantized = copy.deepcopy(model)
    quantize(quantized, config)
    torchq.calibrate(quantized, calibration, method="entropy", progress=False)
    return quantized


def _train(model: nn.Module, data: Images, options: argparse.Namespace, lr: float, freeze_at: int | None = None) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(torchq.qat.param_groups(model, lr=lr, weight_decay=1e-4), momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    model.train()
    for step in range(options.steps):
        if step == freeze_at:
            torchq.qat.freeze_bn_(model)
            calibrate_weights(model)  # the kernels have moved with the statistics
        images, labels = data.augmented(torch.randint(len(data.labels), (64,), generator=generator), generator)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


if __name__ == "__main__":
    main()
