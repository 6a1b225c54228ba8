"""Time what a call of a kernel costs in a deployed network, beside what it computes.

First the operators of torch on an image of 2 x 2 pixels with 16 channels, where nearly all of the
time is the call. Then a deployed network whole, and its kernels alone, called one after the other
with the tensors of one run; the difference is Python and what lies between the kernels. The
baseline is FP32 eager. The processor's time counts, with one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torchq
from benchmarks.deploy_native import build, quantized_for_torch
from benchmarks.harness import Reporter, compare, parse, parser, timing
from torchq.engines import TorchEngine

__all__ = ["main"]

MODELS = ("mobilenet_v2", "mobilenet_v3_small", "shufflenet_v2_x1_0", "resnet18")
Call = Callable[[], object]


class Recorder(TorchDispatchMode):
    """Keeps the calls of integer kernels: operator and arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "onednn":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def small_calls() -> dict[str, Call]:
    """Return calls of torch's operators that compute next to nothing."""
    x = torch.randn(1, 16, 2, 2).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(16, 16, 1, 1), torch.zeros(16)
    codes = torch.ones(1, 16, 2, 2, dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    scale, zeros = torch.ones(16), torch.zeros(16, dtype=torch.int64)
    where = ([1, 1], [0, 0], [1, 1], 1)
    integers = torch.ones(16, 16, 1, 1, dtype=torch.int8)
    packed = torch.ops.onednn.qconv_prepack(integers, scale, 1.0, 0, *where, [1, 16, 2, 2])
    rows = torch.ops.onednn.qlinear_prepack(integers.flatten(1), None)
    output = (1.0, 0, torch.uint8, "none", [], "")
    kept_weight = torch.quantize_per_channel(weight, scale, zeros, 0, torch.qint8)
    kept = torch.ops.quantized.conv2d_prepack(kept_weight, bias, *where)
    quantized_x = torch.quantize_per_tensor(x, 1.0, 0, torch.quint8)
    conv, linear = torch.ops.onednn.qconv2d_pointwise, torch.ops.onednn.qlinear_pointwise
    before = (1.0, 0, packed, scale, zeros, bias)
    flat = codes.permute(0, 2, 3, 1).reshape(4, 16)
    return {
        "float convolution": lambda: torch.conv2d(x, weight, bias),
        "onednn::qconv2d_pointwise": lambda: conv(codes, *before, *where, *output),
        "onednn::qlinear_pointwise": lambda: linear(
            flat, 1.0, 0, rows, scale, zeros, bias, *output
        ),
        "quantized::conv2d": lambda: torch.ops.quantized.conv2d(quantized_x, kept, 1.0, 0),
    }


def network_calls(name: str) -> tuple[dict[str, Call], int]:
    """Return the float network, the deployed one, and its kernels alone; and how many these are."""
    model, x = build(name, 1)
    int8 = torchq.deploy(quantized_for_torch(model, x), x, engine=TorchEngine(measured=False))
    int8(x)
    with Recorder() as recorder:
        int8(x)

    def kernels() -> None:
        for func, args, kwargs in recorder.calls:
            func(*args, **kwargs)

    calls: dict[str, Call] = {
        "fp32 eager": lambda: model(x),
        "deployed": lambda: int8(x),
        "its kernels alone": kernels,
    }
    return calls, len(recorder.calls)


def main(argv: Sequence[str] | None = None) -> None:
    """Time the calls and report."""
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", default=MODELS)
    options = parse(arguments, argv)
    torch.backends.quantized.engine = "onednn"
    with Reporter("deploy_calls", options.out) as report, torch.no_grad():
        clock = {"clock": time.process_time, **timing(options)}
        for row in compare(small_calls(), baseline="float convolution", **clock):
            report.timing(row, case="2 x 2 pixels, 16 channels", microseconds=1e6 * row.least_s)
        for name in options.models:
            calls, count = network_calls(name)
            for row in compare(calls, baseline="fp32 eager", **clock):
                report.timing(row, model=name, kernels=count, speedup=1 / row.ratio)


if __name__ == "__main__":
    main()
