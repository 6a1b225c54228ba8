"""Comparison of an engine with the file that it runs, node by node.

Engines fuse nodes and choose other integer types for them, and some do it wrongly. A difference
alone proves nothing, as a deep network may amplify one value that is rounded the other way at a
tie. How far the results of the file move where its inputs change a little shows how much the
network amplifies.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchq.engines.module import EngineModule
from torchq.graph import call_arguments, call_model, tensors_in
from torchq.onnx.verify.session import Session

__all__ = ["runs_as_written"]

#: The relative error against the file that is always allowed: -20 dB.
_TOLERANCE = 0.1
#: The standard deviation of the changes of inputs, relative to each value. Engines that round the
#: biases of convolutions to integers change about as much; the rounding of float32 is far less.
_CHANGE = 1e-3
#: How many changed inputs are tried, and how much larger an error may be than their largest one.
_TRIES, _FACTOR = 4, 2.0


def runs_as_written(module: EngineModule, model: nn.Module, example: Any) -> bool:
    """Return True if an engine returns what its file does, as far as the model lets one tell.

    Args:
        module: the model on the engine.
        model: the model that the file was made from, whose arguments ``example`` has.
        example: see :func:`torchq.graph.call_model`.

    Raises:
        MissingExtraError: onnxruntime is not installed, which runs the file node by node.
        ExportError: ONNX Runtime cannot run the file.
    """
    args, kwargs = call_arguments(model, example)
    feeds = module.interface.signature.bind(args, kwargs, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        path.write_bytes(module.graph_bytes())
        session = Session(path, optimize=False)
        expected = _results(module, session.run(feeds))
        moved = [_results(module, session.run(_changed(feeds, seed))) for seed in range(_TRIES)]
    with torch.no_grad():
        results = list(tensors_in(call_model(module, example)))
    return all(
        _distance(got, wanted)
        <= max(
            _TOLERANCE * float(wanted.double().norm()),
            _FACTOR * max(_distance(others[number], wanted) for others in moved),
        )
        for number, (got, wanted) in enumerate(zip(results, expected, strict=True))
    )


def _results(module: EngineModule, tensors: list[Tensor]) -> list[Tensor]:
    """Return what the file returns, in the order of the results of the model."""
    return list(tensors_in(module.interface.structure.rebuild(tensors)))


def _changed(feeds: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return inputs with floating-point numbers that are changed a little; others stay."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value * (1 + _CHANGE * torch.randn(value.shape, generator=generator))
        if value.is_floating_point()
        else value
        for name, value in feeds.items()
    }


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference; infinite for results of unlike shapes."""
    return float((a.double() - b.double()).norm()) if a.shape == b.shape else float("inf")
