"""Temporary and lasting changes of what quantizers do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from torchq.errors import ConfigError
from torchq.nn import QuantModule, TensorQuantizer
from torchq.utils import Pattern, check_pattern, matches, pattern_text

__all__ = ["disabled", "freeze_", "quantizers", "select_quantizers", "weight_quantizers"]


def quantizers(model: nn.Module) -> dict[str, TensorQuantizer]:
    """Every distinct quantizer of ``model`` by its first dotted path."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, TensorQuantizer)
    }


def weight_quantizers(model: nn.Module) -> set[int]:
    """The ids of the quantizers that quantize weights: they need no data."""
    return {
        id(q)
        for module in model.modules()
        if isinstance(module, QuantModule)
        for q, _ in module.quantized_weights()
    }


def select_quantizers(
    model: nn.Module, patterns: Pattern | Sequence[Pattern]
) -> dict[str, TensorQuantizer]:
    """The quantizers that a pattern selects, by the path of the quantizer or of the module that it belongs to.

    Raises:
        ConfigError: a pattern selects none.
    """
    if isinstance(patterns, (str, type)) or callable(patterns):
        patterns = (patterns,)
    chosen: dict[str, TensorQuantizer] = {}
    known = quantizers(model)
    for pattern in map(check_pattern, patterns):
        found = {n: q for n, q in known.items() if _selects(model, pattern, n, q)}
        if not found:
            names = ", ".join(list(known)[:8]) or "none"
            raise ConfigError(
                f"pattern {pattern_text(pattern)!r} selects no quantizer; expected one of {names}, ..."
            )
        chosen |= found
    return chosen


def _selects(model: nn.Module, pattern: Pattern, name: str, quantizer: TensorQuantizer) -> bool:
    owner = name.rpartition(".")[0]
    module = model.get_submodule(owner)
    cls = type(module).float_class if isinstance(module, QuantModule) else type(module)
    return matches(pattern, (name,), quantizer) or matches(pattern, (owner,), module, cls)


@contextmanager
def disabled(model: nn.Module, patterns: Pattern | Sequence[Pattern] = "*") -> Iterator[None]:
    """Inside, the selected quantizers pass their input through; afterwards they do what they did before, whatever happened.

    Args:
        model: any module.
        patterns: globs, ``"re:..."``, ``"type:..."``, classes or callables, on quantizers (``"*.weight_quantizer"``) or the
            modules that own them (``"layer1.*"``). Default: all.

    Raises:
        ConfigError: a pattern selects no quantizer.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> _ = torchq.quantize_(model)
        >>> with torchq.disabled(model, "*.weight_quantizer"):
        ...     print(model[0].weight_quantizer.mode, model[0].input_quantizer.mode)
        off quantize
    """
    chosen = list(select_quantizers(model, patterns).values())
    before = [q.mode for q in chosen]
    try:
        for q in chosen:
            q.mode = "off"
        yield
    finally:
        for q, mode in zip(chosen, before, strict=True):
            q.mode = mode


def freeze_(model: nn.Module) -> nn.Module:
    """Fix every range for good: learned ranges stop learning, and observing ends. Calibrate first.

    Survives ``model.train()``. Returns the model.
    """
    for quantizer in quantizers(model).values():
        quantizer.observing = False
        quantizer.requires_grad_(False)
    return model
