"""Fake quantization against copying the tensor: forward, training forward and backward.

``clone`` is 1. The candidates are torchq, torch's own ``fake_quantize_per_*_affine``, and NVIDIA
ModelOpt, Brevitas and torchao where they are installed: run it with the interpreter of ``make
bench-env``. A case that is called learned has a range with a gradient (LSQ).

The modes are ``forward`` (no gradient wanted), ``training`` (a forward that keeps what its backward
needs) and ``backward``. ModelOpt's gradient passes everywhere, so its backward does nothing. On one
thread the clock is CPU time, which other processes disturb less; --wall times the wall.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

import torchq
from benchmarks.harness import Reporter, compare, parse, parser, timing
from torchq.formats import E4M3, INT8, Format, PerAxis, PerBlock, PerTensor
from torchq.formats.granularity import Granularity

Quantize = Callable[[Tensor], Tensor]
PER_TENSOR = PerTensor()
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """A tensor of 6.4 million elements, and how it is quantized."""

    name: str
    format: Format = INT8
    granularity: Granularity = PER_TENSOR
    dtype: str = "fp32"
    channels_last: bool = False
    learned: bool = False

    def tensor(self) -> Tensor:
        x = torch.randn(32, 64, 56, 56).to(DTYPES[self.dtype])
        return (
            x.contiguous(memory_format=torch.channels_last) if self.channels_last else x
        )


CASES = [
    Case("int8 per tensor"),
    Case("int8 per tensor channels_last", channels_last=True),
    Case("int8 per tensor learned", learned=True),
    Case("int8 axis 0", granularity=PerAxis((0,))),
    Case("int8 axis 1", granularity=PerAxis((1,))),
    Case("int8 axis 1 channels_last", granularity=PerAxis((1,)), channels_last=True),
    Case("int8 blocks of 28", granularity=PerBlock(28)),
    Case("int8 per tensor bf16", dtype="bf16"),
    Case("int8 per tensor fp16", dtype="fp16"),
    Case("e4m3 per tensor", E4M3),
    Case("e4m3 axis 0", E4M3, PerAxis((0,))),
]


def aten(case: Case, amax: Tensor) -> Quantize:
    if isinstance(case.granularity, PerAxis):
        axis = case.granularity.axes[0]
        scales = amax.flatten() / 127
        zeros = torch.zeros_like(scales, dtype=torch.int32)
        return lambda x: torch.fake_quantize_per_channel_affine(
            x, scales, zeros, axis, -128, 127
        )
    scale = amax / 127
    zero_point = torch.zeros((), dtype=torch.int32)
    return lambda x: torch.fake_quantize_per_tensor_affine(
        x, scale, zero_point, -128, 127
    )


def modelopt(case: Case, amax: Tensor) -> Quantize:
    config = import_module(
        "modelopt.torch.quantization.config"
    ).QuantizerAttributeConfig
    axis = case.granularity.axes[0] if isinstance(case.granularity, PerAxis) else None
    quantizer = import_module("modelopt.torch.quantization.nn").TensorQuantizer(
        config(num_bits=8 if case.format.is_integer else (4, 3), axis=axis)
    )
    quantizer.amax = amax
    return quantizer


def brevitas(case: Case, amax: Tensor) -> Quantize:
    wrapper = import_module("brevitas.core.function_wrapper")
    quant = import_module("brevitas.core.quant")
    function = quant.IntQuant(
        narrow_range=False, signed=True, input_view_impl=wrapper.Identity()
    )
    step = amax / 127
    zero = torch.tensor(0.0)
    width = torch.tensor(8.0)
    return lambda x: function(step, zero, width, x)


def torchao(case: Case, amax: Tensor) -> Quantize:
    function = import_module(
        "torchao.quantization.quant_primitives"
    )._fake_quantize_affine
    step = (amax / 127).flatten() if amax.dim() else amax / 127
    zero = torch.zeros_like(step, dtype=torch.int32)

    def run(x: Tensor) -> Tensor:
        sizes = zip(amax.shape or [1] * x.dim(), x.shape, strict=True)
        block = tuple(size if n == 1 else 1 for n, size in sizes)
        return function(x, block, step, zero, torch.int8, -128, 127)

    return run


def rivals(case: Case, amax: Tensor) -> dict[str, Quantize]:
    """Return the other tools that can do the case and are installed."""
    tools: dict[str, Quantize] = {}
    if isinstance(case.granularity, PerBlock):
        return tools
    if case.format.is_integer:
        tools["aten"] = aten(case, amax)
    for build in (modelopt, brevitas, torchao):
        try:
            if case.format.is_integer or build is modelopt:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    tools[build.__name__] = build(case, amax)
        except ImportError as error:
            print(f"left out: {build.__name__} ({error})", file=sys.stderr)
    return tools


def candidates(case: Case, x: Tensor, compiled: bool) -> dict[str, Quantize]:
    # Some elements clip.
    amax = torchq.functional.reduce_amax(x, case.granularity).mul_(0.8)
    runs = {} if case.learned else rivals(case, amax)
    plain = torchq.functional.fake_quantize
    learned = torchq.functional.learned_fake_quantize
    function = learned if case.learned else plain
    amax.requires_grad_(case.learned)

    def ours(v: Tensor) -> Tensor:
        return function(v, amax, case.format, case.granularity)

    runs["torchq"] = ours
    if compiled:
        torch.compiler.reset()  # each case is a program of its own, no recompilation of the last
        # The backward is timed again and again on one graph.
        torch._functorch.config.donated_buffer = False
        runs["torchq compiled"] = torch.compile(ours, fullgraph=True)
    usable = {}
    for name, run in runs.items():
        try:
            difference = (
                ((run(x).float() - ours(x).float()).abs() / amax.max()).max().item()
            )
        except (RuntimeError, TypeError, ValueError) as error:
            print(f"left out of {case.name}: {name} ({error})", file=sys.stderr)
            continue
        # 0.07 is the distance of E4M3's largest values; rivals that use 1 / scale flip ties.
        if difference > 0.07:
            raise SystemExit(f"{case.name}: {name} differs by {difference:.3g} of amax")
        usable[name] = run
    return usable


def calls(
    mode: str, runs: dict[str, Quantize], x: Tensor
) -> dict[str, Callable[[], object]]:
    leaf = x.clone().requires_grad_(mode != "forward")
    if mode != "backward":
        return {
            "clone": lambda: x.clone(),
            **{name: (lambda run=run: run(leaf)) for name, run in runs.items()},
        }
    grad = torch.randn_like(x)
    timed: dict[str, Callable[[], object]] = {"clone": lambda: grad.clone()}
    for name, run in runs.items():
        y = run(leaf)
        timed[name] = lambda y=y: torch.autograd.grad(y, leaf, grad, retain_graph=True)
    return timed


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument(
        "--cases", default="", help="only cases whose name contains this"
    )
    options.add_argument(
        "--modes", default="forward,training,backward", help="default: %(default)s"
    )
    compiled = "also torch.compile of torchq's function (needs a C++ compiler)"
    options.add_argument("--compile", action="store_true", help=compiled)
    options.add_argument("--wall", action="store_true", help="wall clock, not CPU time")
    chosen = parse(options, argv)
    clock = time.perf_counter if chosen.wall or chosen.threads > 1 else time.thread_time
    packages = ("nvidia-modelopt", "brevitas", "torchao")
    with Reporter("fake_quant", chosen.out, packages) as report:
        for case in (c for c in CASES if chosen.cases in c.name):
            x = case.tensor()
            runs = candidates(case, x, chosen.compile)
            for mode in chosen.modes.split(","):
                timed = calls(mode, runs, x)
                for row in compare(
                    timed, baseline="clone", clock=clock, **timing(chosen)
                ):
                    report.timing(row, case=case.name, mode=mode, clock=clock.__name__)


if __name__ == "__main__":
    main()
