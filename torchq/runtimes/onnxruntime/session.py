"""ONNX Runtime sessions that take and return torch tensors."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchq.errors import ExportError
from torchq.lowering.kernel import saturates
from torchq.runtimes.onnxruntime.weights_apart import with_weights_apart
from torchq.utils.optional import import_optional

log = logging.getLogger(__name__)

_DTYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(bfloat16)": torch.bfloat16,
    "tensor(double)": torch.float64,
    "tensor(int64)": torch.int64,
    "tensor(int32)": torch.int32,
    "tensor(int16)": torch.int16,
    "tensor(int8)": torch.int8,
    "tensor(uint8)": torch.uint8,
    "tensor(bool)": torch.bool,
}


#: Makes weights that need 8 bits unsigned. Only CPUs without VNNI want it: kernels that multiply
#: uint8 with int8 overflow there, and elsewhere they are the faster ones.
EXACT_PRODUCTS = "session.x64quantprecision"


def _check_input(tensor: Tensor, value: Any) -> None:
    """Raise an error where a tensor has another type or shape than an input of a file."""
    if tensor.dtype is torch.bfloat16:
        raise ExportError(
            f"onnxruntime: the batch has bfloat16 for the input {value.name!r}; expected a type "
            "that NumPy has. Export and compare copy.deepcopy(model).float()"
        )
    expected = list(value.shape or ())
    shape = list(tensor.shape)
    dtype = _DTYPES.get(value.type, tensor.dtype)
    fits = len(shape) == len(expected) and all(
        not isinstance(length, int) or length == length_of_batch
        for length, length_of_batch in zip(expected, shape, strict=True)
    )
    if not fits or tensor.dtype != dtype:
        raise ExportError(
            f"onnxruntime: the batch has {tensor.dtype} of shape {shape} for the input "
            f"{value.name!r}; expected inputs like {dtype} of shape {expected}. Pass batches like "
            "the example of the export"
        )


class Session:
    """A file in ONNX Runtime, by default on as many threads as torch uses. Threads may share it.

    Attributes:
        settings: What differs from a session with default options, as words.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        *,
        optimize: bool,
        save_optimized: Path | None = None,
        threads: int | None = None,
        provider: str = "CPUExecutionProvider",
        exact_products: bool = True,
    ) -> None:
        runtime = import_optional("onnxruntime", "torchq")
        new_options = partial(_options, runtime, optimize, save_optimized, threads)
        self.settings = ""
        try:
            if exact_products and saturates():
                self._session, self.settings = _with_exact_products(
                    runtime, os.fspath(source), new_options, provider
                )
            else:
                self._session = runtime.InferenceSession(
                    os.fspath(source), new_options(), [provider]
                )
        except Exception as error:  # The exception classes of ONNX Runtime are private.
            fix = ""
            if "output_dtype" in str(error):
                fix = ". Export with target='onnxruntime', or with opset 20 or lower"
            raise ExportError(
                f"onnxruntime {runtime.__version__} cannot run the model {source} ({error}){fix}"
            ) from error
        self.inputs = [value.name for value in self._session.get_inputs()]
        self.outputs = [value.name for value in self._session.get_outputs()]

    def feeds(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors under the names of the file's inputs."""
        if all(name in tensors for name in self.inputs):
            by_input = {name: tensors[name] for name in self.inputs}
        else:
            by_input = dict(zip(self.inputs, tensors.values(), strict=False))
        if len(by_input) < len(self.inputs):
            raise ExportError(
                f"onnxruntime: got a batch with {sorted(tensors)}; expected a tensor for each "
                f"input of the file, {self.inputs}"
            )
        for value in self._session.get_inputs():
            _check_input(by_input[value.name], value)
        return by_input

    def run(
        self, feeds: Mapping[str, Tensor], outputs: Sequence[str] | None = None
    ) -> list[Tensor]:
        """Return the named outputs, by default all."""
        arrays = {
            name: value.detach().cpu().contiguous().numpy()
            for name, value in feeds.items()
        }
        try:
            results = self._session.run(outputs or self.outputs, arrays)
        except Exception as error:  # The exception classes of ONNX Runtime are private.
            shapes = {name: array.shape for name, array in arrays.items()}
            expected = {value.name: value.shape for value in self._session.get_inputs()}
            raise ExportError(
                f"onnxruntime: cannot run the model on inputs of shapes {shapes} ({error}); "
                f"expected inputs like {expected}"
            ) from error
        return [torch.from_numpy(array) for array in results]


def _options(
    runtime: Any, optimize: bool, save_optimized: Path | None, threads: int | None
) -> Any:
    """Return new options of a session."""
    options = runtime.SessionOptions()
    levels = runtime.GraphOptimizationLevel
    level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
    if save_optimized is not None:
        # ALL would add memory layouts of this machine.
        level = levels.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(save_optimized)
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name",
            f"{save_optimized.name}.data",
        )
    options.graph_optimization_level = level
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.log_severity_level = 4  # Errors are raised; the log would repeat them.
    return options


def _with_exact_products(
    runtime: Any, path: str, new_options: Callable[[], Any], provider: str
) -> tuple[Any, str]:
    """Return a session for CPUs without VNNI, and what is special about it."""
    exact = new_options()
    exact.add_session_config_entry(EXACT_PRODUCTS, "1")
    setting = f" with {EXACT_PRODUCTS}=1"
    try:
        session = runtime.InferenceSession(path, exact, [provider])
        return session, f"{setting}, as this CPU has no VNNI"
    except Exception as error:  # The exception classes of ONNX Runtime are private.
        log.debug("%s: %s", EXACT_PRODUCTS, error)
    graph = with_weights_apart(path)
    if graph is not None:
        try:
            session = runtime.InferenceSession(graph, exact, [provider])
            return (
                session,
                f"{setting} and weights copied for each of their calls, as this CPU has no VNNI "
                "(sessions of your own need reduce_range=True)",
            )
        except Exception as error:  # The exception classes of ONNX Runtime are private.
            log.debug("%s: %s", EXACT_PRODUCTS, error)
    # Options that had the setting once would print a warning as it is changed.
    return (
        runtime.InferenceSession(path, new_options(), [provider]),
        ", whose products of 8-bit weights can overflow: this CPU has no VNNI",
    )
