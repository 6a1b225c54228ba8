"""Quantizing modules while other code builds a model."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from torchq.config import QuantConfig
from torchq.errors import ConfigError
from torchq.nn import QuantModule, TensorQuantizer, revert_
from torchq.swap.apply import convert_as
from torchq.swap.decisions import Draft, Rules, config_or_default, decide
from torchq.utils import modules_with_names


class Patch:
    """A running :func:`patch`; a context manager, or call :meth:`restore`."""

    def __init__(self, config: QuantConfig) -> None:
        self.config = config
        self._converted: dict[int, Draft] = {}
        self._busy = False
        self._handle = register_module_module_registration_hook(self._registered)

    def _registered(
        self, parent: nn.Module, name: str, child: nn.Module | None
    ) -> None:
        """Decide about ``child`` again, each time with a longer name.

        What a rule on the longer name skips becomes float again.
        """
        if (
            child is None
            or self._busy
            or isinstance(parent, (TensorQuantizer, QuantModule))
        ):
            return
        self._busy = (
            True  # conversion registers quantizers, which calls this hook again
        )
        try:
            self._redo(_Named(name, child))
        finally:
            self._busy = False

    def _redo(self, holder: nn.Module) -> None:
        for names, module in list(modules_with_names(holder)):
            before = self._converted.get(id(module))
            if before is not None and isinstance(module, QuantModule):
                after = Rules(self.config).about(names, module)
                outcomes = [(d.reason, d.input, d.weight) for d in (after, before)]
                if outcomes[0] != outcomes[1]:
                    revert_(module)
        for decision in decide(holder, Rules(self.config)):
            if not decision.reason:
                convert_as(decision.module, decision.decision())
                # The decision holds the module, so no other one can get its id.
                self._converted[id(decision.module)] = decision

    def restore(self) -> None:
        """Stop patching. Models that were built stay quantized; later ones are float."""
        self._handle.remove()
        self._converted.clear()

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()


class _Named(nn.Module):
    """A parent that has ``child`` under the name that it is being registered with."""

    def __init__(self, name: str, child: nn.Module) -> None:
        super().__init__()
        self._modules[name] = child


def patch(config: QuantConfig | None = None) -> Patch:
    """Quantize every module when it is registered in a parent, whoever builds the model.

    The patch uses torch's module registration hook: classes that a script imported directly
    (``from torch.nn import Conv2d``) are caught too, and ``torch.nn`` is not changed. Glob patterns
    see the name as far as it is known; they are tried again each time a larger part of the model
    is put together. A model that is a single layer has no parent and is not caught. Patches nest;
    what one of them has quantized the others leave alone.

    Args:
        config: the rules; default :func:`torchq.recipes.int8`.

    Returns:
        A context manager, also with a method ``restore()``.

    Raises:
        ConfigError: A rule asks for the first or last layer, which are not known yet.

    Example:
        >>> with torchq.patch():
        ...     model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> type(model[0]).__name__, type(torch.nn.Sequential(torch.nn.Linear(2, 2))[0]).__name__
        ('QuantLinear', 'Linear')
    """
    config = config_or_default(config)
    for rule in config.rules:
        if rule.position is not None:
            raise ConfigError(
                f"patch: rule {rule}: needs the whole model, which patch never sees; expected no "
                "rule with a position. Call quantize_, or recipes.integer(..., first_last=None)"
            )
    return Patch(config)
