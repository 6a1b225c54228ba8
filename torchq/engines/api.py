"""``torchq.deploy``: a calibrated model on the integer kernels of an engine."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchq.engines.registry import ENGINES, Engine
from torchq.engines.torch_engine import TorchEngine
from torchq.errors import ConfigError
from torchq.lowering import simulated_copy

__all__ = ["deploy"]


def deploy(
    model: nn.Module,
    example: Any = None,
    *,
    engine: str | Engine = "torch",
    reduce_range: bool = False,
    fuse: bool = True,
) -> nn.Module:
    """Return a copy of a calibrated model that computes on integers, for inference.

    With the engine ``"torch"`` every quantized convolution and linear layer becomes one that
    multiplies uint8 activations with int8 weights. Where the model can be traced, neighbouring
    layers are fused as well: BatchNorm, activations and residual additions move into the kernels,
    and tensors that only integer layers read are passed on as uint8. Layers without an integer
    kernel keep simulating; :func:`torchq.summary` of the result says which, and why.

    Another engine runs the file that :func:`torchq.export_onnx` writes for it, inside a module
    that is called as the original model is, and that returns results of the same structure.

    Args:
        model: calibrated; left unchanged.
        example: arguments for one call of the model, see :func:`torchq.graph.call_model`. With it
            the result is run once and compared with the simulation. A large difference is an
            error; it is a warning where every layer agrees when it is given the inputs of the
            simulation, as the model then only amplifies ties. Engines other than ``"torch"`` need
            it.
        engine: ``"torch"``, ``"onnxruntime"``, or one of :data:`torchq.engines.ENGINES` with
            settings of its own, such as ``torchq.engines.OnnxRuntime(provider="cuda")``.
        reduce_range: round weights to 7 bits. For CPUs without VNNI, whose kernels add pairs of
            products in 16 bits: 8-bit weights can overflow there (there is a warning). Engine
            ``"torch"`` only; for others quantize with ``recipes.int8(reduce_range=True)``.
        fuse: False replaces layers only, each with floating-point input and output, and does not
            trace the model. Engine ``"torch"`` only.

    Returns:
        A new module in eval mode; its attribute ``engine`` names the engine. It can be copied,
        pickled and saved. With the engine ``"torch"`` it is on the device of the model, it can be
        compiled and exported, and its 4-d results are channels last in memory.

    Raises:
        ConfigError: there is no such engine, or it has no such option.
        ExportError: there is nothing to deploy, or quantizers are not calibrated (the text names
            them), or a class of the model refuses to be copied, or the engine cannot run the
            model, or the result for ``example`` differs from the simulation by more than -20 dB
            and by more than quantization itself makes.
        MissingExtraError: the package of the engine is not installed.

    Example:
        >>> layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3)
        >>> model = torch.nn.Sequential(*layers).eval()
        >>> report = torchq.quantize_(model)
        >>> x = torch.randn(1, 3, 8, 8)
        >>> report = torchq.calibrate(model, [x], progress=False)
        >>> int8 = torchq.deploy(model)
        >>> bool((int8(x) - model(x)).abs().max() < 0.02)
        True
        >>> int8.engine
        'torch'
    """
    chosen = _settings(engine, reduce_range, fuse)
    chosen.check()
    if example is None and not isinstance(chosen, TorchEngine):
        raise ConfigError(
            f"deploy: engine {chosen.name!r} without an example; expected one, as a graph is "
            "traced with it. Pass torchq.deploy(model, example, engine=...)"
        )
    result = chosen.build(simulated_copy(model), example)
    if not hasattr(result, "engine"):
        result.engine = chosen.name  # type: ignore[assignment]
    return result


def _settings(engine: str | Engine, reduce_range: bool, fuse: bool) -> Engine:
    """Return an engine with its settings."""
    if isinstance(engine, str):
        engine = ENGINES[engine]()
    if isinstance(engine, TorchEngine):
        if not reduce_range and fuse:
            return engine
        return TorchEngine(engine.quantized, reduce_range, fuse)
    if reduce_range or not fuse:
        option = "reduce_range=True" if reduce_range else "fuse=False"
        raise ConfigError(
            f"deploy: got {option} for engine {engine.name!r}; expected it for 'torch' alone. "
            "For weights of 7 bits, quantize with torchq.recipes.int8(reduce_range=True)"
        )
    return engine
