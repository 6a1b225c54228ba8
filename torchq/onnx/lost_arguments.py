"""Arguments that torch's exporters leave out without a word: a file computes something else.

Measured with torch 2.14 and ONNX Runtime 1.31, over a hundred functions with other arguments than
their defaults: all others that were tried are written right, or refused by the exporter itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torchq.errors import ExportError
from torchq.graph.operators import function_name
from torchq.onnx.trial import run_in_float

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class _Lost:
    """An argument that a file would not have.

    Attributes:
        names: the arguments of the function, in order.
        name: the one that is left out.
        is_lost: whether these arguments need it.
        fix: what to do instead.
        by_dynamo: whether the exporter that is based on torch.export leaves it out too.
        by_torchscript: whether the older one does; it refuses some of these itself.
    """

    names: tuple[str, ...]
    name: str
    is_lost: Callable[[Arguments], bool]
    fix: str
    by_dynamo: bool
    by_torchscript: bool = True


def _differs(name: str, usual: float, arguments: Arguments) -> bool:
    return bool(arguments.get(name, usual) != usual)


_POOL = (
    *("input", "kernel_size", "stride", "padding"),
    *("ceil_mode", "count_include_pad", "divisor_override"),
)
_DIVISOR = _Lost(
    _POOL,
    "divisor_override",
    lambda arguments: bool(arguments.get("divisor_override")),
    "Multiply the mean by the size of the window over the divisor",
    by_dynamo=True,
)
_OTHER_EXPORTER = "Pass dynamo=True"
_LOST: dict[str, _Lost] = {
    "avg_pool2d": _DIVISOR,
    "avg_pool3d": _DIVISOR,
    "batch_norm": _Lost(
        ("input", "running_mean", "running_var", "weight", "bias", "training"),
        "training",
        lambda arguments: (
            bool(arguments.get("training"))
            and arguments.get("running_mean") is not None
        ),
        "Pass training=self.training, or normalize by hand with the mean of the batch",
        by_dynamo=True,
    ),
    "softplus": _Lost(
        ("input", "beta", "threshold"),
        "threshold",
        partial(_differs, "threshold", 20),
        _OTHER_EXPORTER,
        by_dynamo=False,
    ),
    "cosine_similarity": _Lost(
        ("x1", "x2", "dim", "eps"),
        "eps",
        partial(_differs, "eps", 1e-8),
        _OTHER_EXPORTER,
        by_dynamo=False,
    ),
    "cdist": _Lost(
        ("x1", "x2", "p"),
        "p",
        partial(_differs, "p", 2.0),
        "Write the distance with abs, pow and sum",
        by_dynamo=False,
    ),
    "index_put": _Lost(
        ("input", "indices", "values", "accumulate"),
        "accumulate",
        lambda arguments: bool(arguments.get("accumulate")),
        _OTHER_EXPORTER,
        by_dynamo=False,
    ),
    "scatter_reduce": _Lost(
        ("input", "dim", "index", "src", "reduce", "include_self"),
        "include_self",
        lambda arguments: (
            arguments.get("reduce") == "mean"
            and not arguments.get("include_self", True)
        ),
        "Divide the sum by the number of its terms",
        by_dynamo=True,
        by_torchscript=False,
    ),
}


class _Watch(TorchFunctionMode):
    """Refuses calls with arguments that an exporter leaves out, by the module that calls."""

    def __init__(self, model: nn.Module, *, dynamo: bool) -> None:
        super().__init__()
        self._dynamo = dynamo
        self._paths = {id(module): name for name, module in model.named_modules()}
        self._running: list[str] = []

    def enter(self, module: nn.Module, *_: object) -> None:
        """Note that a module begins."""
        self._running.append(self._paths[id(module)])

    def leave(self, *_: object) -> None:
        """Note that a module ends."""
        self._running.pop()

    def _leaves_out(self, lost: _Lost) -> bool:
        return lost.by_dynamo if self._dynamo else lost.by_torchscript

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        lost = _LOST.get(function_name(func).rstrip("_"))
        if lost is not None and self._leaves_out(lost):
            arguments = {**dict(zip(lost.names, args, strict=False)), **kwargs}
            if lost.is_lost(arguments):
                path = self._running[-1] if self._running else ""
                raise ExportError(
                    f"{path or '(root)'}: calls {function_name(func)} with "
                    f"{lost.name}={arguments[lost.name]}; expected its default, since torch's "
                    "exporter leaves it out, so that a file would compute another result. "
                    f"{lost.fix}"
                )
        return func(*args, **kwargs)


def check_arguments(model: nn.Module, example: object, *, dynamo: bool) -> None:
    """Raise an error for a function whose arguments torch's exporter leaves out without a word.

    The model runs once, in float; an error of its own is left to the export, which explains it.

    Raises:
        ExportError: It names the module that calls the function, and what to do.
    """
    watch = _Watch(model, dynamo=dynamo)
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # They take no hooks.
            for handle in (
                module.register_forward_pre_hook(watch.enter),
                module.register_forward_hook(watch.leave, always_call=True),
            ):
                stack.callback(handle.remove)
        stack.enter_context(watch)
        try:
            run_in_float(model, example)
        except ExportError:
            raise
        except Exception:  # A model may raise anything.
            return
