"""Time linear layers with integer weights on one row, as language models decode.

Each candidate is a layer whose weight alone is quantized, deployed; the baseline is the layer in
bfloat16. The processor's time counts, with one thread, as other programs then count little. The
error of a result is that against the simulation in float64, in dB.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import torchq
from benchmarks.deploy_native import db
from benchmarks.harness import Reporter, compare, parse, parser, timing

__all__ = ["main"]

#: Inputs and outputs of the layers.
SHAPES = ((1024, 1024), (4096, 4096), (4096, 11008), (11008, 4096))
WEIGHTS = {
    "int8": torchq.QuantDescriptor(8, axis=0),
    "int4 blocks of 128": torchq.QuantDescriptor(4, block_size=128),
    "int4 blocks of 32": torchq.QuantDescriptor(4, block_size=32),
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def candidates(layer: nn.Linear, x: Tensor) -> dict[str, tuple[nn.Module, Tensor, nn.Module]]:
    """Return what is timed, its input, and the simulation that it is compared with."""
    found: dict[str, tuple[nn.Module, Tensor, nn.Module]] = {}
    for dtype_name, dtype in DTYPES.items():
        plain = copy.deepcopy(layer).to(dtype)
        found[dtype_name] = (plain, x.to(dtype), plain)
        for name, weight in WEIGHTS.items():
            model = nn.Sequential(copy.deepcopy(plain))
            torchq.quantize_(model, torchq.QuantConfig((torchq.Rule("*", weight=weight),)))
            torchq.calibrate(model.eval(), [x.to(dtype)], progress=False)
            label = f"{name}, {dtype_name}"
            found[label] = (torchq.deploy(model), x.to(dtype), model)
    return found


def measure(shape: tuple[int, int], report: Reporter, options: argparse.Namespace) -> None:
    """Time all candidates of one shape."""
    torch.manual_seed(0)
    layer, x = nn.Linear(*shape, bias=False).eval(), torch.randn(1, shape[0])
    found = candidates(layer, x)
    calls: dict[str, Callable[[], object]] = {
        name: (lambda m, v: lambda: m(v))(model, value) for name, (model, value, _) in found.items()
    }
    rows = compare(calls, baseline="bfloat16", clock=time.process_time, **timing(options))
    for row in rows:
        model, value, simulated = found[row.candidate]
        exact = copy.deepcopy(simulated).double()(value.double())
        error = round(db(model(value), exact), 1)
        report.timing(row, shape=list(shape), speedup=1 / row.ratio, to_simulation_db=error)


def main(argv: Sequence[str] | None = None) -> None:
    """Time every shape and report."""
    options = parse(parser(__doc__), argv)
    shapes = SHAPES[:1] if options.quick else SHAPES
    with Reporter("deploy_decode", options.out) as report, torch.no_grad():
        for shape in shapes:
            measure(shape, report, options)


if __name__ == "__main__":
    main()
