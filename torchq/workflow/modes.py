"""Selecting quantizers, and temporary and lasting changes of what they do."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from torchq.errors import ConfigError
from torchq.nn import QuantModule, TensorQuantizer, switched_off
from torchq.nn.convert import float_class_of
from torchq.utils import Pattern, check_pattern, matches, network_of, pattern_text


def is_quantized(model: nn.Module) -> bool:
    """Return True if ``model`` has a quantizer, whatever its mode.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> before, report = torchq.workflow.is_quantized(model), torchq.quantize_(model)
        >>> before, torchq.workflow.is_quantized(model)
        (False, True)
    """
    return any(
        isinstance(module, (QuantModule, TensorQuantizer)) for module in model.modules()
    )


def quantizers(model: nn.Module) -> dict[str, TensorQuantizer]:
    """Return every distinct quantizer of ``model`` by its first dotted path."""
    model = network_of(model)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, TensorQuantizer)
    }


def quantized_weights(model: nn.Module) -> Iterator[tuple[TensorQuantizer, Tensor]]:
    """Yield the weight quantizers of all modules, each with its weight."""
    for module in model.modules():
        if isinstance(module, QuantModule):
            yield from module.quantized_weights()


def weight_quantizers(model: nn.Module) -> set[int]:
    """Return the ids of the quantizers that quantize weights; these need no data."""
    return {id(quantizer) for quantizer, _ in quantized_weights(model)}


#: Products of weights of more bits and codes of 8 overflow the kernels of some CPUs.
_NARROW = 7


def has_wide_weights(model: nn.Module) -> bool:
    """Return True if weights are quantized to so many bits that some CPUs overflow."""
    return any(
        quantizer.quantizing and quantizer.descriptor.format.bits > _NARROW
        for quantizer, _ in quantized_weights(model)
    )


def select_quantizers(
    model: nn.Module, patterns: Pattern | Sequence[Pattern]
) -> dict[str, TensorQuantizer]:
    """Return the quantizers that a pattern selects.

    Args:
        model: any module.
        patterns: one or several; each is matched with the path of the quantizer and with the
            module that owns it.

    Returns:
        The quantizers by dotted path.

    Raises:
        ConfigError: A pattern selects none.
    """
    model = network_of(model)
    if isinstance(patterns, (str, type)) or callable(patterns):
        patterns = (patterns,)
    chosen: dict[str, TensorQuantizer] = {}
    by_path = quantizers(model)
    for pattern in map(check_pattern, patterns):
        selected = {n: q for n, q in by_path.items() if _selects(model, pattern, n, q)}
        if not selected:
            more = ", ..." if len(by_path) > 8 else ""
            expected = f"one of {', '.join(list(by_path)[:8])}{more}"
            if not by_path:
                expected = "a model that has some. Run torchq.quantize_ first"
            raise ConfigError(
                f"pattern {pattern_text(pattern)!r}: selects no quantizer; expected {expected}"
            )
        chosen |= selected
    return chosen


def _selects(
    model: nn.Module, pattern: Pattern, name: str, quantizer: TensorQuantizer
) -> bool:
    owner = name.rpartition(".")[0]
    module = model.get_submodule(owner)
    of_owner = matches(pattern, (owner,), module, float_class_of(module))
    return of_owner or matches(pattern, (name,), quantizer)


@contextmanager
def disabled(
    model: nn.Module, patterns: Pattern | Sequence[Pattern] = "*"
) -> Iterator[None]:
    """Let the selected quantizers pass their input through inside a ``with`` block.

    Afterwards they do what they did before, also after an exception.

    Args:
        model: any module.
        patterns: globs, ``"re:..."``, ``"type:..."``, classes or callables, on quantizers
            (``"*.weight_quantizer"``) or the modules that own them (``"layer1.*"``).

    Raises:
        ConfigError: A pattern selects no quantizer.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> _ = torchq.quantize_(model)
        >>> with torchq.disabled(model, "*.weight_quantizer"):
        ...     print(model[0].weight_quantizer.mode, model[0].input_quantizer.mode)
        off quantize
    """
    chosen = list(select_quantizers(model, patterns).values())
    with switched_off(chosen):
        yield


def freeze_(model: nn.Module) -> tuple[str, ...]:
    """Fix every range for good, in place: learned ranges stop learning, and observing ends.

    Calibrate first. The ranges stay fixed after ``model.train()``.

    Args:
        model: a quantized model; changed in place.

    Returns:
        The paths of all its quantizers, whose ranges are fixed now.
    """
    by_path = quantizers(model)
    for quantizer in by_path.values():
        quantizer.observing = False
        quantizer.requires_grad_(False)
    return tuple(by_path)
