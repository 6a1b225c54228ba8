"""Do the rankings of torchq.analysis find the layers that hurt, and what do they cost?

Four parts, of which ``--parts`` chooses some:

ranking   ResNet-20, W4A4: the estimate from gradients against the real accuracy of each layer alone
pairs     the same network: accuracy without the two worst layers, and without other pairs
mixed     formats under a budget of 5 bits against 5 bits everywhere
cost      ResNet-18 at 224: the work of layer_errors and sensitivity, in float passes

Calibration and estimates never see the test images. Passes are counted in multiplications, and
timed beside it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from random import Random
from typing import Any

import torch
import torchvision
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import torchq
from benchmarks.cifar import Images, accuracy, arguments, logits, read_split, resnet20
from benchmarks.harness import Reporter, parse

__all__ = ["main"]

_PARTS = ("ranking", "pairs", "mixed", "cost")
_FORMATS = (3, 4, 5, 6, 8)


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line a figure."""
    parser = arguments(__doc__, "resnet20.pt", train=512)
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    parser.add_argument(
        "--pairs", type=int, default=30, help="other pairs of layers (default: %(default)s)"
    )
    options = parse(parser, argv)
    if options.quick:
        options.images, options.calibration, options.pairs = 50, 64, 2
    with Reporter("analysis", options.out, packages=["scipy"]) as report:
        if set(options.parts) & {"ranking", "pairs", "mixed"}:
            test = read_split(options.data, "test", options.images)
            data = read_split(options.data, "train", options.calibration)
            model = resnet20(options.data)
            torchq.fuse_(model, data.images[:4])
            batches = data.batches(64)
            report.value(case="fp32", accuracy=_rounded(accuracy(logits(model, test), test)))
            if "ranking" in options.parts:
                _ranking(report, model, batches, test)
            if "pairs" in options.parts:
                _pairs(report, model, batches, test, options.pairs)
            if "mixed" in options.parts:
                _mixed(report, model, batches, test)
        if "cost" in options.parts:
            _cost(report, quick=options.quick)


def _rounded(value: float) -> float:
    return round(value, 4)


def _quantized(
    model: nn.Module, config: torchq.QuantConfig, batches: list[Tensor], **options: Any
) -> nn.Module:
    quantized = copy.deepcopy(model)
    torchq.quantize_(quantized, config, **options)
    torchq.calibrate(quantized, batches, progress=False)
    return quantized


def _ranking(report: Reporter, model: nn.Module, batches: list[Tensor], test: Images) -> None:
    """Compare rankings on training images with the accuracy that each layer alone costs."""
    quantized = _quantized(model, torchq.recipes.integer(4, 4), batches)

    def right(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (output.argmax(1) == batch[1]).float().mean()

    pairs = list(zip(test.images.split(250), test.labels.split(250), strict=True))
    real = torchq.sensitivity(quantized, pairs, right, progress=False)
    drops = {row.name: (real.reference or 0.0) - row.value for row in real.rows}
    report.value(case="w4a4", accuracy=_rounded(real.baseline), float=_rounded(real.reference or 0))
    for metric in ("fisher", "kl", "sqnr"):
        found = torchq.sensitivity(quantized, batches, metric, progress=False)
        harm = [row.value if metric != "sqnr" else -row.value for row in found.rows]
        agreement = spearmanr(harm, [drops[row.name] for row in found.rows]).statistic
        report.value(
            case="ranking", metric=metric, spearman=round(float(agreement), 3), worst=found.worst(2)
        )
    for name, drop in sorted(drops.items(), key=lambda item: -item[1]):
        report.value(case="layer alone", layer=name, loss_of_accuracy=_rounded(drop))


def _pairs(
    report: Reporter, model: nn.Module, batches: list[Tensor], test: Images, count: int
) -> None:
    """Leave the two worst layers float, and other pairs, drawn with seed 0."""
    config = torchq.recipes.integer(4, 4)
    ranking = torchq.sensitivity(
        _quantized(model, config, batches), batches, "fisher", progress=False
    )
    worst = tuple(ranking.worst(2))
    names = sorted(row.name for row in ranking.rows)
    others = [pair for pair in combinations(names, 2) if set(pair) != set(worst)]
    for number, pair in enumerate([worst, *Random(0).sample(others, count)]):
        found = _quantized(model, config, batches, exclude=list(pair))
        share = accuracy(logits(found, test), test)
        choice = "another pair" if number else "the two worst"
        report.value(case="excluded", layers=pair, choice=choice, accuracy=_rounded(share))


def _mixed(report: Reporter, model: nn.Module, batches: list[Tensor], test: Images) -> None:
    """Choose formats at a mean of 5 bits, also with no more bit operations than W5A5 has."""

    def row(name: str, config: torchq.QuantConfig, **fields: object) -> None:
        found = _quantized(model, config, batches)
        report.value(case=name, accuracy=_rounded(accuracy(logits(found, test), test)), **fields)

    uniform = torchq.mixed_precision(
        model, batches, budget={"mean_bits": 5}, formats=[5], progress=False
    )
    row("uniform 5 bits", uniform, **uniform.costs)
    operations = uniform.costs["bit_operations"]
    for budget in ({"mean_bits": 5.0}, {"mean_bits": 5.0, "bit_operations": operations}):
        started = time.perf_counter()
        found = torchq.mixed_precision(
            model, batches, budget=budget, formats=_FORMATS, progress=False
        )
        seconds = round(time.perf_counter() - started, 1)
        bounded = " and ".join(budget)
        row(f"mixed, bounded {bounded}", found, **found.costs, damage=found.damage, seconds=seconds)
        damages = [point.damage for point in found.front]
        monotone = damages == sorted(damages, reverse=True)
        report.value(case="front", bounded=bounded, points=len(damages), monotone=monotone)


def _cost(report: Reporter, *, quick: bool) -> None:
    """Count passes on ResNet-18 with random weights and images, and time them."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None).eval()
    size, count = (64, 2) if quick else (224, 64)
    batches = list(torch.randn(count, 3, size, size).split(min(16, count)))
    torchq.fuse_(model, batches[0][:1])
    torchq.quantize_(model)
    torchq.calibrate(model, batches[:1], progress=False)
    layers = len(torchq.layer_errors(model, [batches[0][:1]], progress=False).rows)

    @torch.no_grad()
    def float_pass() -> None:
        with torchq.disabled(model):
            for batch in batches:
                model(batch)

    @torch.no_grad()
    def naive_ranking() -> None:
        known = [n for n, m in model.named_modules() if isinstance(m, torchq.nn.QuantModule)]
        for name in known:
            others = [f"{other}.*_quantizer" for other in known if other != name]
            with torchq.disabled(model, others):
                for batch in batches:
                    model(batch)

    base_work, base_seconds = _measured(float_pass)
    calls: dict[str, Callable[[], object]] = {
        "layer_errors": lambda: torchq.layer_errors(model, batches, progress=False),
        "sensitivity sqnr": lambda: torchq.sensitivity(model, batches, progress=False),
        "sensitivity fisher": lambda: torchq.sensitivity(model, batches, "fisher", progress=False),
        "naive ranking": naive_ranking,
    }
    for name, call in calls.items():
        work, seconds = _measured(call)
        passes, ratio = round(work / base_work, 2), round(seconds / base_seconds, 2)
        report.value(
            case="cost", call=name, layers=layers, passes_by_work=passes, passes_by_time=ratio
        )


def _measured(call: Callable[[], object]) -> tuple[int, float]:
    """Return the multiplications of a call, and its seconds in a second run."""
    with FlopCounterMode(display=False) as counter:
        call()
    started = time.perf_counter()
    call()
    return counter.get_total_flops(), time.perf_counter() - started


if __name__ == "__main__":
    main()
