"""Forward and backward of quantized recurrent layers over torch's float layers.

Inputs, weights and hidden states are INT8 with fixed ranges. ``float hidden`` leaves the hidden
state float, so that torch's fused kernel runs. ``float`` is torch's layer, and 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import torchq
from benchmarks.harness import Reporter, compare, parse, parser, timing

__all__ = ["main"]

#: Steps, batch, inputs, width.
_SIZES = [(64, 32, 64, 256), (35, 20, 200, 200), (50, 16, 128, 128)]


def _step(layer: Any, x: torch.Tensor) -> Callable[[], object]:
    def step() -> None:
        layer.zero_grad()
        layer(x)[0].sum().backward()

    return step


def _quantized(cls: Any, x: torch.Tensor, width: int) -> Any:
    rule = torchq.Rule("0", input=torchq.QuantDescriptor(), weight=torchq.QuantDescriptor(axis=0))
    model = nn.Sequential(cls(x.shape[2], width))
    torchq.quantize_(model, torchq.QuantConfig((rule,)))
    torchq.calibrate(model, [(x,)], progress=False)
    return model[0]


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line for each layer, size and candidate."""
    options = parse(parser(__doc__), argv)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    with Reporter("recurrent_step", options.out) as report:
        for cls in (nn.LSTM, nn.GRU, nn.RNN):
            for steps, batch, inputs, width in _SIZES:
                torch.manual_seed(0)
                x = torch.randn(steps, batch, inputs)
                fused = _quantized(cls, x, width)
                fused.hidden_l0_quantizer.mode = "off"
                candidates = {
                    "float": _step(cls(inputs, width), x),
                    "quantized": _step(_quantized(cls, x, width), x),
                    "float hidden": _step(fused, x),
                }
                size = {"steps": steps, "batch": batch, "inputs": inputs, "width": width}
                for row in compare(candidates, baseline="float", clock=clock, **timing(options)):
                    report.timing(row, layer=cls.__name__, **size)


if __name__ == "__main__":
    main()
