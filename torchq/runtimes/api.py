"""``torchq.deploy``: a calibrated model on the integer kernels of a runtime."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import nn

from torchq.errors import ConfigError
from torchq.lowering.api import simulated_copy
from torchq.lowering.placeholder import add_placeholder_, placeholder_for
from torchq.runtime import (
    RUNTIMES,
    Runtime,
    check_planned,
    planned_runtime,
    runtime_of,
    targets,
)
from torchq.runtimes.engine import Engine, Task
from torchq.runtimes.fastest import build_fastest
from torchq.runtimes.file_engine import EngineModule
from torchq.runtimes.torch import Torch
from torchq.utils import kept_batches, network_of, uncompiled
from torchq.workflow.changed_weights import warn_of_changed_weights
from torchq.workflow.lost_norms import check_norms

#: Instead of the name of a runtime: the fastest one.
_FASTEST = "fastest"


def deploy(
    model: nn.Module,
    example: object = None,
    *,
    target: str | Runtime | None = None,
    batches: Iterable[object] | None = None,
    check: bool = True,
    progress: bool = True,
) -> nn.Module:
    """Return a copy of a calibrated model that computes on integers, for inference.

    On the runtime ``"torch"`` every quantized convolution and linear layer becomes one that
    multiplies uint8 activations with int8 weights. Where the model can be traced, neighbouring
    layers are fused as well: activations and residual additions move into the kernels, and tensors
    that only integer layers read are passed on as uint8. Layers without an integer kernel keep
    simulating; :func:`torchq.summary` of the result says which, and why.

    Another runtime runs the file that :func:`torchq.export_onnx` writes for it, inside a module
    that is called as the original model is, and that returns results of the same structure.

    Args:
        model: calibrated; left unchanged. Wrappers of torch, such as those of data parallelism and
            ``torch.compile``, are left out of the result.
        example: arguments for one call of the model, see :func:`torchq.graph.call_model`. With it
            the result is compared with the simulation, on the example and on an input of the same
            shapes and other values that is made of it, layer by layer. A layer that differs is an
            error. Where all agree and the results do not, there is a warning: the model amplifies
            ties. All runtimes but ``"torch"`` need it.
        target: ``"torch"``, ``"onnxruntime"``, ``"openvino"``, ``"tensorrt"``, ``"executorch"``, or
            a runtime with settings of its own, such as
            ``torchq.runtimes.OnnxRuntime(provider="cuda")``. None takes the one that the model was
            quantized for, and ``"torch"`` where that was none, or has no kernels for CPUs, or
            without an example. ``"fastest"`` measures all that are installed, but ExecuTorch, on
            the example, with the quantized model and with the float one, and takes the best; the
            attribute ``report`` of the result tells what it measured.
        batches: what to compare on in place of the input that is made of the example.
        check: False compares nothing, for models that take minutes; ``checked`` of the result says
            so.
        progress: show a bar where it takes longer than a second.

    Returns:
        A new module in eval mode; its attribute ``target`` names the runtime. It can be copied,
        pickled and saved, but not compiled or traced. On ``"torch"`` it is on the device of the
        model, and its 4-d results are channels last in memory.

    Raises:
        ConfigError: there is no such runtime, or it has no kernels here or no such option; or
            the model was quantized for another one, and has other quantizers than this one wants.
        ExportError: there is nothing to deploy, or quantizers are not calibrated (the text names
            them), or a class of the model refuses to be copied, or the runtime cannot run the
            model, or a layer or a result differs from the simulation, or results depend on calls
            before, which no graph keeps.
        MissingExtraError: the package of the runtime is not installed.

    Example:
        >>> layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3)
        >>> model = torch.nn.Sequential(*layers).eval()
        >>> report = torchq.quantize_(model, torchq.recipes.int8(reduce_range=True))
        >>> x = torch.randn(1, 3, 8, 8)
        >>> report = torchq.calibrate(model, [x], progress=False)
        >>> int8 = torchq.deploy(model)
        >>> bool((int8(x) - model(x)).abs().max() < 0.02)
        True
        >>> int8.target
        'torch'
    """
    model = network_of(model)
    check_norms("deploy", model)
    warn_of_changed_weights("deploy", model)
    sample_batches = [] if batches is None else kept_batches("deploy", batches)
    with uncompiled():
        if target == _FASTEST:
            _require_example(_FASTEST, example)
            task = Task(
                simulated_copy(model),
                example,
                progress,
                batches=sample_batches,
                compares=check,
            )
            result, report = build_fastest(task)
            result.report = report  # type: ignore[assignment]
            name = report.candidates[0].engine.name
        else:
            chosen = _engine(model, example, target)
            if not isinstance(chosen, Torch):
                _require_example(chosen.name, example)
            chosen.check()
            task = Task(
                simulated_copy(model),
                example,
                progress,
                batches=sample_batches,
                compares=check,
            )
            result = chosen.build(task)
            name = chosen.name
        result.checked = task.line_of(result)  # type: ignore[assignment]
        _warn_of_left_out(result)
        add_placeholder_(result, placeholder_for(model, example))
    if not isinstance(result, EngineModule):
        result.target = name  # type: ignore[assignment]
    return result


def _warn_of_left_out(result: nn.Module) -> None:
    """Warn of what the model returns and a file has no type for."""
    left_out: tuple[str, ...] = ()
    if isinstance(result, EngineModule):
        left_out = result.interface.structure.left_out
    if left_out:
        warnings.warn(
            f"deploy: the model returns {', '.join(left_out)}, which a file has no type for; the "
            "deployed model returns None in its place. Use target='torch' to keep it",
            stacklevel=3,
        )


def _engine(model: nn.Module, example: object, target: str | Runtime | None) -> Engine:
    """Return the runtime that runs a model here: the wanted one, or else the one of its plan."""
    if target is None:
        planned = planned_runtime(model)
        if isinstance(planned, Engine) and planned.measured and example is not None:
            return planned
        return Torch()
    runtime = runtime_of(target)
    if not isinstance(runtime, Engine):
        names = ", ".join(repr(n) for n in targets() if isinstance(RUNTIMES[n], Engine))
        reads_files = runtime is not None and runtime.file is not None
        advice = (
            "Pass its file of torchq.export_onnx to the tools of its maker"
            if reads_files
            else "The model itself simulates it"
        )
        raise ConfigError(
            f"deploy: got target {target!r}, which has no kernels here; expected one of {names}, "
            f"or 'fastest'. {advice}"
        )
    check_planned("deploy", model, runtime)
    return runtime


def _require_example(name: str, example: object) -> None:
    """Raise an error where a runtime other than "torch" has no example to trace a graph with."""
    if example is None:
        raise ConfigError(
            f"deploy: target {name!r} without an example; expected one, as a graph is traced with "
            "it. Pass torchq.deploy(model, example, target=...)"
        )
