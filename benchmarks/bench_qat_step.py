"""One step of quantization-aware training over the same step in float: time and peak memory.

A step is forward, cross-entropy, backward and SGD. Models: the CIFAR ResNet-20 (batch 64, 32x32), torchvision's ResNet-18 (batch 8,
224x224) and a ViT-Tiny (batch 8, 224x224, patches of 16). Weights are INT8 per channel and inputs INT8 per tensor, with fixed ranges
where the tool has them. NVIDIA ModelOpt and Brevitas take part where they are installed: name their interpreter with --python.

``fp32`` is 1; compiled candidates (--compile, needs a C++ compiler) refer to ``fp32 compiled``. On one thread the clock is CPU time.
Memory is measured in a fresh process for each candidate, after two steps, with an allocator that gives freed blocks back.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module

import torch
import torchvision
from torch import Tensor, nn

import torchq
from benchmarks.cifar import resnet20
from benchmarks.harness import Reporter, compare, parse, parser, timing
from benchmarks.memory import peak_bytes

Step = Callable[[], object]


def vit_tiny() -> nn.Module:
    return torchvision.models.VisionTransformer(image_size=224, patch_size=16, num_layers=12, num_heads=3, hidden_dim=192, mlp_dim=768)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet-20": (resnet20, (64, 3, 32, 32)),
    "ResNet-18": (lambda: torchvision.models.resnet18(weights=None), (8, 3, 224, 224)),
    "ViT-Tiny": (vit_tiny, (8, 3, 224, 224)),
}


def ours(model: nn.Module, x: Tensor) -> nn.Module:
    torchq.quantize_(model)
    torchq.calibrate(model, [x], progress=False)
    return model


def modelopt(model: nn.Module, x: Tensor) -> nn.Module:
    tool = import_module("modelopt.torch.quantization")
    return tool.quantize(model, tool.INT8_DEFAULT_CFG, forward_loop=lambda m: m(x))


def brevitas(model: nn.Module, x: Tensor) -> nn.Module:
    return import_module("brevitas.graph.quantize").layerwise_quantize(model)


TOOLS: dict[str, Callable[[nn.Module, Tensor], nn.Module]] = {
    "fp32": lambda model, x: model,
    "torchq": ours,
    "modelopt": modelopt,
    "brevitas": brevitas,
}


def make_step(name: str, tool: str, compiled: bool = False) -> Step:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    x = torch.randn(shape)
    model = build().train()
    target = torch.randint(0, model(x).shape[1], (len(x),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = TOOLS[tool](model, x).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    run = torch.compile(model) if compiled else model

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(run(x), target).backward()
        optimizer.step()

    step()
    return step


def steps(name: str, compiled: bool) -> dict[str, Step]:
    found: dict[str, Step] = {}
    for tool in TOOLS:
        try:
            found[tool + " compiled" * compiled] = make_step(name, tool, compiled)
        except ImportError as error:
            print(f"left out: {tool} ({error})", file=sys.stderr)
        except Exception as error:  # a rival that cannot do a model is no reason to stop
            if tool in ("fp32", "torchq"):
                raise
            print(f"left out of {name}{' compiled' * compiled}: {tool} ({type(error).__name__})", file=sys.stderr)
    return found


def peak_in_child(name: str, tool: str) -> int | None:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    command = [sys.executable, "-m", "benchmarks.bench_qat_step", "--peak-of", name, tool]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def measure(options: argparse.Namespace, name: str, report: Reporter) -> None:
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    eager = steps(name, compiled=False)
    for row in compare(eager, baseline="fp32", clock=clock, **timing(options)):
        report.timing(row, model=name, mode="eager", clock=clock.__name__)
    if options.compile:
        for row in compare(steps(name, compiled=True), baseline="fp32 compiled", clock=clock, **timing(options)):
            report.timing(row, model=name, mode="compiled", clock=clock.__name__)
    float_peak = peak_in_child(name, "fp32")
    for tool in eager:
        peak = peak_in_child(name, tool)
        if peak is not None and float_peak:
            report.value(model=name, mode="memory", candidate=tool, peak_mib=peak / 2**20, ratio=peak / float_peak)


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--python", help="interpreter of the environment that has the rivals")
    options.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    options.add_argument("--compile", action="store_true", help="also compiled models (needs a C++ compiler)")
    options.add_argument("--peak-of", nargs=2, metavar=("MODEL", "TOOL"), help="print the peak memory of one candidate and stop")
    chosen = parse(options, argv)
    if chosen.python:
        rest = list(sys.argv[1:] if argv is None else argv)
        at = rest.index("--python")
        raise SystemExit(subprocess.run([chosen.python, "-m", "benchmarks.bench_qat_step", *rest[:at], *rest[at + 2 :]]).returncode)
    if chosen.peak_of:
        step = make_step(*chosen.peak_of)
        step()
        print(json.dumps(peak_bytes(step)))
        return
    with Reporter("qat_step", chosen.out, packages=("nvidia-modelopt", "brevitas")) as report:
        for name in chosen.models.split(","):
            measure(chosen, name, report)


if __name__ == "__main__":
    main()
