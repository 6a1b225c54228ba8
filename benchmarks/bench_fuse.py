"""Fusing BatchNorms and branches: is it exact, how long does it take, and what does it gain?

- ``exact``: torchvision's CNNs with random weights, statistics and signs; errors of the fused
  network in float64 and float32 against the unfused float64 network.
- ``layer``: layer by layer beside torch.nn.utils.fusion, on layers that it covers and on layers
  that it gets wrong.
- ``latency``: unfused, fused by torch.fx.experimental.optimization.fuse, and fused by torchq.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from benchmarks.harness import Reporter, compare, parse, parser, timing
from benchmarks.repvgg import repvgg_a0

__all__ = ["main"]

_NETWORKS = (
    "alexnet",
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "googlenet",
    "inception_v3",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "mobilenet_v3_large",
    "regnet_x_400mf",
    "regnet_y_400mf",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnext50_32x4d",
    "wide_resnet50_2",
    "shufflenet_v2_x0_5",
    "shufflenet_v2_x1_0",
    "squeezenet1_1",
    "vgg11_bn",
    "fcn_resnet50",
    "deeplabv3_mobilenet_v3_large",
    "lraspp_mobilenet_v3_large",
)
_VIDEO_NETWORKS = (
    "r3d_18",
    "mc3_18",
    "r2plus1d_18",
)
_LATENCY = ("resnet50", "mobilenet_v2", "repvgg_a0")


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line for each network, layer or candidate."""
    options = parser(__doc__)
    options.add_argument(
        "--parts",
        nargs="+",
        default=["exact", "layer", "latency"],
        choices=["exact", "layer", "latency"],
    )
    options.add_argument(
        "--networks",
        nargs="+",
        default=[*_NETWORKS, *_VIDEO_NETWORKS],
        help="for exact (default: all)",
    )
    options.add_argument(
        "--size", type=int, default=96, help="side of the images for exact (default: %(default)s)"
    )
    chosen = parse(options, argv)
    parts = {"exact": _exact, "layer": _layers, "latency": _latency}
    with Reporter("fuse", chosen.out) as report:
        for part in chosen.parts:
            parts[part](report, chosen)


def _build(name: str) -> nn.Module:
    from torchvision import models

    torch.manual_seed(0)
    if name == "repvgg_a0":
        return _random_norms(repvgg_a0())
    extra = {"weights_backbone": None} if name.startswith(("fcn", "deeplab", "lraspp")) else {}
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
        model, size = _build(name), max(options.size, 128 if name == "inception_v3" else 0)
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


_PAIRS: dict[str, tuple[Callable[[], tuple[nn.Module, nn.Module]], tuple[int, ...]]] = {
    "conv2d": (lambda: (nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64)), (2, 64, 8, 8)),
    "depthwise": (lambda: (nn.Conv2d(64, 64, 3, groups=64), nn.BatchNorm2d(64)), (2, 64, 8, 8)),
    "transposed": (lambda: (nn.ConvTranspose2d(64, 64, 3), nn.BatchNorm2d(64)), (2, 64, 8, 8)),
    "transposed, 4 groups": (
        lambda: (nn.ConvTranspose2d(64, 64, 3, groups=4), nn.BatchNorm2d(64)),
        (2, 64, 8, 8),
    ),
    "linear on rows": (lambda: (nn.Linear(64, 64), nn.BatchNorm1d(64)), (8, 64)),
    "linear on 64 tokens": (lambda: (nn.Linear(64, 64), nn.BatchNorm1d(64)), (8, 64, 64)),
}


def _layers(report: Reporter, options: argparse.Namespace) -> None:
    """Compare one layer and its BatchNorm fused by torch's helper and by torchq."""
    for name, (make, shape) in _PAIRS.items():
        torch.manual_seed(0)
        pair = _random_norms(nn.Sequential(*make()))
        x = torch.randn(shape)
        with torch.no_grad():
            want = copy.deepcopy(pair).double()(x.double())
        candidates = {
            "torch": lambda pair=pair: _torch_pair(pair),
            "torchq": lambda pair=pair, x=x: _torchq_pair(pair, x),
        }
        for candidate, call in candidates.items():
            try:
                outcome = f"{_error(call(), x, want):.1e}"
            except RuntimeError as error:
                outcome = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
            refused = (
                candidate == "torchq"
                and len(call()) == 2
                and isinstance(call()[1], nn.modules.batchnorm._BatchNorm)
            )
            report.value(
                part="layer", layer=name, candidate=candidate, error=outcome, left_alone=refused
            )


def _torch_pair(pair: nn.Module) -> nn.Module:
    from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

    layer, norm = copy.deepcopy(pair)
    if isinstance(layer, nn.Linear):
        return fuse_linear_bn_eval(layer, norm)
    return fuse_conv_bn_eval(layer, norm, transpose=isinstance(layer, nn.ConvTranspose2d))


def _torchq_pair(pair: nn.Module, x: Tensor) -> nn.Module:
    fused = copy.deepcopy(pair)
    torchq.fuse_(fused, x, progress=False)
    return fused


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
                row, part="latency", network=name, error=error, parameters=layers, fuse_s=fuse_s
            )


if __name__ == "__main__":
    main()
