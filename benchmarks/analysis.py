"""Do the rankings of torchq.analysis find the layers that hurt, and what do they cost?

Five parts, of which ``--parts`` chooses some:

ranking   ResNet-20, W4A4: the estimate from gradients against the real accuracy of each layer alone
pairs     the same network: accuracy without each pair of layers, beside the two worst ones
mixed     formats under a budget of 5 bits against 5 bits everywhere
cost      ResNet-18 at 224: the work of layer_errors and sensitivity, in float passes
healthy   ten networks of torchvision: what the doctor finds in them

Calibration and estimates never see the test images. Passes are counted in multiplications, and in
seconds of the processor, the median over rounds. The noise of a lead over another pair is that of
the images: the standard error of the paired difference.
"""

from __future__ import annotations

import copy
import statistics
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
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

_PARTS = ("ranking", "pairs", "mixed", "cost", "healthy")
_FORMATS = (3, 4, 5, 6, 8)
#: Networks of torchvision that the doctor examines, and the size of their images.
_NETWORKS = {
    "resnet18": 224,
    "resnext50_32x4d": 224,
    "mobilenet_v3_large": 224,
    "efficientnet_b0": 224,
    "shufflenet_v2_x1_0": 224,
    "densenet121": 224,
    "convnext_tiny": 224,
    "vit_b_16": 224,
    "swin_t": 224,
    "deeplabv3_mobilenet_v3_large": 224,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line a figure."""
    options = _options(argv)
    with Reporter("analysis", options.out, packages=["scipy"]) as report:
        if set(options.parts) & {"ranking", "pairs", "mixed"}:
            _accuracies(report, options)
        if "cost" in options.parts:
            _cost(report, options)
        if "healthy" in options.parts:
            _healthy(report, quick=options.quick)


def _options(argv: Sequence[str] | None) -> Namespace:
    parser = arguments(__doc__, "resnet20.pt", train=512)
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    parser.add_argument(
        "--pair-images", type=int, default=4000, help="for all pairs (default: %(default)s)"
    )
    parser.add_argument(
        "--finals", type=int, default=5, help="pairs that run on all images (default: %(default)s)"
    )
    parser.add_argument(
        "--cost-images", type=int, default=64, help="for the cost (default: %(default)s)"
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        default=("activation", "max"),
        help="methods of the weights' ranges for rankings and pairs (default: %(default)s)",
    )
    parser.add_argument("--resume", type=Path, help="folder for what is known of the pairs")
    options = parse(parser, argv)
    if options.quick:
        options.images, options.calibration, options.finals = 50, 64, 2
        options.pair_images = 20
    return options


def _accuracies(report: Reporter, options: Namespace) -> None:
    """Report what is measured with the accuracy of ResNet-20."""
    test = read_split(options.data, "test", options.images)
    data = read_split(options.data, "train", options.calibration)
    model = resnet20(options.data)
    torchq.fuse_(model, data.images[:4])
    batches = data.batches(64)
    report.value(case="fp32", accuracy=_rounded(accuracy(logits(model, test), test)))
    for method in options.weights if "ranking" in options.parts else ():
        _ranking(report, model, batches, test, method)
    for method in options.weights if "pairs" in options.parts else ():
        _pairs(report, model, batches, test, method, options)
    if "mixed" in options.parts:
        _mixed(report, model, batches, test)


def _rounded(value: float) -> float:
    return round(value, 4)


def _quantized(
    model: nn.Module, config: torchq.QuantConfig, batches: list[Tensor], **options: Any
) -> nn.Module:
    quantized = copy.deepcopy(model)
    torchq.quantize_(quantized, config, **options)
    torchq.calibrate(quantized, batches, progress=False)
    return quantized


def _right(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (output.argmax(1) == batch[1]).float().mean()


def _ranking(
    report: Reporter, model: nn.Module, batches: list[Tensor], test: Images, method: str
) -> None:
    """Compare rankings on training images with the accuracy that each layer alone costs.

    The two halves of the test images rank the layers too. Where they agree no better with each
    other than an estimate does with both, the images are too few to tell more.
    """
    config = torchq.recipes.integer(4, 4, weight_method=method)
    quantized = _quantized(model, config, batches)
    size = min(250, len(test.labels) // 2)
    parts = list(zip(test.images.split(size), test.labels.split(size), strict=True))
    reals = [
        torchq.sensitivity(quantized, half, _right, progress=False)
        for half in (parts[::2], parts[1::2])
    ]
    halves = [
        {row.name: (real.reference or 0.0) - row.value for row in real.rows} for real in reals
    ]
    drops = {name: statistics.mean(half[name] for half in halves) for name in halves[0]}
    accuracy_of_all = _rounded(statistics.mean(real.baseline for real in reals))
    report.value(case="w4a4", weights=method, accuracy=accuracy_of_all)
    report.value(case="halves of the images", weights=method, spearman=_agreement(*halves))
    for metric in ("fisher", "kl", "sqnr"):
        found = torchq.sensitivity(quantized, batches, metric, progress=False)
        sign = 1 if metric != "sqnr" else -1
        agreement = _agreement({row.name: sign * row.value for row in found.rows}, drops)
        report.value(
            case="ranking",
            weights=method,
            metric=metric,
            spearman=agreement,
            worst=found.worst(2),
        )
    for name, drop in sorted(drops.items(), key=lambda item: -item[1]):
        report.value(
            case="layer alone", weights=method, layer=name, loss_of_accuracy=_rounded(drop)
        )


def _agreement(a: dict[str, float], b: dict[str, float]) -> float:
    """Return Spearman's correlation of two rankings of the same layers."""
    return round(float(spearmanr(list(a.values()), [b[name] for name in a]).statistic), 3)


def _pairs(
    report: Reporter,
    model: nn.Module,
    batches: list[Tensor],
    test: Images,
    method: str,
    options: Namespace,
) -> None:
    """Leave every pair of layers float, on a part of the images; the best pairs then on all."""
    config = torchq.recipes.integer(4, 4, weight_method=method)
    quantized = _quantized(model, config, batches)
    ranking = torchq.sensitivity(quantized, batches, "fisher", progress=False)
    worst = frozenset(ranking.worst(2))
    part = Images(test.images[: options.pair_images], test.labels[: options.pair_images])
    kept = None if options.resume is None else options.resume / method
    shares = _without_each_pair(quantized, part, {row.name for row in ranking.rows}, kept)
    ordered = sorted(shares, key=lambda pair: -shares[pair])
    for pair in ordered:
        figure = _rounded(shares[pair])
        report.value(case="without a pair", weights=method, layers=sorted(pair), accuracy=figure)
    counts = {"pairs": len(shares), "images": len(part.labels)}
    place = sum(share > shares[worst] for share in shares.values()) + 1
    report.value(case="all pairs", weights=method, **counts, place_of_the_two_worst=place)
    right: dict[frozenset[str], Tensor] = {}
    for pair in dict.fromkeys([worst, *ordered[: options.finals]]):
        found = _quantized(model, config, batches, exclude=sorted(pair))
        right[pair] = (logits(found, test).argmax(1) == test.labels).double()
        lead = right[worst] - right[pair]
        report.value(
            case="best pairs on all images",
            weights=method,
            layers=sorted(pair),
            choice="the two worst" if pair == worst else "another pair",
            accuracy=_rounded(float(right[pair].mean())),
            lead_of_the_two_worst=_rounded(float(lead.mean())),
            standard_error=_rounded(float(lead.std()) / len(lead) ** 0.5),
        )


def _without_each_pair(
    quantized: nn.Module, test: Images, names: set[str], kept: Path | None
) -> dict[frozenset[str], float]:
    """Return the accuracy without each pair; runs start at the later layer of the pair."""
    batches = list(zip(test.images.split(250), test.labels.split(250), strict=True))
    called = [row.name for row in torchq.layer_errors(quantized, [test.images[:1]]).rows]
    waiting = [name for name in called if name in names]
    found: dict[frozenset[str], float] = {}
    while len(waiting) > 1:
        first = waiting.pop(0)
        scope = {name: f"{name}.*_quantizer" for name in waiting}
        with torchq.disabled(quantized, [f"{first}.*_quantizer"]):
            rows = torchq.sensitivity(
                quantized,
                batches,
                _right,
                scope=scope,
                mode="all_but",
                resume=None if kept is None else kept / f"without.{first}.json",
                progress=False,
            ).rows
        found |= {frozenset((first, row.name)): row.value for row in rows}
    return found


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


def _cost(report: Reporter, options: Namespace) -> None:
    """Count passes on ResNet-18 with random weights and images in four batches, and time them."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None).eval()
    size, count = (64, 4) if options.quick else (224, options.cost_images)
    batches = list(torch.randn(count, 3, size, size).split(-(-count // 4)))
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

    calls: dict[str, Callable[[], object]] = {
        "float pass": float_pass,
        "layer_errors": lambda: torchq.layer_errors(model, batches, progress=False),
        "sensitivity sqnr": lambda: torchq.sensitivity(model, batches, progress=False),
        "sensitivity fisher": lambda: torchq.sensitivity(model, batches, "fisher", progress=False),
        "naive ranking": naive_ranking,
    }
    _report_costs(report, calls, layers, options.rounds)


def _report_costs(
    report: Reporter, calls: dict[str, Callable[[], object]], layers: int, rounds: int
) -> None:
    """Count the multiplications of each call, and time all of them in turn; 0 rounds only count."""
    work = {name: _work(call) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.process_time()
            call()
            seconds[name].append(time.process_time() - started)
    for name in calls:
        ratios = [a / b for a, b in zip(seconds[name], seconds["float pass"], strict=True)]
        timed = {"passes_by_time": round(statistics.median(ratios), 2)} if ratios else {}
        passes = round(work[name] / work["float pass"], 2)
        report.value(
            case="cost", call=name, layers=layers, passes_by_work=passes, rounds=rounds, **timed
        )


def _work(call: Callable[[], object]) -> int:
    """Return the multiplications of a call."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def _healthy(report: Reporter, *, quick: bool) -> None:
    """Examine ten networks that nobody harmed, with random weights and images."""
    for name, size in list(_NETWORKS.items())[: 1 if quick else None]:
        torch.manual_seed(0)
        backbone = {"weights_backbone": None} if "deeplab" in name else {}
        model = torchvision.models.get_model(name, weights=None, **backbone)
        batches = [torch.randn(2, 3, size, size) for _ in range(2)]
        torchq.fuse_(model.eval(), batches[0], progress=False)
        torchq.quantize_(model, example=batches[0])
        torchq.calibrate(model, batches, progress=False)
        found = torchq.doctor(model, batches, progress=False)
        kinds = Counter(finding.kind for finding in found.findings)
        report.value(
            case="healthy",
            model=name,
            errors=len(found.errors),
            findings=dict(sorted(kinds.items())),
        )


if __name__ == "__main__":
    main()
