"""The memory that gptq_ needs for a model whose weights lie in files.

A chain of equal blocks, each of four Linear layers around a residual stream, is rounded to 4 bits
twice: with all weights in memory, and with LazyWeights, where the model is built without memory and
its weights are read from one file for each. Every case runs in a process of its own; its peak is
the largest resident memory, less that before the model was built.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from benchmarks.harness import Reporter, parse, parser

__all__ = ["main"]

_CASES = ("in memory", "LazyWeights")
_ROWS, _BATCHES = 256, 2


class _Block(nn.Module):
    """Four layers of one width, around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(self.norm(x))


class _Chain(nn.Module):
    """Blocks in a row."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _value(name: str, shape: torch.Size) -> Tensor:
    """Return the value of a parameter, which depends on its name alone."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    if len(shape) < 2:
        return torch.ones(shape) if "norm.weight" in name else torch.zeros(shape)
    return torch.randn(shape, generator=generator).div_(shape[1] ** 0.5)


def _peak() -> int:
    """Return the largest resident memory so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _run(case: str, width: int, depth: int, published: bool) -> dict[str, float]:
    """Round the model of one case; return the peak and a sum of the result."""
    how: dict[str, Any] = {"target": "weight", "refine": False} if published else {}
    how["progress"] = False
    with torch.device("meta"):
        model = _Chain(width, depth).eval()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    batches = list(torch.randn(_BATCHES, _ROWS, width, generator=torch.Generator().manual_seed(0)))
    # A small model brings everything into memory that a call needs of torch itself.
    warm = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    torchq.quantize_(warm, torchq.recipes.integer(4, None))
    torchq.ptq.gptq_(warm, [torch.randn(16, 8)], **how)
    before = _peak()
    recipe = torchq.recipes.integer(4, None)
    with tempfile.TemporaryDirectory() as folder:
        if case == "in memory":
            model = model.to_empty(device="cpu")
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(_value(name, parameter.shape))
            torchq.quantize_(model, recipe)
            torchq.ptq.gptq_(model, batches, **how)
        else:
            # A file of a real model would be read here; the values are computed in its place.
            def source(name: str) -> Tensor:
                return _value(name, shapes[name])

            with torchq.ptq.LazyWeights(model, folder, source=source) as weights:
                torchq.quantize_(model, recipe)
                run = torchq.ptq.RunOptions(weights=weights)
                torchq.ptq.gptq_(model, batches, run=run, **how)
        peak = _peak() - before
        total = sum(float(p.double().abs().sum()) for p in model.parameters())
    return {"peak_bytes": peak, "sum_of_weights": total}


def _options() -> argparse.ArgumentParser:
    options = parser(__doc__)
    options.add_argument("--width", type=int, default=512)
    options.add_argument("--depths", type=int, nargs="+", default=[4, 24])
    options.add_argument("--published", action="store_true", help="the published form, the fastest")
    options.add_argument("--case", choices=_CASES, help="run this one alone, and print its figures")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line for each case and depth."""
    options = parse(_options(), argv)
    if options.quick:
        options.width, options.depths = 32, options.depths[:1]
    if options.case is not None:
        print(json.dumps(_run(options.case, options.width, options.depths[0], options.published)))
        return
    block = sum(p.numel() * p.element_size() for p in _Block(options.width).parameters())
    with Reporter("memory_gptq", options.out) as report:
        for depth in options.depths:
            sums = []
            for case in _CASES:
                command = [sys.executable, "-W", "ignore", "-m", "benchmarks.memory_gptq"]
                command += ["--case", case, "--width", str(options.width), "--depths", str(depth)]
                command += ["--published"] * options.published
                root = Path(__file__).resolve().parents[1]
                done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
                found = json.loads(done.stdout.splitlines()[-1])
                sums.append(found.pop("sum_of_weights"))
                sizes = {"block_bytes": block, "model_bytes": depth * block}
                ratio = round(found["peak_bytes"] / block, 2)
                form = "published" if options.published else "refined"
                report.value(
                    case=case, form=form, blocks=depth, **sizes, **found, peak_in_blocks=ratio
                )
            # Matrices in float32 move a few codes to their neighbours.
            assert math.isclose(*sums, rel_tol=1e-3), "both cases give the same weights"


if __name__ == "__main__":
    main()
