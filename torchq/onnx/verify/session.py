"""ONNX Runtime sessions: start one, feed it torch tensors, read torch tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchq.errors import ExportError
from torchq.utils.optional import need

__all__ = ["Session"]


class Session:
    """A model in ONNX Runtime, on the CPU and on as many threads as torch uses.

    Args:
        source: a file.
        optimize: ``False`` runs the graph node by node as written, ``True`` with all optimisations.
        save_optimized: write the optimised graph there.

    Raises:
        MissingExtraError: onnxruntime is not installed.
        ExportError: it cannot run the model.
    """

    def __init__(
        self, source: str | Path, *, optimize: bool, save_optimized: Path | None = None
    ) -> None:
        runtime = need("onnxruntime", "torchq")
        options = runtime.SessionOptions()
        levels = runtime.GraphOptimizationLevel
        options.graph_optimization_level = (
            levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
        )
        if save_optimized is not None:
            options.graph_optimization_level = (
                levels.ORT_ENABLE_EXTENDED
            )  # ALL would add layouts of this machine
            options.optimized_model_filepath = str(save_optimized)
            options.add_session_config_entry(
                "session.optimized_model_external_initializers_file_name",
                f"{save_optimized.name}.data",
            )
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        try:
            self._session = runtime.InferenceSession(
                str(source), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # its own exception classes are private
            fix = (
                ". Export with target='onnxruntime', or with opset 20 or lower"
                if "output_dtype" in str(error)
                else ""
            )
            raise ExportError(
                f"onnxruntime {runtime.__version__} cannot run the model ({error}); expected it to{fix}"
            ) from error
        self.inputs = [value.name for value in self._session.get_inputs()]
        self.outputs = [value.name for value in self._session.get_outputs()]

    def feeds(self, batch: Any) -> dict[str, Tensor]:
        """The inputs by name: from a dict by name, else in order; of ``(x, y, ...)`` from a DataLoader as many as there are inputs."""
        if isinstance(batch, Mapping):
            named = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
            by_order = dict(zip(self.inputs, named.values(), strict=False))
            return {name: named[name] if name in named else by_order[name] for name in self.inputs}
        values: Sequence[Any] = [batch] if isinstance(batch, Tensor) else batch
        return dict(zip(self.inputs, values, strict=False))

    def run(
        self, feeds: Mapping[str, Tensor], outputs: Sequence[str] | None = None
    ) -> list[Tensor]:
        """The outputs named, default all.

        Raises:
            ExportError: the inputs do not fit.
        """
        arrays = {name: value.detach().cpu().contiguous().numpy() for name, value in feeds.items()}
        try:
            results = self._session.run(list(outputs or self.outputs), arrays)
        except Exception as error:  # its own exception classes are private
            shapes = {value.name: value.shape for value in self._session.get_inputs()}
            raise ExportError(
                f"onnxruntime: cannot run the model on this batch ({error}); expected inputs like {shapes}"
            ) from error
        return [torch.from_numpy(array.copy()) for array in results]
