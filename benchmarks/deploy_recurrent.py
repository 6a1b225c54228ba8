"""Forward passes of deployed recurrent layers over torch's float layers and dynamic quantization.

``float`` is torch's layer, and 1. ``torchq static`` and ``torchq dynamic`` are deployed INT8 layers
with a quantized hidden state; the range of an activation is fixed, or that of each call. ``torch
dynamic`` is what ``torch.ao.quantization.quantize_dynamic`` makes, where this torch has it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import torchq
from benchmarks.harness import Reporter, compare, parse, parser, timing

__all__ = ["main"]

#: Steps, batch, inputs, width.
_SIZES = [(64, 1, 64, 256), (64, 1, 512, 1024), (64, 32, 64, 256), (35, 20, 200, 650)]


def _call(layer: Any, x: torch.Tensor) -> Callable[[], object]:
    def call() -> None:
        with torch.no_grad():
            layer(x)

    return call


def _deployed(model: nn.Module, x: torch.Tensor, dynamic: bool) -> nn.Module:
    rule = torchq.Rule(
        "0",
        input=torchq.QuantDescriptor(8, dynamic=dynamic),
        weight=torchq.QuantDescriptor(8, axis=0),
    )
    torchq.quantize_(model, torchq.QuantConfig((rule,)))
    torchq.calibrate(model, [(x,)], progress=False)
    return torchq.deploy(model)


def _torch_dynamic(model: nn.Module) -> nn.Module | None:
    quantize = getattr(getattr(torch.ao, "quantization", None), "quantize_dynamic", None)
    if quantize is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch marks the function as deprecated.
        found = quantize(model, {nn.LSTM, nn.GRU}, dtype=torch.qint8)
    assert isinstance(found, nn.Module)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line for each layer, size and candidate."""
    options = parse(parser(__doc__), argv)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    sizes = _SIZES[:1] if options.quick else _SIZES
    with Reporter("deploy_recurrent", options.out) as report:
        for cls in (nn.LSTM, nn.GRU, nn.RNN):
            for steps, batch, inputs, width in sizes:
                torch.manual_seed(0)
                x = torch.randn(steps, batch, inputs)
                model = nn.Sequential(cls(inputs, width)).eval()
                candidates = {"float": _call(model, x)}
                if cls is not nn.RNN and (other := _torch_dynamic(model)) is not None:
                    candidates["torch dynamic"] = _call(other, x)
                for name, dynamic in (("torchq static", False), ("torchq dynamic", True)):
                    twin = nn.Sequential(cls(inputs, width)).eval()
                    candidates[name] = _call(_deployed(twin, x, dynamic), x)
                size = {"steps": steps, "batch": batch, "inputs": inputs, "width": width}
                for row in compare(candidates, baseline="float", clock=clock, **timing(options)):
                    report.timing(row, layer=cls.__name__, **size)


if __name__ == "__main__":
    main()
