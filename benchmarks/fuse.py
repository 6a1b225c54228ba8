"""Fusing BatchNorms and branches: is it exact, how long does it take, and what does it gain?

- ``exact``: torchvision's CNNs with random weights, statistics and signs; errors of the fused
  network in float64 and float32 against the unfused float64 network.
- ``latency``: unfused, fused by torch.fx.experimental.optimization.fuse, and fused by torchq.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from benchmarks.cifar import repvgg_a0
from benchmarks.harness import Reporter, compare, parse, parser, timing

_NETWORKS = (
    *(
        "resnet18",
        "resnet50",
        "mobilenet_v2",
        "efficientnet_b0",
        "densenet121",
        "inception_v3",
    ),
    *("deeplabv3_mobilenet_v3_large", "r3d_18"),
)
_VIDEO_NETWORKS = ("r3d_18", "mc3_18", "r2plus1d_18")
_LATENCY = ("resnet50", "mobilenet_v2", "repvgg_a0")


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line for each network or candidate."""
    options = parser(__doc__)
    parts = {"exact": _exact, "latency": _latency}
    options.add_argument("--parts", nargs="+", default=list(parts), choices=parts)
    options.add_argument("--networks", nargs="+", default=_NETWORKS, help="for exact")
    options.add_argument(
        "--size", type=int, default=96, help="side of the images for exact"
    )
    chosen = parse(options, argv)
    with Reporter("fuse", chosen.out) as report:
        for part in chosen.parts:
            parts[part](report, chosen)


def _build(name: str) -> nn.Module:
    from torchvision import models

    torch.manual_seed(0)
    if name == "repvgg_a0":
        return _random_norms(repvgg_a0())
    extra = (
        {"weights_backbone": None}
        if name.startswith(("fcn", "deeplab", "lraspp"))
        else {}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _random_norms(models.get_model(name, weights=None, **extra))


def _random_norms(model: nn.Module) -> nn.Module:
    """Give BatchNorms numbers as training leaves them, every fourth scale negative."""
    for norm in model.modules():
        if isinstance(norm, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
            norm.running_mean.normal_(0, 0.3)
            norm.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            norm.weight.data[::4] *= -1
            nn.init.normal_(norm.bias, 0, 0.2)
    return model.eval()


def _first(out: Any) -> Tensor:
    """Return the output, or the first of several."""
    first = out if isinstance(out, Tensor) else next(iter(out.values()))
    assert isinstance(first, Tensor)
    return first


@torch.no_grad()
def _error(model: nn.Module, x: Tensor, want: Tensor) -> float:
    return ((_first(model(x)).double() - want).abs().max() / want.abs().max()).item()


def _exact(report: Reporter, options: argparse.Namespace) -> None:
    """Compare fused networks with the unfused float64 ones."""
    for name in options.networks[:2] if options.quick else options.networks:
        model = _build(name)
        size = max(options.size, 128 if name == "inception_v3" else 0)
        shape = (1, 3, 4, 64, 65) if name in _VIDEO_NETWORKS else (1, 3, size, size + 1)
        x = torch.randn(shape)
        exact = copy.deepcopy(model).double()
        with torch.no_grad():
            want = _first(exact(x.double()))
        unfused = _error(model, x, want)
        start = time.perf_counter()
        done = torchq.fuse_(model, x, progress=False)
        seconds = time.perf_counter() - start
        torchq.fuse_(exact, x.double(), progress=False)
        report.value(
            part="exact",
            network=name,
            fused=len(done.fused),
            refused=len(done.refused),
            error_float64=_error(exact, x.double(), want),
            error_float32=_error(model, x, want),
            error_float32_unfused=unfused,
            seconds=round(seconds, 2),
            reasons=sorted({r.reason[:60] for r in done.refused}),
        )


def _latency(report: Reporter, options: argparse.Namespace) -> None:
    """Compare latencies of networks unfused, fused by torch and fused by torchq."""
    from torch.fx.experimental.optimization import fuse

    for name in _LATENCY:
        unfused = _build(name)
        size = 64 if options.quick else 224
        x = torch.randn(1, 3, size, size)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            want = copy.deepcopy(unfused).double()(x.double())
            seconds = {}
            start = time.perf_counter()
            by_torch = fuse(unfused)
            seconds["torch"] = time.perf_counter() - start
            by_torchq = copy.deepcopy(unfused)
            start = time.perf_counter()
            torchq.fuse_(by_torchq, progress=False)
            seconds["torchq"] = time.perf_counter() - start
        models = {"unfused": unfused, "torch": by_torch, "torchq": by_torchq}
        with torch.inference_mode():
            rows = compare(
                {key: lambda m=m, x=x: m(x) for key, m in models.items()},
                baseline="unfused",
                **timing(options),
            )
        for row in rows:
            layers = sum(1 for _ in models[row.candidate].parameters())
            fuse_s = round(seconds.get(row.candidate, 0.0), 3)
            error = _error(models[row.candidate], x, want)
            report.timing(
                row,
                part="latency",
                network=name,
                error=error,
                parameters=layers,
                fuse_s=fuse_s,
            )


if __name__ == "__main__":
    main()
