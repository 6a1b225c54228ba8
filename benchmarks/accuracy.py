"""Accuracy of what comes out untouched, beside other toolkits, on networks nobody tuned it on.

Six networks are fused, quantized, and calibrated on images or sentences that a draw chooses: a
ResNet-20 and a RepVGG, a MobileNet and a ViT that are trained here once, all on CIFAR-10, a
detector that is trained here on scenes (benchmarks/scenes.py), and a BERT that is trained here on
sentences of documentation (benchmarks/texts.py). ``ranges`` is calibration without its corrections,
``untouched`` the default, and ``gptq_`` comes after it. Of classifiers the table shows the points
of accuracy that are lost, the share of samples with the answer of the float network, and the
divergence from its probabilities in nats; of the detector precision and recall with slack, and
without. Seconds are CPU time, and ``ratio`` is that of calibration over that of its ranges alone.
Peers that are not installed are said to be. With ``--out`` a run goes on after the rows that the
file has already.

Example:
    python -m benchmarks.accuracy --data DIR --cache DIR --out benchmarks/results/accuracy.jsonl
"""

from __future__ import annotations

import argparse
import copy
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from benchmarks import figures, scenes, texts
from benchmarks.accuracy_peers import PACKAGES, PEERS
from benchmarks.cifar import (
    ViT,
    depthwise,
    read_split,
    repvgg_cifar,
    resnet20,
    some_batches,
)
from benchmarks.harness import Reporter, finished_rows, parse, parser
from benchmarks.training import Training, fit, fit_transformer
from torchq.analysis import Detections
from torchq.recipes import int8, integer, w4a4

Run = Callable[[Tensor], Tensor]

#: Images to calibrate are drawn from so many, and read in batches of this size.
_POOL, _BATCH = 2048, 32
#: Training steps of the networks that are trained here, some minutes each.
_STEPS = {"mobilenet": 1500, "detector": 900, "transformer": 2500, "bert": 1500}


@dataclass(frozen=True)
class Network:
    """A float network, images or texts that it is measured on, and those to calibrate from."""

    model: nn.Module
    test: Tensor
    pool: Tensor
    #: From the outputs for all test images, of the float network and another, to figures.
    compare: Callable[[Sequence[Tensor], Sequence[Tensor]], dict[str, float]]

    def outputs(self, run: Run) -> list[Tensor]:
        """Return the outputs for all test images."""
        with torch.no_grad():
            return [run(x) for x in self.test.split(50)]

    @cached_property
    def expected(self) -> list[Tensor]:
        """The outputs of the float network."""
        return self.outputs(self.model)

    def figures(self, run: Run) -> dict[str, float]:
        """Return how far another network computes what the float one does."""
        return self.compare(self.expected, self.outputs(run))


def classifier(name: str, options: argparse.Namespace) -> Network:
    """Return "resnet20", "repvgg", "mobilenet" or "transformer", networks for CIFAR-10."""
    data = options.data
    ready = {"resnet20": resnet20, "repvgg": repvgg_cifar}
    model = ready[name](data) if name in ready else _trained(name, options)
    test = read_split(data, "test", options.images)
    pool = read_split(data, "train", 64 if options.quick else _POOL)

    torchq.fuse_(model, test.images[:4], progress=False)
    return Network(model, test.images, pool.images, _answers_of(test.labels))


def _answers_of(
    labels: Tensor,
) -> Callable[[Sequence[Tensor], Sequence[Tensor]], dict[str, float]]:
    """Return what compares the logits of two classifiers for samples with these labels."""

    def figures(
        expected: Sequence[Tensor], found: Sequence[Tensor]
    ) -> dict[str, float]:
        y = torch.cat(list(expected))
        q = torch.cat(list(found))
        right, still_right = (
            x.argmax(1).eq(labels).float().mean().item() for x in (y, q)
        )
        log_chances = y.log_softmax(1)
        divergence = (
            ((log_chances - q.log_softmax(1)) * log_chances.exp()).sum(1).mean()
        )
        return {
            "float_accuracy": round(100 * right, 2),
            "drop": round(100 * (right - still_right), 2),
            "same": round(100 * float((y.argmax(1) == q.argmax(1)).float().mean()), 2),
            "kl": round(float(divergence), 5),
        }

    return figures


def _trained(name: str, options: argparse.Namespace) -> nn.Module:
    build = {"mobilenet": depthwise, "transformer": ViT}[name]
    images = 64 if options.quick else 30_000

    def train(model: nn.Module, steps: int) -> None:
        data = read_split(options.data, "train", images)
        if name == "transformer":
            fit_transformer(model, len(data.labels), data.augmented, steps)
        else:
            fit(model, data, Training(steps, 0.1, weight_decay=5e-4))

    return _cached(name, build, train, options)


def _detector(name: str, options: argparse.Namespace) -> Network:
    model = _cached(name, scenes.Detector, scenes.fit_detector, options)
    metric = Detections()

    def figures(
        expected: Sequence[Tensor], found: Sequence[Tensor]
    ) -> dict[str, float]:
        rows = list(map(metric.sums, found, expected))
        result = metric.of_sums([sum(column) for column in zip(*rows, strict=True)])
        names = ("precision", "recall", "precision_with_slack", "recall_with_slack")
        values = {key: round(getattr(result, key), 4) for key in names}
        return {
            **values,
            "scores": round(result.score_change, 4),
            "count": result.count,
        }

    test = scenes.images(options.images // 5, 1)
    torchq.fuse_(model, test[:4], progress=False)
    return Network(model, test, scenes.images(64 if options.quick else 768, 2), figures)


def _reader(name: str, options: argparse.Namespace) -> Network:
    path = options.cache / "texts.pt"
    if not path.exists():
        # The numbers of words stay what they are, whatever is installed later.
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save([part.parts() for part in texts.read_texts()], path)
    train, test = (texts.Texts(*part) for part in torch.load(path, weights_only=True))
    model = _cached(
        name,
        texts.Bert,
        lambda model, steps: fit_transformer(
            model, len(train.labels), train.batch, steps
        ),
        options,
    )
    count = options.images
    figures = _answers_of(test.labels[:count])
    pool = train.words[: 64 if options.quick else _POOL]
    return Network(model, test.words[:count], pool, figures)


def _cached(
    name: str,
    build: Callable[[], Any],
    train: Callable[[Any, int], None],
    options: argparse.Namespace,
) -> nn.Module:
    """Return a network with the weights that an earlier run trained, or train it now."""
    path = options.cache / f"{name}.pt"
    if not path.exists():
        torch.manual_seed(0)
        trained = build().to(memory_format=torch.channels_last)
        train(trained, 1 if options.quick else _STEPS[name])
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(trained.state_dict(), path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)
    model: nn.Module = build()
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()


NETWORKS: dict[str, Callable[[str, argparse.Namespace], Network]] = {
    "resnet20": classifier,
    "repvgg": classifier,
    "mobilenet": classifier,
    "detector": _detector,
    "transformer": classifier,
    "bert": _reader,
}

#: Recipe -> its configuration, and the runtime it is for.
RECIPES: dict[str, tuple[Callable[[], torchq.QuantConfig], str | None]] = {
    "int8, no target": (int8, None),
    "int8, signed codes": (lambda: integer(8, 8, unsigned=False), None),
    "int8, onnxruntime": (int8, "onnxruntime"),
    "int8, openvino": (int8, "openvino"),
    "int8, executorch": (int8, "executorch"),
    "int8, torch": (int8, "torch"),
    "w4a4": (w4a4, None),
    "w4a8": (lambda: integer(4, 8), None),
    "w4a8, 8-bit ends": (lambda: integer(4, 8, first_last=8), None),
}
METHODS = ("ranges", "untouched", "gptq_")
#: What is measured of a recipe, where that is not everything on all networks.
_METHODS_OF = {
    "int8, signed codes": ("ranges",),
    "int8, no target": ("untouched",),
    "int8, executorch": ("ranges", "untouched"),
    "int8, torch": ("ranges", "untouched"),
    "int8, onnxruntime": ("ranges", "untouched"),
    "int8, openvino": ("ranges", "untouched"),
    "w4a8": ("ranges", "untouched"),
}
_ONLY_MOBILENET = ("w4a8", "w4a8, 8-bit ends")
#: Networks of which 8 bits are measured alone, and targets that the others have no rows of.
_TRANSFORMERS = ("transformer", "bert")
_ONLY_TRANSFORMERS = ("int8, executorch", "int8, torch")
_KEY = ("network", "recipe", "method", "draw")


def _methods(name: str, recipe: str, options: argparse.Namespace) -> list[str]:
    is_transformer = name in _TRANSFORMERS
    if is_transformer and not recipe.startswith("int8"):
        return []
    if recipe in _ONLY_TRANSFORMERS and not is_transformer:
        return []
    if recipe in _ONLY_MOBILENET and name != "mobilenet":
        return []
    return [m for m in options.methods if m in _METHODS_OF.get(recipe, METHODS)]


def _torchq_rows(
    network: Network, recipe: str, methods: Sequence[str], batches: list[Tensor]
) -> Iterator[tuple[str, dict[str, float], Run]]:
    """Yield each method with its seconds and the model; all three share what they can."""
    build, target = RECIPES[recipe]
    plain = copy.deepcopy(network.model)
    torchq.quantize_(
        plain, build(), target=target, example=batches[0][:1], progress=False
    )
    model = copy.deepcopy(plain)
    torchq.calibrate(copy.deepcopy(plain), batches[:1], progress=False)  # warms up
    ranges = _seconds(
        lambda: torchq.calibrate(plain, batches, correct=False, progress=False)
    )
    if "ranges" in methods:
        yield "ranges", {"seconds": ranges}, plain
    if set(methods) - {"ranges"}:
        whole = _seconds(lambda: torchq.calibrate(model, batches, progress=False))
        yield "untouched", {"seconds": whole, "ratio": round(whole / ranges, 2)}, model
    if "gptq_" in methods:
        seconds = _seconds(lambda: torchq.ptq.gptq_(model, batches, progress=False))
        yield "gptq_", {"seconds": round(whole + seconds, 2)}, model


def _seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return round(time.process_time() - start, 2)


def _peer_row(
    network: Network, peer: str, batches: list[Tensor]
) -> tuple[dict[str, Any], Run | None]:
    """Return what is known of a peer, and its model; None for one that is not installed."""
    start = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = PEERS[peer](copy.deepcopy(network.model), batches)
            with torch.no_grad():
                run(network.test[:2])
    except ImportError:
        return {"missing": "not installed"}, None
    except Exception as error:  # the peer's own limit is a row of the table
        return {
            "missing": f"failed: {type(error).__name__}",
            "error": str(error)[:200],
        }, None
    return {"seconds": round(time.process_time() - start, 2)}, run


def _report_draw(
    name: str,
    network: Network,
    draw: int,
    options: argparse.Namespace,
    report: Reporter,
) -> None:
    """Report the rows of a network and a draw that the file does not have yet."""
    done = finished_rows(options.out, *_KEY)
    batches = some_batches(network.pool, options.calibration, draw, _BATCH)

    def value(
        recipe: str, method: str, fields: dict[str, Any], run: Run | None
    ) -> None:
        row = dict(zip(_KEY, (name, recipe, method, draw), strict=True))
        if tuple(row.values()) not in done:
            sizes = {"images": len(network.test), "calibration": options.calibration}
            measured = {} if run is None else network.figures(run)
            report.value(**row, **sizes, **fields, **measured)

    for recipe in options.recipes:
        methods = _methods(name, recipe, options)
        if not {(name, recipe, method, draw) for method in methods} <= done:
            for method, fields, model in _torchq_rows(
                network, recipe, methods, batches
            ):
                value(recipe, method, fields, model)
    for peer in options.peers:
        if (name, "peers", peer, draw) not in done:
            value("peers", peer, *_peer_row(network, peer, batches))


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line for each row, and the table of all in the end."""
    options = parser(__doc__)
    options.add_argument(
        "--data", type=Path, required=True, help="folder with tars and weights"
    )
    options.add_argument(
        "--cache", type=Path, default=Path(), help="folder of trained weights"
    )
    options.add_argument(
        "--images", type=int, default=2500, help="test images; scenes: a fifth"
    )
    options.add_argument(
        "--calibration", type=int, default=256, help="images to calibrate"
    )
    options.add_argument("--draws", type=int, nargs="+", default=[0, 1, 2])
    for names, choices in (
        ("networks", NETWORKS),
        ("recipes", RECIPES),
        ("methods", METHODS),
        ("peers", PEERS),
    ):
        options.add_argument(
            f"--{names}", nargs="*", default=list(choices), choices=[[], *choices]
        )
    chosen = parse(options, argv)
    if chosen.quick:
        chosen.images = 50
        chosen.calibration = 64
        chosen.draws = chosen.draws[:1]
    with Reporter("accuracy", chosen.out, packages=PACKAGES) as report:
        networks = {name: NETWORKS[name](name, chosen) for name in chosen.networks}
        for draw in chosen.draws:  # a run that is cut short has the same draws of all
            for name, network in networks.items():
                _report_draw(name, network, draw, chosen, report)
    if chosen.out is not None:
        print(figures.accuracy(figures.read_file(chosen.out)))


if __name__ == "__main__":
    main()
