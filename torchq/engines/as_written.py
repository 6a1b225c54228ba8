"""Comparison of an engine with the file that it runs, node by node."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchq.engines.module import EngineModule
from torchq.graph import call_arguments, call_model, tensors_in
from torchq.onnx.verify.amplified import too_different
from torchq.onnx.verify.session import Session

__all__ = ["runs_as_written"]


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

    def run(feeds: Mapping[str, Tensor]) -> list[Tensor]:
        return _results(module, session.run(feeds))

    with torch.no_grad():
        found = list(tensors_in(call_model(module, example)))
    return not too_different(found, run(feeds), run, feeds)


def _results(module: EngineModule, tensors: list[Tensor]) -> list[Tensor]:
    """Return what the file returns, in the order of the results of the model."""
    return list(tensors_in(module.interface.structure.rebuild(tensors)))
